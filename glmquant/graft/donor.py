"""Where the MTP layer comes from: a folder, or a repository of which a few shards are fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from glmquant.checkpoint.formats import PLAIN, module_name
from glmquant.checkpoint.header import ShardHeader, TensorInfo
from glmquant.checkpoint.hub import HubShards, HubSource, RangeReader
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.layout import expected_tensors
from glmquant.checkpoint.source import CONFIG, RUN_FOLDER, Checkpoint, ShardReader, inspect, model_name
from glmquant.checkpoint.weights import Fp8Weight, offered
from glmquant.checkpoint.writer import check_space
from glmquant.errors import CheckpointError, GlmquantError
from glmquant.recipe import Architecture, load_architecture
from glmquant.streaming import Progress
from glmquant.text import short


@dataclass(frozen=True, slots=True)
class Donor:
    """Where the MTP layer comes from.

    Attributes:
        checkpoint: at least config.json and the shards with the MTP layer.
        layers, architecture: as its config.json says.
        offers: every tensor of the shards that are there, fused experts taken apart.
        mtp: names of those of the MTP layers.
        path: where a shard is on this disk.
        name: for people, `org/name@commit` or the folder's.
        hub: the repository that holds the shards that are on no disk yet.
    """

    checkpoint: Checkpoint
    layers: Layers
    architecture: Architecture
    offers: Mapping[str, TensorInfo]
    mtp: tuple[str, ...]
    path: Callable[[str], Path]
    name: str
    hub: HubSource | None = None

    @property
    def headers(self) -> dict[str, ShardHeader]:
        return {header.file: header for header in self.checkpoint.shards}

    def reader(self, file: str) -> ShardReader | RangeReader:
        """Reads pieces of a shard, from the Hub if it must be."""
        if self.hub and file not in self.hub.cached:
            return RangeReader(self.hub, file)
        return ShardReader(self.path(file), self.headers[file])

    def is_mtp(self, tensor: str) -> bool:
        return self.architecture.module(module_name(tensor), self.layers).is_mtp


def open_donor(folder: Path, hub: HubSource | None = None) -> Donor:
    """A bf16 or block-scaled FP8 checkpoint, of which config.json and the shards with the MTP layer are enough.

    Args:
        hub: where the shards are that are not in the folder.

    Raises:
        CheckpointError: it is quantized, has no MTP layer or only a part of it, or cannot be read.
        RecipeError: its model type is not known.
    """
    headers = hub.headers if hub else None
    checkpoint, problems = inspect(folder, headers)
    for problem in problems:
        if problem.code not in ("missing-shard", "no-index"):  # other shards need not be there
            raise problem.error()
    quantization = checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization and method != "fp8":
        raise CheckpointError(
            f"{folder}: already quantized (quantization_config.quant_method {short(method)})",
            "Take the MTP layer from the bf16 or the FP8 checkpoint.",
        )
    architecture = load_architecture(checkpoint.model_type)
    layers = read_layers(checkpoint.config, architecture.keys)
    offers = {tensor.name: tensor for shard in offered(checkpoint).values() for tensor in shard}
    mtp = tuple(name for name in offers if architecture.module(module_name(name), layers).is_mtp)
    path = hub.cached.__getitem__ if hub else folder.joinpath
    donor = Donor(
        checkpoint, layers, architecture, offers, mtp, path, str(hub.repo) if hub else model_name(folder), hub
    )
    if not architecture.keys.mtp:
        raise CheckpointError(f"{folder}: models of type {checkpoint.model_type} have no MTP layer", "Nothing is lost.")
    if not layers.mtp:
        raise CheckpointError(
            f"{folder}: {CONFIG} declares no MTP layer ({architecture.keys.mtp} is 0 or missing)",
            "Take it from the checkpoint as published.",
        )
    _check_complete(donor)
    for name in mtp:
        tensor = offers[name]
        if not (tensor.dtype in PLAIN or (method == "fp8" and isinstance(tensor, Fp8Weight))):
            raise CheckpointError(f"{folder}: tensor {name!r} is {tensor.dtype}", "Needed is bf16, f16, f32 or FP8.")
    return donor


def _check_complete(donor: Donor) -> None:
    """Raise unless all that config.json promises of the MTP layers is there."""
    wanted = [name for name in promised(donor.checkpoint, donor) if donor.is_mtp(name)]
    missing = [name for name in wanted if name not in donor.offers]
    if not missing and donor.mtp:
        return
    named = donor.checkpoint.weight_map or {}
    files = sorted({named[name] for name in missing if name in named})
    what = f"tensor {missing[0]!r}" if missing else "tensor"
    raise CheckpointError(
        f"{donor.checkpoint.folder}: no {what} of the MTP layer ({len(missing)} of {len(wanted)} are missing)",
        f"Fetch {', '.join(map(short, files[:10]))}." if files else "Take it from the checkpoint as published.",
    )


def promised(checkpoint: Checkpoint, donor: Donor) -> dict[str, tuple[int, ...]]:
    """What a config.json says is in it, read with the donor's number of MTP layers."""
    keys = donor.architecture.keys
    layers = replace(read_layers(checkpoint.config, keys), mtp=donor.layers.mtp)
    return expected_tensors(donor.architecture.tensors, keys.of(checkpoint.config), layers)


@contextmanager
def fetched(donor: Donor, files: Sequence[str], folder: Path, space: int, progress: Progress) -> Iterator[Donor]:
    """The donor with these shards of it on this disk: in the checkpoint's folder, where no engine looks, until the end.

    Args:
        folder: the checkpoint.
        space: bytes that must be left on its disk afterwards.

    Raises:
        CheckpointError: a shard cannot be fetched; what was is kept, and a second call goes on from there.
        OutputError: the disk is too small.
    """
    if not donor.hub or not files:
        yield donor
        return
    place = folder / RUN_FOLDER / "mtp-source"
    sizes = {file: donor.hub.files[file].size for file in files}
    left = sum(sizes.values()) - sum(path.stat().st_size for path in place.glob("*"))
    check_space(folder, space + max(0, left))
    try:
        with progress(left, "fetching") as advance, HubShards(donor.hub, [files], place, advance=advance) as shards:
            for file in files:
                shards.path(file)
        yield replace(donor, path=shards.path, hub=None)
    except GlmquantError as err:
        kept = f"Fetched shards are kept in {place} for the next try; without one, remove them."
        raise err.also(kept) from err
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.parent.rmdir()

"""Giving a checkpoint the MTP layer back that it lost: new shards beside the old ones, then index, then config.json.

Tools that load a model with transformers drop its MTP layer, which has no class there (791 tensors of GLM-5.2), and
keep num_nextn_predict_layers; sglang then drafts with random weights.

No shard that is there is written to or removed. sglang (0.5.23 model_loader/weight_utils.py:757) and vLLM (0.33
model_loader/weight_utils.py:590) read the files that the index names and no other, so until it is replaced they see the
checkpoint as it was. From then on the target model, which skips the MTP layer's tensors, loads as before; a draft model
that is started before config.json is replaced as well may stop with an error about a shape. The same command, given
again, ends what a kill interrupted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from glmquant import planner
from glmquant.checkpoint.formats import PLAIN, module_name, stored_formats
from glmquant.checkpoint.header import ShardHeader, TensorInfo
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.layout import expected_tensors
from glmquant.checkpoint.manifest import MANIFEST, Manifest, ShardRecord, file_digest, replace_file
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, ShardReader, inspect, read_json
from glmquant.checkpoint.weights import FP8, SCALE_INV, Fp8Weight, offered, shards_of
from glmquant.checkpoint.writer import TEMPORARY, ShardWriter, check_space, output_error, write_file
from glmquant.engines.targets import Target, evaluate
from glmquant.errors import CheckpointError, OutputError, RecipeError
from glmquant.exclusions import ExclusionList
from glmquant.findings import Report
from glmquant.mend import back_up, like, list_for
from glmquant.mxfp4.backend import Backend
from glmquant.recipe import Architecture, load_architecture
from glmquant.streaming import Advance, SourceShards, Streamer
from glmquant.text import short

logger = logging.getLogger(__name__)

STEM = "model-mtp"
SHARD_SIZE = 5 * 1024**3
"""Bytes of tensors in a new shard: as in the published GLM-5.2."""
METADATA = {"format": "pt", "glmquant": "mtp graft"}
"""Of the new shards. Marks one that a killed run left, and that the index does not name, as ours to write again."""
SAMPLE = 64 * 1024
"""Bytes compared of each tensor that both checkpoints hold un-quantized: 85 MB of GLM-5.2."""

Locate = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Donor:
    """Where the MTP layer comes from.

    Attributes:
        checkpoint: at least config.json and the shards with the MTP layer.
        layers, architecture: as its config.json says.
        offers: every tensor of the shards that are there, fused experts taken apart.
        mtp: names of those of the MTP layers.
        path: where a shard is.
    """

    checkpoint: Checkpoint
    layers: Layers
    architecture: Architecture
    offers: Mapping[str, TensorInfo]
    mtp: tuple[str, ...]
    path: Locate

    def is_mtp(self, tensor: str) -> bool:
        return self.architecture.module(module_name(tensor), self.layers).is_mtp


@dataclass(frozen=True, slots=True)
class Graft:
    """What was grafted, or with a dry run would be.

    Attributes:
        there: tensors of the MTP layers that the checkpoint has already; `missing` those it had not, as SRC names them.
        shards: the new files.
        tensors, nbytes: in them, scales included.
        quantized: weights in them that are MXFP4.
        compared: tensors that both checkpoints hold, whose bytes were compared; `different` the names of those that
            are not the same (only with `force`).
        index: whether the index was, or is to be, replaced.
        config: keys of config.json that change, but for the exclude list -> (before, after).
        before, exclusions: the exclude list as it was, and the one for what is stored now; None where nothing is
            quantized.
        keeps_list: the list as it was is kept, because it loads on every target.
        backups: copies of the files that were replaced.
        dry_run: nothing was written.
        report: what `validate` says of the result; None after a dry run, and for what is not quantized.
    """

    folder: Path
    there: int
    missing: tuple[str, ...]
    shards: tuple[str, ...]
    tensors: int
    nbytes: int
    quantized: int
    compared: int
    different: tuple[str, ...]
    index: bool
    config: Mapping[str, tuple[Any, Any]]
    before: tuple[str, ...]
    exclusions: ExclusionList | None
    keeps_list: bool
    backups: tuple[Path, ...] = ()
    dry_run: bool = False
    report: Report | None = None

    @property
    def list_changes(self) -> bool:
        return self.exclusions is not None and not self.keeps_list and list(self.before) != self.exclusions.texts

    @property
    def nothing_to_do(self) -> bool:
        """All of it was there before, and is named and declared."""
        return not (self.shards or self.index or self.config or self.list_changes)

    @property
    def ok(self) -> bool:
        return self.report is None or self.report.ok


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is to be written; `index` and `config` are None where the file stays as it is."""

    donor: Donor
    folder: Path
    shards: tuple[planner.ShardPlan, ...]
    first_index: dict[str, Any] | None
    index: dict[str, Any] | None
    config: dict[str, Any] | None

    @property
    def disk_needed(self) -> int:
        small = sum(len(json.dumps(value, indent=2)) for value in (self.first_index, self.index, self.config) if value)
        manifest = self.folder / MANIFEST
        known = manifest.stat().st_size if manifest.exists() else 0
        rows = sum(len(shard.jobs) for shard in self.shards)
        return sum(shard.file_size for shard in self.shards) + 2 * small + known + 200 * rows + 65536


def graft(
    donor: Donor,
    folder: Path,
    targets: Sequence[Target],
    form: str = "auto",
    *,
    backends: Sequence[Backend],
    threads: int,
    quantized: bool = False,
    force: bool = False,
    allow_zeros: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], AbstractContextManager[Advance]] = lambda _: nullcontext(lambda _: None),
) -> Graft:
    """Add the MTP layer's tensors that a checkpoint lacks, in place.

    What is there of the MTP layer is left alone: if that is only a part, its un-quantized tensors must be the donor's
    to the byte, and the rest is added. The same goes for tensors that the index does not name, and that it then does.

    Args:
        targets, form: for the exclude list, see exclusions.resolve.
        quantized: store the MTP layer's experts in MXFP4 where the checkpoint's main layers have theirs so.
        force: graft although the checkpoints are not of one set of weights (a fine-tune, say).
        progress: told the bytes to come; gives what counts them.

    Raises:
        CheckpointError: the two are not the same model, CKPT's files cannot be trusted, or what it has of the MTP layer
            is not the donor's.
        RecipeError: `quantized`, and the main layers have no MXFP4 experts.
        ExclusionError: no list serves all targets.
        OutputError: the disk is too small, the folder cannot be written, or another process is grafting.
    """
    with nullcontext() if dry_run else _alone(folder):
        plan, found = _plan(donor, folder, targets, form, quantized, force)
        if dry_run or found.nothing_to_do:
            return replace(found, dry_run=dry_run)
        with progress(sum(job.source.nbytes for shard in plan.shards for job in shard.jobs)) as advance:
            try:
                backups = _write(plan, backends, threads, advance, allow_zeros)
            except OSError as err:  # removing what is half-written, say; shards and files have messages of their own
                raise output_error(str(err.filename or folder), err) from err
        return replace(found, backups=tuple(backups))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps out a second graft on the same folder. Where the file system has no locks, nobody is kept out."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # what is wrong with it is said better by `inspect`
        yield
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{folder} is being grafted by another process", "Wait for it.") from None
        except OSError as err:
            logger.warning("%s cannot be locked (%s): start no second graft on it", folder, err.strerror)
        yield
    finally:
        os.close(fd)


# The donor


def open_donor(folder: Path, headers: Mapping[str, ShardHeader] | None = None, path: Locate | None = None) -> Donor:
    """A bf16 or block-scaled FP8 checkpoint, of which config.json and the shards with the MTP layer are enough.

    Args:
        headers: of shards that are not in the folder; `path` says where they are.

    Raises:
        CheckpointError: it is quantized, has no MTP layer or only a part of it, or cannot be read.
        RecipeError: its model type is not known.
    """
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
    donor = Donor(checkpoint, layers, architecture, offers, mtp, path or folder.joinpath)
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
    wanted = [name for name in _promised(donor.checkpoint, donor) if donor.is_mtp(name)]
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


def _promised(checkpoint: Checkpoint, donor: Donor) -> dict[str, tuple[int, ...]]:
    """What a config.json says is in it, read with the donor's number of MTP layers."""
    keys = donor.architecture.keys
    layers = replace(read_layers(checkpoint.config, keys), mtp=donor.layers.mtp)
    return expected_tensors(donor.architecture.tensors, keys.of(checkpoint.config), layers)


# What is to be done


def _plan(
    donor: Donor, folder: Path, targets: Sequence[Target], form: str, quantized: bool, force: bool
) -> tuple[_Plan, Graft]:
    checkpoint, problems = inspect(folder)
    for problem in problems:
        if problem.code in ("bad-header", "bad-index", "index-path", "link-outside"):
            raise problem.error()
    _check_config(donor, checkpoint)
    leftovers = _leftovers(checkpoint)
    tensors = _trusted_tensors(donor, checkpoint, leftovers)
    missing = _missing(donor, tensors)
    lacking = set(missing)
    there = [name for name in donor.mtp if name not in lacking]
    named = checkpoint.weight_map or {name: tensor.shard for name, tensor in tensors.items()}
    foreign = bool(missing) or any(named.get(name) != tensors[name].shard for name in there)
    pairs = list(_comparable(donor, tensors, there if foreign else ()))
    different = _different(donor, folder, checkpoint, pairs)
    _check_different(donor, len(pairs), different, force)

    packed = _packed_groups(donor, tensors) if quantized else frozenset()
    stem = _stem(checkpoint, leftovers)
    shards = _lay_out(donor, missing, packed, stem) if missing else ()
    if strays := sorted(leftovers - {shard.file for shard in shards}):
        raise OutputError(
            f"{strays[0]}: left by a graft with other options, and not named by {INDEX}", "Remove it, then try again."
        )
    new = [
        TensorInfo(out.name, out.dtype, out.shape, shard.file, out.start, out.end)
        for shard in shards
        for job in shard.jobs
        for out in job.outputs
    ]
    after = {**tensors, **{tensor.name: tensor for tensor in new}}
    index = _index(checkpoint, after, sum(donor.offers[name].numel for name in missing))
    first_index = _index(checkpoint, tensors, 0) if checkpoint.weight_map is None and shards else None
    config = deepcopy(checkpoint.config)
    changes = _declare(donor, config)
    same_index = index["weight_map"] == named
    found, before, keeps = _list(replace(checkpoint, config=config, tensors=after), targets, form)
    # A list that loads is left alone where all the rest was right already.
    keeps = keeps and not shards and same_index and not changes
    if found and not keeps:
        config["quantization_config"]["exclude"] = found.texts
    result = Graft(
        folder=folder,
        there=len(there),
        missing=tuple(missing),
        shards=tuple(shard.file for shard in shards),
        tensors=len(new),
        nbytes=sum(tensor.nbytes for tensor in new),
        quantized=sum(job.quantized for shard in shards for job in shard.jobs),
        compared=len(pairs),
        different=tuple(different),
        index=not same_index,
        config=changes,
        before=before,
        exclusions=found,
        keeps_list=keeps,
    )
    plan = _Plan(
        donor,
        folder,
        tuple(shards),
        first_index,
        None if same_index else index,
        config if config != checkpoint.config else None,
    )
    return plan, result


def _check_config(donor: Donor, checkpoint: Checkpoint) -> None:
    """Raise unless both config.json promise the same tensors (the MTP layer's aside, which CKPT's may not declare)."""
    if checkpoint.model_type != donor.checkpoint.model_type:
        raise CheckpointError(
            f"SRC is a {short(donor.checkpoint.model_type)}, CKPT a {short(checkpoint.model_type)} (model_type)",
            "Take the MTP layer from the model that CKPT was made from.",
        )
    ours, theirs = _promised(checkpoint, donor), _promised(donor.checkpoint, donor)
    for name in dict.fromkeys([*theirs, *ours]):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"not the same model: by SRC's {CONFIG} {name!r} is {_shape(theirs.get(name))}, "
                f"by CKPT's {_shape(ours.get(name))}",
                "Take the MTP layer from the model that CKPT was made from.",
            )


def _shape(shape: Sequence[int] | None) -> str:
    return "not in it" if shape is None else str(list(shape))


def _leftovers(checkpoint: Checkpoint) -> frozenset[str]:
    """Shards that a killed graft has written: complete, but not named by the index, so that nobody reads them."""
    if checkpoint.weight_map is None:
        return frozenset()
    named = set(checkpoint.weight_map.values())
    return frozenset(h.file for h in checkpoint.shards if h.file not in named and h.metadata == METADATA)


def _stem(checkpoint: Checkpoint, leftovers: frozenset[str]) -> str:
    """The beginning of the new shards' names, such that none is taken, not even by a shard that the index names."""
    used = {header.file for header in checkpoint.shards} - leftovers
    used |= set((checkpoint.weight_map or {}).values())
    number, stem = 1, STEM
    while any(re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", file) for file in used):
        number += 1
        stem = f"{STEM}{number}"
    return stem


def _trusted_tensors(donor: Donor, checkpoint: Checkpoint, leftovers: frozenset[str]) -> dict[str, TensorInfo]:
    """All tensors but those of leftovers.

    Raises:
        CheckpointError: one is there twice, or the index is wrong about one that is not of the MTP layer.
    """
    stored = [t for header in checkpoint.shards if header.file not in leftovers for t in header.tensors]
    tensors = {tensor.name: tensor for tensor in stored}
    if len(tensors) != len(stored):
        name, _ = Counter(tensor.name for tensor in stored).most_common(1)[0]
        files = ", ".join(tensor.shard for tensor in stored if tensor.name == name)
        raise CheckpointError(f"tensor {name!r} is in more than one shard: {files}", "Remove the stale shard.")
    if checkpoint.weight_map is None:
        return tensors
    for name, file in checkpoint.weight_map.items():
        if (name not in tensors or tensors[name].shard != file) and not donor.is_mtp(name):
            raise CheckpointError(
                f"{INDEX}: tensor {name!r} is said to be in {short(file)}, where it is not",
                "Only the MTP layer can be brought back: fetch the missing shard, or mend the index.",
            )
    for name, tensor in tensors.items():
        if name not in checkpoint.weight_map and not donor.is_mtp(name):
            raise CheckpointError(
                f"{tensor.shard}: tensor {name!r} is not named by {INDEX}",
                "Remove the stale shard, or mend the index.",
            )
    return tensors


def _missing(donor: Donor, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The donor's MTP tensors that are not there in any form.

    Raises:
        CheckpointError: one is there in a form that no engine reads.
    """
    missing = []
    for name in donor.mtp:
        shape = donor.offers[name].shape
        stored, scale = tensors.get(name), tensors.get(name + "_scale") or tensors.get(name + SCALE_INV)
        if stored is None and scale is None:
            missing.append(name)
        elif not _faithful(shape, stored, scale):
            tensor = stored or scale
            assert tensor
            raise CheckpointError(
                f"{tensor.shard}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, which is neither "
                f"SRC's {list(shape)} nor that in MXFP4 or FP8 with its scale",
                "glmquant adds shards and rewrites none: take this tensor out, or start from a checkpoint without it.",
            )
    return missing


def _faithful(shape: tuple[int, ...], stored: TensorInfo | None, scale: TensorInfo | None) -> bool:
    """Whether what is stored has the form of a tensor of this shape: as it is, FP8, or packed."""
    if stored is None or stored.dtype in PLAIN:
        return stored is not None and stored.shape == shape
    if scale is None or len(shape) != 2:
        return False
    if stored.dtype == FP8:
        return stored.shape == shape
    rows, columns = shape
    packed = (stored.dtype, stored.shape) in (("U8", (rows, columns // 2)), ("I8", (rows, columns // 2)))
    return packed and (scale.dtype, scale.shape) == ("U8", (rows, columns // planner.BLOCK))


# Whether both are the same weights


def _comparable(
    donor: Donor, tensors: Mapping[str, TensorInfo], of_mtp: Sequence[str]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Pairs of one tensor in both checkpoints whose bytes must be equal, the MTP layers' only as far as named.

    Raises:
        CheckpointError: a tensor has another shape.
    """
    chosen = set(of_mtp)
    mtp = set(donor.mtp)
    for name, theirs in donor.offers.items():
        ours = tensors.get(name)
        if ours is None or (name in mtp and name not in chosen):
            continue
        if ours.dtype in PLAIN and ours.shape != theirs.shape:
            raise CheckpointError(
                f"{ours.shard}: tensor {name!r} has shape {list(ours.shape)}, in SRC {list(theirs.shape)}",
                "Take the MTP layer from the model that CKPT was made from.",
            )
        if ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.nbytes:
            yield theirs, ours


def _different(
    donor: Donor, folder: Path, checkpoint: Checkpoint, pairs: Sequence[tuple[TensorInfo, TensorInfo]]
) -> list[str]:
    """Names of tensors of which a piece differs: the first SAMPLE bytes, or all of a tensor of the MTP layer."""
    mtp, found = set(donor.mtp), []
    theirs = {header.file: header for header in donor.checkpoint.shards}
    ours = {header.file: header for header in checkpoint.shards}

    def files(pair: tuple[TensorInfo, TensorInfo]) -> tuple[str, str]:
        return pair[0].shard, pair[1].shard

    for (their_file, our_file), group in groupby(sorted(pairs, key=files), files):
        with (
            ShardReader(donor.path(their_file), theirs[their_file]) as their_reader,
            ShardReader(folder / our_file, ours[our_file]) as our_reader,
        ):
            for a, b in group:
                end = a.nbytes if a.name in mtp else min(a.nbytes, SAMPLE)
                for start in range(0, end, SAMPLE):
                    size = min(SAMPLE, end - start)
                    one, two = memoryview(bytearray(size)), memoryview(bytearray(size))
                    their_reader.read_into(one, a.start + start)
                    our_reader.read_into(two, b.start + start)
                    if one != two:
                        found.append(a.name)
                        break
    return sorted(found)


def _check_different(donor: Donor, compared: int, different: Sequence[str], force: bool) -> None:
    if force:
        return
    if own := [name for name in different if donor.is_mtp(name)]:
        raise CheckpointError(
            f"CKPT has a part of the MTP layer, and {len(own)} tensors of it are not SRC's, {own[0]!r} first",
            "An MTP layer of two origins drafts badly: take it from what CKPT was made from, or use --force.",
        )
    if different:
        raise CheckpointError(
            f"SRC and CKPT are not the same weights: {len(different)} of {compared} un-quantized tensors differ, "
            f"{different[0]!r} first",
            "An MTP layer drafts badly for another fine-tune: take it from what CKPT was made from, or use --force.",
        )
    if not compared:
        raise CheckpointError(
            "SRC and CKPT share no un-quantized tensor, so nothing shows that they are the same weights",
            "Fetch more shards of SRC (those with norms or attention), or use --force.",
        )


# What is written


def _packed_groups(donor: Donor, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Groups that a recipe may quantize in the MTP layer, and that are MXFP4 in all of the checkpoint's main layers."""
    architecture = donor.architecture
    allowed = {
        rule.group for recipe in architecture.recipes.values() for rule in recipe.rules if rule.layers in ("mtp", "all")
    }
    kinds: dict[str, set[str]] = {}
    for name, kind in stored_formats(tensors, architecture.lookups).items():
        module = architecture.module(name, donor.layers)
        if not module.is_mtp:
            kinds.setdefault(module.group, set()).add(kind)
    found = frozenset(group for group in allowed if kinds.get(group) == {"mxfp4"})
    if not found:
        raise RecipeError(
            f"--quantized: none of {', '.join(sorted(allowed)) or 'its groups'} is MXFP4 in all main layers of CKPT",
            "Leave --quantized out: the MTP layer is then stored as SRC has it.",
        )
    return found


def _lay_out(donor: Donor, names: Sequence[str], packed: frozenset[str], stem: str) -> tuple[planner.ShardPlan, ...]:
    fates: list[planner.Fate] = []
    for name in names:
        tensor, module = donor.offers[name], donor.architecture.module(module_name(name), donor.layers)
        quantize = name.endswith(".weight") and module.group in packed
        if quantize:
            planner.check_quantizable(tensor, donor.architecture)
        fates += planner.fates_of(tensor, module, quantize, {})
    packs = planner.pack(fates, SHARD_SIZE)
    files = [f"{stem}-{n:05}-of-{len(packs):05}.safetensors" for n in range(1, len(packs) + 1)]
    return tuple(planner.lay_out(file, METADATA, pack) for file, pack in zip(files, packs, strict=True))


def _index(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], parameters: int) -> dict[str, Any]:
    """The index for these tensors: its other metadata and its order are kept."""
    old: dict[str, Any] = read_json(checkpoint.folder / INDEX) if checkpoint.weight_map is not None else {}
    names = [name for name in checkpoint.weight_map or {} if name in tensors]
    in_order = names == sorted(names)
    names += sorted(tensors.keys() - set(names))
    given = old.get("metadata")
    metadata = {**(given if isinstance(given, dict) else {})}
    metadata["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    if type(count := metadata.get("total_parameters")) is int:  # transformers 5 writes it
        metadata["total_parameters"] = count + parameters
    weight_map = {name: tensors[name].shard for name in (sorted(names) if in_order else names)}
    return {**old, "metadata": metadata, "weight_map": weight_map}


def _declare(donor: Donor, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Declare the MTP layers in CKPT's config as the donor's does; returns key -> (before, after).

    Besides their number: keys that speak of them and are missing, and lists with an item a layer that were cut to the
    main layers.
    """
    keys = donor.architecture.keys
    theirs, ours = keys.of(donor.checkpoint.config), keys.of(config)
    assert isinstance(ours, dict)
    count, mtp = donor.layers.count, len(donor.layers.mtp)
    changes = {}
    for key, value in theirs.items():
        mine = ours.get(key)
        cut = isinstance(value, list) and len(value) == count + mtp and mine == value[:count]
        lost = key not in ours and re.search("nextn|mtp", key)
        if cut or lost or (key == keys.mtp and mine != value):
            changes[key] = (mine, value)
            ours[key] = value
    return changes


def _list(
    checkpoint: Checkpoint, targets: Sequence[Target], form: str
) -> tuple[ExclusionList | None, tuple[str, ...], bool]:
    """The list for what will be stored, the one that is there, and whether that one loads on every target."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None:
        return None, (), True
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "quark":
        raise CheckpointError(
            f"{CONFIG}: quantization_config.quant_method is {short(method)}, not 'quark'",
            "glmquant writes exclude lists of AMD Quark's format only.",
        )
    found = list_for(checkpoint, targets, form)
    listed = quantization.get("exclude")
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        return found, (), False
    loads = all(evaluate(target, listed, found.stored).loads for target in found.targets)
    return found, tuple(listed), loads


def _write(plan: _Plan, backends: Sequence[Backend], threads: int, advance: Advance, allow_zeros: bool) -> list[Path]:
    """Shards, index, config.json, in this order; each appears whole or not at all. Returns the backups."""
    folder = plan.folder
    for partial in folder.glob(f".{STEM}*{TEMPORARY}"):  # of a killed run
        partial.unlink(missing_ok=True)
    check_space(folder, plan.disk_needed)
    if plan.first_index:  # without an index engines read every shard in the folder
        _replace(folder, INDEX, plan.first_index)
    records: list[ShardRecord] = []
    headers = {header.file: header for header in plan.donor.checkpoint.shards}
    try:
        for shard in plan.shards:
            ShardWriter(folder, shard.file, shard.header, shard.file_size).reserve()
        source = SourceShards(headers, plan.shards, plan.donor.path)
        Streamer(backends, threads, advance, records.append, allow_zeros=allow_zeros).run(plan.shards, source, folder)
    finally:
        for shard in plan.shards:
            (folder / f".{shard.file}{TEMPORARY}").unlink(missing_ok=True)
    new = {INDEX: plan.index, CONFIG: plan.config}
    backups = [back_up(folder, name) for name, value in new.items() if value and (folder / name).exists()]
    _record(folder, records, backups)
    for name, value in new.items():
        if value:
            _replace(folder, name, value)
    return backups


def _replace(folder: Path, name: str, value: dict[str, Any]) -> None:
    exists = (folder / name).exists()
    replace_file(folder, name, like(folder / name, value) if exists else json.dumps(value, indent=2).encode())


def _record(folder: Path, records: Sequence[ShardRecord], backups: Sequence[Path]) -> None:
    """Into the manifest, where there is one, so that `verify` knows the new files and misses no lost shard."""
    if not (folder / MANIFEST).exists():
        return
    old = Manifest.read(folder)
    files = {**old.files, **{path.name: (path.stat().st_size, file_digest(path)) for path in backups}}
    kept = {file: record for file, record in old.shards.items() if (folder / file).exists()}
    shards = {**kept, **{record.file: record for record in sorted(records, key=lambda record: record.file)}}
    write_file(folder, MANIFEST, Manifest(old.fingerprint, shards, files).encode())


def files_to_fetch(donor: Donor) -> list[str]:
    """What of the donor's repository is enough, for one who has not got it: a few files of hundreds."""
    shards = {shard for name in donor.mtp for shard in shards_of(donor.offers[name])}
    return [CONFIG, *([INDEX] if donor.checkpoint.weight_map is not None else []), *sorted(shards)]

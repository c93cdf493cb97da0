"""Each verb as one short function; the only place where order is decided."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from glmquant.card import make_card
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, ShardReader, open_source, read_json
from glmquant.checkpoint.writer import ShardWriter, check_output, copy_file, create_folder, write_file
from glmquant.engines.targets import DEFAULT_TARGETS, parse_targets
from glmquant.errors import CheckpointError
from glmquant.exclusions import ExclusionList, resolve
from glmquant.mend import Difference, Fix, diff, fix, on_disk
from glmquant.mxfp4.config import quantization_config
from glmquant.planner import Plan, ShardPlan, TensorJob, make_plan
from glmquant.recipe import load_architecture, select_recipe
from glmquant.validator import Report, validate_folder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

CARD = "README.md"
RECORD = "glmquant.json"
COPY_CHUNK = 8 * 1024 * 1024

Folder = str | os.PathLike[str]
Advance = Callable[[int], object]


class Backend(Protocol):
    """What turns a weight into MXFP4."""

    name: str
    version: str

    def quantize(
        self, raw: memoryview, dtype: str, shape: tuple[int, int], name: str
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]: ...


@dataclass(frozen=True)
class PlanResult:
    """What `quantize` would do: the source's headers, every output byte's place, and the exclude list."""

    checkpoint: Checkpoint
    plan: Plan
    exclusions: ExclusionList

    @property
    def disk_needed(self) -> int:
        """Bytes the output will take: shards to the byte, side files, and an estimate of the JSON files."""
        folder = self.checkpoint.folder
        side = sum((folder / name).stat().st_size for name in self.checkpoint.side_files)
        names = sum(len(name) + len(file) + 12 for name, file in self.plan.weight_map.items())
        entries = sum(4 * len(entry.text) + 100 for entry in self.exclusions.entries)
        return self.plan.disk_needed + side + names + entries + 65536


@dataclass(frozen=True)
class QuantizeResult:
    """A finished run: where the output is, what was planned, and what the validator says of it."""

    output: Path
    plan: Plan
    exclusions: ExclusionList
    report: Report
    seconds: float


def plan(
    source: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
) -> PlanResult:
    """Plan a quantization from headers alone: no weight is read, nothing is written.

    Args:
        source: folder of a bf16 checkpoint, or a hub-cache snapshot.
        recipe: a name from exclusions/<model_type>.yaml, or a file of your own (`my.yaml`, `my.yaml:name`).
        quantize, keep: overrides, globs (or `re:` regexes) over module names; keep wins.
        targets: engine releases that must load the result, e.g. `sglang>=0.5.13,vllm`.
        form: spelling of the exclude list: `auto`, `literal` (no regex) or `regex` (as short as possible).

    Raises:
        CheckpointError: the source is damaged, incomplete or already quantized.
        RecipeError: unknown model type or recipe, or a combination that no engine loads.
        ExclusionError: no exclude list serves all targets.
    """
    checkpoint = open_source(source)
    architecture = load_architecture(checkpoint.model_type)
    architecture, chosen = select_recipe(architecture, recipe)
    layers = read_layers(checkpoint.config)
    planned = make_plan(checkpoint, architecture, chosen.with_overrides(quantize, keep), layers)
    exclusions = resolve(planned.formats, layers, architecture, parse_targets(targets), form)
    return PlanResult(checkpoint, planned, exclusions)


def resolve_exclusions(
    checkpoint: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
) -> ExclusionList:
    """The exclude list for a bf16 source and a recipe, or for a quantized folder of any producer as it is on disk.

    Raises: as `plan`; CheckpointError if a quantized folder is given together with a recipe or overrides.
    """
    if not read_json(Path(checkpoint) / CONFIG).get("quantization_config"):
        return plan(checkpoint, recipe=recipe, quantize=quantize, keep=keep, targets=targets, form=form).exclusions
    if recipe or quantize or keep:
        raise CheckpointError(
            f"{checkpoint} is already quantized: its list follows from what is stored", "Leave the recipe out."
        )
    return on_disk(Path(checkpoint), parse_targets(targets), form)


def fix_exclusions(
    checkpoint: Folder, *, targets: str = DEFAULT_TARGETS, form: str = "auto", dry_run: bool = False
) -> Fix:
    """Mend quantization_config.exclude of an existing checkpoint in place, with a backup; see mend.fix."""
    return fix(Path(checkpoint), parse_targets(targets), form, dry_run)


def diff_exclusions(a: Folder, b: Folder, *, targets: str = DEFAULT_TARGETS) -> list[Difference]:
    """What two exclude lists answer differently, per engine and module; see mend.diff."""
    return diff(Path(a), Path(b), parse_targets(targets))


def validate(checkpoint: Folder, *, targets: str = DEFAULT_TARGETS) -> Report:
    """Check a quantized checkpoint of any producer from its headers, against what each target engine asks for.

    Raises:
        CheckpointError: the folder or its config.json cannot be read at all; everything else is a finding.
    """
    return validate_folder(checkpoint, parse_targets(targets))


def quantize(
    source: Folder,
    output: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
    device: str = "cpu",
    base_model: str | None = None,
    progress: bool = False,
) -> QuantizeResult:
    """Write an MXFP4 checkpoint; see `plan` for the arguments it shares.

    Args:
        output: a folder that does not exist or is empty.
        device: torch device for AMD Quark: `cpu`, `cuda`, `cuda:1`.
        base_model: the source's name on the Hub, for the model card; guessed from a hub-cache path.
        progress: show a progress bar on stderr.

    Raises:
        As `plan`, and OutputError or BackendError. After an error no config.json is in the output, so no engine
        takes it for finished.
    """
    begun = time.monotonic()
    result = plan(source, recipe=recipe, quantize=quantize, keep=keep, targets=targets, form=form)
    out = Path(output)
    check_output(out, result.checkpoint.folder, result.disk_needed)
    backend = _make_backend(device)
    create_folder(out)
    headers = {header.file: header for header in result.checkpoint.shards}
    with _progress(result.plan.bytes_in, progress) as advance:
        for shard in result.plan.shards:
            logger.info("writing %s", shard.file)
            with (
                ShardReader(result.checkpoint.folder, headers[shard.file]) as reader,
                ShardWriter(out, shard.file, shard.header, shard.file_size) as writer,
            ):
                _write_shard(shard, reader, writer, backend, advance)
    _finish(result, out, backend, base_model or _guess_base_model(result.checkpoint.folder))
    report = validate_folder(out, parse_targets(targets))
    return QuantizeResult(out, result.plan, result.exclusions, report, time.monotonic() - begun)


def _make_backend(device: str) -> Backend:
    from glmquant.mxfp4.quark import QuarkBackend

    return QuarkBackend(device)


def _write_shard(
    shard: ShardPlan, reader: ShardReader, writer: ShardWriter, backend: Backend, advance: Advance
) -> None:
    for job in shard.jobs:
        if job.quantized:
            _quantize_tensor(job, reader, writer, backend, advance)
        else:
            _copy_tensor(job.source, job.outputs[0].start, reader, writer, advance)


def _copy_tensor(tensor: TensorInfo, to: int, reader: ShardReader, writer: ShardWriter, advance: Advance) -> None:
    buffer = memoryview(bytearray(min(COPY_CHUNK, tensor.nbytes)))
    for start in range(0, tensor.nbytes, COPY_CHUNK):
        part = buffer[: min(COPY_CHUNK, tensor.nbytes - start)]
        reader.read_into(part, tensor.start + start)
        writer.write(part, to + start)
        advance(len(part))


def _quantize_tensor(
    job: TensorJob, reader: ShardReader, writer: ShardWriter, backend: Backend, advance: Advance
) -> None:
    tensor = job.source
    raw = memoryview(bytearray(tensor.nbytes))
    reader.read_into(raw, tensor.start)
    packed_at, scale_at = (out.start for out in job.outputs)
    rows, columns = tensor.shape
    for packed, scale in backend.quantize(raw, tensor.dtype, (rows, columns), tensor.name):
        writer.write(packed.data, packed_at)
        writer.write(scale.data, scale_at)
        packed_at += packed.nbytes
        scale_at += scale.nbytes
        advance(tensor.nbytes * len(packed) // rows)


def _finish(result: PlanResult, out: Path, backend: Backend, base_model: str) -> None:
    """Everything that is not a shard: index, side files, record, card, and config.json last."""
    source = result.checkpoint
    if source.weight_map is not None:
        index = {"metadata": {"total_size": result.plan.total_size}, "weight_map": result.plan.weight_map}
        write_file(out, INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode())
    for name in source.side_files:
        if name not in (CARD, RECORD):
            copy_file(source.folder / name, out, name)
    record = _record(result, backend, base_model)
    write_file(out, RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    write_file(out, CARD, make_card(source.folder / CARD, result.plan, result.exclusions, record).encode())
    config = {
        **source.config,
        "quantization_config": quantization_config(result.exclusions.texts, backend.version),
    }
    write_file(out, CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def _record(result: PlanResult, backend: Backend, base_model: str) -> dict[str, object]:
    """What was done, for people and tools: goes into the output as glmquant.json."""
    recipe = result.plan.recipe
    command = ["glmquant", "quantize", base_model, "OUT", "--recipe", recipe.name]
    for override in recipe.overrides:
        command += ["--quantize" if override.quantize else "--keep", override.pattern]
    return {
        "base_model": base_model,
        "recipe": recipe.name,
        "rules": [{"group": r.group, "layers": r.layers, "reason": r.reason} for r in recipe.rules],
        "overrides": [str(override) for override in recipe.overrides],
        "command": shlex.join(command),
        "backend": backend.name,
        "versions": {
            "glmquant": installed_version("glmquant"),
            "amd-quark": backend.version,
            "torch": installed_version("torch"),
        },
        "targets": [str(target) for target in result.exclusions.targets],
        "needs": [str(need) for need in result.exclusions.needs],
        "exclude": [
            {
                "entry": e.text,
                "origin": e.origin,
                "module": e.module,
                **({"source": e.source} if e.source else {}),
            }
            for e in result.exclusions.entries
        ],
    }


def _guess_base_model(folder: Path) -> str:
    """`org/name` of a hub-cache snapshot (models--org--name/snapshots/<commit>), else the folder's name."""
    parts = folder.resolve().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return parts[-1]


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Advance]:
    if not wanted:
        yield lambda _: None
        return
    from tqdm import tqdm

    # disable=None: quiet when stderr is not a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:
        yield bar.update

"""Each verb as one short function; the only place where order is decided."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

from glmquant.card import make_card
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, open_source, read_json
from glmquant.checkpoint.writer import check_output, copy_file, create_folder, write_file
from glmquant.engines.targets import DEFAULT_TARGETS, parse_targets
from glmquant.errors import BackendError, CheckpointError, OutputError
from glmquant.exclusions import ExclusionList, resolve
from glmquant.findings import Report
from glmquant.mend import Difference, Fix, diff, fix, on_disk
from glmquant.mxfp4.backend import Backend, CheckedBackend
from glmquant.mxfp4.config import quantization_config
from glmquant.planner import Plan, make_plan
from glmquant.recipe import load_architecture, select_recipe
from glmquant.streaming import Advance, Streamer, available_memory, default_workers
from glmquant.validator import validate_folder

logger = logging.getLogger(__name__)

CARD = "README.md"
RECORD = "glmquant.json"
BACKENDS = ("auto", "fused", "quark")

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class PlanResult:
    """What `quantize` would do: the source's headers, every output byte's place, and the exclude list.

    `options` are the command-line options that ask for the same again.
    """

    checkpoint: Checkpoint
    plan: Plan
    exclusions: ExclusionList
    options: tuple[str, ...]

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
    options = ["--recipe", recipe or chosen.name]
    options += [word for pattern in quantize for word in ("--quantize", pattern)]
    options += [word for pattern in keep for word in ("--keep", pattern)]
    options += ["--targets", targets] if targets != DEFAULT_TARGETS else []
    options += ["--form", form] if form != "auto" else []
    return PlanResult(checkpoint, planned, exclusions, tuple(options))


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
    backend: str = "auto",
    device: str = "cpu",
    workers: int | None = None,
    check_backend: float = 0.0,
    base_model: str | None = None,
    progress: bool = False,
) -> QuantizeResult:
    """Write an MXFP4 checkpoint; see `plan` for the arguments it shares.

    Args:
        output: a folder that does not exist or is empty.
        backend: `quark` is AMD Quark's own code, `fused` this project's kernel with the same bits and no torch; `auto`
            is the kernel on the CPU and Quark on a GPU.
        device: torch device, or several for Quark: `cpu`, `cuda`, `cuda:0,1`.
        workers: threads; by default as many as CPUs may be used.
        check_backend: share of the chunks (0 to 1) that are quantized by Quark as well; a differing bit is an error.
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
    backends = _make_backends(backend, device, check_backend)
    create_folder(out)
    headers = {header.file: header for header in result.checkpoint.shards}
    memory = available_memory()
    with _progress(result.plan.bytes_in, progress) as advance:
        streamer = Streamer(
            backends,
            _threads(backends, workers),
            advance,
            drop_behind=memory is not None and result.plan.bytes_in > memory // 2,
        )
        streamer.run(result.plan.shards, headers, result.checkpoint.folder, out)
    _finish(result, out, backends[0], base_model or _guess_base_model(result.checkpoint.folder))
    report = validate_folder(out, parse_targets(targets))
    return QuantizeResult(out, result.plan, result.exclusions, report, time.monotonic() - begun)


def _make_backends(name: str, device: str, check: float) -> list[Backend]:
    """One backend per device; `auto` is the fused kernel on the CPU and Quark on anything else."""
    devices = _devices(device)
    on_cpu = all(found.startswith("cpu") for found in devices)
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}", f"Known: {', '.join(BACKENDS)}.")
    if name == "fused" and not on_cpu:
        raise BackendError(f"the fused kernel runs on the CPU, not on {device!r}", "Leave --backend or --device out.")
    if name == "quark" or not on_cpu:
        from glmquant.mxfp4.quark import QuarkBackend

        return [QuarkBackend(found) for found in devices]
    from glmquant.mxfp4.kernel import FusedBackend

    if not check:
        return [FusedBackend()]
    from glmquant.mxfp4.quark import QuarkBackend

    return [CheckedBackend(FusedBackend(), QuarkBackend("cpu"), check)]


def _devices(device: str) -> list[str]:
    """`cuda:0,1` names two devices, like `cuda:0,cuda:1`."""
    kind = device.partition(":")[0]
    return [f"{kind}:{part}" if part.isdigit() else part for part in device.split(",")]


def _threads(backends: Sequence[Backend], workers: int | None) -> int:
    wanted = workers or default_workers()
    limit = backends[0].threads * len(backends)
    return min(wanted, limit) if limit else wanted


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
    try:
        write_file(out, CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    except OutputError:
        (out / CONFIG).unlink(missing_ok=True)  # it may have its name already, and not be durable
        raise


def _record(result: PlanResult, backend: Backend, base_model: str) -> dict[str, object]:
    """What was done, for people and tools: goes into the output as glmquant.json."""
    recipe = result.plan.recipe
    command = ["glmquant", "quantize", base_model, "OUT", *result.options]
    return {
        "base_model": base_model,
        "recipe": recipe.name,
        "rules": [{"group": r.group, "layers": r.layers, "reason": r.reason} for r in recipe.rules],
        "overrides": [str(override) for override in recipe.overrides],
        "command": shlex.join(command),
        "backend": backend.name,
        "versions": {"glmquant": installed_version("glmquant"), "amd-quark": backend.version},
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

"""Each verb as one short function; the only place where order is decided."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

from glmquant.card import make_card
from glmquant.checkpoint.checksums import check_source
from glmquant.checkpoint.header import ShardHeader
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Run,
    ShardRecord,
    digest,
    file_digest,
    lasting,
    open_run,
)
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, open_source, read_json, unfinished
from glmquant.checkpoint.writer import ShardWriter, check_place, check_space, copy_file, write_file
from glmquant.engines.targets import DEFAULT_TARGETS, parse_targets
from glmquant.errors import CheckpointError, GlmquantError, OutputError
from glmquant.exclusions import ExclusionList, resolve
from glmquant.findings import Report
from glmquant.mend import Difference, Fix, diff, fix, on_disk
from glmquant.mxfp4.backend import Backend
from glmquant.mxfp4.choose import make_backends, threads_for
from glmquant.mxfp4.config import quantization_config
from glmquant.planner import Plan, make_plan
from glmquant.recipe import load_architecture, select_recipe
from glmquant.resume import check_deletable, delete_shard, deleted_headers, fingerprint, intact
from glmquant.streaming import Advance, Streamer, available_memory, default_workers
from glmquant.validator import validate_folder
from glmquant.verifier import Verification, verify_output

logger = logging.getLogger(__name__)

CARD = "README.md"
RECORD = "glmquant.json"

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
    return _plan(source, recipe, quantize, keep, targets, form, {})


def _plan(
    source: Folder,
    recipe: str | None,
    quantize: Sequence[str],
    keep: Sequence[str],
    targets: str,
    form: str,
    deleted: Mapping[str, ShardHeader],
) -> PlanResult:
    checkpoint = open_source(source, deleted)
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


def verify(
    output: Folder,
    source: Folder | None = None,
    *,
    sample: float = 1.0,
    workers: int | None = None,
    progress: bool = False,
) -> Verification:
    """Read a finished output again and compare it with its manifest, and with its source if given.

    Args:
        source: the bf16 checkpoint it was made from: copies must be equal, quantized weights must come out the same.
        sample: share (0 to 1) of the tensors to compare with the source.

    Raises:
        CheckpointError: the output is unfinished or not glmquant's, or a folder cannot be read at all.
    """
    if not 0 <= sample <= 1:
        raise CheckpointError(f"--sample {sample} is not a share between 0 and 1")
    threads = workers or default_workers()
    total = sum(
        path.stat().st_size for folder in (output, source) if folder for path in Path(folder).glob("*.safetensors")
    )
    with _progress(total, progress, "verifying") as advance:
        backend = make_backends("fused", "cpu", 0.0)[0]
        return verify_output(Path(output), Path(source) if source else None, sample, backend, threads, advance)


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
    resume: bool = False,
    verify_source: bool = False,
    allow_zeros: bool = False,
    delete_source_shards: bool = False,
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
        resume: continue the unfinished run in `output`, or begin one. Finished shards are read again and kept if they
            are what was written; what decides the bytes must be the same as before.
        verify_source: first compare the source with the checksums that came with it; see checkpoint/checksums.py.
        allow_zeros: accept a weight that is all zeros, normally a sign of a damaged download.
        delete_source_shards: remove each source shard once its output is durable and was read back.
        progress: show a progress bar on stderr.

    Raises:
        As `plan`, and OutputError or BackendError. After an error no config.json is in the output, so no engine
        takes it for finished; finished shards are kept for `resume`.
    """
    begun, out = time.monotonic(), Path(output)
    deleted = deleted_headers(out) if resume else {}
    result = _plan(source, recipe, quantize, keep, targets, form, deleted)
    folder = result.checkpoint.folder
    check_place(out, folder)
    if delete_source_shards:
        check_deletable(result.checkpoint, deleted)
    backends = make_backends(backend, device, check_backend)
    base = base_model or _guess_base_model(folder)
    threads = threads_for(backends, workers or default_workers())
    decides = fingerprint(result.checkpoint, result.plan, result.exclusions.texts, base, backends[0])
    words = ["glmquant", "quantize", str(source), str(output), *result.options]
    words += ["--base-model", base_model] if base_model else []
    words += ["--backend", backend] if backend != "auto" else []
    words += [
        option
        for option, wanted in (("--allow-zeros", allow_zeros), ("--delete-source-shards", delete_source_shards))
        if wanted
    ]
    with open_run(out, decides, shlex.join([*words, "--resume"]), resume) as run:
        if not run.finished:
            with _continuable(run, [shard.file for shard in result.plan.shards]):
                if verify_source:
                    with _progress(result.checkpoint.file_bytes, progress, "verifying source") as advance:
                        check_source(result.checkpoint, threads, advance)
                _write_shards(result, run, backends, threads, progress, allow_zeros, delete_source_shards)
                _finish(result, run, backends[0], base)
        run.finish()
    report = validate_folder(out, parse_targets(targets))
    return QuantizeResult(out, result.plan, result.exclusions, report, time.monotonic() - begun)


def _write_shards(
    result: PlanResult,
    run: Run,
    backends: Sequence[Backend],
    threads: int,
    progress: bool,
    allow_zeros: bool,
    delete_source: bool,
) -> None:
    """All shards that are not in the output yet; their space is taken before the first byte is written."""
    source, out, memory = result.checkpoint.folder, run.output, available_memory()
    headers = {header.file: header for header in result.checkpoint.shards}
    run.drop_partials(headers)
    records = run.records()
    kept: dict[str, ShardRecord] = {}
    if records:
        with _progress(sum(record.size for record in records.values()), progress, "checking") as advance:
            kept = intact(out, records, threads, advance)
    todo = [shard for shard in result.plan.shards if shard.file not in kept]

    def finished(record: ShardRecord) -> None:
        run.record(record)
        if delete_source:
            delete_shard(source, run, headers[record.file], record)

    small = result.disk_needed - result.plan.disk_needed
    if delete_source:
        for file, record in kept.items():
            if (source / file).exists():
                delete_shard(source, run, headers[file], record)
        # Each shard frees more than the next one takes; only those that are open at once must fit.
        check_space(out, small + sum(sorted((shard.file_size for shard in todo), reverse=True)[: threads + 1]))
    else:
        check_space(out, small + sum(shard.file_size for shard in todo))
        for shard in todo:
            ShardWriter(out, shard.file, shard.header, shard.file_size).reserve()
    total = sum(job.source.nbytes for shard in todo for job in shard.jobs)
    with _progress(total, progress, "quantizing") as advance:
        drop = delete_source or (memory is not None and total > memory // 2)
        streamer = Streamer(backends, threads, advance, finished, drop_behind=drop, allow_zeros=allow_zeros)
        streamer.run(todo, headers, source, out)


@contextmanager
def _continuable(run: Run, files: Sequence[str]) -> Iterator[None]:
    """After an error or a signal: nothing half-written stays, finished shards do, and the error says how to go on."""
    try:
        yield
    except BaseException as err:
        run.drop_partials(files)
        if not any((run.output / file).exists() for file in files):
            run.abandon()
        elif isinstance(err, GlmquantError):
            hint = f"Finished shards are kept. Continue with: {unfinished(run.output)}"
            raise type(err)(err.message, "\n  ".join(filter(None, (err.hint, hint)))) from err
        raise


def _finish(result: PlanResult, run: Run, backend: Backend, base_model: str) -> None:
    """Everything that is not a shard: index, side files, record, card, manifest, and config.json last."""
    source, out, shards = result.checkpoint, run.output, run.records()
    files: dict[str, tuple[int, str]] = {}

    def write(name: str, content: bytes) -> None:
        write_file(out, name, content)
        files[name] = (len(content), digest(content))

    if source.weight_map is not None:
        index = {"metadata": {"total_size": result.plan.total_size}, "weight_map": result.plan.weight_map}
        write(INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode())
    for name in source.side_files:
        if name not in (CARD, RECORD, MANIFEST):
            copy_file(source.folder / name, out, name)
            files[name] = ((out / name).stat().st_size, file_digest(out / name))
    record = _record(result, backend, base_model)
    write(RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    write(CARD, make_card(source.folder / CARD, result.plan, result.exclusions, record).encode())
    config = {
        **source.config,
        "quantization_config": quantization_config(result.exclusions.texts, backend.version),
    }
    content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    files[CONFIG] = (len(content), digest(content))
    ordered = {shard.file: shards[shard.file] for shard in result.plan.shards}
    write_file(out, MANIFEST, Manifest(lasting(run.fingerprint), ordered, files).encode())
    try:
        write_file(out, CONFIG, content)
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
def _progress(total: int, wanted: bool, doing: str) -> Iterator[Advance]:
    if not wanted:
        yield lambda _: None
        return
    from tqdm import tqdm

    # disable=None: quiet when stderr is not a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=None) as bar:
        yield bar.update

"""Each verb as one short function; the only place where order is decided."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from glmquant.checkpoint.checksums import check_source
from glmquant.checkpoint.header import ShardHeader
from glmquant.checkpoint.hub import HubSource, fetch_small, parse_repo
from glmquant.checkpoint.hub_client import Repo
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.manifest import MANIFEST, Manifest, open_run
from glmquant.checkpoint.push import COMMIT_SHARDS, Pusher
from glmquant.checkpoint.source import CONFIG, Checkpoint, model_name, open_source, read_json
from glmquant.checkpoint.writer import check_place
from glmquant.engines.targets import DEFAULT_TARGETS, parse_targets
from glmquant.errors import CheckpointError, OutputError
from glmquant.exclusions import ExclusionList, fp8_notes, resolve
from glmquant.findings import Report
from glmquant.finishing import finish
from glmquant.mend import Difference, Fix, diff, fix, on_disk
from glmquant.mxfp4.choose import make_backends, threads_for
from glmquant.planner import Plan, make_plan
from glmquant.recipe import load_architecture, select_recipe
from glmquant.shards import Work, check_deletable, continuable, deleted_headers, fingerprint, write_shards
from glmquant.streaming import Advance, default_workers
from glmquant.validator import validate_folder
from glmquant.verifier import Verification, verify_output

if TYPE_CHECKING:
    from glmquant.graft import Graft

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


class _Holder:
    """A folder that is removed when nobody refers to it any more."""

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix="glmquant-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


@dataclass(frozen=True)
class PlanResult:
    """What `quantize` would do: the source's headers, every output byte's place, and the exclude list.

    Attributes:
        options: the command-line options that ask for the same again.
        hub: where the shards are, if the source is on the Hub; `holder` keeps the folder of its small files alive.
    """

    checkpoint: Checkpoint
    plan: Plan
    exclusions: ExclusionList
    options: tuple[str, ...]
    hub: HubSource | None = None
    holder: _Holder | None = None

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
    """A finished run: where the output is, what was planned, and what the validator says of it.

    `report` is None for a rank that ended while others still had `missing` shards to write.
    """

    output: Path
    plan: Plan
    exclusions: ExclusionList
    report: Report | None
    seconds: float
    missing: int = 0

    @property
    def ok(self) -> bool:
        """Nothing is wrong with what was written."""
        return self.report is None or self.report.ok


def plan(
    source: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    keep_fp8: bool = False,
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
    max_shard_size: int | None = None,
) -> PlanResult:
    """Plan a quantization from headers alone: no weight is read, nothing is written.

    Args:
        source: folder of a bf16 or block-scaled FP8 checkpoint, hub-cache snapshot, or `org/name[@revision]`.
        recipe: a name from exclusions/<model_type>.yaml, or a file of your own (`my.yaml`, `my.yaml:name`).
        quantize, keep: overrides, globs (or `re:` regexes) over module names; keep wins.
        keep_fp8: leave un-quantized modules of a block-scaled FP8 source FP8, where all targets read that; else they
            become bf16.
        targets: engine releases that must load the result, e.g. `sglang>=0.5.13,vllm`.
        form: spelling of the exclude list: `auto`, `literal` (no regex) or `regex` (as short as possible).
        max_shard_size: bytes; pack the output's shards anew, layer by layer, instead of one for each source shard.

    Raises:
        CheckpointError: the source is damaged, incomplete or already quantized.
        RecipeError: unknown model type or recipe, or a combination that no engine loads.
        ExclusionError: no exclude list serves all targets.
    """
    return _plan(source, recipe, quantize, keep, keep_fp8, targets, form, max_shard_size, {})


def _plan(
    source: Folder,
    recipe: str | None,
    quantize: Sequence[str],
    keep: Sequence[str],
    keep_fp8: bool,
    targets: str,
    form: str,
    max_shard_size: int | None,
    deleted: Mapping[str, ShardHeader],
) -> PlanResult:
    hub, holder = None, None
    if repo := parse_repo(os.fspath(source)):
        holder = _Holder()
        hub = fetch_small(repo, holder.folder)
        checkpoint = open_source(hub.folder, {**hub.headers, **deleted})
    else:
        checkpoint = open_source(source, deleted)
    architecture = load_architecture(checkpoint.model_type)
    architecture, chosen = select_recipe(architecture, recipe)
    layers = read_layers(checkpoint.config, architecture.keys)
    chosen_targets = parse_targets(targets)
    kept_for = chosen_targets if keep_fp8 else None
    planned = make_plan(
        checkpoint, architecture, chosen.with_overrides(quantize, keep), layers, max_shard_size, kept_for
    )
    exclusions = resolve(planned.formats, layers, architecture, chosen_targets, form, planned.fp8)
    exclusions = replace(exclusions, needs=(*exclusions.needs, *fp8_notes(planned.bf16, layers)))
    options = ["--recipe", recipe or chosen.name]
    options += [word for pattern in quantize for word in ("--quantize", pattern)]
    options += [word for pattern in keep for word in ("--keep", pattern)]
    options += ["--keep-fp8"] if keep_fp8 else []
    options += ["--targets", targets] if targets != DEFAULT_TARGETS else []
    options += ["--form", form] if form != "auto" else []
    options += ["--max-shard-size", str(max_shard_size)] if max_shard_size is not None else []
    return PlanResult(checkpoint, planned, exclusions, tuple(options), hub, holder)


def resolve_exclusions(
    checkpoint: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    keep_fp8: bool = False,
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
) -> ExclusionList:
    """The exclude list for a bf16 source and a recipe, or for a quantized folder of any producer as it is on disk.

    Raises: as `plan`; CheckpointError if a quantized folder is given together with a recipe or overrides.
    """
    on_hub = parse_repo(os.fspath(checkpoint)) is not None
    quantization = None if on_hub else read_json(Path(checkpoint) / CONFIG).get("quantization_config")
    if not quantization or (isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"):
        planned = plan(
            checkpoint, recipe=recipe, quantize=quantize, keep=keep, keep_fp8=keep_fp8, targets=targets, form=form
        )
        return planned.exclusions
    if recipe or quantize or keep or keep_fp8:
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

    Args:
        checkpoint: folder, or `org/name[@revision]` on the Hub, of which only the headers are fetched.

    Raises:
        CheckpointError: the folder or its config.json cannot be read at all; everything else is a finding.
    """
    repo = parse_repo(os.fspath(checkpoint))
    if not repo:
        return validate_folder(checkpoint, parse_targets(targets))
    holder = _Holder()
    hub = fetch_small(repo, holder.folder)
    report = validate_folder(hub.folder, parse_targets(targets), hub.headers)
    return replace(report, folder=Path(str(hub.repo)))


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
    with progress_bar(total, progress, "verifying") as advance:
        backend = make_backends("fused", "cpu", 0.0)[0]
        return verify_output(Path(output), Path(source) if source else None, sample, backend, threads, advance)


def quantize(
    source: Folder,
    output: Folder,
    *,
    recipe: str | None = None,
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    keep_fp8: bool = False,
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
    max_shard_size: int | None = None,
    backend: str = "auto",
    device: str = "cpu",
    workers: int | None = None,
    check_backend: float = 0.0,
    base_model: str | None = None,
    resume: bool = False,
    verify_source: bool = False,
    allow_zeros: bool = False,
    delete_source_shards: bool = False,
    rank: int = 0,
    world_size: int = 1,
    ray: str | None = None,
    max_disk: int | None = None,
    push_to_hub: str | None = None,
    drop_pushed: bool = False,
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
        rank, world_size: of several processes, on any machines, that write one output in a shared folder: each writes
            every world_size-th shard, and the last to end the rest. Each may be started again.
        ray: address of a Ray cluster whose tasks write the shards ('' starts one here); see cluster.py.
        max_disk: bytes of source shards on disk at once, for a source on the Hub; by default two shards a worker.
        push_to_hub: `org/name` of a repository (created private if there is none) that finished shards are uploaded to
            meanwhile; config.json follows last, once the validator has found no error.
        drop_pushed: remove each shard of the output once the Hub has it. The validator then reads the repository.
        progress: show a progress bar on stderr.

    Raises:
        As `plan`, and OutputError or BackendError. After an error no config.json is in the output, so no engine
        takes it for finished; finished shards are kept for `resume`.
    """
    begun, out = time.monotonic(), Path(output)
    resume = resume or world_size > 1  # the ranks of one run meet in its folder
    deleted = deleted_headers(out) if resume else {}
    result = _plan(source, recipe, quantize, keep, keep_fp8, targets, form, max_shard_size, deleted)
    checkpoint, planned = result.checkpoint, result.plan
    check_place(out, checkpoint.folder)
    if delete_source_shards:
        if result.hub:
            raise CheckpointError("--delete-source-shards is for folders", "From the Hub, --max-disk bounds the disk.")
        if world_size > 1 or ray is not None:
            raise CheckpointError("--delete-source-shards is for one process", "Another may need the shard still.")
        check_deletable(checkpoint, deleted)
    if result.hub and ray is not None:
        raise CheckpointError("--engine ray needs a source folder that all its nodes see", "Download it first.")
    if not 0 <= rank < world_size:
        raise OutputError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
    target = _push_target(push_to_hub, drop_pushed, delete_source_shards, alone=world_size == 1 and ray is None)
    backends = make_backends(backend, device, check_backend)
    base = base_model or (result.hub.repo.id if result.hub else model_name(checkpoint.folder))
    threads = threads_for(backends, workers or default_workers())
    decides = fingerprint(checkpoint, planned, result.exclusions.texts, base, backends[0], result.hub)
    words = ["glmquant", "quantize", str(result.hub.repo if result.hub else source), str(output), *result.options]
    words += ["--base-model", base_model] if base_model else []
    words += ["--backend", backend] if backend != "auto" else []
    words += ["--allow-zeros"] if allow_zeros else []
    words += ["--delete-source-shards"] if delete_source_shards else []
    words += ["--engine", "ray"] if ray is not None else []
    words += ["--address", ray] if ray else []
    words += ["--max-disk", str(max_disk)] if max_disk is not None else []
    words += ["--push-to-hub", target.id] if target else []
    words += ["--drop-pushed"] if drop_pushed else []
    _check_utf8([*words, base])

    def bar(total: int, doing: str) -> AbstractContextManager[Advance]:
        return progress_bar(total, progress, doing)

    def done(report: Report | None, missing: int = 0) -> QuantizeResult:
        return QuantizeResult(out, planned, result.exclusions, report, time.monotonic() - begun, missing)

    mine = [shard.file for shard in planned.shards[rank::world_size]]
    report = None
    with open_run(out, decides, shlex.join([*words, "--resume"]), resume, (rank, world_size)) as run:
        with ExitStack() as stack:
            if not run.finished:
                stack.enter_context(continuable(run, mine, alone=world_size == 1))
            pusher = stack.enter_context(_pusher(target, out, planned, drop_pushed)) if target else None
            if not run.finished:
                if verify_source and not result.hub:  # every download is compared anyway
                    with bar(checkpoint.file_bytes, "verifying source") as advance:
                        check_source(checkpoint, threads, advance)
                work = Work(
                    threads, allow_zeros, delete_source_shards, rank, world_size, ray, result.hub, max_disk, pusher
                )
                write_shards(checkpoint, planned, run, backends, work, result.disk_needed - planned.disk_needed, bar)
                with run.finishing() as needed:
                    missing = {shard.file for shard in planned.shards} - run.records().keys() if needed else set()
                    if missing:
                        return done(None, len(missing))
                    if needed:
                        finish(checkpoint, planned, result.exclusions, result.options, run, backends[0], base)
            if not drop_pushed:
                report = validate(out, targets=targets)
            if pusher and (report is None or report.ok):
                pusher.finish([*Manifest.read(out).files, MANIFEST, *(shard.file for shard in planned.shards)])
        run.finish()
    return done(report or validate(str(target), targets=targets))


def _push_target(push_to_hub: str | None, drop: bool, delete_source: bool, alone: bool) -> Repo | None:
    """Where to push to, if the other options allow it."""
    if push_to_hub is None:
        if drop:
            raise OutputError("--drop-pushed without --push-to-hub would throw the output away")
        return None
    target = parse_repo(push_to_hub)
    if target is None or target.revision:
        raise OutputError(f"--push-to-hub {push_to_hub}: not the name of a repository", "Give org/name.")
    if not alone:
        raise OutputError("--push-to-hub is for one process", "Push the finished output: --resume --push-to-hub.")
    if drop and delete_source:
        raise OutputError("--drop-pushed and --delete-source-shards exclude each other", "Leave one out.")
    return target


def _pusher(target: Repo, output: Path, planned: Plan, drop: bool) -> Pusher:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would write over this program's
    # While a commit's shards are on their way, as many again may be written.
    room = 2 * COMMIT_SHARDS * max(shard.file_size for shard in planned.shards) if drop else None
    return Pusher(target, output, [shard.file for shard in planned.shards], drop=drop, max_pending=room)


def _check_utf8(words: Sequence[str]) -> None:
    """run.json and glmquant.json say how the output was made, and JSON is UTF-8; a path need not be."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as err:
            raise OutputError(
                f"{word!r} is not UTF-8, and the output's files name it; nothing was touched",
                "Rename it, or name it through a link and the source with --base-model.",
            ) from err


@contextmanager
def progress_bar(total: int, wanted: bool, doing: str) -> Iterator[Advance]:
    if not wanted:
        yield lambda _: None
        return
    from tqdm import tqdm

    # disable=None: quiet when stderr is not a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=None) as bar:
        yield bar.update


def graft_mtp(
    source: Folder,
    checkpoint: Folder,
    *,
    quantized: bool = False,
    targets: str = DEFAULT_TARGETS,
    form: str = "auto",
    force: bool = False,
    allow_zeros: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    progress: bool = False,
) -> Graft:
    """Give a checkpoint the MTP layer back that it lost, in place, then validate it; see graft.graft.

    Args:
        source: folder with config.json and at least the shards that hold the MTP layer, bf16 or block-scaled FP8; or
            `org/name[@revision]`, of which these shards are fetched.
        quantized: store the MTP layer's experts in MXFP4 where the checkpoint's main layers have theirs so; otherwise
            everything is stored as the source has it (FP8 as bf16).
        force: graft although the two are not of one set of weights.
        dry_run: only say what would be done.

    Raises: as `graft`.
    """
    from glmquant.graft import graft, open_donor  # the other verbs start faster without

    found, folder = parse_targets(targets), Path(checkpoint)
    hub, holder = None, None
    if repo := parse_repo(os.fspath(source)):
        holder = _Holder()
        hub = fetch_small(repo, holder.folder, partly=True)
    done = graft(
        open_donor(hub.folder if hub else Path(source), hub),
        folder,
        found,
        form,
        backends=make_backends("auto", "cpu", 0.0),
        threads=workers or default_workers(),
        quantized=quantized,
        force=force,
        allow_zeros=allow_zeros,
        dry_run=dry_run,
        progress=lambda total, doing: progress_bar(total, progress, doing),
    )
    if dry_run or done.exclusions is None:
        return done
    return replace(done, report=validate_folder(folder, found))

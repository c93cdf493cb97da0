"""Writing the shards of a run: what decides their bytes, which are done already, and source shards that may go."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

from glmquant.checkpoint.header import ShardHeader, parse_header
from glmquant.checkpoint.hub import HubShards, HubSource
from glmquant.checkpoint.manifest import FORMAT, SOURCE_FILE, Fingerprint, Run, ShardRecord, damage, digest
from glmquant.checkpoint.push import Pusher
from glmquant.checkpoint.source import CONFIG, RUN_FOLDER, Checkpoint, unfinished
from glmquant.checkpoint.writer import ShardWriter, check_space, sync_folder
from glmquant.errors import CheckpointError, GlmquantError, OutputError
from glmquant.mxfp4.backend import Backend
from glmquant.planner import Plan
from glmquant.streaming import Progress, SourceShards, Streamer, available_memory

logger = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(
    checkpoint: Checkpoint,
    plan: Plan,
    exclude: Sequence[str],
    base_model: str,
    backend: Backend,
    hub: HubSource | None = None,
) -> Fingerprint:
    """Everything that decides the bytes of an output: two runs with the same one write the same.

    A source shard is its size, its header, and, while the run lasts, what says that its weights are the same: the
    blob's sha256 in a hub cache, otherwise the time of its last change.
    """
    recipe = plan.recipe
    return {
        "format": FORMAT,
        "glmquant": installed_version("glmquant"),
        "amd-quark": backend.version,
        "backend": backend.name,
        "base model": base_model,
        "recipe": recipe.name,
        "rules": {f"{rule.group} {rule.layers}": rule.reason for rule in recipe.rules},
        "overrides": [str(override) for override in recipe.overrides],
        CONFIG: digest(json.dumps(checkpoint.config).encode()),
        "exclude list": digest("\n".join(exclude).encode()),
        "source shard": {h.file: [h.file_size, h.digest] for h in checkpoint.shards},
        SOURCE_FILE: hub.identity if hub else {h.file: _identity(checkpoint.folder, h) for h in checkpoint.shards},
        "output shard": {shard.file: digest(shard.header) for shard in plan.shards},
    }


def _identity(folder: Path, header: ShardHeader) -> str:
    path = folder / header.file
    if path.is_symlink() and _SHA256.fullmatch(name := os.path.basename(os.readlink(path))):
        return name
    return f"changed {header.mtime_ns}"


def intact(
    output: Path, records: Mapping[str, ShardRecord], threads: int, advance: Callable[[int], object]
) -> dict[str, ShardRecord]:
    """The finished shards that are still what was written, every byte read again."""
    with ThreadPoolExecutor(threads) as pool:
        problems = pool.map(lambda record: damage(output / record.file, record, advance), records.values())
        found = dict(zip(records, problems, strict=True))
    for problem in found.values():
        if problem:
            logger.warning("%s; written again", problem)
    return {file: records[file] for file, problem in found.items() if not problem}


def check_deletable(checkpoint: Checkpoint, deleted: Mapping[str, ShardHeader]) -> None:
    """Refuse to delete source shards through links: what they lead to is not this folder's.

    Raises:
        CheckpointError: names the shard.
    """
    for header in checkpoint.shards:
        if (checkpoint.folder / header.file).is_symlink():
            raise CheckpointError(
                f"{header.file} is a link: --delete-source-shards would delete a file outside {checkpoint.folder}",
                "Use it on a plain folder only; for the hub cache there is `hf cache`.",
            )
        if header.file not in deleted and not os.access(checkpoint.folder, os.W_OK):
            raise CheckpointError(f"{checkpoint.folder} is read-only: --delete-source-shards cannot work there")


def delete_shard(source: Path, run: Run, header: ShardHeader, records: Iterable[ShardRecord]) -> None:
    """Remove a source shard once all that was made from it was read back from the disk; its header is kept.

    Raises:
        OutputError: the output is not what was written; the source is left.
        CheckpointError: the source shard changed or cannot be removed.
    """
    for record in records:
        if problem := damage(run.output / record.file, record):
            raise OutputError(f"{problem}; its source shard was not deleted", "Is the disk failing?")
    path = source / header.file
    try:
        with open(path, "rb") as file:
            content = _head(file.fileno())
        run.save_header(header, content)
        path.unlink()
        sync_folder(source)
    except OSError as err:
        raise CheckpointError(f"{header.file}: cannot be deleted: {err.strerror or err}") from err


def _head(fd: int) -> bytes:
    prefix = os.pread(fd, 8, 0)
    return prefix + os.pread(fd, int.from_bytes(prefix, "little"), 8)


def deleted_headers(output: Path) -> dict[str, ShardHeader]:
    """Headers of the source shards that an unfinished run has deleted."""
    found = {}
    for path in sorted((output / RUN_FOLDER).glob("*.source")):
        first, _, content = path.read_bytes().partition(b"\n")
        kept = json.loads(first)
        file = path.name.removesuffix(".source")
        found[file] = parse_header(file, content, int(kept["size"]), int(kept["mtime_ns"]))
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """How a run's shards are written; nothing here changes their bytes.

    Attributes:
        allow_zeros, delete_source: as of `quantize`.
        rank, world_size: this process writes every world_size-th shard, from the rank-th (counted from 0) on.
        ray: address of a Ray cluster that does it ('' for one on this machine), or None.
        hub, max_disk: where shards come from that are not in the source folder, and how many bytes of them at once.
        pusher: where finished shards go.
    """

    threads: int
    allow_zeros: bool = False
    delete_source: bool = False
    rank: int = 0
    world_size: int = 1
    ray: str | None = None
    hub: HubSource | None = None
    max_disk: int | None = None
    pusher: Pusher | None = None


def write_shards(
    checkpoint: Checkpoint,
    plan: Plan,
    run: Run,
    backends: Sequence[Backend],
    work: Work,
    small: int,
    progress: Progress,
) -> None:
    """All of this process's shards that are not in the output yet; their space is taken before the first byte.

    Args:
        small: bytes of all files that are no shards.

    Raises:
        CheckpointError, OutputError, BackendError: the first that happened.
    """
    source, out, memory = checkpoint.folder, run.output, available_memory()
    headers = {header.file: header for header in checkpoint.shards}
    mine = plan.shards[work.rank :: work.world_size]
    names = {shard.file for shard in mine}
    run.drop_partials(names)
    records = {file: record for file, record in run.records().items() if file in names}
    pusher = work.pusher
    gone = pusher.arrived if pusher and pusher.drop else set()
    kept = {file: records[file] for file in records.keys() & gone}
    if here := {file: record for file, record in records.items() if file not in kept}:
        with progress(sum(record.size for record in here.values()), "checking") as advance:
            kept |= intact(out, here, work.threads, advance)
    todo = [shard for shard in mine if shard.file not in kept]
    users = _users(plan)

    def delete(file: str) -> None:
        found = run.records()
        delete_shard(source, run, headers[file], [found[user] for user in users[file]])

    if work.delete_source:
        for file, made in users.items():
            if kept.keys() >= set(made) and (source / file).exists():
                delete(file)
    # Where shards make room as it goes, only those that are there at once must fit.
    sizes = sorted((shard.file_size for shard in todo), reverse=True)
    if work.delete_source:
        check_space(out, small + sum(sizes[: work.threads + 1]))
    elif pusher and pusher.drop:
        waiting = sum(sizes[: work.threads]) + (pusher.max_pending or 0)
        check_space(out, small + min(sum(sizes), sum(sizes[: work.threads + 1]) + waiting))
    else:
        check_space(out, small + sum(sizes))
        for shard in todo:
            ShardWriter(out, shard.file, shard.header, shard.file_size).reserve()
    total = sum(job.source.nbytes for shard in todo for job in shard.jobs)
    with ExitStack() as stack:
        advance = stack.enter_context(progress(total, "quantizing"))
        if work.ray is not None:
            from glmquant.cluster import write_on_ray

            write_on_ray(todo, headers, source, out, backends[0], work.ray, work.allow_zeros, run.record, advance)
            return
        stops: list[Callable[[], object]] = [pusher.stop] if pusher else []
        path: Callable[[str], Path] = source.joinpath
        done = delete if work.delete_source else None
        if work.hub and todo:
            folder = out / RUN_FOLDER / f"source-{work.rank}"
            uses = [shard.sources for shard in todo]
            hub = stack.enter_context(HubShards(work.hub, uses, folder, work.max_disk, workers=work.threads))
            path, done = hub.path, hub.done
            stops.append(hub.stop)
        shards = SourceShards(headers, todo, path, done, lambda: [stop() for stop in stops])

        def published(record: ShardRecord) -> None:
            run.record(record)
            if pusher:
                pusher.add(record.file)

        if pusher:
            for file in sorted(kept.keys() - gone):
                pusher.add(file)
        drop = work.delete_source or (memory is not None and total > memory // 2)
        streamer = Streamer(backends, work.threads, advance, published, drop_behind=drop, allow_zeros=work.allow_zeros)
        streamer.run(todo, shards, out)


def _users(plan: Plan) -> dict[str, list[str]]:
    """Source shard -> the output shards that are made from it."""
    found: dict[str, list[str]] = {}
    for shard in plan.shards:
        for file in shard.sources:
            found.setdefault(file, []).append(shard.file)
    return found


@contextmanager
def continuable(run: Run, files: Sequence[str], alone: bool) -> Iterator[None]:
    """After an error or a signal: nothing half-written stays, finished shards do, and the error says how to go on.

    Args:
        files: this process's shards.
        alone: no other process works on this run, so that one without any shard can be undone.
    """
    try:
        yield
    except BaseException as err:
        run.drop_partials(files)
        if alone and not run.records() and not any((run.output / file).exists() for file in files):
            run.abandon()
        elif isinstance(err, GlmquantError):
            hint = f"Finished shards are kept. Continue with: {unfinished(run.output)}"
            raise err.also(hint) from err
        raise

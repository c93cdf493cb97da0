"""Continuing a run: what decides the bytes, which shards are done, and source shards that may go."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as installed_version
from pathlib import Path

from glmquant.checkpoint.header import ShardHeader, parse_header
from glmquant.checkpoint.manifest import FORMAT, SOURCE_FILE, Fingerprint, Run, ShardRecord, damage, digest
from glmquant.checkpoint.source import CONFIG, RUN_FOLDER, Checkpoint
from glmquant.checkpoint.writer import sync_folder
from glmquant.errors import CheckpointError, OutputError
from glmquant.mxfp4.backend import Backend
from glmquant.planner import Plan

logger = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(
    checkpoint: Checkpoint, plan: Plan, exclude: Sequence[str], base_model: str, backend: Backend
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
        SOURCE_FILE: {h.file: _identity(checkpoint.folder, h) for h in checkpoint.shards},
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


def delete_shard(source: Path, run: Run, header: ShardHeader, record: ShardRecord) -> None:
    """Remove a source shard whose output is durable, once that was read back from the disk; its header is kept.

    Raises:
        OutputError: the output is not what was written; the source is left.
        CheckpointError: the source shard changed or cannot be removed.
    """
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

"""Writes a graft: shards, index, config.json, in this order."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from glmquant.card import with_graft
from glmquant.checkpoint.header import open_regular
from glmquant.checkpoint.manifest import MANIFEST, Manifest, ShardRecord, file_digest, replace_file
from glmquant.checkpoint.source import CONFIG, INDEX, read_json, refuse_link_outside
from glmquant.checkpoint.writer import TEMPORARY, ShardWriter, check_space, write_file
from glmquant.errors import CheckpointError, OutputError
from glmquant.finishing import CARD, RECORD
from glmquant.graft.donor import Donor
from glmquant.graft.planning import STEM, Plan
from glmquant.mend import back_up, like
from glmquant.mxfp4.backend import Backend
from glmquant.streaming import Advance, SourceShards, Streamer
from glmquant.text import printable

logger = logging.getLogger(__name__)

_MAX_CARD = 1_000_000


@contextmanager
def alone(folder: Path) -> Iterator[None]:
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


def write(
    plan: Plan, donor: Donor, backends: Sequence[Backend], threads: int, advance: Advance, allow_zeros: bool
) -> list[Path]:
    """Shards, index, config.json, in this order; each appears whole or not at all. Returns the backups."""
    folder = plan.checkpoint.folder
    for partial in folder.glob(f".{STEM}*{TEMPORARY}"):  # of a killed run
        partial.unlink(missing_ok=True)
    check_space(folder, plan.disk_needed)
    if plan.first_index:  # without an index engines read every shard in the folder
        _replace(folder, INDEX, plan.first_index)
    records: list[ShardRecord] = []
    try:
        for shard in plan.shards:
            ShardWriter(folder, shard.file, shard.header, shard.file_size).reserve()
        source = SourceShards(donor.headers, plan.shards, donor.path)
        Streamer(backends, threads, advance, records.append, allow_zeros=allow_zeros).run(plan.shards, source, folder)
    finally:
        for shard in plan.shards:
            (folder / f".{shard.file}{TEMPORARY}").unlink(missing_ok=True)
    new = {INDEX: plan.index, CONFIG: plan.config}
    backups = [back_up(folder, name) for name, value in new.items() if value and (folder / name).exists()]
    _record(folder, records, backups)
    if plan.shards:
        _tell(plan, donor, backends[0].version)
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


def _tell(plan: Plan, donor: Donor, quark: str) -> None:
    """In the record and on the card of an output of glmquant, which speak of it as it was; elsewhere nothing."""
    folder = plan.checkpoint.folder
    if not (folder / RECORD).exists():
        return
    try:
        before = read_json(folder / RECORD)
    except CheckpointError as err:  # not worth losing what was just written
        logger.warning("%s; it was left as it is, and so was the card", err.message)
        return
    jobs = [job for shard in plan.shards for job in shard.jobs]
    record = {
        **before,
        "mtp_graft": {
            "source": printable(donor.name),
            "versions": {"glmquant": installed_version("glmquant"), "amd-quark": quark},
            "shards": [shard.file for shard in plan.shards],
            "tensors": sum(len(job.outputs) for job in jobs),
            "bytes": sum(out.end - out.start for job in jobs for out in job.outputs),
            "quantized": sum(job.quantized for job in jobs),
        },
    }
    if plan.exclusions:
        record["exclude"] = [entry.record() for entry in plan.exclusions.entries]
    replace_file(folder, RECORD, like(folder / RECORD, record))
    try:
        refuse_link_outside(folder, CARD)
        with open_regular(folder / CARD) as file:
            card = file.read(_MAX_CARD + 1).decode()
    except (OSError, UnicodeDecodeError, CheckpointError):
        return
    if len(card) <= _MAX_CARD:
        replace_file(folder, CARD, with_graft(card, record["mtp_graft"]).encode())

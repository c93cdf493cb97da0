"""What a run has done, so that it can be continued, and what it wrote, so that it can be checked later.

While an output is unfinished, its folder `.glmquant` holds `run.json` (everything that decides the bytes), `lock`, and
one record per finished shard, written after the shard is durable. A finished output has all of it in one file,
`glmquant.manifest.json`, written just before config.json.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from glmquant.checkpoint.header import ShardHeader, open_regular
from glmquant.checkpoint.source import CONFIG, RUN, RUN_FOLDER, read_json
from glmquant.checkpoint.writer import TEMPORARY, output_error, sync_folder, write_file
from glmquant.errors import CheckpointError, OutputError
from glmquant.text import short

logger = logging.getLogger(__name__)

MANIFEST = "glmquant.manifest.json"
LOCK, BEGIN, FINISH = "lock", "begin", "finish"
FORMAT = 1
DIGEST = "xxh3_128"
"""Finds damage, not forgery; fast enough (tens of GB/s) to cost nothing beside the copy."""

Fingerprint = dict[str, Any]
SOURCE_FILE = "source file"
"""The key of what matters only while a run lasts: a finished output is the same wherever its source lay."""
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard. `ranges` cut the file from its first byte to its last: (end, digest of the bytes up to it)."""

    file: str
    size: int
    ranges: tuple[tuple[int, str], ...]


def record_of(file: str, pieces: Iterable[tuple[int, int, str]]) -> ShardRecord:
    """A record from (start, end, digest) pieces in any order.

    Raises:
        OutputError: they leave a gap or overlap: not every byte was written exactly once.
    """
    position, ranges = 0, []
    for start, end, digest in sorted(pieces):
        if start != position:
            raise OutputError(f"{file}: bytes {position} to {start} were not written, or twice")
        if end > start:
            ranges.append((end, digest))
        position = end
    return ShardRecord(file, position, tuple(ranges))


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Of a whole file.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = xxhash.xxh3_128()
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    except OSError as err:
        raise CheckpointError(f"{path.name}: cannot be read: {err.strerror or err}") from err
    return state.hexdigest()


def damage(
    path: Path,
    record: ShardRecord,
    advance: Callable[[int], object] = lambda _: None,
    name: Callable[[int], str] = lambda _: "",
) -> str:
    """What is wrong with a shard on disk, with byte range; '' if it is what the record says.

    Args:
        name: says what is at a byte offset.
    """
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != record.size:
                return f"{path.name}: {size:,} bytes instead of {record.size:,}"
            position = 0
            for end, expected in record.ranges:
                start, state = position, xxhash.xxh3_128()
                while position < end:
                    count = file.readinto(buffer[: end - position])
                    if not count:
                        return f"{path.name}: ends at byte {position:,}"
                    state.update(buffer[:count])
                    position += count
                    advance(count)
                if state.hexdigest() != expected:
                    return f"{path.name}: bytes {start:,} to {end:,}{name(start)} are not those that were written"
    except OSError as err:
        return f"{path.name}: cannot be read: {err.strerror or err}"
    return ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished output holds: `files` are all but the shards, name -> (size, digest)."""

    fingerprint: Fingerprint
    shards: Mapping[str, ShardRecord]
    files: Mapping[str, tuple[int, str]]

    def encode(self) -> bytes:
        """As JSON, a line a shard."""
        head = {"format": FORMAT, "digest": DIGEST, "fingerprint": self.fingerprint, "files": self.files}
        lines = [f"{json.dumps(record.file)}: {json.dumps(_encode(record))}" for record in self.shards.values()]
        body = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        return (body + ',\n "shards": {\n' + ",\n".join(lines) + "\n }\n}\n").encode()

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Of a finished output.

        Raises:
            CheckpointError: there is none, or it is not one this version understands.
        """
        found = read_json(folder / MANIFEST)
        kind, sums = found.get("format"), found.get("digest")
        if (kind, sums) != (FORMAT, DIGEST):
            raise CheckpointError(
                f"{MANIFEST}: format {short(kind)} with digest {short(sums)} is not known here",
                f"This glmquant reads format {FORMAT} with {DIGEST}.",
            )
        shards, files, fingerprint = found.get("shards"), found.get("files"), found.get("fingerprint")
        if not (isinstance(shards, dict) and isinstance(files, dict) and isinstance(fingerprint, dict)):
            raise CheckpointError(f"{MANIFEST}: shards, files and fingerprint must be objects")
        for name, entry in files.items():
            if not (_is_name(name) and isinstance(entry, list) and len(entry) == 2 and _is_size(entry[0])):
                raise CheckpointError(
                    f"{MANIFEST}: files: {short(name)} must be a path inside the folder: [size, digest]"
                )
        return Manifest(
            fingerprint,
            {file: _decode(file, entry, MANIFEST) for file, entry in shards.items()},
            {name: (size, str(value)) for name, (size, value) in files.items()},
        )


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file of an output anew, and its digest in the manifest, if there is one, first."""
    if (folder / MANIFEST).exists():
        old = Manifest.read(folder)
        files = {**old.files, name: (len(content), digest(content))}
        write_file(folder, MANIFEST, Manifest(old.fingerprint, old.shards, files).encode())
    write_file(folder, name, content)


def lasting(fingerprint: Fingerprint) -> Fingerprint:
    """What of it goes into a manifest."""
    return {key: value for key, value in fingerprint.items() if key != SOURCE_FILE}


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """What decides the bytes and is not the same, in words; parts that are maps are compared key by key."""
    found = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in [*old, *new] if old.get(name) != new.get(name)]
            others = len(set(names)) - 1
            found.append(f"{key} {names[0]!r}" + (f" and {others} more" if others else "") + " changed")
        else:
            found.append(f"{key} was {old!r}, now {new!r}")
    return found


class Run:
    """The unfinished state of an output folder; made by `open_run`, which holds the lock."""

    def __init__(
        self, output: Path, fingerprint: Fingerprint, *, created: bool = False, finished: bool = False
    ) -> None:
        self.output, self.fingerprint, self.finished = output, fingerprint, finished
        self._created = created
        self._folder = output / RUN_FOLDER

    def records(self) -> dict[str, ShardRecord]:
        """Of the shards that were finished; a record that cannot be read counts as none."""
        found = {}
        for path in sorted(self._folder.glob("*.safetensors.json")):
            file = path.name.removesuffix(".json")
            try:
                found[file] = _decode(file, read_json(path), path.name)
            except CheckpointError as err:
                logger.warning("%s: the shard will be written again", err)
        return found

    def record(self, record: ShardRecord) -> None:
        write_file(self._folder, record.file + ".json", json.dumps(_encode(record)).encode())

    def save_header(self, header: ShardHeader, content: bytes) -> None:
        """Keep the header of a source shard that is about to be deleted."""
        kept = {"size": header.file_size, "mtime_ns": header.mtime_ns}
        write_file(self._folder, header.file + ".source", json.dumps(kept).encode() + b"\n" + content)

    def drop_partials(self, files: Iterable[str]) -> None:
        """Remove what a stopped or killed run left half-written."""
        for file in files:
            (self.output / f".{file}{TEMPORARY}").unlink(missing_ok=True)
            (self._folder / f".{file}.json{TEMPORARY}").unlink(missing_ok=True)

    def finish(self) -> None:
        """Remove the run's folder: config.json is there, so nothing is left to continue."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # what is left of it does no harm
            sync_folder(self.output)

    @contextmanager
    def finishing(self) -> Iterator[bool]:
        """One process at a time; whether the output still lacks its end, or False if another one made it meanwhile."""
        with ExitStack() as lock:
            with suppress(FileNotFoundError):  # it also removed the folder
                lock.enter_context(_one_at_a_time(self._folder / FINISH))
            yield not (self.output / CONFIG).exists()

    def abandon(self) -> None:
        """Leave no trace of a run that could not begin."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._created:
            with suppress(OSError):
                self.output.rmdir()


@contextmanager
def open_run(
    output: Path, fingerprint: Fingerprint, command: str, resume: bool, share: tuple[int, int] = (0, 1)
) -> Iterator[Run]:
    """Begin or continue the run that fills `output`; no other process can until the block ends.

    Args:
        fingerprint: everything that decides the bytes of the output.
        command: what the user can run to continue.
        share: (rank, number of processes) of those that work on one output together; they keep out other runs, and
            each other's doubles.

    Raises:
        OutputError: the folder holds something else, an unfinished run (without `resume`), a run with another
            fingerprint (says what differs), or is being written by another process.
    """
    begun = output / RUN_FOLDER
    if begun.is_symlink():
        raise OutputError(f"{begun} is a link; glmquant makes a folder there", "Remove the link.")
    if (output / CONFIG).exists() and (output / MANIFEST).exists():
        if not resume:
            raise OutputError(f"output {output} holds a finished checkpoint; nothing was touched", "Name a new folder.")
        _compare(output, Manifest.read(output).fingerprint, lasting(fingerprint))
        yield Run(output, fingerprint, finished=True)
        return
    if not begun.exists() and output.exists() and (first := next(iter(sorted(os.listdir(output))), None)):
        raise OutputError(
            f"output {output} is not empty (it holds {first!r}); nothing was touched",
            "Name a new folder, or remove this one yourself.",
        )
    new, created = not begun.exists(), not output.exists()
    _make_folder(output)
    _make_folder(begun)
    rank, count = share
    with ExitStack() as locks:
        locks.enter_context(_locked(begun / LOCK, output, shared=count > 1))
        if count > 1:
            locks.enter_context(_locked(begun / f"rank-{rank}-of-{count}", output))
        with _one_at_a_time(begun / BEGIN):
            _begin(output, fingerprint, command, new or resume)
        try:
            # Another rank may have ended the run while this one began.
            yield Run(output, fingerprint, created=created, finished=(output / CONFIG).exists())
        except OSError as err:  # bookkeeping; shards and source have messages of their own
            raise output_error(str(err.filename or f"output {output}"), err) from err


def _begin(output: Path, fingerprint: Fingerprint, command: str, resume: bool) -> None:
    path = output / RUN_FOLDER / RUN
    if not path.exists():
        content = {"state": "unfinished", "continue": command, "format": FORMAT, "fingerprint": fingerprint}
        write_file(path.parent, RUN, json.dumps(content, indent=1, ensure_ascii=False).encode())
    elif not resume:
        raise OutputError(
            f"output {output} is unfinished; nothing was touched",
            f"Continue with: {command}\n  or name a new folder.",
        )
    _compare(output, read_json(path).get("fingerprint"), fingerprint)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Waits for others that are at the same place. Where the file system has no locks, nobody waits.

    Raises:
        FileNotFoundError: its folder is gone.
        OutputError: the system refused.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        raise
    except OSError as err:
        raise output_error(str(path), err) from err
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def _locked(path: Path, output: Path, shared: bool = False) -> Iterator[None]:
    """Refuses to wait: whoever holds it works for hours."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as err:
        raise OutputError(f"output {output} cannot be locked: {err.strerror or err}") from err
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            raise OutputError(
                f"output {output} is being written by another process ({holder or 'unknown'})",
                "Wait for it, or name another folder.",
            ) from None
        except OSError as err:  # a file system without locks
            logger.warning("output %s cannot be locked (%s): start no second run on it", output, err.strerror)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as err:
            raise output_error(f"output {output}", err) from err
        yield
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise OutputError(f"output {folder} cannot be created: {err.strerror or err}") from err


def _compare(output: Path, before: Any, now: Fingerprint) -> None:
    found = differences(before if isinstance(before, dict) else {}, json.loads(json.dumps(now)))
    if found:
        raise OutputError(
            f"output {output} was begun with something else, so it cannot be continued: {'; '.join(found)}",
            "Use what was used before, or name a new folder.",
        )


def _encode(record: ShardRecord) -> dict[str, Any]:
    return {"size": record.size, "ranges": record.ranges}


def _decode(file: str, entry: Any, where: str) -> ShardRecord:
    """Strictly: the manifest of a downloaded checkpoint is a stranger's.

    Raises:
        CheckpointError: not a shard's record.
    """
    bad = CheckpointError(f"{where}: the record of {short(file)} is damaged")
    if not _is_name(file) or "/" in file or not isinstance(entry, dict) or entry.keys() != {"size", "ranges"}:
        raise bad
    size, ranges = entry["size"], entry["ranges"]
    if not _is_size(size) or not isinstance(ranges, list):
        raise bad
    position = 0
    for item in ranges:
        if not (isinstance(item, list) and len(item) == 2 and _is_size(item[0]) and isinstance(item[1], str)):
            raise bad
        if item[0] <= position:
            raise bad
        position = item[0]
    if position != size:
        raise bad
    return ShardRecord(file, size, tuple((end, value) for end, value in ranges))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_name(name: str) -> bool:
    """A relative path that stays inside its folder."""
    return bool(name) and not name.startswith("/") and "\0" not in name and ".." not in name.split("/")

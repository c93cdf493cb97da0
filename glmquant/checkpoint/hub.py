"""A checkpoint on the Hugging Face Hub: headers by range requests, then shards fetched ahead of their use and dropped.

Everything is asked for at one commit, resolved once.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glmquant.checkpoint.header import MAX_HEADER_BYTES, MAX_TENSORS, ShardHeader, parse_header, read_header
from glmquant.checkpoint.hub_client import (
    INCOMPLETE,
    PATIENT,
    SOON,
    Advance,
    HubFile,
    Repo,
    Stopped,
    explained,
    fetch,
    list_files,
    stream,
)
from glmquant.checkpoint.source import CONFIG, INDEX, MAX_FILES, SUFFIX, read_json
from glmquant.errors import CheckpointError

# GLM-5.2's files that are no shards have 26 MB together; against repositories with other formats beside them.
MAX_SMALL_BYTES = 500_000_000
HEADER_REQUESTS = 16
DOWNLOADS = 4
"""One connection gives about 100 MB/s, and each download holds a shard's room on the disk."""
# As huggingface_hub checks names (utils/_validators.py, validate_repo_id), with the organization.
_REPO = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)


@dataclass(frozen=True)
class HubSource:
    """A repository at one commit: `open_source(folder, headers)` makes a checkpoint of it.

    `repo.revision` is the commit. `folder` holds what is no shard; `headers` are those of all shards, and `cached` the
    shards that lie in the user's hub cache.
    """

    repo: Repo
    folder: Path
    files: Mapping[str, HubFile]
    headers: Mapping[str, ShardHeader]
    cached: Mapping[str, Path]

    @property
    def identity(self) -> dict[str, str]:
        """What says, for each shard, that its bytes are the same as before."""
        return {name: file.digest for name, file in self.files.items() if name.endswith(SUFFIX)}


def parse_repo(text: str) -> Repo | None:
    """`org/name[@revision]`, unless that is something that exists on this disk."""
    match = _REPO.fullmatch(text)
    return Repo(match["id"], match["revision"] or "") if match and not os.path.lexists(text) else None


def fetch_small(repo: Repo, folder: Path, *, partly: bool = False) -> HubSource:
    """Resolve the commit, fetch every file that is no shard into `folder`, and the header of every shard.

    No byte of a weight is fetched. What is in the user's hub cache is taken from there, with HF_HUB_OFFLINE everything.

    Args:
        partly: offline, what is in the cache will do.

    Raises:
        CheckpointError: the repository cannot be reached, does not exist, needs a token or a licence to be accepted,
            or holds what no checkpoint does; a header is damaged; offline, and shards are missing in the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return _from_cache(repo, partly)
    stop = threading.Event()
    at, files = list_files(repo, stop, SOON)
    small = _small(at, files)
    cached = {}
    for name, file in files.items():
        path = try_to_load_from_cache(repo.id, name, revision=at.revision)
        if isinstance(path, str) and os.path.getsize(path) == file.size:
            cached[name] = Path(path)

    def bring(name: str) -> None:
        path = folder / name
        with explained(at, name, folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in cached:
                shutil.copyfile(cached[name], path)
        fetch(at, name, files[name], path, 0, stop, SOON)

    def header(name: str) -> ShardHeader:
        if name in cached:
            return read_header(cached[name])
        with explained(at, name):
            return _header(at, name, files[name].size, stop)

    headers: dict[str, ShardHeader] = {}
    count = 0
    with _pool(HEADER_REQUESTS, stop) as pool:
        fetched = pool.map(bring, small)
        for found in pool.map(header, [name for name in files if name.endswith(SUFFIX)]):
            headers[found.file] = found
            count += len(found.tensors)
            if count > MAX_TENSORS:
                raise CheckpointError(f"{at}: more than {MAX_TENSORS:,} tensors", "Is this GLM-5.2?")
        list(fetched)
    return HubSource(at, folder, files, headers, {name: path for name, path in cached.items() if name in headers})


def _small(at: Repo, files: Mapping[str, HubFile]) -> list[str]:
    """The files that are no shards, if all names and sizes are those of a checkpoint."""
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{at}: more than {MAX_FILES:,} files", "Is this a checkpoint?")
    for name in files:
        if not name.isprintable() or "\\" in name or name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{at}: {name!r}: not a file name of a checkpoint")
        if name.endswith(SUFFIX) and "/" in name:
            raise CheckpointError(f"{at}: {name}: a shard in a subfolder, which no index can name")
    small = [name for name in files if not name.endswith(SUFFIX)]
    if sum(files[name].size for name in small) > MAX_SMALL_BYTES:
        biggest = max(small, key=lambda name: files[name].size)
        raise CheckpointError(
            f"{at}: {biggest} has {files[biggest].size:,} bytes and is no safetensors shard",
            "Weights in other formats are neither read nor copied. Download what you need, and give that folder.",
        )
    return small


def _from_cache(repo: Repo, partly: bool) -> HubSource:
    """Offline: a snapshot in the hub cache is a folder like any other."""
    from huggingface_hub import try_to_load_from_cache

    hint = f"Unset HF_HUB_OFFLINE, or where there is a network: hf download {repo.id}" + (
        f" --revision {repo.revision}" if repo.revision else ""
    )
    # Not `snapshot_download`, which takes a snapshot with missing files for none, and does not say which.
    found = try_to_load_from_cache(repo.id, CONFIG, revision=repo.revision or None)
    if not isinstance(found, str):
        raise CheckpointError(f"HF_HUB_OFFLINE is set, and {repo} is not in the hub cache", hint)
    folder = Path(found).parent
    named = set(read_json(folder / INDEX).get("weight_map", {}).values()) if (folder / INDEX).exists() else set()
    present = {path.name: path for path in folder.glob("*" + SUFFIX) if path.exists()}
    if (missing := sorted(named - present.keys())) and not partly:
        raise CheckpointError(
            f"HF_HUB_OFFLINE is set, and {len(missing)} of {len(named)} shards of {repo} are not in the hub cache: "
            f"{missing[0]}" + (" and others" if len(missing) > 1 else ""),
            hint,
        )
    # The cache names a blob by the digest that the hub told.
    files = {
        name: HubFile(path.stat().st_size, os.path.basename(os.path.realpath(path))) for name, path in present.items()
    }
    return HubSource(Repo(repo.id, folder.name), folder, files, {}, present)


class RangeReader:
    """Pieces of a shard on the Hub, a request for each: for looking into it, with the calls of a ShardReader."""

    def __init__(self, hub: HubSource, file: str) -> None:
        self._at, self._file = hub.repo, file

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from `offset` of the file on.

        Raises:
            CheckpointError: they cannot be fetched.
        """
        content = bytearray()
        with explained(self._at, self._file):
            stream(self._at, self._file, offset, offset + len(buffer), content.extend, threading.Event(), SOON)
        buffer[:] = content


class HubShards:
    """Shards as local files: fetched in the background in the order of their use, checked, and dropped after it.

    What is on the disk at once, whole or in part, has never more than `max_disk` bytes; a shard in the hub cache takes
    nothing. What a stopped run left in `folder` is used again.

    Args:
        uses: for each output shard, in order, the source shards it is made from.
        folder: of this run alone.
        max_disk: bytes; None is two shards for each worker.
        advance: told the bytes of each chunk fetched.

    Raises:
        CheckpointError: `max_disk` is not enough.
    """

    def __init__(
        self,
        hub: HubSource,
        uses: Sequence[Collection[str]],
        folder: Path,
        max_disk: int | None = None,
        *,
        workers: int = 1,
        advance: Advance = lambda _: None,
    ) -> None:
        self._hub, self._folder, self._advance = hub, folder, advance
        order = dict.fromkeys(file for use in uses for file in sorted(use) if file not in hub.cached)
        self._sizes = {file: hub.files[file].size for file in order}
        least = least_disk([[file for file in use if file in order] for use in uses], self._sizes)
        self._max = max_disk if max_disk is not None else max(least, 2 * workers * max(self._sizes.values(), default=0))
        if self._max < least:
            raise CheckpointError(
                f"--max-disk {self._max:,} is less than the {least:,} bytes of source shards that are needed at once",
                f"Give --max-disk {least} or more.",
            )
        self._todo, self._used, self._ready = list(order), 0, set[str]()
        self._error: BaseException | None = None
        self._stop, self._changed = threading.Event(), threading.Condition()
        with explained(hub.repo, folder=folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._drop_leftovers()
        # Daemons: one may be in a request when the program ends.
        self._threads = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(DOWNLOADS)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> HubShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, file: str) -> Path:
        """Where a shard is; waits until it is there.

        Raises:
            CheckpointError: it cannot be fetched, or is not what the hub says.
            Stopped: `stop` was called.
        """
        if file in self._hub.cached:
            return self._hub.cached[file]
        with self._changed:
            self._changed.wait_for(lambda: file in self._ready or self._stop.is_set())
            if file in self._ready:
                return self._folder / file
        raise self._error or Stopped()

    def done(self, file: str) -> None:
        """Nobody needs this shard any more: make room for others. The user's hub cache is not touched."""
        if file in self._hub.cached:
            return
        (self._folder / file).unlink(missing_ok=True)
        with self._changed:
            self._ready.discard(file)
            self._used -= self._sizes[file]
            self._changed.notify_all()

    def stop(self) -> None:
        """End all downloads and whoever waits for one; does not wait itself. What was fetched is kept to continue."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and wait for the threads unless they are in a request that does not answer."""
        self.stop()
        for thread in self._threads:
            thread.join(1.0)

    def _drop_leftovers(self) -> None:
        """What an earlier run left is kept as far as its room would be given out anyway."""
        kept, room = set(), self._max
        for file in self._todo:
            room -= self._sizes[file]
            if room < 0:
                break
            kept |= {file, file + INCOMPLETE}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def _work(self) -> None:
        try:
            while file := self._next():
                mtime = self._hub.headers[file].mtime_ns
                fetch(
                    self._hub.repo,
                    file,
                    self._hub.files[file],
                    self._folder / file,
                    mtime,
                    self._stop,
                    PATIENT,
                    self._advance,
                )
                with self._changed:
                    self._ready.add(file)
                    self._changed.notify_all()
        except Stopped:
            pass
        except BaseException as err:
            with self._changed:
                self._error = self._error or err
            self.stop()

    def _next(self) -> str:
        """The next shard in order, once there is room for it; '' at the end.

        Strictly in order: a later one never takes the room of one that somebody waits for.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stop.is_set() or not self._todo or self._used + self._sizes[self._todo[0]] <= self._max
            )
            if self._stop.is_set() or not self._todo:
                return ""
            file = self._todo.pop(0)
            self._used += self._sizes[file]
            return file


def least_disk(uses: Sequence[Collection[str]], sizes: Mapping[str, int]) -> int:
    """Bytes of source shards that must be there at once, however few output shards are written at a time."""
    left = Counter(file for use in uses for file in use)
    held: set[str] = set()
    most = 0
    for use in uses:
        held |= set(use)
        most = max(most, sum(sizes[file] for file in held))
        left.subtract(use)
        held = {file for file in held if left[file]}
    return most


def _header(at: Repo, name: str, size: int, stop: threading.Event) -> ShardHeader:
    content = bytearray()
    stream(at, name, 0, min(8, size), content.extend, stop, SOON)
    length = int.from_bytes(content, "little")
    if 8 + length <= size and length <= MAX_HEADER_BYTES:
        stream(at, name, 8, 8 + length, content.extend, stop, SOON)
    return parse_header(name, bytes(content), size)


@contextmanager
def _pool(threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Threads that are told to stop when the block ends early."""
    pool = ThreadPoolExecutor(threads, "hub")
    try:
        yield pool
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)

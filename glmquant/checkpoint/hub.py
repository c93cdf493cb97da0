"""A checkpoint on the Hugging Face Hub: headers by range requests, then shards fetched ahead of their use and dropped.

Everything is asked for at one commit, resolved once. Sessions, credentials, proxies, addresses, errors and the cache
are huggingface_hub's. Its `hf_hub_download` is not used: it begins an interrupted file again from its first byte
(file_download.py, `_download_to_tmp_and_move`), and its backed-off requests cannot be stopped while they wait.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from glmquant.checkpoint.header import MAX_HEADER_BYTES, MAX_TENSORS, ShardHeader, parse_header, read_header
from glmquant.checkpoint.source import CONFIG, INDEX, MAX_FILES, SUFFIX, read_json
from glmquant.errors import CheckpointError, GlmquantError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

logger = logging.getLogger(__name__)

# Seconds between tries while nothing arrives; a first request tells soon that there is no network, while a run of
# hours outlives a hub that is away for some minutes.
SOON = (1.0, 2.0, 4.0)
PATIENT = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)
MAX_WAIT = 300.0
"""The hub's own `Retry-After` is followed up to this; its windows are five minutes."""
# GLM-5.2's files that are no shards have 26 MB together; against repositories with other formats beside them.
MAX_SMALL_BYTES = 500_000_000
HEADER_REQUESTS = 16
DOWNLOADS = 4
"""One connection gives about 100 MB/s, and each download holds a shard's room on the disk."""
_CHUNK = 1024 * 1024
_INCOMPLETE = ".incomplete"
# As huggingface_hub checks names (utils/_validators.py, validate_repo_id), with the organization.
_REPO = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)

T = TypeVar("T")
Advance = Callable[[int], object]


class Stopped(CheckpointError):
    """The user, or another thread's error, ended the run; that one is what should be shown."""

    def __init__(self) -> None:
        super().__init__("stopped")


@dataclass(frozen=True, slots=True)
class Repo:
    """A model repository; `revision` is a branch, a tag or a commit, '' for its main branch."""

    id: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


@dataclass(frozen=True, slots=True)
class HubFile:
    """What the hub says of a file: `digest` is the sha256 of a large one, the git id of a small one."""

    size: int
    digest: str

    def hasher(self) -> hashlib._Hash:
        """To be fed with the whole content, for the same kind of digest."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


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

    def fetch(name: str) -> None:
        path = folder / name
        with explained(at, name, folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in cached:
                shutil.copyfile(cached[name], path)
        _fetch(at, name, files[name], path, 0, stop, SOON)

    def header(name: str) -> ShardHeader:
        if name in cached:
            return read_header(cached[name])
        with explained(at, name):
            return _header(at, name, files[name].size, stop)

    headers: dict[str, ShardHeader] = {}
    count = 0
    with _pool(HEADER_REQUESTS, stop) as pool:
        fetched = pool.map(fetch, small)
        for found in pool.map(header, [name for name in files if name.endswith(SUFFIX)]):
            headers[found.file] = found
            count += len(found.tensors)
            if count > MAX_TENSORS:
                raise CheckpointError(f"{at}: more than {MAX_TENSORS:,} tensors", "Is this GLM-5.2?")
        list(fetched)
    return HubSource(at, folder, files, headers, {name: path for name, path in cached.items() if name in headers})


def list_files(
    repo: Repo, stop: threading.Event, waits: Sequence[float], kind: type[GlmquantError] = CheckpointError
) -> tuple[Repo, dict[str, HubFile]]:
    """The commit that a revision is now, and its files. Errors as in `explained`, of this `kind`."""

    def info() -> ModelInfo:
        return api().model_info(repo.id, revision=repo.revision or None, files_metadata=True, timeout=30)

    with explained(repo, kind=kind):
        found = retried(info, stop, waits)
    files = {
        file.rfilename: HubFile(file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in found.siblings or ()
    }
    return Repo(repo.id, found.sha or ""), files


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
            _stream(self._at, self._file, offset, offset + len(buffer), content.extend, threading.Event(), SOON)
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
            kept |= {file, file + _INCOMPLETE}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def _work(self) -> None:
        try:
            while file := self._next():
                mtime = self._hub.headers[file].mtime_ns
                _fetch(
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


def api() -> HfApi:
    """huggingface_hub's client, which takes endpoint, token and proxies from the environment."""
    from huggingface_hub import HfApi

    return HfApi(library_name="glmquant", library_version=installed_version("glmquant"))


def retried(
    call: Callable[[], T], stop: threading.Event, waits: Sequence[float], position: Callable[[], int] = lambda: 0
) -> T:
    """Call again after what may pass: a broken connection, a server in trouble, too many requests.

    Args:
        waits: seconds between tries in a row of which none moved `position`.

    Raises:
        Stopped: `stop` was set.
        Exception: the call's own, when the tries are used up or it will not pass.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's, by version

    tries, before = 0, position()
    while True:
        if stop.is_set():
            raise Stopped
        try:
            return call()
        # RuntimeError: huggingface_hub wraps uploads' errors in it, hf_xet raises it, and so does a client that
        # another thread has closed (utils/_http.py, close_session).
        except (HTTPError, RuntimeError) as err:
            if position() > before:
                tries, before = 0, position()
            status = _status(err)
            if tries == len(waits) or not (status in (0, 408, 429) or status >= 500):
                raise
            wait = min(MAX_WAIT, max(waits[tries], _retry_after(err)))
            tries += 1
            logger.warning("%s; again in %g s (%d of %d)", _short(err), wait, tries, len(waits))
            stop.wait(wait)


def _status(err: BaseException | None) -> int:
    """Of an answer; 0 if there was none."""
    from huggingface_hub.errors import HfHubHTTPError

    while err is not None:
        if isinstance(err, HfHubHTTPError):
            return int(err.response.status_code)
        err = err.__cause__
    return 0


def _retry_after(err: BaseException) -> float:
    value = getattr(getattr(err, "response", None), "headers", {}).get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def _short(err: BaseException) -> str:
    """In one line, without the signatures that are in a CDN's addresses."""
    text = " ".join(str(err).partition("\nFor more information")[0].split())
    return re.sub(r"\?[^\s']*", "", text)[:300] or type(err).__name__


def _get(at: Repo, name: str, start: int, end: int, into: Callable[[bytes], object], stop: threading.Event) -> int:
    """One request for the bytes [start, end); returns how many were given to `into`, fewer if the connection ended."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="glmquant", library_version=installed_version("glmquant"))
    headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(at.id, name, revision=at.revision)
    given = 0
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        skip = start if response.status_code == 200 else 0  # a server or a proxy that knows no ranges
        for chunk in response.iter_bytes():  # as it comes: what waits for a full chunk is lost with the connection
            if stop.is_set():
                raise Stopped
            wanted = chunk[skip:][: end - start - given]
            skip = max(0, skip - len(chunk))
            into(wanted)
            given += len(wanted)
            if start + given == end:
                break
    return given


def _stream(
    at: Repo,
    name: str,
    start: int,
    end: int,
    into: Callable[[bytes], object],
    stop: threading.Event,
    waits: Sequence[float],
) -> None:
    """The bytes [start, end) of a file, in order and once; goes on where a connection broke."""
    position = start

    def take(chunk: bytes) -> None:
        nonlocal position
        into(chunk)
        position += len(chunk)

    def get() -> None:
        if position < end:
            _get(at, name, position, end, take, stop)
        if position < end:
            raise RuntimeError(f"{name}: the answer ended at byte {position:,} of {end:,}")

    retried(get, stop, waits, lambda: position)


def _header(at: Repo, name: str, size: int, stop: threading.Event) -> ShardHeader:
    content = bytearray()
    _stream(at, name, 0, min(8, size), content.extend, stop, SOON)
    length = int.from_bytes(content, "little")
    if 8 + length <= size and length <= MAX_HEADER_BYTES:
        _stream(at, name, 8, 8 + length, content.extend, stop, SOON)
    return parse_header(name, bytes(content), size)


def _fetch(
    at: Repo,
    name: str,
    file: HubFile,
    path: Path,
    mtime_ns: int,
    stop: threading.Event,
    waits: Sequence[float],
    advance: Advance = lambda _: None,
) -> None:
    """Bring a file to `path`, its content checked; what is there already, whole or not, is gone on with.

    Args:
        mtime_ns: what its header was read with: readers refuse a file with another.

    Raises:
        CheckpointError: it cannot be fetched or written, or is twice not what the hub says.
    """
    partial = path.with_name(path.name + _INCOMPLETE)
    with explained(at, name, path.parent):
        if path.exists():  # from an earlier run, or the cache: whole, but who knows what the disk kept of it
            path.rename(partial)
        for _ in range(2):
            found = _continue(at, name, file, partial, stop, waits, advance)
            if found == file.digest:
                os.utime(partial, ns=(mtime_ns, mtime_ns))
                partial.rename(path)
                return
            logger.warning("%s: its checksum is %s, not %s: fetched again", name, found, file.digest)
            partial.unlink()
    raise CheckpointError(
        f"{at}: {name}: its checksum is {found}, the Hub says {file.digest}; so again in a second download",
        "Something on the way changes it (a proxy, a mirror), or this machine's disk or memory does.",
    )


def _continue(
    at: Repo,
    name: str,
    file: HubFile,
    partial: Path,
    stop: threading.Event,
    waits: Sequence[float],
    advance: Advance,
) -> str:
    """Fetch what is missing at the end of `partial`; returns the checksum of all of it."""
    state = file.hasher()
    with open(partial, "a+b") as out:
        if out.tell() > file.size:
            out.truncate(0)
        out.seek(0)
        while chunk := out.read(_CHUNK):
            state.update(chunk)

        def keep(chunk: bytes) -> None:
            out.write(chunk)
            state.update(chunk)
            advance(len(chunk))

        _stream(at, name, out.tell(), file.size, keep, stop, waits)
    return state.hexdigest()


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


@contextmanager
def explained(
    repo: Repo, name: str = "", folder: Path | None = None, kind: type[GlmquantError] = CheckpointError
) -> Iterator[None]:
    """Errors of huggingface_hub and of the system, in this project's words.

    Args:
        name: the file that was asked for.
        folder: where it was to be written.
        kind: what to raise; OutputError for a repository that is written to.
    """
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    what = f"{repo}: {name}" if name else str(repo)
    page = f"{constants.ENDPOINT}/{repo.id}"
    token = "et HF_TOKEN to the token of an account that {}, or run `hf auth login`."
    try:
        yield
    except GlmquantError:
        raise
    except hub.OfflineModeIsEnabled as err:
        raise kind(f"{what}: HF_HUB_OFFLINE is set", "Unset it.") from err
    except hub.GatedRepoError as err:
        raise kind(
            f"{what}: the repository is gated", f"Accept its licence at {page}, and s{token.format('did')}"
        ) from err
    except hub.RevisionNotFoundError as err:
        raise kind(
            f"{repo.id} has no revision {repo.revision!r}", f"Name a branch, tag or commit of {page}, or none for main."
        ) from err
    except hub.RepositoryNotFoundError as err:
        raise kind(
            f"there is no {repo.id}, neither as a folder nor on {constants.ENDPOINT}",
            f"Check the name. If it is private: s{token.format('may')}",
        ) from err
    except hub.EntryNotFoundError as err:
        raise kind(f"{what}: no such file", f"Does {page} list it?") from err
    except (hub.HTTPError, RuntimeError) as err:  # type: ignore[attr-defined]
        raise _refused(kind, what, _status(err), err, "S" + token.format("may")) from err
    except ValueError as err:
        raise kind(f"{what}: {_short(err)}") from err
    except OSError as err:
        where = err.filename or folder or name
        raise kind(f"{what}: {where}: {err.strerror or err}", "Free space there." if err.errno == 28 else "") from err


def _refused(kind: type[GlmquantError], what: str, status: int, err: Exception, token: str) -> GlmquantError:
    if status in (401, 403):
        return kind(f"{what}: access refused ({status})", token)
    if status == 429:
        hint = "Wait some minutes; with a token (HF_TOKEN) the limits are higher."
        return kind(f"{what}: too many requests (429), and so in every further try", hint)
    if status >= 500:
        hint = "The Hub is in trouble (https://status.huggingface.co): try again later."
        return kind(f"{what}: the server answers {status}, and so in every further try", hint)
    if status:
        return kind(f"{what}: the server answers {status}: {_short(err)}")
    return kind(f"{what}: the connection failed: {_short(err)}", "Check the network, HTTPS_PROXY and HF_ENDPOINT.")

"""Requests to the Hugging Face Hub: tried again, continued in mid-file, stopped; their errors in this project's words.

Sessions, credentials, proxies, addresses, errors and the cache are huggingface_hub's. Its `hf_hub_download` is not
used: it begins an interrupted file again from its first byte (file_download.py, `_download_to_tmp_and_move`), and its
backed-off requests cannot be stopped while they wait.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
INCOMPLETE = ".incomplete"
_CHUNK = 1024 * 1024

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


def api() -> HfApi:
    """huggingface_hub's client, which takes endpoint, token and proxies from the environment."""
    from huggingface_hub import HfApi

    return HfApi(library_name="glmquant", library_version=installed_version("glmquant"))


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


def stream(
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


def fetch(
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
    partial = path.with_name(path.name + INCOMPLETE)
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

        stream(at, name, out.tell(), file.size, keep, stop, waits)
    return state.hexdigest()


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

"""Writing an output folder so that nothing half-done looks done.

Every file is written under a temporary name, synced, and renamed; config.json comes last, so a folder without it is
unfinished.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from glmquant.errors import CheckpointError, OutputError

TEMPORARY = ".partial"


def check_place(output: Path, source: Path) -> None:
    """Refuse, before anything is written, an output that is the source, lies in it or contains it.

    Raises:
        OutputError: says which.
    """
    real_out, real_source = output.resolve(), source.resolve()
    if real_out == real_source:
        raise OutputError(f"output {output} is the source folder", "Name another folder.")
    if real_source in real_out.parents:
        raise OutputError(f"output {output} lies inside the source {source}", "Name a folder outside it.")
    if real_out in real_source.parents:
        raise OutputError(f"output {output} contains the source {source}", "Name a folder beside it.")
    if (output.exists() or output.is_symlink()) and not output.is_dir():
        raise OutputError(f"output {output} exists and is not a folder")


def check_space(output: Path, needed: int) -> None:
    """Refuse a disk that is too small.

    Args:
        needed: bytes the run will write.

    Raises:
        OutputError: says what is free and what is needed.
    """
    real_out = output.resolve()
    anchor = next(parent for parent in (real_out, *real_out.parents) if parent.exists())
    free = shutil.disk_usage(anchor).free
    if free < needed:
        raise OutputError(
            f"the disk of {output} has {free:,} bytes free, the output needs {needed:,}",
            f"Free {needed - free:,} bytes or choose another disk.",
        )


def create_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise OutputError(f"output {output} cannot be created: {err.strerror or err}") from err


class ShardWriter:
    """One output shard: preallocated at its exact size, filled in any order by any thread, visible only when complete.

    `open`, write everything, `publish`; or `discard`. As a context manager it publishes at the end of the block and
    discards on an exception.
    """

    def __init__(self, folder: Path, file: str, header: bytes, size: int) -> None:
        self.path = folder / file
        self._temporary = folder / f".{file}{TEMPORARY}"
        self._header, self._size, self._written = header, size, 0
        self._lock = threading.Lock()
        self._fd = -1

    def reserve(self) -> None:
        """Take the file's whole size on the disk now, to write it later.

        Raises:
            OutputError: the disk or the quota is too small; nothing is left behind.
        """
        self._create()
        os.close(self._fd)
        self._fd = -1

    def open(self) -> None:
        """Create and preallocate the temporary file, unless it is reserved already, and write the header.

        Raises:
            OutputError: the system refused; nothing is left behind.
        """
        self._create()
        with self._or_discard():
            self.write(self._header, 0)

    def _create(self) -> None:
        try:
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as err:
            raise output_error(self.path.name, err) from err
        with self._or_discard():
            allocate(self._fd, self._size)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at an absolute file offset; each byte of the file is to be written once.

        Raises:
            OutputError: the system refused; says which shard and why.
        """
        view = memoryview(data).cast("B")
        try:
            _write_all(self._fd, view, offset)
        except OSError as err:
            raise output_error(self.path.name, err) from err
        self._count(len(view))

    def start_writeback(self, start: int, end: int) -> None:
        """Have the system begin to write these bytes to the disk, so that the sync at the end has little left to do."""
        if _sync_file_range:
            _sync_file_range(self._fd, start, end - start, _SYNC_FILE_RANGE_WRITE)  # errors show again in fsync

    def publish(self, drop_pages: bool = False) -> None:
        """Make the file durable and give it its name.

        Args:
            drop_pages: tell the system that its pages will not be read again soon.

        Raises:
            OutputError: bytes are missing, or the system refused; the temporary file is removed.
        """
        with self._or_discard():
            if self._written != self._size:
                raise OutputError(f"{self.path.name}: {self._written} bytes written, {self._size} planned")
            os.fsync(self._fd)
            if drop_pages:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._fd = -1
            os.rename(self._temporary, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Close and remove the temporary file; harmless after `publish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.publish()
        else:
            self.discard()

    @contextmanager
    def _or_discard(self) -> Iterator[None]:
        """Remove the temporary file on any exception; what the system refuses becomes an OutputError."""
        try:
            yield
        except OSError as err:
            self.discard()
            raise output_error(self.path.name, err) from err
        except BaseException:
            self.discard()
            raise

    def _count(self, done: int) -> None:
        with self._lock:
            self._written += done


# Linux only, and not in Python's os; posix_fallocate writes into every block where the file system can't reserve.
_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
_fallocate = getattr(_libc, "fallocate", None)
if _sync_file_range:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
if _fallocate:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_SYNC_FILE_RANGE_WRITE = 2


def allocate(fd: int, size: int) -> None:
    """Make a file exactly `size` bytes long and reserve its blocks where the file system can.

    Raises:
        OSError: disk full, quota exceeded.
    """
    os.ftruncate(fd, size)
    while _fallocate and size and _fallocate(fd, 0, 0, size):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """An open temporary file that becomes `path`, durable, when the block ends well."""
    temporary = path.parent / f".{path.name}{TEMPORARY}"
    fd = -1
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        yield fd
        os.fsync(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException as err:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(err, OSError):
            raise output_error(path.name, err) from err
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a small file atomically.

    Raises:
        OutputError: the system refused.
    """
    with _replacing(folder / name) as fd:
        _write_all(fd, memoryview(content), 0)


def copy_file(source: Path, folder: Path, name: str) -> None:
    """Copy a side file byte for byte (a symlink's target, not the link), permissions by umask.

    Raises:
        CheckpointError: the source cannot be read.
        OutputError: the system refused.
    """
    create_folder((folder / name).parent)
    with _replacing(folder / name) as fd:
        offset = 0
        for chunk in _chunks(source, name):
            _write_all(fd, memoryview(chunk), offset)
            offset += len(chunk)


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1024 * 1024):
                yield chunk
    except OSError as err:
        raise CheckpointError(f"{name}: cannot be read: {err.strerror or err}") from err


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def output_error(name: str, err: OSError) -> OutputError:
    """What the system refused, in words; with a hint where the user can do something about it."""
    full = err.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"{name}: cannot be written: {err.strerror or err}",
        "Free space on the disk of the output." if full else "",
    )

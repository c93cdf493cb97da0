"""Writing an output folder so that nothing half-done looks done.

Every file is written under a temporary name, synced, and renamed; config.json comes last, so a folder without it is
unfinished. An existing folder with anything in it is never touched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from glmquant.errors import OutputError

TEMPORARY = ".partial"


def check_output(output: Path, source: Path, needed: int) -> None:
    """Refuse, before anything is written, an output that could lose or mix data, or a disk that is too small.

    Args:
        needed: bytes the run will write.

    Raises:
        OutputError: the folder is not empty, is the source, lies in it or contains it, or the disk is too full.
    """
    real_out, real_source = output.resolve(), source.resolve()
    if real_out == real_source:
        raise OutputError(f"output {output} is the source folder", "Name another folder.")
    if real_source in real_out.parents:
        raise OutputError(f"output {output} lies inside the source {source}", "Name a folder outside it.")
    if real_out in real_source.parents:
        raise OutputError(f"output {output} contains the source {source}", "Name a folder beside it.")
    if output.exists() or output.is_symlink():
        if not output.is_dir():
            raise OutputError(f"output {output} exists and is not a folder")
        if first := next(iter(sorted(os.listdir(output))), None):
            raise OutputError(
                f"output {output} is not empty (it holds {first!r}); nothing was touched",
                "Name a new folder, or remove this one yourself.",
            )
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
        raise OutputError(f"output {output} cannot be created: {err.strerror}") from err


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

    def open(self) -> None:
        """Create and preallocate the temporary file and write the header.

        Raises:
            OutputError: the system refused; nothing is left behind.
        """
        try:
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as err:
            raise _output_error(self.path, err) from err
        with self._or_discard():
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self._size)
            self.write(self._header, 0)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at an absolute file offset; each byte of the file is to be written once.

        Raises:
            OutputError: the system refused; says which shard and why.
        """
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as err:
                raise _output_error(self.path, err) from err
        self._count(done)

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
            raise _output_error(self.path, err) from err
        except BaseException:
            self.discard()
            raise

    def _count(self, done: int) -> None:
        with self._lock:
            self._written += done


# Linux only, and not in Python's os.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well."""
    temporary = path.parent / f".{path.name}{TEMPORARY}"
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise _output_error(path, err) from err


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a small file atomically.

    Raises:
        OutputError: the system refused.
    """
    with _replacing(folder / name) as temporary:
        temporary.write_bytes(content)


def copy_file(source: Path, folder: Path, name: str) -> None:
    """Copy a side file byte for byte (a symlink's target, not the link), permissions by umask.

    Raises:
        OutputError: the system refused.
    """
    create_folder((folder / name).parent)
    with _replacing(folder / name) as temporary:
        shutil.copyfile(source, temporary)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _output_error(path: Path, err: OSError) -> OutputError:
    full = err.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"{path.name}: cannot be written: {err.strerror or err}",
        "Free space on the disk of the output." if full else "",
    )

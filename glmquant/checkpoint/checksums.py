"""Compares a source with the checksums that came with it, before anything is made of it.

Sources of checksums, all written by the tools that download: a hub cache names a blob by its sha256 (large files) or
its git sha1 (small ones); `hf download --local-dir` notes the same as etag in .cache/huggingface/download/*.metadata
(second line); a SHA256SUMS file is as `sha256sum` writes it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from glmquant.checkpoint.header import open_regular
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint
from glmquant.errors import CheckpointError

SUMS = "SHA256SUMS"
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1024 * 1024
# A line a file, for as many files as a checkpoint may have.
_MOST = 30_000_000


def check_source(checkpoint: Checkpoint, threads: int, advance: Callable[[int], object]) -> int:
    """Read every file with a known checksum; returns how many there were.

    Args:
        advance: told the bytes of each chunk read.

    Raises:
        CheckpointError: a file differs, a shard has no checksum, or a file cannot be read.
    """
    shards = [header.file for header in checkpoint.shards if (checkpoint.folder / header.file).exists()]
    names = [*shards, CONFIG, *([INDEX] if checkpoint.weight_map is not None else []), *checkpoint.side_files]
    sums = _sums(checkpoint.folder)
    expected = {name: _expected(checkpoint.folder, name, sums) for name in names}
    if missing := [name for name in shards if not expected[name]]:
        raise CheckpointError(
            f"{checkpoint.folder}: no checksum of {missing[0]} ({len(missing)} shards without one)",
            f"--verify-source needs a hub cache, a folder made by `hf download --local-dir`, or a {SUMS} file.",
        )
    known = {name: value for name, value in expected.items() if value}
    with ThreadPoolExecutor(threads) as pool:
        sums_found = pool.map(lambda name: _sum(checkpoint.folder / name, known[name], advance), known)
        for name, found in zip(known, sums_found, strict=True):
            if found != known[name]:
                raise CheckpointError(
                    f"{name}: its checksum is {found}, not {known[name]}", "The download is damaged: fetch it again."
                )
    return len(known)


def _sums(folder: Path) -> dict[str, str]:
    try:
        lines = _text(folder / SUMS).splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{SUMS}: cannot be read: {err}") from err
    found = {}
    for line in lines:
        value, _, name = line.strip().partition(" ")
        found[name.lstrip(" *").removeprefix("./")] = value.lower()
    return found


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_MOST).decode()


def _expected(folder: Path, name: str, sums: dict[str, str]) -> str:
    path = folder / name
    candidates = [sums.get(name, "")]
    if path.is_symlink():
        candidates.append(os.path.basename(os.readlink(path)))
    with suppress(OSError, ValueError, IndexError):
        lines = _text(folder / ".cache/huggingface/download" / f"{name}.metadata").splitlines()
        candidates.append(lines[1].strip())
    return next((value for value in candidates if _HEX.fullmatch(value)), "")


def _sum(path: Path, like: str, advance: Callable[[int], object]) -> str:
    """sha256, or the sha1 that git gives a blob, whichever `like` is."""
    state = hashlib.sha256() if len(like) == 64 else hashlib.sha1(usedforsecurity=False)
    try:
        with open(path, "rb", buffering=0) as file:
            if len(like) == 40:
                state.update(f"blob {os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(_CHUNK):
                state.update(chunk)
                advance(len(chunk))
    except OSError as err:
        raise CheckpointError(f"{path.name}: cannot be read: {err.strerror or err}") from err
    return state.hexdigest()

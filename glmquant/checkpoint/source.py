"""A checkpoint folder read from its headers: a plain folder or a hub-cache snapshot (symlinks into blobs).

`inspect` reads everything and *lists* what is wrong, for the validator; `open_source` refuses the first problem,
for quantizing. Neither reads a weight or imports torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from glmquant.checkpoint.header import (
    MAX_NAME,
    MAX_TENSORS,
    ShardHeader,
    TensorInfo,
    open_regular,
    parse_json,
    read_header,
)
from glmquant.errors import CheckpointError
from glmquant.text import short

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
RUN_FOLDER, RUN = ".glmquant", "run.json"
"""Where an unfinished output keeps its state; see manifest.py."""
# Against strangers' checkpoints that take memory or time, and far above real ones: GLM-5.2 has 290 files in one folder
# and an index of 5.4 MB, and its config.json is 4 levels deep.
MAX_JSON_BYTES = 100_000_000
MAX_JSON_DEPTH = 50
MAX_FILES = 100_000
MAX_FOLDERS_DEEP = 20
# One stale file gives a problem per tensor; nobody reads more than this.
MAX_PROBLEMS = 1000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Linux cuts a longer request to the larger of the device's request size and its read-ahead (mm/readahead.c).
_READ_AHEAD = 512 * 1024
# Tool bookkeeping, not part of a checkpoint.
_SKIPPED_FOLDERS = {".git", ".cache", RUN_FOLDER, "__pycache__"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a folder: `code` is stable, `file` and `tensor` say where ('' if not applicable)."""

    code: str
    message: str
    file: str = ""
    tensor: str = ""
    hint: str = ""

    def error(self) -> CheckpointError:
        return CheckpointError(self.message, self.hint)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds. `tensors` maps each name to its place; `side_files` are relative paths to copy."""

    folder: Path
    config: dict[str, Any]
    shards: tuple[ShardHeader, ...]
    tensors: Mapping[str, TensorInfo]
    weight_map: Mapping[str, str] | None
    total_size: int | None
    side_files: tuple[str, ...]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.file_size for shard in self.shards)


def open_source(folder: str | os.PathLike[str], deleted: Mapping[str, ShardHeader] | None = None) -> Checkpoint:
    """Read a bf16 checkpoint's headers and refuse whatever would make quantizing it wrong.

    Args:
        deleted: headers of shards that need not be in the folder any more.

    Raises:
        CheckpointError: names the file and the tensor. If there is more than one problem, the first one is
            shown and the others are counted.
    """
    checkpoint, problems = inspect(folder, deleted)
    problems.extend(_source_problems(checkpoint))
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise CheckpointError(first.message + more, first.hint)
    return checkpoint


def inspect(
    folder: str | os.PathLike[str], deleted: Mapping[str, ShardHeader] | None = None
) -> tuple[Checkpoint, list[Problem]]:
    """Read config, index and all headers of a folder; return what is there and what does not fit together.

    Raises:
        CheckpointError: the folder or its config.json cannot be read at all, config.json or the index is a link out
            of the folder, or there are more files or tensors than any checkpoint has.
    """
    root = Path(folder)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise CheckpointError(f"{root} {what}", "Give the folder that holds config.json and the shards.")
    if not (root / CONFIG).exists() and (command := unfinished(root)):
        raise CheckpointError(f"{root} is an unfinished output: no {CONFIG} yet", f"Continue with: {command}")
    config = read_json(root / CONFIG)
    refuse_link_outside(root, INDEX)
    problems: list[Problem] = []
    files = sorted(_walk(root))
    problems += [
        Problem("file-name", f"{f!r}: a file name with unprintable characters", f, hint="Rename or remove it.")
        for f in files
        if not f.isprintable()
    ]
    outside = {file: target for file in files if (target := link_outside(root, file))}
    problems += [_link_problem(file, target) for file, target in outside.items()]
    gone = {file: header for file, header in (deleted or {}).items() if file not in files}
    shard_files = sorted([f for f in files if f.endswith(SUFFIX) and "/" not in f] + list(gone))
    problems += [
        Problem("shard-in-subfolder", f"{f}: a shard in a subfolder, which no index can name", f)
        for f in files
        if f.endswith(SUFFIX) and "/" in f
    ]
    weight_map, total_size = _read_index(root, shard_files, problems)
    shards: list[ShardHeader] = []
    count = 0
    for file in shard_files:
        if file in outside:
            continue
        try:
            shards.append(gone[file] if file in gone else read_header(root / file))
        except CheckpointError as err:
            problems.append(Problem("bad-header", err.message, file, hint=err.hint))
            continue
        count += len(shards[-1].tensors)
        if count > MAX_TENSORS:
            raise CheckpointError(f"{root}: more than {MAX_TENSORS:,} tensors up to {file}", "Is this GLM-5.2?")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for tensor in shard.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor and len(problems) < MAX_PROBLEMS:
                problems.append(
                    Problem(
                        "duplicate-tensor",
                        f"tensor {tensor.name!r} is in two shards: {other.shard} and {shard.file}",
                        shard.file,
                        tensor.name,
                        "Remove the stale shard.",
                    )
                )
    if weight_map is not None:
        readable = {shard.file for shard in shards}
        problems.extend(islice(_compare_index(weight_map, set(shard_files), readable, tensors), MAX_PROBLEMS))
    side = tuple(f for f in files if not f.endswith(SUFFIX) and f not in (INDEX, CONFIG, *outside))
    problems += [
        Problem("not-a-file", f"{f}: not a regular file, or a link that leads nowhere", f, hint="Fetch it again.")
        for f in side
        if not (root / f).is_file()
    ]
    return Checkpoint(root, config, tuple(shards), tensors, weight_map, total_size, side), problems


def link_outside(root: Path, file: str) -> str:
    """Where a symlink in a checkpoint folder leads, if that is out of it; '' if it is no link, or one that may be.

    A hub-cache snapshot (models--ORG--NAME/snapshots/COMMIT) may link into the blobs folder of its repository.
    """
    path = root / file
    if not path.is_symlink():
        return ""
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        allowed.append(Path(os.path.realpath(home.parent.parent / "blobs")))
    return "" if any(target.is_relative_to(folder) for folder in allowed) else os.readlink(path)


def model_name(folder: Path) -> str:
    """`org/name` of a hub-cache snapshot (models--org--name/snapshots/<commit>), else the folder's name."""
    parts = folder.resolve().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return parts[-1]


def refuse_link_outside(root: Path, file: str) -> None:
    """Raise CheckpointError if the file is a symlink out of the checkpoint folder."""
    if target := link_outside(root, file):
        raise _link_problem(file, target).error()


def _link_problem(file: str, target: str) -> Problem:
    return Problem(
        "link-outside",
        f"{file}: a link to {target!r}, outside the checkpoint folder",
        file,
        hint="Put the file itself there, or give the folder that really holds the files.",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sane size and depth, no key twice, every number finite.

    Raises:
        CheckpointError: missing, unreadable, too big, a link out of its folder, or not one JSON object.
    """
    refuse_link_outside(path.parent, path.name)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path.name}: {size} bytes is too big for a checkpoint's JSON file")
            parsed = parse_json(file.read(MAX_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}", "Is this a checkpoint folder?") from None
    except OSError as err:
        raise CheckpointError(f"{path.name}: cannot be read: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{path.name}: not valid JSON: {err}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name}: not a JSON object")
    _check_depth(path.name, parsed)
    return parsed


def _check_depth(file: str, parsed: Any) -> None:
    """Python's JSON writer and `==` fail on what its reader has just managed to read."""
    level = [parsed]
    for _ in range(MAX_JSON_DEPTH):
        inside = (item for value in level for item in (value.values() if isinstance(value, dict) else value))
        level = [item for item in inside if isinstance(item, (dict, list))]
        if not level:
            return
    raise CheckpointError(f"{file}: nested more than {MAX_JSON_DEPTH} levels deep")


def unfinished(folder: Path) -> str:
    """The command that continues an unfinished output, or '' if the folder is none.

    The folder may be a stranger's: only a plain `glmquant quantize` is worth showing to a user who will run it.
    """
    try:
        command = str(read_json(folder / RUN_FOLDER / RUN).get("continue", ""))
        words = shlex.split(command)
    except (CheckpointError, ValueError):
        return ""
    return command if words[:2] == ["glmquant", "quantize"] and shlex.join(words) == command else ""


def _walk(root: Path) -> Iterator[str]:
    count = 0
    for folder, subfolders, names in os.walk(root):
        for name in list(subfolders):
            if os.path.islink(os.path.join(folder, name)):
                # Following it could loop or leave the checkpoint; dropping it silently could lose files.
                link = Path(folder, name).relative_to(root)
                raise CheckpointError(f"{link}: a symlinked folder inside a checkpoint", "Replace it by its files.")
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        count += len(names) + len(subfolders)
        if count > MAX_FILES:
            raise CheckpointError(f"{root}: more than {MAX_FILES:,} files and folders", "Is this a checkpoint folder?")
        if len(Path(folder).relative_to(root).parts) >= MAX_FOLDERS_DEEP and subfolders:
            where = Path(folder).relative_to(root)
            raise CheckpointError(f"{where}: folders more than {MAX_FOLDERS_DEEP} deep", "Is this a checkpoint folder?")
        for name in names:
            yield Path(folder, name).relative_to(root).as_posix()


def _read_index(
    root: Path, shard_files: list[str], problems: list[Problem]
) -> tuple[Mapping[str, str] | None, int | None]:
    if not (root / INDEX).exists():
        if shard_files != [SINGLE]:
            found = f"{len(shard_files)} shards" if shard_files else "no shard"
            problems.append(Problem("no-index", f"{root}: no {INDEX}, and {found} instead of one {SINGLE}", INDEX))
        return None, None
    try:
        index = read_json(root / INDEX)
    except CheckpointError as err:
        problems.append(Problem("bad-index", err.message, INDEX, hint=err.hint))
        return None, None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        problems.append(Problem("bad-index", f"{INDEX}: weight_map is not a map of tensor to file", INDEX))
        return None, None
    if len(weight_map) > MAX_TENSORS or max(map(len, weight_map), default=0) > MAX_NAME:
        text = f"{INDEX}: more than {MAX_TENSORS:,} tensors, or a name of more than {MAX_NAME:,} characters"
        problems.append(Problem("bad-index", text, INDEX))
        return None, None
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int and 0 <= total < 2**63 else None


def _compare_index(
    weight_map: Mapping[str, str], on_disk: set[str], readable: set[str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Problem]:
    named = set(weight_map.values())
    first_tensor: dict[str, str] = {}
    for name, file in weight_map.items():
        first_tensor.setdefault(file, name)
    for file in sorted(named):
        where = f"tensor {first_tensor[file]!r}"
        if file != os.path.basename(file) or "\\" in file or not file.endswith(SUFFIX) or len(file) > 255:
            yield Problem(
                "index-path",
                f"{INDEX}: {where} is said to be in {short(file)}, which is not a shard name in this folder",
                INDEX,
                first_tensor[file],
            )
        elif file not in on_disk:
            yield Problem(
                "missing-shard",
                f"{INDEX} names shard {file} (for {where} and others), which is not there",
                file,
                first_tensor[file],
                "Fetch the missing shard.",
            )
    for file in sorted(on_disk - named):
        inside = next((t.name for t in tensors.values() if t.shard == file), "")
        yield Problem(
            "unindexed-shard",
            f"shard {file} (with tensor {inside!r}) is not named by {INDEX}: engines would not read it",
            file,
            inside,
            f"Remove the file, or add its tensors to {INDEX}.",
        )
    for name, file in weight_map.items():
        if file not in readable:
            continue
        tensor = tensors.get(name)
        if tensor is None:
            yield Problem(
                "missing-tensor",
                f"{INDEX}: tensor {name!r} is not in shard {file}",
                file,
                name,
                "Stale index?",
            )
        elif tensor.shard != file:
            yield Problem(
                "wrong-shard",
                f"{INDEX}: tensor {name!r} is said to be in {file} but is in {tensor.shard}",
                file,
                name,
                "Stale index?",
            )
    for tensor in tensors.values():
        if tensor.shard in named and tensor.name not in weight_map:
            yield Problem(
                "unindexed-tensor",
                f"tensor {tensor.name!r} of shard {tensor.shard} is not named by {INDEX}",
                tensor.shard,
                tensor.name,
                "Stale index?",
            )


def _source_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """What is fine in a checkpoint as such, but not in a source to quantize."""
    for file in checkpoint.side_files:
        if file.endswith(_PICKLES):
            yield Problem(
                "pickle",
                f"{file}: a pickle file; glmquant neither reads nor copies pickles",
                file,
                hint="Remove it.",
            )
    config = checkpoint.config.get("quantization_config")
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else "unknown"
    fp8 = bool(config) and method == "fp8"
    if config and not fp8:
        yield Problem(
            "already-quantized",
            f"{CONFIG}: the source is already quantized (quantization_config.quant_method {short(method)})",
            CONFIG,
            hint="Start from the bf16 or the FP8 checkpoint.",
        )
    silent = "An FP8 checkpoint? config.json says nothing of it: quantization_config.quant_method 'fp8' is missing."
    dtypes = ("BF16", "F16", "F32", *(("F8_E4M3",) if fp8 else ()))
    packed = ("weight_scale", "input_scale", "output_scale", "_packed", *(() if fp8 else ("_scale_inv",)))
    for tensor in checkpoint.tensors.values():
        if tensor.name.endswith(packed) or tensor.dtype in ("U8", "I8"):
            yield Problem(
                "already-quantized",
                f"{tensor.shard}: tensor {tensor.name!r} ({tensor.dtype}) shows that the source is already quantized",
                tensor.shard,
                tensor.name,
                silent if tensor.name.endswith("_scale_inv") else "Start from the bf16 or the FP8 checkpoint.",
            )
        elif tensor.dtype not in dtypes:
            yield Problem(
                "dtype",
                f"{tensor.shard}: tensor {tensor.name!r} has dtype {tensor.dtype}; a source may hold "
                + ", ".join(dtypes),
                tensor.shard,
                tensor.name,
                silent if tensor.dtype == "F8_E4M3" else "",
            )


class ShardReader:
    """Exact reads from one shard file, by any thread; never a short read, never bytes of another version of the file.

    Raises:
        CheckpointError: the file cannot be opened, or is not the one whose header was read.
    """

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self.file, self._header = header.file, header
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as err:
            raise CheckpointError(f"{self.file}: cannot be read: {err.strerror or err}") from err
        try:
            self.check_unchanged()
        except CheckpointError:
            self.close()
            raise
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def check_unchanged(self) -> None:
        """Refuse a file that is not, or no longer, the one whose header was read.

        Raises:
            CheckpointError: its size or its time of change differs.
        """
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self._header.file_size, self._header.mtime_ns):
            what = f"{self._header.file_size:,} to {now.st_size:,} bytes"
            if now.st_size == self._header.file_size:
                what = "it was written to"
            raise CheckpointError(
                f"{self.file}: changed since its header was read ({what})", "Leave the source alone during the run."
            )

    def drop_pages(self) -> None:
        """Tell the system that this file will not be read again soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def will_need(self, offset: int, length: int) -> None:
        """Have the system begin to read these bytes."""
        if hasattr(os, "posix_fadvise"):
            for start in range(offset, offset + length, _READ_AHEAD):
                os.posix_fadvise(self.fd, start, _READ_AHEAD, os.POSIX_FADV_WILLNEED)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from an absolute offset.

        Raises:
            CheckpointError: I/O error or end of file; names shard and offset.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as err:
                raise CheckpointError(f"{self.file}: read failed at byte {offset + done}: {err.strerror}") from err
            if not count:
                missing = len(buffer) - done
                raise CheckpointError(f"{self.file}: ends at byte {offset + done}, {missing} more expected")
            done += count

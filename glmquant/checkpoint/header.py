"""The safetensors header: which tensors a shard holds and where, without reading any weight.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of
JSON, then the data. `data_offsets` count from the end of the header; together they must cover the data exactly.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import xxhash

from glmquant.errors import CheckpointError
from glmquant.text import short

# Headers come from strangers, and each limit keeps one from taking memory or time. They are far above anything real:
# all of GLM-5.2 is 59,585 tensors of at most 2 dimensions in 282 shards, and its longest name has 53 characters.
# The limit of the reference implementation (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
# Values in one JSON text, a tensor's entry being about ten: Python takes up to 200 bytes for each.
MAX_JSON_ITEMS = 4_000_000
MAX_TENSORS = 1_000_000
MAX_NAME = 1000
MAX_RANK = 16

# Bits per element, in the order of the reference implementation's Dtype enum: the order in which its writer
# lays tensors out (largest dtype first), kept by `layout_order`.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one shard. `start` and `end` are absolute byte offsets in the shard file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A shard's header: `tensors` in file order, `metadata` the free-form `__metadata__` strings.

    `file_size` and `mtime_ns` are the file's when the header was read; `digest` is that of the header's bytes.
    """

    file: str
    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    file_size: int
    mtime_ns: int = 0
    digest: str = ""


def tensor_nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; sub-byte dtypes must fill whole bytes."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def layout_order(dtype: str, name: str) -> tuple[int, str]:
    """Sort key of the reference writer: widest dtype first (keeps every tensor aligned), then name."""
    return (-_DTYPE_RANK[dtype], name)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]], metadata: dict[str, str]) -> bytes:
    """Length prefix and header for (name, dtype, shape, begin, end) rows, offsets counted from the data's start.

    Padded with spaces so that the data begins at a multiple of 8 bytes, as the reference writer does.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, dtype, shape, begin, end in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def parse_json(content: bytes) -> Any:
    """JSON of a stranger: UTF-8, no key twice, no NaN or infinity, and not more values than memory can bear.

    Raises:
        ValueError: says what is wrong with it.
        RecursionError: it is nested too deep.
    """
    # Every value but the first follows one of these; those inside of texts count as well, which does no harm.
    if content.count(b",") + content.count(b"[") + content.count(b"{") > MAX_JSON_ITEMS:
        raise ValueError(f"more than {MAX_JSON_ITEMS:,} values")
    parsed = json.loads(
        content.decode(), object_pairs_hook=no_duplicate_keys, parse_constant=_no_number, parse_float=_finite
    )
    if b"\\u" in content:
        # Half a surrogate pair ("\ud800"): Python reads it, but cannot write it back.
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: the same key twice is an attack or damage, never meant."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {short(twice)} appears twice")
    return result


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{short(text)} is too large a number")
    return value


def open_regular(path: Path) -> BufferedReader:
    """Open to read, but not a pipe or a device, which could block for ever.

    Raises:
        OSError: also for these.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, `open` says it better
        raise OSError(f"not a regular file ({stat.filemode(mode)})")
    return open(path, "rb")


def read_header(path: Path) -> ShardHeader:
    """Read and check one shard's header; no weight byte is read.

    Raises:
        CheckpointError: the header is cut short, malformed, names an unknown dtype, or its byte ranges overlap,
            leave gaps or do not end exactly at the end of the file. The message names file and tensor.
    """
    try:
        with open_regular(path) as handle:
            status = os.fstat(handle.fileno())
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            body = handle.read(min(length, status.st_size)) if length <= MAX_HEADER_BYTES else b""
    except OSError as err:
        raise CheckpointError(f"{path.name}: cannot be read: {err.strerror or err}") from err
    return parse_header(path.name, prefix + body, status.st_size, status.st_mtime_ns)


def parse_header(file: str, content: bytes, file_size: int, mtime_ns: int = 0) -> ShardHeader:
    """A header from its bytes, the length in front included; checks and errors as in `read_header`."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8:
        raise CheckpointError(f"{file}: header cut short: the file has {file_size} bytes", _DOWNLOAD)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: header length {length} is over the format's limit {MAX_HEADER_BYTES}; "
            "this is not a safetensors file"
        )
    if len(content) - 8 < length:
        present = len(content) - 8
        raise CheckpointError(f"{file}: header cut short: {length} bytes announced, {present} present", _DOWNLOAD)
    try:
        parsed = parse_json(content[8 : 8 + length])
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{file}: header is not valid JSON: {err}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ is not a map of strings")
    if len(parsed) > MAX_TENSORS:
        raise CheckpointError(f"{file}: header names {len(parsed):,} tensors; the limit is {MAX_TENSORS:,}")
    data_start = 8 + length
    tensors = [_tensor(file, name, spec, data_start) for name, spec in parsed.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    _check_ranges(file, tensors, data_start, file_size)
    return ShardHeader(file, tuple(tensors), metadata, file_size, mtime_ns, xxhash.xxh3_128_hexdigest(content))


_DOWNLOAD = "The download is incomplete: fetch this file again."


_FIELDS = {"dtype", "shape", "data_offsets"}


def _tensor(file: str, name: str, spec: Any, data_start: int) -> TensorInfo:
    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {short(name)}: {what}")

    if len(name) > MAX_NAME:
        raise bad(f"a name of {len(name):,} characters; the limit is {MAX_NAME:,}")
    if not isinstance(spec, dict) or spec.keys() != _FIELDS:
        raise bad("header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"unknown dtype {short(dtype)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise bad(f"shape {short(shape)} or data_offsets {short(offsets)} are not natural numbers")
    if len(shape) > MAX_RANK:
        raise bad(f"shape has {len(shape):,} dimensions; the limit is {MAX_RANK}")
    begin, end = offsets
    try:
        expected = tensor_nbytes(dtype, shape)
    except ValueError as err:
        raise bad(str(err)) from err
    if end - begin != expected:
        raise bad(f"data_offsets [{begin}, {end}] hold {end - begin} bytes, {dtype} {shape} needs {expected}")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _naturals(value: Any) -> bool:
    # bool is an int in Python; JSON true must not pass for 1.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_ranges(file: str, tensors: list[TensorInfo], data_start: int, file_size: int) -> None:
    position, previous = data_start, "the header"
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps" if tensor.start < position else "leaves a gap after"
            raise CheckpointError(f"{file}: tensor {tensor.name!r} {kind} {previous}")
        position, previous = tensor.end, repr(tensor.name)
        if position > file_size:
            raise CheckpointError(
                f"{file}: tensor {tensor.name!r} ends at byte {position}, past the end of the file ({file_size})",
                _DOWNLOAD,
            )
    if position != file_size:
        raise CheckpointError(f"{file}: {file_size - position} bytes after {previous} belong to no tensor")

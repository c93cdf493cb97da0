"""The safetensors header: which tensors a shard holds and where, without reading any weight.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of
JSON, then the data. `data_offsets` count from the end of the header; together they must cover the data exactly.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from glmquant.errors import CheckpointError

# The limit of the reference implementation (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000

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


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: the same key twice is an attack or damage, never meant.

    Refused too is half a surrogate pair ("\\ud800"): Python reads it, but cannot write it back.
    """
    result = dict(pairs)
    "".join([*result, *(value for value in result.values() if isinstance(value, str))]).encode()
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice!r} appears twice")
    return result


def read_header(path: Path) -> ShardHeader:
    """Read and check one shard's header; no weight byte is read.

    Raises:
        CheckpointError: the header is cut short, malformed, names an unknown dtype, or its byte ranges overlap,
            leave gaps or do not end exactly at the end of the file. The message names file and tensor.
    """
    try:
        with open(path, "rb") as handle:
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
        parsed = json.loads(content[8:].decode("utf-8"), object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{file}: header is not valid JSON: {err}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ is not a map of strings")
    data_start = 8 + length
    tensors = [_tensor(file, name, spec, data_start) for name, spec in parsed.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    _check_ranges(file, tensors, data_start, file_size)
    return ShardHeader(file, tuple(tensors), metadata, file_size, mtime_ns, xxhash.xxh3_128_hexdigest(content))


_DOWNLOAD = "The download is incomplete: fetch this file again."


_FIELDS = {"dtype", "shape", "data_offsets"}


def _tensor(file: str, name: str, spec: Any, data_start: int) -> TensorInfo:
    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {what}")

    if not isinstance(spec, dict) or spec.keys() != _FIELDS:
        raise bad("header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise bad(f"shape {shape!r} or data_offsets {offsets!r} are not natural numbers")
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

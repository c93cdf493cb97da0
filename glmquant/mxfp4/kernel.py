"""The fused CPU kernel: weights to packed E2M1 + E8M0 in one pass, bit for bit AMD Quark 0.13's numbers.

Everything happens on integers. An element's *key* is the float32 bits of its magnitude, shortened to 16 bits that still
compare like the magnitudes: all thresholds are multiples of a quarter of the scale, so the bits that a key drops can
only matter by not being zero, and one bit keeps that. A block's largest key gives a row of the table below: seven
thresholds and the scale byte. A code is the number of thresholds that a key exceeds. There are no special cases: zeros,
subnormals and the top of the range are rows like the others, and Inf and NaN have the largest keys.

Why C, compiled for several instruction sets and picked at run time, without intrinsics (_kernel.c): on one core of a
Zen 4, [2048, 6144] bf16, in elements per second of CPU time, Quark's own calls make 0.03 G, torch.compile 0.17 G, numba
0.6 G (plus a JIT at each start), plain SSE2 code 1.6 G, AVX2 and AVX-512 3.5 G; a memory copy makes 5.0 G. AVX-512
intrinsics gave 4.9 G, but the disk is the limit by far. Without a compiler at install time numpy does the same, at
0.2 G. `scripts/bench.py kernel` measures most of these.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from glmquant.checkpoint import fp8
from glmquant.errors import BackendError
from glmquant.mxfp4.format import BLOCK

VARIABLE = "GLMQUANT_KERNEL"
"""Environment variable that forces one of available()."""

# 1 MB of bf16: read, quantized and written without leaving the second-level cache.
CHUNK_ELEMENTS = 512 * 1024

Buffer = bytes | bytearray | memoryview

# The order is that of _kernel.c's dtypes.
_SOURCES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_NON_FINITE = 0x7F00
_NUMPY_ELEMENTS = 256 * 1024


def _make_table() -> npt.NDArray[np.int16]:
    """int16 [256, 8]: per exponent field of a block's largest magnitude, seven keys to exceed and the scale byte."""
    field = np.arange(256)
    # Quark's even_round: the exponent of amax, less 2 (E2M1's largest exponent), clamped; an overflow to Inf gives 127.
    e = np.where(field == 255, 127, np.clip(field - 127 - 2, -127, 127))
    # Midway between neighbours of {0, .5, 1, 1.5, 2, 3, 4, 6}; a tie goes to the even code, so up from 0.75, 1.75, 3.5.
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties_up = np.array([0, 1, 0, 1, 0, 1, 0])
    with np.errstate(over="ignore"):
        thresholds = np.ldexp(midpoints, e[:, None]).astype(np.float32)  # exact, or Inf, which no element exceeds
    keys = (thresholds.view(np.uint32) >> 15).astype(np.int32) - 0x8000 - ties_up
    # Quark stores an exponent of -127 as byte 1, like -126.
    return np.column_stack((keys, np.maximum(e, -126) + 127)).astype(np.int16)


_TABLE = _make_table()


@cache
def _compiled() -> ModuleType | None:
    try:
        return importlib.import_module("glmquant.mxfp4._kernel")
    except ImportError:  # installed without a C compiler
        return None


@cache
def available() -> tuple[str, ...]:
    """Implementations that work here, fastest first: some of avx512, avx2 and c, then numpy. All give the same bits."""
    module = _compiled()
    return (*module.available(), "numpy") if module else ("numpy",)


def implementation() -> str:
    """The implementation in use: the fastest, or the one that GLMQUANT_KERNEL names.

    Raises:
        BackendError: GLMQUANT_KERNEL names one that is not available.
    """
    forced = os.environ.get(VARIABLE)
    if forced and forced not in available():
        raise BackendError(
            f"{VARIABLE}={forced}: no such kernel on this machine", f"Available: {', '.join(available())}."
        )
    return forced or available()[0]


def quantize_into(source: Buffer, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
    """Quantize whole rows into the caller's buffers, without holding the GIL.

    Args:
        source: rows of `columns` elements, little-endian, contiguous, at any alignment.
        dtype: of the source: BF16, F16 or F32.
        columns: a multiple of 32.
        packed: writable, contiguous; gets half a byte per element, the even column in the low nibble.
        scale: writable, contiguous; gets one E8M0 byte per 32 elements.

    Returns:
        -1, or the flat index of the first NaN or Inf; packed and scale are then undefined.

    Raises:
        ValueError: unknown dtype, or buffers of the wrong size, not contiguous or not writable.
        BackendError: as `implementation`.
    """
    if dtype not in _SOURCES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_SOURCES)}")
    if columns <= 0 or columns % BLOCK:
        raise ValueError(f"columns {columns} is not a positive multiple of {BLOCK}")
    buffers = [memoryview(buffer) for buffer in (source, packed, scale)]
    rows, rest = divmod(buffers[0].nbytes, columns * _SOURCES[dtype].itemsize)
    if rest:
        raise ValueError(f"source has {buffers[0].nbytes} bytes, which are no whole rows of {columns} {dtype}")
    wanted = (buffers[0].nbytes, rows * columns // 2, rows * columns // BLOCK)
    for name, buffer, size in zip(("source", "packed", "scale"), buffers, wanted, strict=True):
        if buffer.nbytes != size:
            raise ValueError(f"{name} has {buffer.nbytes} bytes instead of {size}")
        if not buffer.c_contiguous or (buffer.readonly and name != "source"):
            raise ValueError(f"{name} is not contiguous" if not buffer.c_contiguous else f"{name} is read-only")
    chosen = implementation()
    if not rows:
        return -1
    module = _compiled()
    if chosen == "numpy" or module is None:
        return _quantize_numpy(source, dtype, packed, scale)
    return int(module.quantize(chosen, list(_SOURCES).index(dtype), source, packed, scale, _TABLE))


def dequantize_into(
    source: memoryview,
    columns: int,
    scale: npt.NDArray[np.float32],
    first_row: int,
    block: tuple[int, int],
    out: memoryview,
) -> int:
    """Whole rows of block-scaled E4M3 to bf16, without holding the GIL: the bits of checkpoint/fp8.py, which see.

    Raises:
        ValueError: buffers or sizes that do not belong together.
        BackendError: as `implementation`.
    """
    chosen, module = implementation(), _compiled()
    if chosen == "numpy" or module is None:
        return fp8.dequantize_into(source, columns, scale, first_row, block, out)
    scales = np.ascontiguousarray(scale, "<f4")
    if scales.shape[1] != -(-columns // block[1]):
        raise ValueError(f"scale has {scales.shape[1]} columns; {columns} in blocks of {block[1]} need another number")
    return int(module.dequantize(chosen, source, columns, scales, first_row, *block, out))


def _quantize_numpy(source: Buffer, dtype: str, packed: Buffer, scale: Buffer) -> int:
    """What _kernel.c does, stage by stage; a part at a time, to stay in the caches."""
    elements = np.frombuffer(source, _SOURCES[dtype])
    pairs = np.frombuffer(packed, np.uint8).reshape(-1, BLOCK // 2)
    scales = np.frombuffer(scale, np.uint8)
    for start in range(0, elements.size, _NUMPY_ELEMENTS):
        bits = _widen(elements[start : start + _NUMPY_ELEMENTS]).reshape(-1, BLOCK)
        blocks = slice(start // BLOCK, start // BLOCK + len(bits))
        magnitude = bits & 0x7FFFFFFF
        key = (magnitude >> 15) | ((magnitude & 0x7FFF) != 0)
        key = (key.astype(np.uint16) ^ 0x8000).view(np.int16)
        top = key.max(axis=1)
        if top.max() >= _NON_FINITE:
            return start + int((key.reshape(-1) >= _NON_FINITE).argmax())
        row = _TABLE[(top.astype(np.int32) + 0x8000 + 0x40) >> 8]
        code = np.zeros(key.shape, np.uint8)
        for i in range(7):
            code += key > row[:, i : i + 1]
        code |= (bits >> 28 & 8).astype(np.uint8) * (code != 0)
        pairs[blocks] = code[:, 0::2] | code[:, 1::2] << 4
        scales[blocks] = row[:, 7]
    return -1


def _widen(elements: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """float32 bits of BF16 (as integers), F16 or F32 elements."""
    wide: npt.NDArray[np.uint32]
    if elements.dtype.kind == "u":
        wide = elements.astype(np.uint32) << np.uint32(16)
    else:
        wide = elements.astype(np.float32).view(np.uint32)
    return wide


class FusedBackend:
    """Quantizes weights to MXFP4 with this kernel; needs neither torch nor Quark.

    Raises:
        BackendError: as `implementation`.
    """

    name = "fused"
    chunk_elements = CHUNK_ELEMENTS
    threads = 0  # any number

    def __init__(self) -> None:
        implementation()  # a wrong GLMQUANT_KERNEL is told before any work
        try:
            self.version = installed_version("amd-quark")
        except PackageNotFoundError:
            self.version = "0.13"  # whose numbers these are

    def quantize_into(self, source: Buffer, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
        """`quantize_into` of this module."""
        return quantize_into(source, dtype, columns, packed, scale)

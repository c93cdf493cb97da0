"""glmquant.mxfp4.kernel: every implementation gives AMD Quark's bits, for every finite input."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import safe_open
from support import TRAINED

from glmquant.errors import BackendError
from glmquant.mxfp4 import kernel
from glmquant.mxfp4.kernel import FusedBackend, available, implementation, quantize_into
from glmquant.mxfp4.quark import QuarkBackend

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Result = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

ROOT = Path(__file__).resolve().parent.parent
STORAGE = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23}
INF = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
SIGN = {"BF16": 1 << 15, "F16": 1 << 15, "F32": 1 << 31}

each_implementation = pytest.mark.parametrize("chosen", available(), indirect=True)
each_dtype = pytest.mark.parametrize("dtype", STORAGE)


@pytest.fixture
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(kernel.VARIABLE, request.param)
    return str(request.param)


pytestmark = pytest.mark.filterwarnings("error")


def run(bits: Bits, dtype: str) -> Result:
    """What the implementation in force makes of [rows, columns]."""
    rows, columns = bits.shape
    packed, scale = np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 32), np.uint8)
    assert quantize_into(bits.data, dtype, columns, packed.data, scale.data) == -1
    return packed, scale


@cache
def quark() -> QuarkBackend:
    return QuarkBackend()


def run_quark(bits: Bits, dtype: str) -> Result:
    rows, columns = bits.shape
    packed, scale = np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 32), np.uint8)
    raw = memoryview(bytearray(bits.tobytes()))
    assert quark().quantize_into(raw, dtype, columns, packed.reshape(-1).data, scale.reshape(-1).data) == -1
    return packed, scale


def same(ours: Result, theirs: Result) -> bool:
    return all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


# the same bits as Quark


def maxima(dtype: str) -> npt.NDArray[np.int64]:
    """Block maxima of all exponents, and on both sides of the mantissa 1.75 from which the scale doubles."""
    size = MANTISSA[dtype]
    mantissas = np.array([0, (3 << (size - 2)) - 1, 3 << (size - 2), (1 << size) - 1])
    return (np.arange(INF[dtype] >> size)[:, None] << size | mantissas).reshape(-1)


def in_blocks(maximum: int, magnitudes: npt.NDArray[np.int64], dtype: str) -> Bits:
    """Blocks [n, 32] that begin with the maximum and hold the magnitudes up to it, with both signs."""
    values = magnitudes[magnitudes <= maximum]
    values = np.concatenate((values, values | SIGN[dtype]))
    blocks = np.zeros((-(-values.size // 31), 32), STORAGE[dtype])
    padded = np.zeros(len(blocks) * 31, STORAGE[dtype])
    padded[: values.size] = values
    blocks[:, 0] = maximum
    blocks[:, 1:] = padded.reshape(-1, 31)
    return blocks


def each_pattern_below_each_maximum(dtype: str) -> Bits:
    every = np.arange(INF[dtype])
    return np.concatenate([in_blocks(int(m), every, dtype) for m in maxima(dtype)])


def each_pattern_as_maximum(dtype: str) -> Bits:
    rng = np.random.default_rng(0)
    top = np.arange(INF[dtype])[:, None]
    below = np.maximum(top - rng.integers(0, 5 << MANTISSA[dtype], (len(top), 32)), 0)
    place = rng.integers(0, 32, len(top))
    below[np.arange(len(top)), place] = top[:, 0]
    signs = rng.integers(0, 2, below.shape) * SIGN[dtype]
    return np.concatenate((below | signs, below | (SIGN[dtype] - signs))).astype(STORAGE[dtype])


def f32_thresholds_below_each_maximum() -> Bits:
    """Quark's thresholds for each scale, and the float32 next to them, near and at the distance of a bf16 step."""
    blocks = []
    for maximum in maxima("F32"):
        exponent = min(max(((int(maximum) + 0x200000) >> 23) - 129, -127), 127)
        thresholds = np.ldexp(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), exponent)
        thresholds = thresholds[thresholds <= np.finfo(np.float32).max].astype(np.float32)
        around = np.array([0, 1, -1, 0x7FFF, -0x7FFF, 0x8000, -0x8000, 0xFFFF, -0xFFFF, 0x10000, -0x10000])
        near = thresholds.view(np.uint32).astype(np.int64)[:, None] + around
        blocks.append(in_blocks(int(maximum), np.concatenate((near[near >= 0], [0, 1])), "F32"))
    return np.concatenate(blocks)


def random_bits(dtype: str) -> Bits:
    """All bit patterns alike, and blocks of elements of similar size."""
    rng = np.random.default_rng(1)
    wild = rng.integers(0, INF[dtype], (20_000, 32))
    tops = rng.integers(0, INF[dtype], (20_000, 1))
    tame = np.maximum(tops - rng.integers(0, 4 << MANTISSA[dtype], (20_000, 32)), 0)
    bits = np.concatenate((wild, tame))
    return (bits | rng.integers(0, 2, bits.shape) * SIGN[dtype]).astype(STORAGE[dtype])


def trained() -> Bits:
    found = []
    for path in sorted(TRAINED.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            tensors = [shard.get_tensor(name) for name in shard.keys()]  # noqa: SIM118 (not a dict)
        found += [t.view(torch.int16).numpy().view(np.uint16) for t in tensors if t.dtype == torch.bfloat16]
    return np.concatenate([t.reshape(-1, 32) for t in found if t.ndim == 2 and t.shape[1] % 32 == 0])


CASES: dict[str, tuple[str, Callable[[], Bits]]] = {
    "bf16: each pattern below each maximum": ("BF16", lambda: each_pattern_below_each_maximum("BF16")),
    "bf16: each pattern as maximum": ("BF16", lambda: each_pattern_as_maximum("BF16")),
    "bf16: random": ("BF16", lambda: random_bits("BF16")),
    "bf16: trained": ("BF16", trained),
    "f16: each pattern below each maximum": ("F16", lambda: each_pattern_below_each_maximum("F16")),
    "f16: each pattern as maximum": ("F16", lambda: each_pattern_as_maximum("F16")),
    "f16: random": ("F16", lambda: random_bits("F16")),
    "f32: thresholds below each maximum": ("F32", f32_thresholds_below_each_maximum),
    "f32: random": ("F32", lambda: random_bits("F32")),
}


@cache
def reference(case: str) -> tuple[Bits, Result]:
    dtype, make = CASES[case]
    bits = make()
    return bits, run_quark(bits, dtype)


@pytest.mark.parametrize("case", CASES)
@each_implementation
def test_bits_are_quarks(case: str, chosen: str) -> None:
    bits, theirs = reference(case)
    assert same(run(bits, CASES[case][0]), theirs)


def test_the_bf16_case_holds_all_patterns_and_all_scales() -> None:
    bits, (packed, scale) = reference("bf16: each pattern below each maximum")
    assert np.unique(bits).size == 65536 - 2 * 128
    assert set(np.unique(scale)) == {*range(1, 253), 254}  # 253 does not exist: from 1.75 * 2^127 on it is 254
    assert np.unique(packed & 15).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]


any_dtype = st.sampled_from(sorted(STORAGE))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[str, Bits]:
    """Rows of two blocks whose elements lie at most a few octaves below a maximum, or anywhere."""
    dtype = draw(any_dtype)
    top = draw(arrays(np.int64, (3, 2, 1), elements=st.integers(0, INF[dtype] - 1)))
    reach = draw(st.sampled_from([5 << MANTISSA[dtype], INF[dtype]]))
    drop = draw(arrays(np.int64, (3, 2, 32), elements=st.integers(0, reach)))
    sign = draw(arrays(np.int64, (3, 2, 32), elements=st.sampled_from([0, SIGN[dtype]])))
    return dtype, (np.maximum(top - drop, 0) | sign).reshape(3, 64).astype(STORAGE[dtype])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(blocks())
def test_bits_are_quarks_on_what_hypothesis_finds(found: tuple[str, Bits]) -> None:
    dtype, bits = found
    theirs = run_quark(bits, dtype)
    for name in available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(kernel.VARIABLE, name)
            assert same(run(bits, dtype), theirs), name


@each_implementation
@each_dtype
def test_flushed_subnormals_change_no_bit(dtype: str, chosen: str) -> None:
    tiny = np.arange(1 << (MANTISSA[dtype] - 1)).astype(STORAGE[dtype])[: 64 * 32].reshape(-1, 32)
    before = run(tiny, dtype)
    torch.set_flush_denormal(True)
    try:
        assert same(run(tiny, dtype), before)
    finally:
        torch.set_flush_denormal(False)


# buffers


@each_implementation
@each_dtype
@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 37])
def test_any_number_of_blocks_at_any_alignment_and_nothing_beside_them(dtype: str, count: int, chosen: str) -> None:
    bits = random_bits(dtype)[:count]
    size = bits.itemsize
    source = memoryview(b"\xff" + bits.tobytes() + b"\xff" * size)[1:-size]
    packed, scale = bytearray(b"\xa5" * (16 * count + 64)), bytearray(b"\xa5" * (count + 64))
    inner = memoryview(packed)[31:-33], memoryview(scale)[31:-33]
    assert quantize_into(source, dtype, 32, *inner) == -1
    assert [a.tobytes() for a in run(bits, dtype)] == [bytes(b) for b in inner]
    assert {*packed[:31], *packed[-33:], *scale[:31], *scale[-33:]} == {0xA5}


@each_implementation
def test_no_rows(chosen: str) -> None:
    assert quantize_into(b"", "BF16", 32, bytearray(), bytearray()) == -1


@each_implementation
@pytest.mark.parametrize(
    ("dtype", "columns", "sizes", "message"),
    [
        ("I8", 32, (64, 16, 1), "dtype 'I8' is not one of BF16, F16, F32"),
        ("BF16", 33, (66, 16, 1), "columns 33 is not a positive multiple of 32"),
        ("BF16", 0, (64, 16, 1), "columns 0 is not"),
        ("BF16", -32, (64, 16, 1), "columns -32 is not"),
        ("BF16", 64, (64, 16, 1), "source has 64 bytes, which are no whole rows of 64 BF16"),
        ("F32", 32, (64, 16, 1), "source has 64 bytes, which are no whole rows of 32 F32"),
        ("F16", 32, (64, 15, 1), "packed has 15 bytes instead of 16"),
        ("F16", 32, (64, 17, 1), "packed has 17 bytes instead of 16"),
        ("BF16", 32, (64, 16, 2), "scale has 2 bytes instead of 1"),
        ("BF16", 32, (64, 16, 0), "scale has 0 bytes instead of 1"),
    ],
)
def test_wrong_sizes_are_refused(dtype: str, columns: int, sizes: tuple[int, ...], message: str, chosen: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_into(bytearray(sizes[0]), dtype, columns, bytearray(sizes[1]), bytearray(sizes[2]))


@each_implementation
def test_read_only_and_strided_buffers_are_refused(chosen: str) -> None:
    with pytest.raises(ValueError, match="packed is read-only"):
        quantize_into(bytes(64), "BF16", 32, bytes(16), bytearray(1))
    with pytest.raises(ValueError, match="scale is read-only"):
        quantize_into(bytes(64), "BF16", 32, bytearray(16), bytes(1))
    with pytest.raises(ValueError, match="source is not contiguous"):
        quantize_into(memoryview(bytes(128))[::2], "BF16", 32, bytearray(16), bytearray(1))


# NaN and Inf


@each_implementation
@each_dtype
def test_the_first_nan_or_inf_is_found(dtype: str, chosen: str) -> None:
    rng = np.random.default_rng(2)
    bits = random_bits(dtype)[:10_000].reshape(100, 3200)  # more than numpy's part and C's strip
    last = bits.size - 1
    for place in (0, 1, 31, 32, 255, 256, 262_143, 262_144, last - 1, last, *rng.integers(0, last, 20)):
        for bad in (INF[dtype], INF[dtype] + 1, SIGN[dtype] - 1):
            hurt = bits.copy()
            flat = hurt.reshape(-1)
            flat[rng.integers(place, last, 3, endpoint=True)] = INF[dtype]
            flat[place] = bad | (place % 2 * SIGN[dtype])
            packed, scale = np.empty((100, 1600), np.uint8), np.empty((100, 100), np.uint8)
            assert quantize_into(hurt.data, dtype, 3200, packed.data, scale.data) == place


# the backend


@each_dtype
def test_the_backend_gives_quarks_rows(dtype: str) -> None:
    bits = random_bits(dtype)[:201].reshape(67, 96)
    packed, scale = np.zeros((67, 48), np.uint8), np.zeros((67, 3), np.uint8)
    assert FusedBackend().quantize_into(bits.data, dtype, 96, packed.data, scale.data) == -1
    assert same((packed, scale), run_quark(bits, dtype))


def test_the_backend_has_the_version_of_quark() -> None:
    assert (FusedBackend.name, FusedBackend().version) == ("fused", quark().version)


# threads


@each_implementation
def test_other_threads_run_meanwhile(chosen: str) -> None:
    """With this switch interval nobody takes the GIL from a thread that does not let go of it."""
    bits = np.zeros((1024, 8192), np.uint16)
    packed, scale = np.empty((1024, 4096), np.uint8), np.empty((1024, 256), np.uint8)
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0.0001)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        for _ in range(1000):
            before = turns[0]
            quantize_into(bits.data, "BF16", 8192, packed.data, scale.data)
            if turns[0] > before:
                return
        pytest.fail("the GIL was never released")
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


# which implementation


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != kernel.VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=60
    )


SHOW = (
    "import sys; from glmquant.mxfp4.kernel import *; FusedBackend(); "
    "print(implementation(), *{'torch', 'quark'} & set(sys.modules))"
)


@pytest.mark.parametrize("name", available())
def test_the_environment_forces_one(name: str) -> None:
    assert python(SHOW, GLMQUANT_KERNEL=name).stdout.split() == [name]


def test_the_best_is_taken_by_itself() -> None:
    assert python(SHOW).stdout.split() == [available()[0]]
    assert python(SHOW, GLMQUANT_KERNEL="").stdout.split() == [available()[0]]


def test_one_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "abacus")
    for call in (implementation, FusedBackend):
        with pytest.raises(BackendError, match=r"GLMQUANT_KERNEL=abacus: no such kernel.*\n.*Available: .*numpy\."):
            call()


def test_without_the_compiled_module_numpy_does_it() -> None:
    code = f"import sys; sys.modules['glmquant.mxfp4._kernel'] = None; {SHOW}; print(available())"
    assert python(code).stdout.splitlines() == ["numpy", "('numpy',)"]


@pytest.mark.skipif(not shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]), reason="no C compiler")
def test_where_a_compiler_is_the_kernel_was_compiled() -> None:
    assert available()[-2:] == ("c", "numpy")


def test_the_compiled_module_guards_its_memory() -> None:
    module = kernel._compiled()
    if module is None:
        pytest.skip("not compiled")
    good = ["c", 0, bytes(128), bytearray(32), bytearray(2), bytes(4096)]
    assert module.quantize(*good) == -1
    wrong = [(0, "abacus"), (1, 3), (1, -1), (1, 2), (2, bytes(66)), (3, bytearray(31)), (4, bytearray(1)), (5, b"")]
    for place, bad in wrong:
        with pytest.raises(ValueError, match="do not belong together"):
            module.quantize(*good[:place], bad, *good[place + 1 :])


def test_every_package_is_installed() -> None:
    listed = re.findall(r"^packages = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[0]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "glmquant").rglob("__init__.py")}
    assert set(re.findall(r'"(.*?)"', listed)) == found | {"glmquant._recipes"}

"""glmquant.mxfp4.quark: bit for bit what AMD Quark's own run writes, and what those bits mean."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support import RECIPES, TRAINED, bits

import glmquant
from glmquant.errors import BackendError
from glmquant.mxfp4.format import decode, unpack
from glmquant.mxfp4.quark import QuarkBackend

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@cache
def backend() -> QuarkBackend:
    return QuarkBackend()


def quantize(weight: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    raw = memoryview(bytearray(weight.contiguous().view(torch.uint8).numpy().tobytes()))
    rows, columns = weight.shape
    packed, scale = np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 32), np.uint8)
    bad = backend().quantize_into(
        raw, NAMES[weight.dtype], columns, memoryview(packed).cast("B"), scale.reshape(-1).data
    )
    assert bad == -1
    return packed, scale


def block(*values: float, dtype: torch.dtype = torch.bfloat16) -> tuple[list[int], int, list[float]]:
    """One block that begins with `values`, the rest zeros: the first codes, the scale byte, the first decoded."""
    weight = torch.zeros(1, 32, dtype=dtype)
    weight[0, : len(values)] = torch.tensor(values, dtype=torch.float64).to(dtype)
    packed, scale = quantize(weight)
    n = len(values)
    return unpack(packed)[0, :n].tolist(), int(scale[0, 0]), decode(packed, scale)[0, :n].tolist()


# the same bits as Quark's own run over the folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_the_bits_of_quarks_own_run(tiny: Path, recipe: str) -> None:
    ours = support.output(tiny, recipe)
    theirs = support.quark_output(tiny, recipe)
    compare(tiny, ours.output, theirs, quantized=sum(job.quantized for job in ours.plan.jobs))


def test_the_trained_checkpoint_gives_the_bits_of_quarks_own_run() -> None:
    ours = support.output(TRAINED, "moe")
    compare(TRAINED, ours.output, support.quark_output(TRAINED, "moe"), quantized=204)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_f32_and_f16_sources_give_the_bits_of_quarks_own_run(tiny: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    # The factor fills the mantissa: a detour through bf16 would show.
    folder = support.copy(
        tiny,
        tmp_path / "source",
        lambda name, t: (t.float() * 1.0123457).to(dtype) if t.dtype == torch.bfloat16 else t,
    )
    ours = support.output(folder, "routed-mtp")
    compare(folder, ours.output, support.quark_output(folder, "routed-mtp"), quantized=120)


def compare(source: Path, ours: Path, theirs: Path, quantized: int) -> None:
    before, mine, quarks = support.tensors(source), support.tensors(ours), support.tensors(theirs)
    assert mine.keys() == quarks.keys()
    assert [n for n in mine if mine[n][0] != quarks[n][0] or bits(mine[n][1]) != bits(quarks[n][1])] == []
    packed = [name.removesuffix("_scale") for name in mine.keys() - before.keys()]
    assert len(packed) == quantized
    for name in packed:
        out_features, in_features = before[name][1].shape
        for stored, columns in ((name, in_features // 2), (name + "_scale", in_features // 32)):
            file, tensor = mine[stored]
            assert (file, tensor.dtype, tensor.shape) == (before[name][0], torch.uint8, (out_features, columns))
    copied = mine.keys() - packed - {name + "_scale" for name in packed}
    assert [n for n in copied if mine[n][0] != before[n][0] or bits(mine[n][1]) != bits(before[n][1])] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantization_config_is_quarks_own_but_for_the_exclude_list(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    ours = support.read_json(result.output / "config.json")["quantization_config"]
    theirs = support.read_json(support.quark_output(tiny, recipe) / "config.json")["quantization_config"]
    assert list(ours) == list(theirs)
    assert ours.pop("exclude") == result.exclusions.texts
    # Quark writes out the modules that it left alone: they are those that the list must speak of.
    left_alone = theirs.pop("exclude")
    assert sorted(left_alone) == sorted(support.plain_modules(tiny, recipe))
    assert ours == theirs


# a few rows at a time


def test_a_run_in_small_chunks_writes_the_same_shards(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = support.output(tiny, "moe-mtp")
    monkeypatch.setattr(QuarkBackend, "chunk_elements", 50 * 128)
    again = glmquant.quantize(tiny, tmp_path / "out", recipe="moe-mtp", backend="quark")
    for path in result.output.glob("*.safetensors"):
        assert (again.output / path.name).read_bytes() == path.read_bytes()


# what the bits mean

# Blocks worth a look: a power of two, and elements at most 2^5 below it, so that most codes occur.
exponents = arrays(np.int64, (3, 2, 1), elements=st.integers(-133, 127))
drops = arrays(np.int64, (3, 2, 32), elements=st.integers(0, 5))
mantissas = arrays(np.int64, (3, 2, 32), elements=st.integers(0, 127))
signs = arrays(np.int64, (3, 2, 32), elements=st.sampled_from([-1, 1]))
zeros = arrays(np.bool_, (3, 2, 32))


@st.composite
def near_the_top(draw: st.DrawFn) -> torch.Tensor:
    values = draw(signs) * np.ldexp(1 + draw(mantissas) / 128, draw(exponents) - draw(drops))
    return torch.from_numpy(np.where(draw(zeros), np.copysign(0.0, values), values).reshape(3, 64)).bfloat16()


any_bits = arrays(np.int16, (3, 64)).map(lambda a: torch.from_numpy(a).view(torch.bfloat16))
weights = (near_the_top() | any_bits).filter(lambda w: bool(w.isfinite().all()))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights)
def test_decoded_weights_are_within_half_a_step_of_the_source(weight: torch.Tensor) -> None:
    packed, scale = quantize(weight)
    x = weight.double().numpy().reshape(3, 2, 32)
    amax = np.abs(x).max(-1, keepdims=True)
    ordinary = ((amax >= 1.75 * 2.0**-125) & (amax < 1.75 * 2.0**127))[..., 0]
    step = np.ldexp(1.0, scale.astype(int) - 127)[..., None]
    scaled = np.abs(x) / step
    half = np.select([scaled <= 2, scaled <= 4, scaled <= 6], [0.25, 0.5, 1.0], np.inf)
    half = np.where(scaled > 6, scaled - 6, half)  # saturates
    error = np.abs(decode(packed, scale).reshape(x.shape) - x) / step
    assert (error <= half)[ordinary].all()
    assert (scaled < 7)[ordinary].all() and (scaled.max(-1) >= 3.5)[ordinary].all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights)
def test_codes_and_scales_are_those_of_the_rule(weight: torch.Tensor) -> None:
    """The rule written down a second time, in exact arithmetic, two known oddities of Quark included."""
    packed, scale = quantize(weight)
    x = weight.double().numpy().reshape(3, 2, 32)
    mantissa, exponent = np.frexp(np.abs(x).max(-1, keepdims=True))  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1
    top = np.where(mantissa > 0, exponent - 1 + (mantissa >= 0.875), -1000)  # 1.75 and more count as 2
    e = np.where(top > 127, 127, np.clip(top - 2, -127, 127))
    assert (scale.reshape(3, 2, 1) == np.maximum(e, -126) + 127).all()
    distance = np.abs(np.ldexp(np.abs(x), -e)[..., None] - MAGNITUDES)
    # Ties go to the even code: try even ones first.
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    code = order[distance[..., order].argmin(-1)]
    code = np.where((x < 0) & (code > 0), code + 8, code)  # what rounds to zero is +0
    assert (unpack(packed).reshape(x.shape) == code).all()


def test_ties_go_to_the_even_code_and_the_top_saturates() -> None:
    ties = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -5.0)
    assert block(*ties)[:2] == ([7, 0, 2, 2, 4, 4, 6, 6, 10, 14], 127)
    assert block(6.96875) == ([7], 127, [6.0])
    assert block(7.0) == ([6], 128, [8.0])


def test_what_rounds_to_zero_loses_its_sign() -> None:
    codes, _, decoded = block(6.0, -0.25, -0.0, 0.0)
    assert codes == [7, 0, 0, 0]
    assert not np.signbit(decoded).any()


def test_a_block_of_zeros_has_scale_byte_1() -> None:
    assert block(0.0, -0.0) == ([0, 0], 1, [0.0, 0.0])


def test_blocks_of_almost_nothing_decode_twice_too_large() -> None:
    # Scaled with 2^-127, stored as byte 1, which is 2^-126: Quark's way with subnormal scales.
    almost = 2.0**-125
    assert block(1.7421875 * almost, -0.75 * almost) == ([7, 13], 1, [3.0 * almost, -1.5 * almost])
    assert block(1.75 * almost, -0.75 * almost) == ([6, 11], 1, [2.0 * almost, -0.75 * almost])


def test_blocks_at_the_end_of_the_range_decode_to_inf() -> None:
    huge = 2.0**127
    assert block(1.7421875 * huge) == ([7], 252, [1.5 * huge])
    assert block(1.75 * huge, -0.5 * huge) == ([4, 9], 254, [np.inf, -0.5 * huge])


def test_f32_and_f16_keep_their_mantissa_in_the_choice_of_scale() -> None:
    assert block(1.7499999, dtype=torch.float32) == ([7], 125, [1.5])
    assert block(1.7499999, dtype=torch.bfloat16) == ([6], 126, [2.0])
    assert block(1.749, dtype=torch.float16) == ([7], 125, [1.5])


# what is refused


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_first_nan_or_inf_is_found(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 64, dtype=dtype)
    weight[3, 41] = weight[4, 2] = value
    raw = memoryview(bytearray(weight.view(torch.uint8).numpy().tobytes()))
    assert backend().quantize_into(raw, NAMES[dtype], 64, bytearray(160), bytearray(10)) == 3 * 64 + 41


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(BackendError, match=f"device '{device}' cannot be used: .+"):
        QuarkBackend(device)


@pytest.mark.parametrize(("changes", "named"), [({"CXX": "/nonexistent/c++"}, "/nonexistent/c++"), ({}, "c++")])
def test_without_a_compiler_the_command_says_so_at_once(
    tiny: Path, tmp_path: Path, changes: dict[str, str], named: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CXX"} | {"PATH": str(tmp_path)} | changes
    command = [sys.executable, "-m", "glmquant", "quantize", tiny, tmp_path / "out", "--backend", "quark"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert f"compiles a C++ extension at import and {named!r} is not there" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()

"""FP8 and fused sources: the same bits as from the bf16 checkpoint with one tensor per expert that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import glmquant
from glmquant.checkpoint.fp8 import E4M3, dequantize_into
from glmquant.cli import main
from glmquant.errors import BackendError, CheckpointError
from glmquant.mxfp4 import kernel
from glmquant.recipe import load_architecture

Tensors = dict[str, torch.Tensor]
BLOCK = (64, 48)  # so that most weights of the tiny checkpoint have ragged last blocks
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def save(folder: Path, source: Path, shards: dict[str, Tensors], config: Callable[[dict], object]) -> Path:
    """A checkpoint like `source` with other tensors and another config.json."""
    support.copy(source, folder)
    found = support.read_json(folder / "config.json")
    config(found)
    (folder / "config.json").write_text(json.dumps(found))
    for file, tensors in shards.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = support.read_json(folder / support.INDEX)
    index["weight_map"] = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / support.INDEX).write_text(json.dumps(index))
    return folder


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepSeek does: a scale of amax / 448 a block."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
    scale = torch.zeros(rows, columns)
    coded = torch.zeros(weight.shape)
    for r in range(rows):
        for c in range(columns):
            at = (slice(r * BLOCK[0], (r + 1) * BLOCK[0]), slice(c * BLOCK[1], (c + 1) * BLOCK[1]))
            scale[r, c] = weight[at].float().abs().max() / 448
            coded[at] = weight[at].float() / scale[r, c] if scale[r, c] else 0
    return coded.to(torch.float8_e4m3fn), scale


def from_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return (weight.float() * wide[: weight.shape[0], : weight.shape[1]]).bfloat16()


@pytest.fixture(scope="module")
def fp8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An FP8 checkpoint, and the bf16 one that it stands for. One weight's scales are in another shard."""
    root = tmp_path_factory.mktemp("fp8")
    lookups = load_architecture("glm_moe_dsa").lookups
    coded: dict[str, Tensors] = {}
    plain: dict[str, Tensors] = {}
    for file, tensors in support.shards(tiny).items():
        coded[file], plain[file] = {}, {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if tensor.ndim != 2 or module in (*lookups, "lm_head") or module.endswith(("mlp.gate", "weights_proj")):
                coded[file][name] = plain[file][name] = tensor
                continue
            coded[file][name], coded[file][name + "_scale_inv"] = to_fp8(tensor)
            plain[file][name] = from_fp8(coded[file][name], coded[file][name + "_scale_inv"])
    first, last = sorted(coded)[0], sorted(coded)[-1]
    moved = next(name for name in coded[first] if name.endswith("_scale_inv"))
    coded[last][moved] = coded[first].pop(moved)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    source = save(root / "fp8", tiny, coded, lambda config: config.update(quantization_config=method))
    return source, save(root / "bf16", tiny, plain, lambda config: None)


def equal(a: Path, b: Path) -> bool:
    ours, theirs = support.tensors(a), support.tensors(b)
    return ours.keys() == theirs.keys() and all(
        (ours[name][0], support.bits(ours[name][1])) == (theirs[name][0], support.bits(theirs[name][1]))
        for name in ours
    )


@pytest.mark.parametrize("recipe", ["moe", "routed-mtp"])
def test_an_fp8_source_gives_what_its_bf16_values_give(fp8: tuple[Path, Path], tmp_path: Path, recipe: str) -> None:
    ours = glmquant.quantize(fp8[0], tmp_path / "ours", recipe=recipe, workers=2)
    theirs = support.quark_output(fp8[1], recipe)
    assert ours.report.ok
    assert equal(ours.output, theirs)
    assert support.read_json(ours.output / "config.json")["quantization_config"]["quant_method"] == "quark"
    assert ours.plan.total_size == glmquant.plan(fp8[1], recipe=recipe).plan.total_size
    assert "except FP8 weights that became bf16" in (ours.output / "README.md").read_text()
    proof = glmquant.verify(ours.output, fp8[0])
    assert proof.ok and proof.requantized and proof.copied
    assert glmquant.resolve_exclusions(fp8[0], recipe=recipe).texts == ours.exclusions.texts


def test_an_fp8_source_is_continued_like_any_other(
    fp8: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glmquant.streaming import Streamer

    publish = Streamer._publish

    def one(streamer: Streamer, *args: object) -> None:
        publish(streamer, *args)  # type: ignore[arg-type]
        raise BackendError("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streamer, "_publish", one)
        with pytest.raises(BackendError):
            glmquant.quantize(fp8[0], tmp_path / "out", workers=1)
    assert equal(glmquant.quantize(fp8[0], tmp_path / "out", resume=True).output, support.output(fp8[1], "moe").output)


def change(fp8: tuple[Path, Path], tmp_path: Path, edit: Callable[[str, Tensors], object]) -> Path:
    shards = {file: dict(tensors) for file, tensors in support.shards(fp8[0]).items()}
    for file, tensors in shards.items():
        edit(file, tensors)
    return save(tmp_path / "source", fp8[0], shards, lambda config: None)


WEIGHT = "model.layers.4.mlp.experts.3.down_proj.weight"
DENSE = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", [WEIGHT, DENSE])
def test_e4m3_nan_is_an_error_with_its_place(fp8: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    def spoil(_: str, tensors: Tensors) -> None:
        if name in tensors:
            tensors[name].view(torch.uint8)[70, 50] = 0xFF

    with pytest.raises(BackendError, match=rf"tensor '{name}' holds nan at row 70, column 50"):
        glmquant.quantize(change(fp8, tmp_path, spoil), tmp_path / "out")


def test_a_block_with_scale_zero_is_zeros(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    def clear(_: str, tensors: Tensors) -> None:
        if WEIGHT in tensors:
            tensors[WEIGHT + "_scale_inv"][1, 0] = 0

    out = glmquant.quantize(change(fp8, tmp_path, clear), tmp_path / "out").output
    packed = support.tensors(out)[WEIGHT][1]
    assert not packed[64:128, :16].any() and packed[:64].any()
    assert set(support.tensors(out)[WEIGHT + "_scale"][1][64:128, 0].tolist()) == {1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f, t: t.pop(WEIGHT + "_scale_inv", None), f"tensor '{WEIGHT}' is FP8 without '{WEIGHT}_scale_inv'"),
        (lambda f, t: t.pop(WEIGHT, None), f"tensor '{WEIGHT}_scale_inv' has no FP8 weight"),
        (
            lambda f, t: WEIGHT in t and t.update({WEIGHT + "_scale_inv": torch.ones(1, 1)}),
            rf"'{WEIGHT}_scale_inv' is F32 \[1, 1\]; .* needs F32 \[2, 2\]",
        ),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_refused(
    fp8: tuple[Path, Path], tmp_path: Path, edit: Callable[[str, Tensors], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        glmquant.plan(change(fp8, tmp_path, edit))


def test_fp8_that_the_config_does_not_tell_of_is_refused(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    source = save(tmp_path / "source", fp8[0], support.shards(fp8[0]), lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"already quantized .*\n.*quant_method 'fp8' is missing"):
        glmquant.plan(source)


def test_a_source_shard_is_deleted_after_the_last_output_that_needs_its_scales(
    fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    source = support.copy(fp8[0], tmp_path / "source")
    out = glmquant.quantize(source, tmp_path / "out", delete_source_shards=True, workers=1).output
    assert equal(out, support.output(fp8[1], "moe").output)
    assert not list(source.glob("*.safetensors"))


def test_the_decode_table_is_torchs() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(1, 4), st.integers(1, 70), st.integers(1, 70))
def test_any_fp8_weight_is_what_torch_makes_of_it(seed: int, rows: int, blocks: int, high: int, wide: int) -> None:
    rng = np.random.default_rng(seed)
    columns = 32 * blocks
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    codes[codes & 0x7F == 0x7F] = 1
    shape = (-(-rows // high), -(-columns // wide))
    scale = np.ldexp(rng.random(shape, np.float32), rng.integers(-90, 90, shape)).astype(np.float32)
    grown = torch.from_numpy(scale).repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    expected = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * grown).bfloat16().view(torch.int16)
    half = rows // 2
    for implementation in kernel.available():
        out = bytearray(2 * rows * columns)
        for first, last in ((0, half), (half, rows)):
            if first < last:
                part = memoryview(out)[2 * first * columns : 2 * last * columns]
                found = decode(implementation, codes[first:last], scale, first, (high, wide), part)
                assert found == -1
        assert np.array_equal(np.frombuffer(out, np.int16).reshape(rows, columns), expected.numpy()), implementation


def decode(
    implementation: str, codes: np.ndarray, scale: np.ndarray, first: int, block: tuple[int, int], out: memoryview
) -> int:
    content = memoryview(codes.tobytes())
    if implementation == "numpy":
        return dequantize_into(content, codes.shape[1], scale, first, block, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernel.VARIABLE, implementation)
        return kernel.dequantize_into(content, codes.shape[1], scale, first, block, out)


# Scales whose products with some code are tiny, subnormal, a tie of bf16, just finite, Inf or NaN; zeros; and others.
def _scales() -> np.ndarray:
    exponents = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 2**32, 3000, np.uint32).view(np.float32)
    last = np.array([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0x3F818000, 1, 0x7FFFFF, 0x800000], np.uint32)
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    return np.concatenate([exponents, -exponents, exponents * np.float32(1.5), some, last.view(np.float32), odd])


@pytest.mark.parametrize("implementation", [name for name in kernel.available() if name != "numpy"])
def test_every_code_times_many_scales_has_numpys_bits_and_first_bad_place(implementation: str) -> None:
    """256 codes x 3,844 scales; a row a scale, so that each row's first NaN or Inf is asked for too."""
    scale = _scales().reshape(-1, 1)
    codes = np.arange(256, dtype=np.uint8)
    for order in (codes, codes[::-1], np.roll(codes, 100)):
        finite = np.isfinite(E4M3[order])
        whole = np.ascontiguousarray(np.broadcast_to(order, (len(scale), 256)))
        ours, theirs = (memoryview(bytearray(2 * whole.size)) for _ in range(2))
        bad = decode(implementation, whole, scale, 0, (1, 256), ours)
        assert bad == decode("numpy", whole, scale, 0, (1, 256), theirs) >= 0
        a, b = (np.frombuffer(part, np.uint16).reshape(whole.shape) for part in (ours, theirs))
        with np.errstate(all="ignore"):
            number = finite & np.isfinite(E4M3[order] * scale)
        assert number.any() and np.array_equal(a[number], b[number])
        for row in range(len(scale)):
            line = memoryview(bytearray(512))
            args = (whole[:1], scale[row : row + 1], 0, (1, 256), line)
            assert decode(implementation, *args) == decode("numpy", *args)


@pytest.mark.parametrize("implementation", kernel.available())
def test_the_first_bad_value_is_found_across_rows_and_blocks(implementation: str) -> None:
    codes = np.ones((7, 50), np.uint8)
    scale = np.ones((3, 4), np.float32)
    out = memoryview(bytearray(2 * codes.size))
    assert decode(implementation, codes, scale, 1, (3, 16), out) == -1
    for place in ((6, 49), (4, 16), (4, 3), (0, 49), (0, 0)):
        codes[place] = 0xFF
        assert decode(implementation, codes, scale, 1, (3, 16), out) == place[0] * 50 + place[1]
    codes[:] = 0x7E
    scale[1, 2] = 3e38  # rows 2-4 of these, columns 32-47
    assert decode(implementation, codes, scale, 1, (3, 16), out) == 2 * 50 + 32


@pytest.mark.skipif(len(kernel.available()) == 1, reason="installed without a C compiler: there is no compiled kernel")
def test_the_compiled_kernel_refuses_buffers_that_do_not_belong_together() -> None:
    module, name = kernel._compiled(), kernel.available()[0]
    assert module
    codes, scale, out = bytes(6 * 8), np.ones((3, 2), "<f4"), bytearray(2 * 6 * 8)
    assert module.dequantize(name, codes, 8, scale, 0, 2, 4, out) == -1
    huge = 2**62
    for wrong in (
        ("none", codes, 8, scale, 0, 2, 4, out),
        (name, codes, 7, scale, 0, 2, 4, out),
        (name, codes, 0, scale, 0, 2, 4, out),
        (name, codes, -8, scale, 0, 2, 4, out),
        (name, codes, 8, scale, 1, 2, 4, out),  # rows 1-6 need four rows of scales
        (name, codes, 8, scale, -1, 2, 4, out),
        (name, codes, 8, scale, huge, 2, 4, out),
        (name, codes, 8, scale, 0, 0, 4, out),
        (name, codes, 8, scale, 0, 2, 0, out),
        (name, codes, 8, scale, 0, 2, 3, out),  # three scales across: 3 x 3 are not there
        (name, codes, 8, scale, 0, 2, huge, out[:-2]),
        (name, codes, 8, scale, 0, 2, 4, out + bytearray(1)),
        (name, b"", 8, scale, 0, 2, 4, bytearray()),
    ):
        with pytest.raises(ValueError, match="do not belong together"):
            module.dequantize(*wrong)
    with pytest.raises(ValueError, match="need another number"):
        kernel.dequantize_into(memoryview(codes), 8, scale, 0, (2, 3), memoryview(out))


# fused experts


def fuse(source: Path, folder: Path) -> Path:
    """As transformers 5 saves it: two 3-D parameters a layer, in the shard of their first expert."""
    shards = support.shards(source)
    loose: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    home: dict[str, str] = {}
    for file, tensors in shards.items():
        for name in list(tensors):
            if found := EXPERT.fullmatch(name):
                loose.setdefault(found[1], {})[int(found[2]), found[3]] = tensors.pop(name)
                home.setdefault(found[1], file)
    for prefix, parts in loose.items():
        count = len(parts) // 3
        both = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)]
        shards[home[prefix]][f"{prefix}.gate_up_proj"] = torch.stack(both)
        shards[home[prefix]][f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
    return save(folder, source, shards, lambda config: None)


@pytest.mark.parametrize("recipe", ["moe", "routed-mtp"])
def test_fused_experts_give_what_single_ones_give(tiny: Path, tmp_path: Path, recipe: str) -> None:
    source = fuse(tiny, tmp_path / "fused")
    done = glmquant.quantize(source, tmp_path / "out", recipe=recipe)
    assert done.report.ok
    ours, theirs = support.tensors(done.output), support.tensors(support.output(tiny, recipe).output)
    assert {n: support.bits(t) for n, (_, t) in ours.items()} == {n: support.bits(t) for n, (_, t) in theirs.items()}
    assert done.exclusions.texts == support.output(tiny, recipe).exclusions.texts
    assert support.read_json(done.output / support.INDEX)["weight_map"].keys() == ours.keys()
    proof = glmquant.verify(done.output, source)
    assert proof.ok and proof.requantized == len([n for n in ours if n.endswith("_scale")])


def test_a_transposed_layout_is_refused_with_the_shape_it_should_have(tiny: Path, tmp_path: Path) -> None:
    source = fuse(tiny, tmp_path / "fused")

    def turn(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous() if name.endswith("experts.down_proj") else tensor

    with pytest.raises(CheckpointError, match=r"has shape \[8, 64, 128\]; .* should be \[experts, 128, 64\]"):
        glmquant.plan(support.copy(source, tmp_path / "turned", turn))


def test_a_square_layout_that_nothing_explains_is_refused(tmp_path: Path) -> None:
    from make_tiny_glm import make_tiny_glm

    make_tiny_glm(tmp_path / "tiny", layers=2, experts=2, hidden=64, moe_intermediate=64, intermediate=64)
    source = fuse(tmp_path / "tiny", tmp_path / "fused")
    assert glmquant.plan(source)  # gate_up_proj [2, 128, 64] tells that down_proj [2, 64, 64] is not transposed either
    shards = support.shards(source)
    for tensors in shards.values():
        for name in [name for name in tensors if name.endswith("gate_up_proj")]:
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensors.pop(name)):
                tensors[f"{prefix}{expert}.gate_proj.weight"], tensors[f"{prefix}{expert}.up_proj.weight"] = (
                    part.clone() for part in both.chunk(2)
                )
    with pytest.raises(CheckpointError, match="is square, and nothing in its layer tells"):
        glmquant.plan(save(tmp_path / "square", source, shards, lambda config: None))


def test_an_expert_that_is_there_twice_is_refused(tiny: Path, tmp_path: Path) -> None:
    source = fuse(tiny, tmp_path / "fused")
    shards = support.shards(source)
    shards[sorted(shards)[0]][WEIGHT] = torch.ones(128, 64, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"tensor '{WEIGHT}' is there twice, as itself and inside a fused one"):
        glmquant.plan(save(tmp_path / "twice", source, shards, lambda config: None))


# other shards than the source's


def bits_by_name(folder: Path) -> dict[str, object]:
    return {name: support.bits(tensor) for name, (_, tensor) in support.tensors(folder).items()}


@pytest.mark.parametrize("size", [1, 200_000, 1_000_000, 10**9])
def test_shards_packed_anew_hold_the_same_tensors_layer_by_layer(tiny: Path, tmp_path: Path, size: int) -> None:
    done = glmquant.quantize(tiny, tmp_path / "out", max_shard_size=size)
    assert done.report.ok and glmquant.verify(done.output, tiny).ok
    assert bits_by_name(done.output) == bits_by_name(support.output(tiny, "moe").output)
    names = sorted(path.name for path in done.output.glob("*.safetensors"))
    count = len(names)
    expected = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert names == (expected if count > 1 else ["model.safetensors"])
    layers = [job.module.layer for shard in done.plan.shards for job in shard.jobs if job.module.layer is not None]
    assert layers == sorted(layers)
    for shard in done.plan.shards:
        held = sum(job.nbytes_out for job in shard.jobs)
        assert held <= size or len(shard.jobs) == 1
    assert support.read_json(done.output / support.INDEX)["metadata"]["total_size"] == done.plan.total_size


def test_shards_packed_anew_are_continued_and_their_sources_deleted(
    tiny: Path, copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    from glmquant.streaming import Streamer

    source, publish, published = copy_of(tiny), Streamer._publish, []

    def three(streamer: Streamer, *args: object) -> None:
        publish(streamer, *args)  # type: ignore[arg-type]
        published.append(args)
        if len(published) == 3:
            raise BackendError("stop")

    options = {"max_shard_size": 300_000, "delete_source_shards": True, "workers": 1, "base_model": "tiny"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streamer, "_publish", three)
        with pytest.raises(BackendError):
            glmquant.quantize(source, tmp_path / "out", **options)
    out = glmquant.quantize(source, tmp_path / "out", resume=True, **options).output
    assert bits_by_name(out) == bits_by_name(support.output(tiny, "moe").output)
    assert not list(source.glob("*.safetensors"))


def test_a_size_is_read_as_people_write_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, shards in (("300kb", 10), ("0.3MB", 10), ("300000", 10), ("5GB", 1)):
        assert main(["plan", str(tiny), "--max-shard-size", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shards"] == shards
    for text in ("", "x", "-5", "0", "5 apples"):
        with pytest.raises(SystemExit):
            main(["plan", str(tiny), "--max-shard-size", text])
        assert "is no size such as 5GB" in capsys.readouterr().err

"""--keep-fp8: un-quantized modules of a block-scaled FP8 source stay FP8, where every target engine reads that.

Which release reads what was found with the engines' own code: tests/conformance/test_fp8.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from make_tiny_glm import make_tiny_glm
from safetensors.torch import save_file

import glmquant
from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.source import inspect
from glmquant.cli import main
from glmquant.engines import block_fp8
from glmquant.engines.block_fp8 import is_block_fp8, keepable, layer_keys
from glmquant.engines.model import Fp8Layers, Stored, Verdict
from glmquant.engines.targets import ENGINES, evaluate, parse_targets
from glmquant.errors import BackendError, CheckpointError, RecipeError
from glmquant.findings import Report
from glmquant.mxfp4.config import block_fp8_spec, quantization_config
from glmquant.recipe import load_architecture

SGLANG, NEWEST, VLLM = "sglang>=0.5.21", "sglang>=0.5.23", "vllm"
RECIPES = ("moe", "routed")
MTP = "model.layers.5"
ATTENTION = "model.layers.0.self_attn"
# Modules of the source that are bf16 there, as in zai-org/GLM-5.2-FP8.
PLAIN = ("lm_head", "model.embed_tokens", "mlp.gate", "eh_proj", "weights_proj")
# kv_a_proj_with_mqa has 192 rows: its last block of 128 is ragged.
SIZES = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 128,
}


def to_fp8(weight: torch.Tensor, step: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // step) * step, -(-columns // step) * step)
    padded[:rows, :columns] = weight.float()
    blocks = padded.reshape(padded.shape[0] // step, step, padded.shape[1] // step, step)
    scale = blocks.abs().amax((1, 3)) / 448
    coded = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return coded.to(torch.float8_e4m3fn).contiguous(), scale


def save(folder: Path, source: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    support.copy(source, folder)
    for file, tensors in shards.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = support.read_json(folder / support.INDEX)
    index["weight_map"] = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / support.INDEX).write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-scaled FP8 checkpoint; the first scale of its first shard lies in the last one."""
    root = tmp_path_factory.mktemp("keep-fp8")
    make_tiny_glm(root / "bf16", moe_intermediate=128, overrides=SIZES)
    coded: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in support.shards(root / "bf16").items():
        coded[file] = {}
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or name.removesuffix(".weight").endswith(PLAIN):
                coded[file][name] = tensor
            else:
                coded[file][name], coded[file][name + "_scale_inv"] = to_fp8(tensor)
    first, last = sorted(coded)[0], sorted(coded)[-1]
    moved = next(name for name in coded[first] if name.endswith("self_attn.o_proj.weight_scale_inv"))
    coded[last][moved] = coded[first].pop(moved)
    folder = save(root / "fp8", root / "bf16", coded)
    config = support.read_json(folder / "config.json")
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def made(source: Path, recipe: str, targets: str) -> Path:
    """What glmquant makes of it with --keep-fp8."""
    done = glmquant.quantize(
        source, support.new_folder("kept"), recipe=recipe, keep_fp8=True, targets=targets, workers=2
    )
    assert done.report and done.report.ok, [finding.message for finding in done.report.findings]
    return done.output


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = support.read_json(folder / "config.json")["quantization_config"]
    return found


def formats_of(folder: Path) -> dict[str, str]:
    tensors = inspect(folder)[0].tensors
    return stored_formats(tensors, load_architecture("glm_moe_dsa").lookups)


# What is written


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("targets", "name"), [(NEWEST, "weight_scale_inv"), (VLLM, "weight_scale"), ("atom", "weight_scale_inv")]
)
def test_weights_and_scales_are_the_sources_to_the_byte(source: Path, recipe: str, targets: str, name: str) -> None:
    out = made(source, recipe, targets)
    ours, theirs = support.tensors(out), support.tensors(source)
    default = support.tensors(support.output(source, recipe).output)
    kept = 0
    for tensor, (file, content) in theirs.items():
        module, _, tail = tensor.rpartition(".")
        if tail == "weight_scale_inv" or f"{tensor}_scale_inv" not in theirs:
            continue
        if f"{module}.weight" in default and default[tensor][1].dtype == torch.uint8:
            assert support.bits(ours[tensor][1]) == support.bits(default[tensor][1])  # MXFP4, the option or not
            assert support.bits(ours[f"{tensor}_scale"][1]) == support.bits(default[f"{tensor}_scale"][1])
            continue
        kept += 1
        assert support.bits(ours[tensor][1]) == support.bits(content) and ours[tensor][0] == file
        scale = theirs[f"{tensor}_scale_inv"][1]
        assert support.bits(ours[f"{module}.{name}"][1]) == support.bits(scale)
        assert ours[f"{module}.{name}"][0] == file  # with its weight, wherever it was
        assert ours.keys().isdisjoint(
            {f"{module}.{other}" for other in ("weight_scale_inv", "weight_scale")} - {f"{module}.{name}"}
        )
    assert kept == {"moe": 68, "routed": 80}[recipe] == list(formats_of(out).values()).count("fp8")
    assert any(file != theirs[n.removesuffix("_scale_inv")][0] for n, (file, _) in theirs.items() if n.endswith("_inv"))
    ragged = ours[f"{MTP}.self_attn.kv_a_proj_with_mqa.{name}"][1]
    assert ours[f"{MTP}.self_attn.kv_a_proj_with_mqa.weight"][1].shape == (192, 128) and ragged.shape == (2, 1)
    plan = glmquant.plan(source, recipe=recipe, keep_fp8=True, targets=targets).plan
    assert plan.total_size == sum(t.numel() * t.element_size() for _, t in ours.values())
    assert plan.formats == formats_of(out)
    assert plan.total_size < glmquant.plan(source, recipe=recipe).plan.total_size


def test_verify_compares_weights_and_scales(source: Path, tmp_path: Path) -> None:
    out = made(source, "moe", VLLM)
    proof = glmquant.verify(out, source)
    assert proof.ok and proof.requantized == 108
    spoilt = support.copy(out, tmp_path / "spoilt")
    names = ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight_scale")
    for name in names:
        path = spoilt / support.tensors(out)[name][0]
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start + json.loads(content[8:start])[name]["data_offsets"][0]] ^= 1
        path.write_bytes(content)
    texts = [problem.message for problem in glmquant.verify(spoilt, source).problems]
    assert all(any(f"tensor {name!r} differs from the source" in text for text in texts) for name in names)


def test_the_config_says_so_as_quark_would(source: Path) -> None:
    from quark.torch.export.prequantized_config_converter import FP8LinearConfigConverter

    linear = type("FP8Linear", (torch.nn.Module,), {})()
    linear.weight, linear.block_size = torch.zeros(128, 128).to(torch.float8_e4m3fn), [128, 128]
    assert FP8LinearConfigConverter().convert(linear).to_dict() == block_fp8_spec()
    config = config_of(made(source, "moe", NEWEST))
    assert config["quant_method"] == "quark"
    assert config["global_quant_config"] == quantization_config([], "")["global_quant_config"]
    assert all(spec == block_fp8_spec() for spec in config["layer_quant_config"].values())
    assert set(config["layer_quant_config"]) == {
        *(f"*.self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b", "o")),
        "*.self_attn.kv_a_proj_with_mqa",
        *(f"*.self_attn.indexer.{name}" for name in ("wq_b", "wk")),
        *(f"*.mlp.{name}_proj" for name in ("gate", "up", "down")),
        f"{MTP}.mlp.experts*",
        *(f"{MTP}.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert config_of(support.output(source, "moe").output)["layer_quant_config"] == {}
    # what stays FP8 is not excluded: it would be built bf16
    assert not any("self_attn.q_a_proj" in entry for entry in config["exclude"])
    assert f"{MTP}.eh_proj" in config["exclude"]


def test_what_one_release_cannot_read_becomes_bf16_and_is_said(source: Path) -> None:
    result = glmquant.plan(source, keep_fp8=True, targets=SGLANG)
    kv_b = [module for module, kind in result.plan.formats.items() if module.endswith("kv_b_proj") and kind == "plain"]
    assert len(kv_b) == 6
    assert [str(need) for need in result.exclusions.needs] == [
        "sglang 0.5.21-0.5.22: became bf16, which these cannot read as FP8: model.layers.*.self_attn.kv_b_proj"
    ]
    out = support.tensors(made(source, "moe", SGLANG))
    default = support.tensors(support.output(source, "moe").output)
    assert all(support.bits(out[f"{m}.weight"][1]) == support.bits(default[f"{m}.weight"][1]) for m in kv_b)
    assert json.dumps(result.exclusions.needs[0].reason) in (json.dumps(n.reason) for n in result.exclusions.needs)


def test_engines_that_name_scales_differently_share_only_what_both_read(source: Path) -> None:
    result = glmquant.plan(source, recipe="routed", keep_fp8=True, targets=f"{NEWEST},{VLLM}")
    kept = {
        module.partition(".mlp.")[2] or "attention" for module, kind in result.plan.formats.items() if kind == "fp8"
    }
    assert kept == {"attention", "down_proj"}  # gate_up_proj, experts: sglang asks weight_scale_inv, vLLM weight_scale
    assert set(result.plan.fp8.scales.values()) == {"weight_scale"}
    said = " ".join(str(need) for need in result.exclusions.needs)
    assert "sglang 0.5.23, vllm 0.30.0-0.33.0: became bf16, of which these read the scale under different names" in said
    assert "all targets: became bf16, since what they are fused with is not FP8" in said


def test_shards_packed_anew_keep_weight_and_scale_together(source: Path, tmp_path: Path) -> None:
    done = glmquant.quantize(source, tmp_path / "out", keep_fp8=True, targets=VLLM, max_shard_size=300_000)
    assert done.report.ok and glmquant.verify(done.output, source).ok
    ours = support.tensors(done.output)
    pairs = [(name, f"{name}_scale") for name, (_, tensor) in ours.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(pairs) == 68 and all(ours[weight][0] == ours[scale][0] for weight, scale in pairs)
    one = support.tensors(made(source, "moe", VLLM))
    assert {n: support.bits(t) for n, (_, t) in ours.items()} == {n: support.bits(t) for n, (_, t) in one.items()}


def test_a_run_is_continued_with_the_option_only(source: Path, tmp_path: Path) -> None:
    from glmquant.streaming import Streamer

    publish = Streamer._publish

    def one(streamer: Streamer, *args: object) -> None:
        publish(streamer, *args)  # type: ignore[arg-type]
        raise BackendError("stop")

    out, options = tmp_path / "out", {"keep_fp8": True, "targets": VLLM, "base_model": "tiny"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streamer, "_publish", one)
        with pytest.raises(BackendError):
            glmquant.quantize(source, out, workers=1, **options)
    with pytest.raises(
        CheckpointError, match=r"Continue with: glmquant quantize .* --keep-fp8 --targets vllm .*--resume"
    ):
        glmquant.validate(out)
    with pytest.raises(glmquant.GlmquantError, match="output shard"):
        glmquant.quantize(source, out, resume=True, base_model="tiny", targets=VLLM)
    done = glmquant.quantize(source, out, resume=True, **options)
    theirs = support.tensors(made(source, "moe", VLLM))
    assert {n: support.bits(t) for n, (_, t) in support.tensors(done.output).items()} == {
        n: support.bits(t) for n, (_, t) in theirs.items()
    }
    assert "--keep-fp8" in support.read_json(out / "glmquant.json")["command"]


def test_fp8_shards_are_deleted_after_the_last_output_that_needs_a_scale(source: Path, tmp_path: Path) -> None:
    own = support.copy(source, tmp_path / "source")
    options = {"keep_fp8": True, "targets": VLLM, "delete_source_shards": True, "workers": 1}
    out = glmquant.quantize(own, tmp_path / "out", **options).output
    theirs = support.tensors(made(source, "moe", VLLM))
    assert {n: support.bits(t) for n, (_, t) in support.tensors(out).items()} == {
        n: support.bits(t) for n, (_, t) in theirs.items()
    }
    assert not list(own.glob("*.safetensors"))


# Refusals


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            "sglang>=0.5.13,vllm",
            r"sglang 0\.5\.13\.post1-0\.5\.20 cannot read block-scaled FP8 beside MXFP4 \(NotImplementedError.*"
            r"sglang 0\.5\.21-0\.5\.22 reads its scales as weight_scale_inv; "
            r"sglang 0\.5\.23 reads its scales as weight_scale_inv or weight_scale; "
            r"vllm 0\.30\.0-0\.33\.0 reads its scales as weight_scale\n",
        ),
        (
            "sglang==0.5.20",
            r"sglang 0\.5\.20 cannot read .* scheme was found .*\)\n.*--targets 'sglang>=0\.5\.21', or --targets vllm",
        ),
        (
            "sglang>=0.5.21,vllm",
            r"sglang 0\.5\.21-0\.5\.22 reads its scales as weight_scale_inv; .*; vllm .* as weight_scale\n",
        ),
        ("quark", r"quark 0\.13 cannot read block-scaled FP8 beside MXFP4"),
    ],
)
def test_targets_that_cannot_read_it_are_refused_by_name(source: Path, targets: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"no module can stay FP8 for all targets: .*{message}"):
        glmquant.plan(source, keep_fp8=True, targets=targets)


def test_sources_without_such_weights_are_refused(tiny: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no un-quantized weight of this source is block-scaled FP8\n  Leave"):
        glmquant.plan(tiny, keep_fp8=True, targets=VLLM)
    other = support.copy(source, tmp_path / "other")
    shards = support.shards(source)
    for tensors in shards.values():
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            rows = tensors[name].shape
            tensors[name] = tensors[name].repeat_interleave(2, 1)[:, : -(-shape_of(shards, name)[1] // 64)].contiguous()
            assert tensors[name].shape[0] == rows[0]
    for file, tensors in shards.items():
        save_file(tensors, other / file, {"format": "pt"})
    config = support.read_json(other / "config.json")
    config["quantization_config"]["weight_block_size"] = [128, 64]
    (other / "config.json").write_text(json.dumps(config))
    assert glmquant.plan(other).plan
    with pytest.raises(RecipeError, match=r"the source's blocks are \[128, 64\]; engines read \[128, 128\]"):
        glmquant.plan(other, keep_fp8=True, targets=VLLM)


def shape_of(shards: Mapping[str, Mapping[str, torch.Tensor]], scale: str) -> torch.Size:
    name = scale.removesuffix("_scale_inv")
    return next(tensors[name].shape for tensors in shards.values() if name in tensors)


def test_the_command_line_has_it(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(source), "--keep-fp8"]) == 1
    assert "cannot read block-scaled FP8 beside MXFP4" in capsys.readouterr().err
    assert main(["plan", str(source), "--keep-fp8", "--targets", VLLM]) == 0
    assert "F8_E4M3" in capsys.readouterr().out
    assert main(["quantize", str(source), str(tmp_path / "out"), "--keep-fp8", "--targets", VLLM, "--quiet"]) == 0
    assert main(["exclusions", str(source), "--keep-fp8", "--targets", VLLM, "--json"]) == 0
    assert glmquant.resolve_exclusions(tmp_path / "out", targets=VLLM).texts == config_of(tmp_path / "out")["exclude"]


# Which modules can stay


def linears(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name, (_, tensor) in support.tensors(folder).items():
        if name.endswith(".weight") and tensor.ndim == 2 and not name.removesuffix(".weight").endswith(PLAIN):
            found[name.removesuffix(".weight")] = (tensor.shape[0], tensor.shape[1])
    return found


def test_modules_side_by_side_stay_together_or_not_at_all(source: Path) -> None:
    layers = read_layers(support.read_json(source / "config.json"))
    shapes = linears(source)
    targets = parse_targets(NEWEST)
    kept, dropped = keepable(shapes, shapes, layers, targets)
    assert kept.keys() == shapes.keys() and not dropped

    def without(*gone: str) -> set[str]:
        kept, dropped = keepable({m: s for m, s in shapes.items() if m not in gone}, shapes, layers, targets)
        assert kept.keys().isdisjoint(gone) and kept.keys() | dropped.keys() | set(gone) == shapes.keys()
        return {m.removeprefix(f"{MTP}.") for m in dropped}

    assert without(f"{MTP}.self_attn.q_a_proj") == {"self_attn.kv_a_proj_with_mqa"}
    assert without(f"{MTP}.self_attn.o_proj") == set()
    shared = {f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    experts = {f"mlp.experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "up", "down")}
    assert without(f"{MTP}.mlp.experts.3.up_proj") == experts - {"mlp.experts.3.up_proj"} | shared
    assert without(f"{MTP}.mlp.shared_experts.up_proj") == experts | shared - {"mlp.shared_experts.up_proj"}


@pytest.mark.parametrize(
    ("module", "shape", "gone"),
    [
        ("model.layers.0.mlp.gate_proj", (320, 128), {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", (200, 128), set()),
        (
            "model.layers.0.self_attn.q_a_proj",
            (192, 128),
            {f"model.layers.0.self_attn.{n}" for n in ("q_a_proj", "kv_a_proj_with_mqa")},
        ),
        ("model.layers.0.mlp.down_proj", (130, 250), set()),
    ],
)
def test_blocks_that_do_not_fit_side_by_side_become_bf16(
    source: Path, module: str, shape: tuple[int, int], gone: set[str]
) -> None:
    layers = read_layers(support.read_json(source / "config.json"))
    shapes = linears(source) | {module: shape}
    for targets in (NEWEST, VLLM):
        kept, dropped = keepable(shapes, shapes, layers, parse_targets(targets))
        assert dropped.keys() == gone and kept.keys() == shapes.keys() - gone
        assert {why.why for why in dropped.values()} <= {"blocks"}


@pytest.mark.parametrize("recipe", ["moe", "moe-mtp", "routed", "routed-mtp"])
@pytest.mark.parametrize("targets", [SGLANG, NEWEST, VLLM, f"{NEWEST},{VLLM}", "atom"])
def test_the_keys_find_what_is_fp8_and_nothing_else(source: Path, recipe: str, targets: str) -> None:
    """Independently of the engine models: each target's documented lookup, over the names that it asks."""
    from fnmatch import fnmatchcase

    plan = glmquant.plan(source, recipe=recipe, keep_fp8=True, targets=targets).plan
    for module, kind in plan.formats.items():
        assert any(fnmatchcase(module, key) for key in plan.fp8_keys) == (kind == "fp8"), module
    assert plan.fp8_keys == layer_keys(plan.formats, plan.layers)


# What becomes of a checkpoint of any producer

ALL = "sglang>=0.5.13,vllm,atom"
KEYS, SPEC = "layer_quant_config", block_fp8_spec()


def verdicts(folder: Path, targets: str = ALL) -> tuple[dict[str, str], Report]:
    report = glmquant.validate(folder, targets=targets)
    return {target: verdict.value for target, verdict in report.verdicts.items()}, report


def edited(folder: Path, to: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    out = support.copy(folder, to)
    config = support.read_json(out / "config.json")
    edit(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_the_validator_says_per_release_who_loads_it(source: Path) -> None:
    found, report = verdicts(made(source, "moe", NEWEST))
    assert {target for target, verdict in found.items() if verdict == "ok"} == {"sglang 0.5.23", "atom 2026.10"}
    assert set(found.values()) == {"ok", "crash"}
    texts = [f"{effect.targets} {effect.message}" for finding in report.findings for effect in finding.effects]
    assert any("sglang 0.5.13.post1-0.5.20 NotImplementedError: No quark compatible scheme" in text for text in texts)
    assert any("sglang 0.5.21-0.5.22 AttributeError: 'ColumnParallelLinear'" in text for text in texts)
    assert any("vllm 0.30.0-0.33.0 KeyError: ...weight_scale_inv" in text for text in texts)
    assert {finding.code for finding in report.findings if finding.severity == "error"} == {"fp8-unread"}

    found, _ = verdicts(made(source, "moe", SGLANG))
    assert {t for t, v in found.items() if v == "ok"} == {
        "sglang 0.5.21",
        "sglang 0.5.22",
        "sglang 0.5.23",
        "atom 2026.10",
    }
    found, _ = verdicts(made(source, "routed", VLLM))
    assert {t for t, v in found.items() if v == "ok"} == {f"vllm 0.{n}.0" for n in (30, 31, 32, 33)} | {"atom 2026.10"}
    found, _ = verdicts(made(source, "routed", f"{NEWEST},{VLLM}"))
    assert {t for t, v in found.items() if v == "ok"} == {"sglang 0.5.23", "atom 2026.10"} | {
        f"vllm 0.{n}.0" for n in (30, 31, 32, 33)
    }


@pytest.mark.parametrize(
    ("edit", "target", "verdict", "text"),
    [
        (lambda q: q.update(layer_quant_config={}), "sglang 0.5.23", "crash", "built packed, the tensor is FP8"),
        (lambda q: q.update(layer_quant_config={}), "vllm 0.33.0", "crash", "built packed, the tensor is FP8"),
        (
            lambda q: q["layer_quant_config"].pop("*.self_attn.o_proj"),
            "sglang 0.5.23",
            "silent misload",
            "cut to the packed width",
        ),
        (lambda q: q["exclude"].append("re:.*o_proj"), "sglang 0.5.23", "silent misload", "as if they needed no scale"),
        (lambda q: q["exclude"].append("re:.*q_[a-z]*_proj"), "vllm 0.33.0", "crash", "different quantization schemes"),
        (lambda q: q["exclude"].append("re:.*o_proj"), "vllm 0.33.0", "crash", "KeyError: the scale is no parameter"),
        (
            lambda q: q["layer_quant_config"].update({"*.mlp.experts": block_fp8_spec()}),
            "sglang 0.5.23",
            "crash",
            "layer_quant_config says FP8, the experts are packed",
        ),
        (
            lambda q: q["layer_quant_config"].pop("*.mlp.up_proj"),
            "sglang 0.5.23",
            "crash",
            "Found a different quantization configuration",
        ),
        (lambda q: q["layer_quant_config"].update({"*eh_proj": block_fp8_spec()}), "sglang 0.5.23", "ok", ""),
    ],
)
def test_mistakes_of_other_producers_get_a_verdict(
    source: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], target: str, verdict: str, text: str
) -> None:
    made_for = NEWEST if target.startswith("sglang") else VLLM
    out = edited(made(source, "moe", made_for), tmp_path / "out", edit)
    found, report = verdicts(out, target.replace(" ", "=="))
    effects = [effect.message for finding in report.findings for effect in finding.effects]
    assert found == {target: verdict}
    assert any(text in effect for effect in effects) or (verdict == "ok" and report.ok)


def test_keys_by_expert_and_vllms_substrings_are_read(source: Path, tmp_path: Path) -> None:
    """As AMD's own exports list them: a key for each expert's projection."""

    def leaves(quantization: dict[str, Any]) -> None:
        specs = quantization["layer_quant_config"]
        spec = specs.pop(f"{MTP}.mlp.experts*")
        specs |= {f"{MTP}.mlp.experts.{e}.{part}_proj": spec for e in range(8) for part in ("gate", "up", "down")}

    for targets in (NEWEST, VLLM):
        out = edited(made(source, "moe", targets), tmp_path / targets, leaves)
        assert set(verdicts(out, targets)[0].values()) == {"ok"}

    def uneven(quantization: dict[str, Any]) -> None:
        leaves(quantization)
        changed = block_fp8_spec()
        changed["weight"]["observer_cls"] = "another"
        quantization["layer_quant_config"][f"{MTP}.mlp.experts.7.up_proj"] = changed

    found, _ = verdicts(edited(made(source, "moe", NEWEST), tmp_path / "uneven", uneven), NEWEST)
    assert found == {"sglang 0.5.23": "crash"}


def big(recipe: str) -> Stored:
    """256 experts, so that sglang considers fusing the shared expert: layers 0-2 and an MTP layer."""
    layers = Layers(3, (3,), frozenset({0}), frozenset(range(3)), 256, 1)
    formats = {}
    for layer in range(4):
        parts = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk"]
        formats |= {f"model.layers.{layer}.self_attn.{part}": "fp8" for part in parts}
        for part in ("gate_proj", "up_proj", "down_proj"):
            packed = layer < 3 or recipe.endswith("mtp")
            if layer == 0:
                formats[f"model.layers.0.mlp.{part}"] = "fp8"
                continue
            shared = "mxfp4" if packed and recipe.startswith("moe") else "fp8"
            formats[f"model.layers.{layer}.mlp.shared_experts.{part}"] = shared
            routed = "mxfp4" if packed else "fp8"
            formats |= {f"model.layers.{layer}.mlp.experts.{e}.{part}": routed for e in range(256)}
    formats |= {"model.layers.3.eh_proj": "plain", "lm_head": "plain"}
    scales = {module: "weight_scale_inv" for module, kind in formats.items() if kind == "fp8"}
    keys = {key: block_fp8_spec() for key in layer_keys(formats, layers)}
    default = quantization_config([], "")["global_quant_config"]
    return Stored.of(formats, layers, Fp8Layers(keys, default, scales))


EXCLUDE = ["model.layers.3.eh_proj", "model.eh_proj"]


@pytest.mark.parametrize("recipe", ["moe", "moe-mtp", "routed", "routed-mtp"])
def test_shared_expert_fusion_is_off_where_formats_differ(recipe: str) -> None:
    stored = big(recipe)
    for target in parse_targets(NEWEST):
        assert evaluate(target, EXCLUDE, stored).verdict is Verdict.OK, evaluate(target, EXCLUDE, stored).faults[:2]


@pytest.mark.parametrize(
    ("release", "key", "loads"),
    [
        ("0.5.23", "*.mlp.shared_experts.*", True),
        ("0.5.21", "*.mlp.shared_experts.*", False),  # it asks for "shared_expert" when it decides on fusion
        ("0.5.21", "*.mlp.shared_expert*", True),
        ("0.5.23", "model.layers.[123].mlp.shared_experts.*", False),  # it looks at layer 0
    ],
)
def test_keys_that_leave_fusion_on_crash(release: str, key: str, loads: bool) -> None:
    stored = big("routed")
    assert stored.fp8
    specs = {k: v for k, v in stored.fp8.config.items() if "shared" not in k}
    keys = replace(stored.fp8, config={**specs, key: block_fp8_spec()}, scales=stored.fp8.scales)
    changed = replace(stored, fp8=keys)
    found = block_fp8.faults(ENGINES["sglang"], release, EXCLUDE, changed)
    fused = [fault for fault in found if "fused into the container" in fault.message]
    assert bool(fused) is not loads
    assert loads or {fault.prefix for fault in fused} >= {"model.layers.1.mlp.experts", "model.layers.2.mlp.experts"}


@pytest.mark.parametrize(
    ("change", "sglang", "vllm"),
    [
        ({}, True, True),
        ({"weight": {"block_size": [128, 64]}}, False, False),
        ({"weight": {"qscheme": "per_channel"}}, False, False),
        ({"weight": {"is_dynamic": True}}, False, False),
        ({"input_tensors": {"is_dynamic": False}}, False, False),
        ({"weight": {"symmetric": None}}, True, False),
        ({"input_tensors": {"group_size": 32}}, True, False),
        ({"weight": {"dtype": "fp8_e4m3fn"}}, True, False),
    ],
)
def test_what_counts_as_block_scaled(change: dict[str, dict[str, Any]], sglang: bool, vllm: bool) -> None:
    spec = block_fp8_spec()
    for which, values in change.items():
        spec[which] |= values
    assert (is_block_fp8(spec, "sglang"), is_block_fp8(spec, "vllm"), is_block_fp8(spec)) == (sglang, vllm, sglang)
    assert not is_block_fp8(None) and not is_block_fp8({"weight": [], "input_tensors": {}})


def test_hostile_keys_end_in_an_error_not_in_a_hang(source: Path, tmp_path: Path) -> None:
    def flood(quantization: dict[str, Any]) -> None:
        spec = quantization["layer_quant_config"]["*.self_attn.o_proj"]
        quantization["layer_quant_config"] |= {"*a" * 40 + f"*{i}": spec for i in range(300)}
        quantization["layer_quant_config"] |= {"[": spec, "": spec, "*" * 3000: None, "x\n*": 3, "re:(": spec}

    _, report = verdicts(edited(made(source, "moe", NEWEST), tmp_path / "out", flood), NEWEST)
    assert report.findings
    for n, value in enumerate((7, [1], {"a": 7}, {"*": None}, {"*": {"weight": 3}}, None)):
        out = edited(made(source, "moe", NEWEST), tmp_path / f"{n}", lambda q, v=value: q.update({KEYS: v}))
        assert glmquant.validate(out, targets=ALL).findings


def test_tensor_parallel_sizes_keep_blocks_whole(source: Path) -> None:
    _, report = verdicts(made(source, "moe", VLLM), VLLM)
    assert report.tensor_parallel["vllm 0.33.0"] == [1]  # experts of 128 rows cannot be cut

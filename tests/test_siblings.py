"""The sibling models: what their YAML files promise agrees with what was published and with transformers, and the verbs
work on a tiny checkpoint of each. That engines load these is in tests/conformance/test_siblings_load.py."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import yaml
from safetensors.torch import save_file

import glmquant
from glmquant import recipe as recipes
from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.layout import Promise, expected_tensors, promised_tensors
from glmquant.checkpoint.source import inspect
from glmquant.engines.targets import ENGINES, parse_targets
from glmquant.errors import CheckpointError, ExclusionError, GlmquantError
from glmquant.exclusions import resolve
from glmquant.planner import make_plan
from glmquant.recipe import known_model_types, load_architecture, recipe_folder
from glmquant.validator import validate_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import glm_layout
from make_tiny import is_fp8, make_tiny, tiny_config

DATA = Path(__file__).parent / "data/siblings"
SIBLINGS = ("deepseek_v3", "deepseek_v32", "kimi_k2", "qwen3_moe", "glm5_next")
NEWEST = "sglang==0.5.23,vllm==0.33.0"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def layout_of(config: Mapping[str, Any]) -> tuple[dict[str, Promise], Layers]:
    architecture = load_architecture(config["model_type"])
    layers = read_layers(config, architecture.keys)
    keys = architecture.keys
    return dict(promised_tensors(architecture.tensors, keys.of(config), layers, keys.tower(config))), layers


# What is published. The totals are those that the Hub shows for the checkpoint (its safetensors metadata), as public
# repositories quote them; tensor counts those of its index.


def test_deepseek_v3_has_the_published_tensors() -> None:
    """deepseek-ai/DeepSeek-V3 and R1: 3,918,786,560 BF16, 680,571,043,840 F8_E4M3 and 41,555,600 F32."""
    found, layers = layout_of(config_of("deepseek_v3"))
    fp8 = [promise for name, promise in found.items() if is_fp8(name, promise.shape)]
    scales = sum(prod(-(-size // 128) for size in promise.shape) for promise in fp8)
    biases = sum(prod(promise.shape) for promise in found.values() if promise.dtype == "F32")
    total = sum(prod(promise.shape) for promise in found.values())
    assert sum(prod(promise.shape) for promise in fp8) == 680_571_043_840
    assert scales + biases == 41_555_600
    assert total - 680_571_043_840 - biases == 3_918_786_560
    assert total + scales == 684_531_386_000
    assert len(found) + len(fp8) == 91_991  # derived
    assert (layers.mtp, sorted(layers.dense), layers.routed_experts) == ((61,), [0, 1, 2], 256)


def test_deepseek_v32_has_the_published_number_of_elements() -> None:
    """deepseek-ai/DeepSeek-V3.2: 685,355,329,792; V3.2-Exp, whose scales are counted too: 685,396,921,376."""
    found, layers = layout_of(config_of("deepseek_v32"))
    total = sum(prod(promise.shape) for promise in found.values())
    fp8 = [promise for name, promise in found.items() if is_fp8(name, promise.shape)]
    assert total == 685_355_329_792
    assert total + sum(prod(-(-size // 128) for size in p.shape) for p in fp8) == 685_396_921_376
    assert layers.indexer == frozenset(range(61))


def test_kimi_k2_has_the_published_number_of_elements_but_for_its_rotary_tables() -> None:
    """moonshotai/Kimi-K2-Instruct: 1,026,408,235,864. The 3,416 elements more are 56 a layer; not known which."""
    found, layers = layout_of(config_of("kimi_k2"))
    total = sum(prod(promise.shape) for name, promise in found.items() if "rotary" not in name)
    assert total == 1_026_408_235_864 - 61 * 56
    assert (layers.mtp, sorted(layers.dense), layers.routed_experts, layers.count) == ((), [0], 384, 61)


def test_qwen3_moe_has_the_published_tensors() -> None:
    """Qwen/Qwen3-235B-A22B: 36,945 tensors, total_size 470,187,269,120."""
    found, layers = layout_of(config_of("qwen3_moe"))
    assert len(found) == 36_945
    assert sum(2 * prod(promise.shape) for promise in found.values()) == 470_187_269_120
    assert (layers.mtp, layers.dense, layers.shared_experts, layers.count) == ((), frozenset(), 0, 94)


def test_glm5_next_has_the_published_number_of_tensors() -> None:
    """zai-org/GLM-5.3-Flash (FP8): 76,108 names, of these 347 of the vision tower and 1,760 of the MTP layer; 37,338
    scales. Which four linears of a sparse-attention layer are FP8 is not known, only that four are."""
    found, layers = layout_of(config_of("glm5_next"))
    mtp = [name for name in found if layers.number(name) == 45]
    scaled_mlps = [
        name
        for name in found
        if is_fp8(name, found[name].shape) and re.search(r"\.mlp\.(.*\.)?(gate|up|down)_proj\.weight$", name)
    ]
    sparse = [*layers.main("sparse"), *layers.mtp]
    scales = len(scaled_mlps) + 4 * len(sparse)
    assert scales == 37_338
    assert sum(name.startswith("model.visual.") for name in found) == 347
    assert len(found) + scales == 76_108
    assert len(mtp) + len([n for n in scaled_mlps if layers.number(n) == 45]) + 4 == 1_760


def test_glm_5_has_an_indexer_on_every_layer() -> None:
    """zai-org/GLM-5 (and 5.1): derived, 59,870 tensors; 282 shards at the published size limit, as it has."""
    found, layers = layout_of(config_of("glm-5"))
    required = {name: promise for name, promise in found.items() if not promise.optional}
    assert layers.indexer == frozenset(range(78))
    assert len(required) == 59_870
    tensors = [glm_layout.Tensor(name, promise.shape, promise.dtype) for name, promise in required.items()]
    assert sum(tensor.nbytes for tensor in tensors) == 1_507_728_316_928
    assert len(glm_layout.pack(sorted(tensors), glm_layout.SHARD_LIMIT)) == 282


def test_glm_5_2s_rules_give_its_published_layout() -> None:
    config = json.loads(glm_layout.CONFIG.read_text())
    found, _ = layout_of(config)
    ours = {name: (promise.shape, promise.dtype) for name, promise in found.items() if not promise.optional}
    assert ours == {tensor.name: (tensor.shape, tensor.dtype) for tensor in glm_layout.tensors(config)}


# transformers

RENAMED = {  # transformers' own name -> the checkpoint's (conversion_mapping.py, "glm5_next")
    "forget_gate.": "",
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_transformers_model_has_the_same_tensors(name: str) -> None:
    """Built from the same small config, it has the names and shapes of the rules, the MTP layer left aside."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    source = config_of(name)
    config = tiny_config(source, load_architecture(name), {"rope_scaling": None} if "rope_scaling" in source else {})
    # Kimi-K2 names DeepSeek-V3's class, and transformers has no other for it
    kind = "deepseek_v3" if name == "kimi_k2" else name
    theirs_config = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if name == "glm5_next" else AutoModelForCausalLM
        state = auto.from_config(theirs_config).state_dict()
    found, layers = layout_of(config)
    ours = {
        tensor: promise.shape
        for tensor, promise in found.items()
        if not promise.optional and (layers.number(tensor) or 0) < layers.count
    }
    assert ours == dict(_as_saved(state))


def _as_saved(state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as save_pretrained writes them: experts and convolutions apart."""
    for name, tensor in state.items():
        for theirs, saved in RENAMED.items():
            name = name.replace(theirs, saved)
        if fused := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name):
            parts = fused[2].split("_")
            for expert in range(tensor.shape[0]):
                for part in parts:
                    shape = (tensor.shape[1] // len(parts), tensor.shape[2])
                    yield f"{fused[1]}.{expert}.{part}_proj.weight", shape
        elif name.endswith(".conv1d.weight"):
            for part in "qkv":
                shape = (tensor.shape[0] // 3, *tensor.shape[1:])
                yield name.replace(".conv1d.", f".{part}_conv1d."), shape
        else:
            yield name, tuple(tensor.shape)


@pytest.mark.parametrize("name", [n for n in known_model_types() if (DATA / f"{n}.json").exists()])
def test_every_tensor_is_in_a_group(name: str) -> None:
    architecture = load_architecture(name)
    found, layers = layout_of(tiny_config(config_of(name), architecture, {}))
    other = [t for t in found if architecture.module(t.rpartition(".")[0], layers).group == "other"]
    assert other == []


# The verbs, on a tiny checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, made = tmp_path_factory.mktemp("siblings"), {}
    for name in (*SIBLINGS, "glm-5"):
        made[name] = root / name
        make_tiny(config_of(name), made[name], lean=name == "glm-5")
    made["deepseek_v3-fp8"] = root / "fp8"
    make_tiny(config_of("deepseek_v3"), made["deepseek_v3-fp8"], fp8=True)
    return made


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-fp8", "deepseek_v32", "kimi_k2", "qwen3_moe", "glm-5"])
def test_the_verbs_work(name: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    source, out = tiny[name], tmp_path / "out"
    architecture = load_architecture(json.loads((source / "config.json").read_text())["model_type"])
    for recipe in architecture.recipes:
        planned = glmquant.plan(source, recipe=recipe, targets=NEWEST)
        assert planned.exclusions.texts and all(e.loads for e in planned.exclusions.evaluations)
        assert len(planned.exclusions.evaluations) == 2
    done = glmquant.quantize(source, out, recipe="moe", targets=NEWEST)
    assert done.ok
    report = glmquant.validate(out, targets=NEWEST)
    assert report.ok and set(report.verdicts.values()) == {"ok"}
    assert {finding.code for finding in report.findings} <= {"tensor-parallel", "engine-note", "side-file-missing"}
    assert glmquant.resolve_exclusions(out, targets=NEWEST).texts == done.exclusions.texts
    fixed = glmquant.fix_exclusions(out, targets=NEWEST, dry_run=True)
    assert not fixed.added and not fixed.removed
    assert glmquant.diff_exclusions(out, out, targets=NEWEST) == []
    assert glmquant.verify(out, source).ok


def test_glm5_next_is_planned_and_validated_by_name(tiny: dict[str, Path]) -> None:
    """The config is in text_config, and names begin with model.language_model."""
    checkpoint, problems = inspect(tiny["glm5_next"])
    architecture = load_architecture("glm5_next")
    layers = read_layers(checkpoint.config, architecture.keys)
    assert not problems and (layers.count, layers.mtp, layers.dense) == (4, (4,), {0, 1, 2})
    plan = make_plan(checkpoint, architecture, architecture.recipe("moe"), layers)
    packed = {module for module, kind in plan.formats.items() if kind == "mxfp4"}
    experts = {
        f"model.language_model.layers.3.mlp.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down")
    }
    assert packed == experts | {
        f"model.language_model.layers.3.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")
    }
    found = resolve(plan.formats, layers, architecture, parse_targets("sglang,vllm"))
    assert [str(target) for target in found.targets] == ["sglang 0.5.23", "vllm 0.33.0"]
    assert "model.language_model.layers.0.self_attn.q_proj" in found.texts
    reasons = " ".join(map(str, found.needs))
    assert "sglang 0.5.13.post1-0.5.22: not modelled for glm5_next before 0.5.23" in reasons
    assert "vllm 0.30.0-0.32.0: not modelled for glm5_next before 0.33.0" in reasons
    report = validate_folder(tiny["glm5_next"], parse_targets("sglang,vllm"))
    codes = [finding.code for finding in report.findings]
    assert codes.count("not-modelled") == 2 and list(report.verdicts) == ["sglang 0.5.23", "vllm 0.33.0"]
    assert "tensor-missing" not in codes and "tensor-unexpected" not in codes


@pytest.mark.parametrize("fp8", [False, True])
def test_glm5_next_is_quantized_for_engines_that_are_modelled_and_others(fp8: bool, tmp_path: Path) -> None:
    """Its hyper-connections have tensors called hc_attn_scale: not the scales of a quantized source."""
    make_tiny(config_of("glm5_next"), tmp_path / "source", fp8=fp8)
    for targets, asked in (("atom", []), ("sglang,vllm,atom", ["sglang 0.5.23", "vllm 0.33.0"])):
        out = tmp_path / targets
        done = glmquant.quantize(tmp_path / "source", out, targets=targets)
        assert done.ok and [str(target) for target in done.exclusions.targets] == asked
        assert glmquant.verify(out, tmp_path / "source").ok
        fixed = glmquant.fix_exclusions(out, targets=targets, dry_run=True)
        assert not fixed.added and not fixed.removed


@pytest.mark.parametrize("form", ["auto", "literal"])
@pytest.mark.parametrize("recipe", ["moe", "moe-mtp", "routed"])
def test_the_list_of_glm5_next_has_the_names_of_vllms_draft(
    form: str, recipe: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM renames the list for its target (model.language_model. to language_model.model.), not for its draft."""
    target = parse_targets("vllm==0.33.0")[0]
    done = glmquant.quantize(tiny["glm5_next"], tmp_path / "out", recipe=recipe, form=form, targets="vllm==0.33.0")
    asked = {
        f"language_model.model.layers.{layer}.mlp.{part}"
        for layer, parts in ((0, ("gate_up_proj", "down_proj")), (3, ("experts", "shared_experts.down_proj")))
        for part in parts
    } | {f"model.layers.4.mlp.{part}" for part in ("experts", "shared_experts.gate_up_proj")}
    answers = {name: done.exclusions.matches(name, target)[name] for name in asked}
    packed = {"language_model.model.layers.3.mlp.experts"}
    packed |= {"language_model.model.layers.3.mlp.shared_experts.down_proj"} if recipe != "routed" else set()
    packed |= {name for name in asked if name.startswith("model.layers.4.")} if recipe == "moe-mtp" else set()
    assert answers == {name: name not in packed for name in asked}
    own = [text for text in done.exclusions.texts if "language_model" in text]
    report = validate_folder(tmp_path / "out", [target])
    assert report.verdicts[str(target)].value == "ok"
    assert validate_list(tmp_path / "out", own, tmp_path / "own") == ("ok" if recipe == "moe-mtp" else "crash")


def validate_list(folder: Path, exclude: list[str], out: Path) -> str:
    """vLLM's verdict on a checkpoint with another list."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["exclude"] = exclude
    (out / "config.json").write_text(json.dumps(config))
    target = parse_targets("vllm==0.33.0")[0]
    return validate_folder(out, [target]).verdicts[str(target)].value


def test_a_regex_on_glm5_nexts_own_names_reaches_no_module_of_vllm(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExclusionError, match=r"no exclude list loads on vllm 0\.33\.0"):
        glmquant.quantize(tiny["glm5_next"], tmp_path / "out", form="regex", targets="vllm==0.33.0")


SGLANG = parse_targets("sglang==0.5.23")[0]


@pytest.mark.parametrize("recipe", ["moe", "moe-mtp", "routed"])
def test_the_list_of_glm5_next_reaches_sglangs_target_and_draft_by_the_checkpoints_names(
    recipe: str, tiny: dict[str, Path]
) -> None:
    """Both of sglang's classes rename every entry to their own names, so no second name is needed."""
    found = glmquant.plan(tiny["glm5_next"], recipe=recipe, targets="sglang==0.5.23").exclusions
    own = [text for text in found.texts if text.startswith(("model.language_model.", "model.visual.", "lm_head"))]
    checkpoint, _ = inspect(tiny["glm5_next"])
    layers = read_layers(checkpoint.config, load_architecture("glm5_next").keys)
    for texts in (own, found.texts):
        answers = {module.prefix: answer for module, answer in ENGINES["sglang"].answers("0.5.23", texts, layers)}
        packed = {name for name, ignored in answers.items() if ignored is False}
        expected = {"model.layers.3.mlp.experts"}
        shared = {f"mlp.shared_experts.{part}_proj" for part in ("gate_up", "down")}
        if recipe != "routed":
            expected |= {f"model.layers.3.{part}" for part in shared}
        if recipe == "moe-mtp":
            expected |= {"model.decoder.mlp.experts"} | {f"model.decoder.{part}" for part in shared}
        assert packed == expected
        assert {"model.layers.0.self_attn.qkv_proj", "model.layers.3.self_attn.indexer.wk", "model.eh_proj"} <= set(
            answers
        )


@pytest.mark.parametrize(
    ("entry", "modules"),
    [
        ("model.visual.blocks.0.attn.qkv", ["visual.blocks.0.attn.qkv_proj"]),
        ("model.visual.blocks.23.attn.proj", ["visual.blocks.23.attn.proj"]),
        ("model.visual.merger.proj", ["visual.merger.proj"]),
        ("visual.merger.down_proj", ["visual.merger.down_proj"]),
        ("model.visual.blocks.24.attn.proj", []),  # 24 blocks
        ("model.language_model.layers.0.self_attn.o_proj", ["model.layers.0.self_attn.o_proj"]),
        ("model.layers.0.self_attn.o_proj", ["model.layers.0.self_attn.o_proj"]),
        ("model.language_model.layers.45.eh_proj", ["model.eh_proj"]),
        ("model.layers.45.mlp.experts", ["model.decoder.mlp.experts"]),
        (r"re:model\.language_model\.layers\.0\.self_attn\.o_proj", []),
        (r"re:model\.layers\.0\.self_attn\.o_proj", ["model.layers.0.self_attn.o_proj"]),
        # the substring model.layers.4 is not renamed, but model.layers.45 in it is
        ("model.language_model.layers.4.self_attn.o_proj", ["model.layers.4.self_attn.o_proj"]),
    ],
)
def test_which_modules_of_sglangs_glm5_next_an_entry_reaches(entry: str, modules: list[str]) -> None:
    layers = read_layers(config_of("glm5_next"), load_architecture("glm5_next").keys)
    answers = ENGINES["sglang"].answers("0.5.23", [entry], layers)
    assert [module.prefix for module, ignored in answers if ignored is True] == modules


def test_sglang_refuses_half_of_glm5_nexts_fused_modules() -> None:
    layers = read_layers(config_of("glm5_next"), load_architecture("glm5_next").keys)
    for entry, module in (
        ("model.language_model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.language_model.layers.3.self_attn.q_a_proj", "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa"),
        ("model.visual.blocks.0.mlp.up_proj", "visual.blocks.0.mlp.gate_up_proj"),
    ):
        answers = {module.prefix: answer for module, answer in ENGINES["sglang"].answers("0.5.23", [entry], layers)}
        assert {name for name, answer in answers.items() if isinstance(answer, str)} == {module}


def test_sglang_fuses_the_shared_expert_of_glm5_next_only_where_the_list_is_silent_about_it() -> None:
    """0.5.23 models/glm5_next.py: neither the containers nor a shared expert may be listed; the draft never fuses."""
    sglang, layers = ENGINES["sglang"], read_layers(config_of("glm5_next"), load_architecture("glm5_next").keys)
    layer = "model.language_model.layers.7."
    for entries, fuses in (
        ([], True),
        ([f"{layer}self_attn.o_proj"], True),
        ([f"{layer}mlp.shared_experts.{part}_proj" for part in ("gate", "up")], False),
        ([f"{layer}mlp.experts"], False),
        (["model.language_model.layers.45.mlp.experts"], True),
    ):
        assert [sglang.fuses(role, "0.5.23", entries, layers) for role in ("target", "draft")] == [fuses, False]


@pytest.mark.parametrize(
    ("tower", "blocks"), [({"depth": 2}, 2), ({}, 24), (None, 0), ("no map", 0), ({"depth": 0}, 0)]
)
def test_the_blocks_of_a_vision_tower_are_read(tower: object, blocks: int) -> None:
    config = {**config_of("glm5_next"), "vision_config": tower}
    assert read_layers(config, load_architecture("glm5_next").keys).vision == blocks


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A quantized checkpoint in one shard, its tensors changed."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor for name, (_, tensor) in support.tensors(folder).items()}
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_what_is_missing_of_a_vision_tower_is_noticed(tiny: dict[str, Path], tmp_path: Path) -> None:
    whole = glmquant.quantize(tiny["glm5_next"], tmp_path / "whole", targets=NEWEST).output
    assert glmquant.validate(whole, targets=NEWEST).ok
    bias = "model.visual.blocks.1.attn.qkv.bias"
    report = glmquant.validate(changed(whole, tmp_path / "less", lambda t: t.pop(bias)), targets=NEWEST)
    (found,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (found.code, found.names) == ("tensor-missing", (bias,))
    assert {effect.verdict for effect in found.effects} == {"silent misload"}

    def blind(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("model.visual.")]:
            del tensors[name]

    report = glmquant.validate(changed(whole, tmp_path / "blind", blind), targets=NEWEST)
    tower = [f for f in report.findings if "model.visual." in str(f.names)]
    assert [(f.code, f.severity, f.names) for f in tower] == [("vision-absent", "warning", ("model.visual.",))]
    assert report.ok


def test_a_packed_weight_leaves_its_bias_as_it_is(tiny: dict[str, Path], tmp_path: Path) -> None:
    """sglang builds the tower as the list says, and loads this."""
    names = [f"model.visual.blocks.0.attn.{part}" for part in ("qkv", "proj")]
    done = glmquant.quantize(tiny["glm5_next"], tmp_path / "out", targets="sglang==0.5.23", quantize=names)
    assert done.report and done.report.ok
    assert not {"tensor-shape", "tensor-missing"} & {finding.code for finding in done.report.findings}
    bias = f"{names[0]}.bias"
    short = changed(done.output, tmp_path / "short", lambda t: t.update({bias: t[bias][:-2].clone()}))
    (found,) = [f for f in glmquant.validate(short, targets=NEWEST).findings if f.code == "tensor-shape"]
    assert found.names == (bias,)


def test_sizes_of_a_vision_tower_that_cannot_be_told_leave_the_rest_checked() -> None:
    architecture, config = load_architecture("glm5_next"), config_of("glm5_next")
    layers, keys = read_layers(config, architecture.keys), architecture.keys
    inner = keys.of(config)
    both, text = (
        expected_tensors(architecture.tensors, inner, layers, tower)
        for tower in (keys.tower(config), {**keys.tower(config), "patch_size": [14, 14]})
    )
    assert len(both) - len(text) == 347 and text == expected_tensors(architecture.tensors, inner, layers)


def test_a_wrong_number_of_vision_blocks_is_named() -> None:
    with pytest.raises(CheckpointError, match="depth"):
        read_layers({**config_of("glm5_next"), "vision_config": {"depth": "2"}}, load_architecture("glm5_next").keys)


def test_the_schedule_of_glm_5_2_on_a_glm_5_is_read_as_it_stands(tiny: dict[str, Path]) -> None:
    checkpoint, _ = inspect(tiny["glm-5"])
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
    assert {f"model.layers.{layer}.self_attn.indexer.wk" for layer in range(5)} <= modules


# What is not known is said


def test_releases_that_are_not_modelled_are_named_and_not_asked(tiny: dict[str, Path]) -> None:
    found = glmquant.plan(tiny["qwen3_moe"], targets="sglang>=0.5.13,vllm,atom,quark").exclusions
    assert [str(target) for target in found.targets] == ["sglang 0.5.23", "vllm 0.33.0"]
    notes = [str(need) for need in found.needs]
    assert any(n.startswith("sglang 0.5.13.post1-0.5.22: not modelled for qwen3_moe before 0.5.23") for n in notes)
    assert any(n.startswith("atom 2026.10, quark 0.13: not modelled for qwen3_moe;") for n in notes)


def test_with_no_modelled_target_the_list_has_the_checkpoints_names_and_says_so(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    found = glmquant.plan(tiny["deepseek_v3"], targets="atom").exclusions
    assert found.targets == () and found.evaluations == ()
    assert [str(need) for need in found.needs] == [
        "atom 2026.10: not modelled for deepseek_v3; this list was not checked for it"
    ]
    assert all(text.startswith(("model.layers.", "lm_head")) for text in found.texts)
    glmquant.quantize(tiny["deepseek_v3"], tmp_path / "out", targets="atom")
    report = glmquant.validate(tmp_path / "out", targets="atom")
    assert {f.code for f in report.findings} == {"not-modelled"}
    (finding,) = report.findings
    assert finding.severity == "warning" and report.verdicts == {} and report.coverage == {}
    with pytest.raises(GlmquantError, match="not modelled for deepseek_v3: no target's answers are known"):
        glmquant.diff_exclusions(tmp_path / "out", tmp_path / "out", targets="atom")


def test_a_release_that_is_not_modelled_gives_no_answer(tiny: dict[str, Path]) -> None:
    found = glmquant.plan(tiny["deepseek_v3"], targets=NEWEST).exclusions
    for target in ("sglang 0.5.22", "atom 2026.10"):
        with pytest.raises(GlmquantError, match=r"not modelled for deepseek_v3"):
            found.matches("model.layers.1.self_attn.o_proj", target)
    assert found.matches("model.layers.1.self_attn.o_proj", "sglang 0.5.23") == {
        "model.layers.1.self_attn.o_proj": True
    }


def test_what_an_engine_does_whatever_the_list_says_is_a_note(tiny: dict[str, Path]) -> None:
    for name in ("deepseek_v3", "kimi_k2"):
        notes = [str(need) for need in glmquant.plan(tiny[name], targets=NEWEST).exclusions.needs]
        assert any(note.startswith("sglang 0.5.23: packs kv_b_proj into MXFP4 itself") for note in notes)
    notes = [str(need) for need in glmquant.plan(tiny["glm5_next"], targets=NEWEST).exclusions.needs]
    assert any(note.startswith("sglang 0.5.23: fuses the shared expert of GLM-5.3-Flash at") for note in notes)


def test_sglang_builds_every_qwen3_layer_with_experts(tmp_path: Path) -> None:
    make_tiny(config_of("qwen3_moe"), tmp_path / "dense", changes={"mlp_only_layers": [1]})
    with pytest.raises(ExclusionError, match=r"no exclude list loads on sglang 0\.5\.23: target model\.layers\.1"):
        glmquant.plan(tmp_path / "dense", targets=NEWEST, form="regex")
    with pytest.raises(ExclusionError, match=r"vllm 0\.33\.0: target model\.layers\.1\.mlp\.gate_up_proj"):
        glmquant.plan(tmp_path / "dense", targets="vllm==0.33.0")  # by name, the fused module is not in the list
    glmquant.quantize(tmp_path / "dense", tmp_path / "out", targets="vllm==0.33.0", form="regex")
    report = glmquant.validate(tmp_path / "out", targets=NEWEST)
    assert {target: str(verdict.value) for target, verdict in report.verdicts.items()} == {
        "sglang 0.5.23": "silent misload",
        "vllm 0.33.0": "ok",
    }
    assert "not-served" in {finding.code for finding in report.findings}


def test_a_layer_too_many_in_a_model_without_mtp_layers(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Loaded with both (tests/conformance): sglang passes over it, vLLM has no parameter for it."""
    out = tmp_path / "out"
    glmquant.quantize(tiny["qwen3_moe"], out, targets=NEWEST)
    save_file({"model.layers.94.mlp.gate.weight": torch.zeros(8, 64)}, out / "more.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.94.mlp.gate.weight"] = "more.safetensors"
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    report = glmquant.validate(out, targets=NEWEST)
    assert {target: verdict.value for target, verdict in report.verdicts.items()} == {
        "sglang 0.5.23": "ok",
        "vllm 0.33.0": "crash",
    }
    assert "mtp-undeclared" in {finding.code for finding in report.findings}


def test_a_source_layer_too_many_names_the_key_that_this_model_type_has(tiny: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny["qwen3_moe"], source)
    config = json.loads((source / "config.json").read_text())
    count = config["num_hidden_layers"] - 1
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    with pytest.raises(CheckpointError) as caught:
        glmquant.plan(source)
    first, fix = str(caught.value).split("\n")
    assert first.endswith(f"belongs to layer {count}, but config.json declares {count} layers")
    assert fix == "  Set num_hidden_layers to the number of layers; this model type has no MTP layer."


def test_half_of_a_qkv_pair_is_found(tiny: dict[str, Path]) -> None:
    layers = read_layers(
        json.loads((tiny["qwen3_moe"] / "config.json").read_text()), load_architecture("qwen3_moe").keys
    )
    for engine, release in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        answers = dict(
            (module.prefix, answer)
            for module, answer in ENGINES[engine].answers(release, ["model.layers.0.self_attn.k_proj"], layers)
        )
        assert "different quantization schemes" in str(answers["model.layers.0.self_attn.qkv_proj"])


def test_only_deepseek_v3s_own_target_is_fused() -> None:
    """sglang 0.5.23: the gate compares the architecture with DeepseekV3ForCausalLM; V3.2's draft has V3's class."""
    sglang = ENGINES["sglang"]
    for name, expected in (("deepseek_v3", [True, True]), ("deepseek_v32", [False, True])):
        layers = read_layers(config_of(name), load_architecture(name).keys)
        assert [sglang.fuses(role, "0.5.23", [], layers) for role in ("target", "draft")] == expected
        own = ["model.layers.61.mlp.shared_experts.gate_proj"]
        # layer 61 is renamed before the draft's gate reads the list, and is no draft layer any more
        assert [sglang.fuses(role, "0.5.23", own, layers) for role in ("target", "draft")] == [expected[0], False]


def test_a_packed_draft_with_bf16_shared_experts_costs_deepseek_v3_its_own_fusion_only() -> None:
    """GLM-5.2's refusal does not hold at layer 61; loaded with both engines, target fused, draft not."""
    found, layers = layout_of(config_of("deepseek_v3"))
    architecture = load_architecture("deepseek_v3")
    formats = {
        name.removesuffix(".weight"): "mxfp4" if ".experts." in name or ".shared_experts." in name else "plain"
        for name, promise in found.items()
        if name.endswith(".weight") and len(promise.shape) == 2 and "embed_tokens" not in name
    }
    formats |= {f"model.layers.61.mlp.shared_experts.{part}_proj": "plain" for part in ("gate", "up", "down")}
    (evaluation,) = resolve(formats, layers, architecture, parse_targets("sglang==0.5.23")).evaluations
    assert (evaluation.verdict.value, evaluation.fused_target, evaluation.fused_draft) == ("ok", True, False)


# At full size


def test_the_full_size_of_deepseek_v3_is_planned(tmp_path: Path) -> None:
    """One shard of true headers over a hole."""
    config = config_of("deepseek_v3")
    del config["quantization_config"]  # as bf16
    found, _ = layout_of(config)
    ordered = glm_layout.stored_order(glm_layout.Tensor(n, p.shape, p.dtype) for n, p in found.items())
    head = glm_layout.header(ordered)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(tensor.nbytes for tensor in ordered))
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = glmquant.plan(tmp_path, targets=NEWEST)
    packed = sum(job.quantized for job in planned.plan.jobs)
    assert packed == 58 * (256 + 1) * 3
    assert len(planned.plan.weight_map) == 46_183 + packed
    elements = sum(job.source.numel for job in planned.plan.jobs if job.quantized)
    assert planned.plan.total_size == planned.plan.bytes_in - 2 * elements + elements // 2 + elements // 32


# Adding one: a YAML file and a test, no code

TOY = {
    "schema": 1,
    "model_type": "toy_moe",
    "about": "a model that only this test knows",
    "config": {
        "inside": "llm",
        "layers": "depth",
        "experts": "experts",
        "kinds": {"dense": [{"numbers": "plain_layers"}], "wide": [{"every": "wide_every", "offset": 1}]},
    },
    "layers": {"prefix": "net.blocks.{layer}.", "experts": "ffn.experts"},
    "tensors": {
        "top": {"{net.embed,head}.weight": ["vocab", "width"]},
        "all": {"attn.{q_proj,o_proj}.weight": ["width", "width"]},
        "wide": {"attn.gate.weight": [1, "width"]},
        "dense": {"ffn.{up_proj,down_proj}.weight": ["width", "width"]},
        "moe": {
            "ffn.router.weight": ["experts", "width"],
            "ffn.experts.{expert}.{gate_proj,up_proj}.weight": ["2 * width", "width"],
            "ffn.experts.{expert}.down_proj.weight": ["width", "2 * width"],
        },
    },
    "roles": {"up": ["gate_proj", "up_proj"], "down": ["down_proj"], "row": ["o_proj"]},
    "groups": {
        "routed": {
            "modules": ["net.blocks.{layer}.ffn.experts.{expert}.{gate_proj,up_proj,down_proj}"],
            "about": "most",
        },
        "rest": {
            "modules": [
                "net.blocks.{layer}.attn.{q_proj,o_proj,gate}",
                "net.blocks.{layer}.ffn.{router,up_proj,down_proj}",
            ],
            "about": "little",
        },
        "ends": {"modules": ["net.embed", "head"], "about": "not quantized"},
    },
    "lookups": ["net.embed"],
    "mtp": {"kinds": [], "aliases": []},
    "covers": ["net.blocks.{layer}.attn."],
    "default": "moe",
    "recipes": {"moe": {"about": "experts", "quantize": [{"group": "routed", "layers": "main", "reason": "most"}]}},
}
TOY_CONFIG = {"model_type": "toy_moe", "llm": {"depth": 3, "experts": 2, "plain_layers": [1], "wide_every": 2}}
TOY_CONFIG["llm"] |= {"vocab": 266, "vocab_size": 266, "width": 32}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The folder of architectures, with one more; the test may change it before it is first read."""
    folder, found = tmp_path / "exclusions", json.loads(json.dumps(TOY))
    folder.mkdir()

    class Written(dict):  # type: ignore[type-arg]
        def save(self) -> None:
            (folder / "toy_moe.yaml").write_text(yaml.safe_dump(dict(self), sort_keys=False))
            load_architecture.cache_clear()

    monkeypatch.setattr(recipes, "recipe_folder", lambda: folder)
    written = Written(found)
    written.save()
    yield written
    load_architecture.cache_clear()


def test_a_new_architecture_needs_a_yaml_file_only(toy: Any, tmp_path: Path) -> None:
    make_tiny(TOY_CONFIG, tmp_path / "in")
    names = set(inspect(tmp_path / "in")[0].tensors)
    assert "net.blocks.2.ffn.experts.1.down_proj.weight" in names and "net.blocks.1.ffn.up_proj.weight" in names
    assert "net.blocks.0.attn.gate.weight" in names and "net.blocks.1.attn.gate.weight" not in names
    done = glmquant.quantize(tmp_path / "in", tmp_path / "out", form="regex")
    assert sum(job.quantized for job in done.plan.jobs) == 2 * 2 * 3
    assert {str(need).partition(";")[0] for need in done.exclusions.needs} == {
        "sglang 0.5.13.post1-0.5.23, vllm 0.30.0-0.33.0: not modelled for toy_moe"
    }
    report = glmquant.validate(tmp_path / "out")
    assert report.ok and report.verdicts == {}
    assert glmquant.verify(tmp_path / "out", tmp_path / "in").ok


def test_a_missing_tensor_of_a_new_architecture_is_found(toy: Any, tmp_path: Path) -> None:
    make_tiny(TOY_CONFIG, tmp_path / "in", shards=1)
    glmquant.quantize(tmp_path / "in", tmp_path / "out")
    toy["tensors"]["all"]["attn.k_proj.weight"] = ["width", "width"]
    toy.save()
    missing = next(f for f in glmquant.validate(tmp_path / "out").findings if f.code == "tensor-missing")
    assert missing.names == tuple(f"net.blocks.{n}.attn.k_proj.weight" for n in range(3))


def test_a_new_model_of_a_known_family_is_served(toy: Any, tmp_path: Path) -> None:
    """`family` says that engines have the class of another model for it."""
    text = yaml.safe_load((recipe_folder() / "qwen3_moe.yaml").read_text())
    toy.clear()
    toy.update(text | {"model_type": "toy_moe", "family": "qwen3_moe"})
    toy.save()
    make_tiny(config_of("qwen3_moe") | {"model_type": "toy_moe"}, tmp_path / "in")
    done = glmquant.quantize(tmp_path / "in", tmp_path / "out", targets=NEWEST)
    assert done.ok and set(glmquant.validate(tmp_path / "out", targets=NEWEST).verdicts.values()) == {"ok"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("config", "kinds", "dense"), [{"numbers": "a", "below": "b"}], "config.kinds.dense: a rule is one of"),
        (("config", "kinds", "moe"), [{"all": True}], "config.kinds: 'moe' means something already"),
        (("config", "kinds", "dense"), [], "config.kinds.dense must be a list of rules"),
        (("config", "kinds", "dense"), [{"below": "b", "offset": []}], "offset must be a number or a key"),
        (("config", "depth"), "x", "unknown key 'depth' in config"),
        (("config", "vision"), "tower", "config.vision must be a map"),
        (
            ("config", "vision"),
            {"inside": "v", "blocks": "b"},
            "config.vision.defaults must be a map of keys to numbers",
        ),
        (
            ("config", "vision"),
            {"inside": "v", "blocks": "b", "defaults": {"b": -1}},
            "must be a map of keys to numbers",
        ),
        (("config", "vision"), {"inside": "v", "blocks": "b", "defaults": {"c": 1}}, "must say how many b there are"),
        (("config", "vision"), {"inside": "v", "defaults": {}}, "blocks must be a text"),
        (("config", "kinds", "vision"), [{"all": True}], "config.kinds: 'vision' means something already"),
        (("layers", "prefix"), "net.blocks.", "layers.prefix must have {layer} once, and end with a dot"),
        (("tensors", "every"), {"a.weight": [1]}, "tensors.every: no such kind of layer"),
        (("tensors", "all"), {"a.weight": ["width ** 9"]}, "tensors.all.a.weight: 'width ** 9' is no size"),
        (("tensors", "all"), {"a.weight": ["__import__('os')"]}, "is no size"),
        (("tensors", "all"), {"a.weight": "width"}, "tensors.all.'a.weight': shape must be a list of sizes"),
        (("roles", "sideways"), ["q_proj"], "unknown key 'sideways' in roles"),
        (("mtp", "kinds"), ["sparse"], "mtp.kinds: unknown kind 'sparse'"),
    ],
)
def test_a_wrong_line_is_refused(toy: Any, path: tuple[str, ...], value: Any, message: str) -> None:
    place: Any = toy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    toy.save()
    with pytest.raises(GlmquantError) as caught:
        load_architecture("toy_moe")
    assert message in str(caught.value)


def test_a_config_without_its_inner_map_is_refused_by_name(toy: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: llm is None, a map is needed"):
        read_layers({"model_type": "toy_moe"}, load_architecture("toy_moe").keys)


@pytest.mark.parametrize("value", [1, [-1], ["1"], [0] * 3000])
def test_a_list_of_layer_numbers_must_be_one(toy: Any, value: object) -> None:
    config = json.loads(json.dumps(TOY_CONFIG))
    config["llm"]["plain_layers"] = value
    with pytest.raises(CheckpointError, match=r"plain_layers is .*, a list of layer numbers is needed"):
        read_layers(config, load_architecture("toy_moe").keys)


def test_formats_of_an_mtp_layers_copy_of_the_embedding(tiny: dict[str, Path]) -> None:
    """DeepSeek-V3 stores embedding and head twice: looked up by row is the one, a Linear the other."""
    checkpoint, _ = inspect(tiny["deepseek_v3"])
    formats = stored_formats(checkpoint.tensors, load_architecture("deepseek_v3").lookups)
    assert "model.layers.4.embed_tokens" not in formats and formats["model.layers.4.shared_head.head"] == "plain"

"""The sibling models' tiny checkpoints in the real engines: what glmquant writes loads, and what is wrong with a list
or a tensor does what the validator says."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import pytest
import siblings
from siblings import ENGINES, SIBLINGS, Sibling

import glmquant
from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.source import inspect
from glmquant.engines.model import Stored
from glmquant.engines.targets import ENGINES as MODELS
from glmquant.engines.targets import Target
from glmquant.recipe import load_architecture
from glmquant.validator import validate_folder

pytestmark = pytest.mark.conformance

NO_DRAFT: dict[str, dict[str, Any]] = {
    "sglang": dict.fromkeys(
        (
            "speculative_algorithm",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
        )
    ),
    "vllm": {"speculative_config": None},
}


def load(target: Target, sibling: Sibling, folders: list[Path]) -> list[dict[str, Any]]:
    if sibling.has_mtp:
        return harness.load(target.engine, target.release, folders)
    return harness.load(target.engine, target.release, folders, roles=["target"], engine_args=NO_DRAFT[target.engine])


def roles(sibling: Sibling) -> tuple[str, ...]:
    return ("target", "draft") if sibling.has_mtp else ("target",)


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Sibling and recipe -> what glmquant writes."""
    root, found = tmp_path_factory.mktemp("siblings"), {}
    for number, sibling in enumerate(SIBLINGS.values()):
        source = sibling.source(root / f"source-{number}")
        model_type = json.loads((source / "config.json").read_text())["model_type"]
        for recipe in load_architecture(model_type).recipes:
            out = root / f"{number}-{recipe}"
            found[sibling.name, recipe] = siblings.quantized(sibling, source, out, recipe=recipe)
    return found


@pytest.mark.parametrize("target", ENGINES, ids=str)
def test_every_recipe_loads(target: Target, outputs: dict[tuple[str, str], Path]) -> None:
    """Each parameter filled, each tensor read (but for the MTP layer's copies), fusion as promised."""
    wrong, seen = [], 0
    for has_mtp in (True, False):
        mine = {
            key: folder
            for key, folder in outputs.items()
            if SIBLINGS[key[0]].has_mtp is has_mtp and target.engine in SIBLINGS[key[0]].engines
        }
        some = SIBLINGS[next(iter(mine))[0]]
        for (key, folder), answer in zip(mine.items(), load(target, some, list(mine.values())), strict=True):
            report = validate_folder(folder, [target])
            judge = report.verdicts[str(target)].value
            unread = [n for n in answer["consumed_by_neither"] or () if not n.endswith(COPIES)]
            bad = {r: answer[r].get("error") or answer[r].get("unfilled") for r in roles(some)}
            clean = not any(bad.values()) and not any(answer[r]["experts"]["different"] for r in roles(some))
            fused = {r: bool(answer[r].get("fused_shared_experts")) for r in roles(some)}
            promised = promised_fusion(folder, target)
            flag = bool(report.flags)
            if flag or not clean or unread or judge != "ok" or any(fused[r] != promised[r] for r in fused):
                wrong.append(
                    f"{key}: {judge} {report.flags}, fused {fused} promised {promised}, {bad}, unread {unread[:3]}"
                )
        seen += len(mine)
    print(f"{target}: {seen} checkpoints load")
    assert not wrong, "\n".join(wrong)


COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


def promised_fusion(folder: Path, target: Target) -> dict[str, bool]:
    checkpoint, _ = inspect(folder)
    architecture = load_architecture(checkpoint.model_type)
    layers = read_layers(checkpoint.config, architecture.keys)
    stored = Stored.of(stored_formats(checkpoint.tensors, architecture.lookups), layers)
    exclude = checkpoint.config["quantization_config"]["exclude"]
    found = MODELS[target.engine].evaluate(target.release, exclude, stored)
    return {"target": found.fused_target, "draft": found.fused_draft}


# Every so-maniest case, the others for the other engine; 1 gives all cases to both. As in test_verdicts.py.
STRIDE = int(os.environ.get("GLMQUANT_VERDICT_STRIDE", "2"))
CASES = ("deepseek_v3", "deepseek_v3 256 experts", "deepseek_v3 256 experts 61 layers")
CASES += ("deepseek_v32", "deepseek_v32 256 experts", "kimi_k2", "qwen3_moe", "glm5_next")


def test_sglang_builds_experts_where_a_qwen3_layer_has_none(outputs: dict[tuple[str, str], Path]) -> None:
    target, name = ENGINES[0], "qwen3_moe dense layer"
    report = validate_folder(outputs[name, "moe"], [target])
    (answer,) = load(target, SIBLINGS[name], [outputs[name, "moe"]])
    assert report.verdicts[str(target)].value == real_verdict(answer, SIBLINGS[name]) == "silent misload"
    assert "not-served" in {finding.code for finding in report.findings}


def test_vllm_builds_all_attention_of_glm5_next_in_bf16(tmp_path: Path) -> None:
    """Whatever the list says: packed modules of linear or sparse attention, or of its indexer, cannot load."""
    target, sibling = ENGINES[1], SIBLINGS["glm5_next"]
    source = sibling.source(tmp_path / "source")
    folders = []
    packed = [
        *(f"0.self_attn.{name}" for name in ("q_proj", "b_proj", "f_a_proj", "f_b_proj", "g_b_proj", "o_proj")),
        *(f"3.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b")),
        *(f"4.self_attn.{name}" for name in ("kv_a_proj_with_mqa", "o_proj", "indexer.wk")),
    ]
    for number, module in enumerate(packed):
        folders.append(tmp_path / str(number))
        module = f"model.language_model.layers.{module}"
        glmquant.quantize(source, folders[-1], targets="atom", quantize=[module])
    answers = load(target, sibling, folders)
    found = {
        module: (validate_folder(folder, [target]).verdicts[str(target)].value, real_verdict(answer, sibling))
        for module, folder, answer in zip(packed, folders, answers, strict=True)
    }
    assert found == dict.fromkeys(packed, ("crash", "crash"))


# Modules of GLM-5.3-Flash that sglang builds by what the list says. Linear attention: all fused, q, k and v apart from
# the fused others, or nothing fused (models/glm5_next.py:421-520).
QKV, BFG = ("q_proj", "k_proj", "v_proj"), ("b_proj", "f_a_proj", "g_a_proj", "f_b_proj", "g_b_proj")
PACKINGS = {
    "linear qkv": [f"layers.0.self_attn.{name}" for name in QKV],
    "linear bfg": [f"layers.0.self_attn.{name}" for name in BFG],
    "linear all": [f"layers.0.self_attn.{name}" for name in (*QKV, *BFG, "o_proj")],
    "linear output": ["layers.0.self_attn.o_proj"],
    **{f"linear {name}": [f"layers.1.self_attn.{name}"] for name in BFG},
    "linear qkv and one more": [f"layers.2.self_attn.{name}" for name in (*QKV, "g_b_proj")],
    **{
        f"{role} {what}": [f"layers.{number}.{name}" for name in names]
        for role, number in (("target", 3), ("draft", 4))
        for what, names in {
            "latent": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
            "query": ["self_attn.q_b_proj"],
            "output": ["self_attn.o_proj"],
            "indexer": ["self_attn.indexer.wq_b", "self_attn.indexer.wk"],
        }.items()
    },
    "draft glue": ["layers.4.eh_proj"],
    "dense": [f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")],
    "vision qkv": ["visual.blocks.0.attn.qkv"],
    "vision output": ["visual.blocks.1.attn.proj"],
    "vision mlp": [f"visual.blocks.1.mlp.{name}_proj" for name in ("gate", "up")],
    "vision mlp down": ["visual.blocks.0.mlp.down_proj"],
    "vision merger": [f"visual.merger.{name}proj" for name in ("", "gate_", "up_", "down_")],
}


@pytest.mark.parametrize(
    "what", ["as written", "listed all the same", "stored in bf16, not listed", "half of it listed"]
)
def test_sglang_builds_all_of_glm5_next_as_the_list_says(what: str, tmp_path: Path) -> None:
    """Packed and covered it loads; stored otherwise than listed, or half listed, it does what the validator says."""
    target, sibling = ENGINES[0], SIBLINGS["glm5_next"]
    source = sibling.source(tmp_path / "source")
    plain = siblings.quantized(sibling, source, tmp_path / "plain")
    folders = []
    for number, names in enumerate(PACKINGS.values()):
        own = [f"model.{'' if name.startswith('visual') else 'language_model.'}{name}" for name in names]
        folders.append(tmp_path / str(number))
        if what == "stored in bf16, not listed":
            siblings.copy(plain, folders[-1], siblings.with_list(lambda found, own=own: _without(found, own)))
            continue
        glmquant.quantize(source, folders[-1], targets=str(target).replace(" ", "=="), form="literal", quantize=own)
        more = {"listed all the same": own, "half of it listed": own[: (len(own) + 1) // 2]}.get(what, [])
        siblings.with_list(lambda found, more=more: [*found, *more])(folders[-1])
    matrix: Counter[tuple[str, str]] = Counter()
    wrong = []
    for name, folder, answer in zip(PACKINGS, folders, load(target, sibling, folders), strict=True):
        found = (validate_folder(folder, [target]).verdicts[str(target)].value, real_verdict(answer, sibling))
        matrix[found] += 1
        if found[0] != found[1] or (what == "as written" and found[0] != "ok"):
            errors = {r: (answer[r].get("error"), answer[r].get("unfilled")) for r in roles(sibling)}
            wrong.append(f"{name}: (ours, real) {found} {errors}")
    print(f"{target}, {what}: {dict(matrix)}")
    assert not wrong, "\n".join(wrong)


def _without(found: list[str], names: list[str]) -> list[str]:
    """The list without these modules, under the checkpoint's names and the draft's."""
    aliases = [name.replace("model.language_model.", "model.") for name in names]
    return [entry for entry in found if entry not in (*names, *aliases)]


PAIRS = [(target, name) for name in CASES for target in ENGINES if target.engine in SIBLINGS[name].engines]


@pytest.mark.parametrize(("target", "name"), PAIRS, ids=[f"{target}-{name}" for target, name in PAIRS])
def test_one_thing_wrong(target: Target, name: str, outputs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Lists and tensors with one thing wrong: our verdict is the engine's."""
    sibling, base = SIBLINGS[name], outputs[name, "moe"]
    literal = siblings.copy(base, tmp_path / "literal", lambda folder: None)
    listed = glmquant.fix_exclusions(literal, targets=siblings.targets(sibling), form="literal").exclusions.texts
    checkpoint, _ = inspect(base)
    cases = list(siblings.wrong_lists(listed))
    if "256" not in name:
        cases += siblings.wrong_tensors(list(checkpoint.tensors))
    cases = cases[ENGINES.index(target) % STRIDE :: STRIDE]
    folders = [siblings.copy(literal, tmp_path / str(i), change) for i, (_, change) in enumerate(cases)]
    matrix: Counter[tuple[str, str]] = Counter()
    wrong = []
    for (what, _), folder, answer in zip(cases, folders, load(target, sibling, folders), strict=True):
        real = real_verdict(answer, sibling)
        report = validate_folder(folder, [target])
        ours = "crash" if report.flags else report.verdicts[str(target)].value
        ours = "ok" if ours == "slow" else ours  # told apart by test_every_recipe_loads
        matrix[ours, real] += 1
        if ours != real:
            errors = {r: (answer[r].get("error"), answer[r].get("unfilled")) for r in roles(sibling)}
            wrong.append(f"{what}: we say {ours} {[f.code for f in report.findings]}, it does {real} {errors}")
    print(f"\n{target} {name}: {len(cases)} checkpoints (ours, real): {dict(matrix)}")
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong)


DAMAGED = {"deepseek_v3": 2, "deepseek_v32": 2, "kimi_k2": 2, "qwen3_moe": 1, "glm-5": 3, "glm5_next": 3}
"""Sibling -> an MoE layer of it."""


@pytest.mark.parametrize(
    ("target", "name"), [(t, name) for name in DAMAGED for t in ENGINES], ids=lambda value: str(value)
)
def test_damaged_tensors(target: Target, name: str, outputs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Tensors of every shape and name but the right one: our verdict is the engine's."""
    sibling, base = SIBLINGS[name], outputs[name, "moe"]
    checkpoint, _ = inspect(base)
    prefix = load_architecture(checkpoint.model_type).prefix.format(layer=DAMAGED[name])
    cases = list(siblings.damaged_tensors(checkpoint.tensors, prefix))[ENGINES.index(target) % STRIDE :: STRIDE]
    folders = [siblings.copy(base, tmp_path / str(i), change) for i, (_, change, _) in enumerate(cases)]
    matrix: Counter[tuple[str, str]] = Counter()
    wrong = []
    for (what, _, hurt), folder, answer in zip(cases, folders, load(target, sibling, folders), strict=True):
        real = real_verdict(answer, sibling)
        real = "silent misload" if hurt and real == "ok" else real
        report = validate_folder(folder, [target])
        ours = report.verdicts[str(target)].value
        matrix[ours, real] += 1
        if ours != real:
            errors = {r: (answer[r].get("error"), answer[r].get("unfilled")) for r in roles(sibling)}
            wrong.append(f"{what}: we say {ours} {[f.code for f in report.findings]}, it does {real} {errors}")
    print(f"\n{target} {name}: {len(cases)} checkpoints (ours, real): {dict(matrix)}")
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong)


def real_verdict(answer: dict[str, Any], sibling: Sibling) -> str:
    found = [answer[role] for role in roles(sibling)]
    if not all(role["loaded"] for role in found):
        return "crash"
    bad = any(role["unfilled"] or role["odd_copies"] or role["experts"]["different"] for role in found)
    return "silent misload" if bad else "ok"

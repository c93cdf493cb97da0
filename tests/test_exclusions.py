"""The exclude list: which form is chosen, what it costs, and that it says exactly what is stored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glmquant
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.source import read_json
from glmquant.engines.model import DISABLE_FUSION, Stored, Verdict
from glmquant.engines.targets import DEFAULT_TARGETS, ENGINES, parse_targets, span
from glmquant.exclusions import ExclusionList, resolve
from glmquant.recipe import Architecture, load_architecture

ALL = "sglang>=0.5.13,vllm,atom"
# One release per behaviour: enough where the point is another.
FEW = (
    ",".join(f"sglang=={r}" for r in ("0.5.13.post1", "0.5.16", "0.5.18", "0.5.19", "0.5.21", "0.5.22")) + ",vllm,atom"
)
FORMS = ("auto", "literal", "regex")
RECIPES = ("moe", "moe-mtp", "routed", "routed-mtp")


@pytest.fixture(scope="session")
def formats(full: Path) -> Callable[[str], dict[str, str]]:
    """Recipe -> stored formats of the full-size model."""

    @cache
    def of(recipe: str) -> dict[str, str]:
        return glmquant.plan(full, recipe=recipe, targets="vllm").plan.formats

    return of


@pytest.fixture(scope="session")
def layers(full: Path) -> Layers:
    return read_layers(read_json(full / "config.json"))


@pytest.fixture(scope="session")
def glm() -> Architecture:
    return load_architecture("glm_moe_dsa")


def test_moe_loads_everywhere_with_fusion_and_without_a_flag(formats, layers: Layers, glm: Architecture) -> None:
    found = resolve(formats("moe"), layers, glm, parse_targets(ALL))
    assert found.needs == ()
    assert {e.verdict for e in found.evaluations} == {Verdict.OK}
    sglang = {e.release: (e.fused_target, e.fused_draft) for e in found.evaluations if e.engine == "sglang"}
    assert all(target for target, _ in sglang.values())
    assert [r for r, (_, draft) in sglang.items() if draft] == [
        *("0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
        *("0.5.22", "0.5.23"),
    ]


def test_the_main_layers_stand_under_their_checkpoint_names(formats, layers: Layers, glm: Architecture) -> None:
    found = resolve(formats("moe"), layers, glm, parse_targets(DEFAULT_TARGETS))
    plain = [m for m, kind in formats("moe").items() if kind == "plain" and not m.startswith("model.layers.78.")]
    assert [e.text for e in found.entries if e.origin == "checkpoint"][: len(plain)] == sorted(
        plain, key=lambda name: [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]
    )
    assert [(e.text, e.origin) for e in found.entries[len(plain) :]] == [
        (r"re:model\.layers\.78\..*", "regex"),
        (r"re:model\.decoder\..*", "alias"),
        ("model.eh_proj", "alias"),
    ]
    assert all(e.source for e in found.entries if e.origin == "alias")


def test_moe_in_regexes_is_short_and_in_literals_has_no_regex(formats, layers: Layers, glm: Architecture) -> None:
    short = resolve(formats("moe"), layers, glm, parse_targets(ALL), "regex")
    assert len(short.entries) < 10
    literal = resolve(formats("moe"), layers, glm, parse_targets(ALL), "literal")
    assert not any(text.startswith("re:") for text in literal.texts)
    assert [n.releases for n in literal.needs] == ["sglang 0.5.18"]  # the one release where literals cost fusion


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_forms_give_the_same_answer_per_module_on_every_target(
    recipe: str, formats, layers: Layers, glm: Architecture
) -> None:
    lists = [resolve(formats(recipe), layers, glm, parse_targets(FEW), form).texts for form in FORMS]
    stored = Stored.of(formats(recipe), layers)
    for target in parse_targets(FEW):
        answers = [
            [
                (m, answer)
                for m, answer in ENGINES[target.engine].answers(target.release, texts, layers)
                if stored.parts(m)
            ]
            for texts in lists
        ]
        assert answers[0] == answers[1] == answers[2], target


@pytest.mark.parametrize("recipe", ("routed", "routed-mtp"))
def test_bf16_shared_experts_need_a_flag_before_0_5_18(recipe: str, formats, layers: Layers, glm: Architecture) -> None:
    found = resolve(formats(recipe), layers, glm, parse_targets(ALL))
    assert [(n.releases, n.flag) for n in found.needs] == [("sglang 0.5.13.post1-0.5.17", DISABLE_FUSION)]


def test_the_refused_combination_is_unloadable_for_the_engine_models_too(layers: Layers, glm: Architecture) -> None:
    """Routed MXFP4 everywhere, shared MXFP4 but for the MTP layer's: 0.5.22 cannot load it fused."""
    formats = _tiny_formats(
        layers, lambda group, mtp: "mxfp4" if group == "routed" or (group == "shared" and not mtp) else "plain"
    )
    leaves = [m for m, kind in formats.items() if kind == "plain"]
    crashes = {
        release: ENGINES["sglang"].evaluate(release, leaves, Stored.of(formats, layers)).verdict
        for release in ("0.5.21", "0.5.22", "0.5.23")
    }
    assert crashes == {"0.5.21": Verdict.OK, "0.5.22": Verdict.CRASH, "0.5.23": Verdict.CRASH}


def test_a_container_in_two_formats_is_refused_with_the_module_and_what_to_do(
    layers: Layers, glm: Architecture
) -> None:
    formats = _tiny_formats(layers, lambda group, mtp: "mxfp4" if group in ("routed", "shared") else "plain")
    formats["model.layers.5.mlp.experts.1.up_proj"] = "plain"
    with pytest.raises(glmquant.ExclusionError, match=r"(?s)model\.layers\.5\.mlp\.experts.*one format.*--keep"):
        resolve(formats, layers, glm, parse_targets("sglang>=0.5.22"))


def test_half_a_fused_pair_is_refused(layers: Layers, glm: Architecture) -> None:
    formats = _tiny_formats(layers, lambda group, mtp: "mxfp4" if group in ("routed", "shared") else "plain")
    formats["model.layers.5.self_attn.q_a_proj"] = "mxfp4"
    with pytest.raises(glmquant.ExclusionError, match="fused_qkv_a_proj"):
        resolve(formats, layers, glm, parse_targets(ALL))


def test_what_an_engine_always_builds_in_bf16_cannot_be_packed(layers: Layers, glm: Architecture) -> None:
    formats = _tiny_formats(layers, lambda group, mtp: "mxfp4" if group in ("routed", "shared") else "plain")
    formats["model.layers.78.eh_proj"] = "mxfp4"
    with pytest.raises(glmquant.ExclusionError, match=r"vllm 0\.30\.0-0\.33\.0.*eh_proj.*always built in bf16"):
        resolve(formats, layers, glm, parse_targets("sglang>=0.5.13,vllm"))


def test_globs_and_ignore_say_exactly_what_is_stored(formats, layers: Layers, glm: Architecture) -> None:
    found = resolve(formats("moe"), layers, glm, parse_targets("vllm"))
    _check_exact(found, formats("moe"))
    assert len(found.globs()) == 7


def test_matches_answers_for_checkpoint_and_runtime_names(formats, layers: Layers, glm: Architecture) -> None:
    found = resolve(formats("moe"), layers, glm, parse_targets(ALL))
    fused = "model.decoder.self_attn.fused_qkv_a_proj_with_mqa"
    assert found.matches("model.layers.78.self_attn.q_a_proj", "sglang 0.5.23") == {fused: True}
    assert found.matches(fused, "sglang 0.5.14") == {fused: True}
    assert found.matches("model.layers.3.mlp.experts.7.up_proj", "vllm 0.33.0") == {"model.layers.3.mlp.experts": False}
    assert found.matches("model.layers.3.mlp.gate", "sglang 0.5.23") == {}  # never asks


def test_targets_are_parsed_and_printed() -> None:
    targets = parse_targets("sglang>=0.5.21, vllm,sglang==0.5.14")
    assert span(targets) == "sglang 0.5.14, sglang 0.5.21-0.5.23, vllm 0.30.0-0.33.0"
    for wrong in ("tgi", "sglang>0.9", "sglang>=x", ""):
        with pytest.raises(glmquant.GlmquantError):
            parse_targets(wrong)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(FORMS))
def test_a_list_is_either_right_on_every_target_or_refused(rng: random.Random, form: str) -> None:
    """Random formats of whole groups in a small model: no list is given that some target would not load."""
    layers = Layers(6, rng.choice(((6,), ())), frozenset({0, 1}), frozenset({0, 1, 3}), rng.choice((8, 256)), 1)
    kinds = {(g, mtp): rng.choice(("mxfp4", "plain")) for g in ("routed", "shared", "dense") for mtp in (True, False)}
    formats = _tiny_formats(layers, lambda group, mtp: kinds.get((group, mtp), "plain"))
    try:
        found = resolve(formats, layers, load_architecture("glm_moe_dsa"), parse_targets(ALL), form)
    except glmquant.ExclusionError:
        # Only the bf16 shared expert that an MXFP4 draft would fuse has no list; see the recipe file's refusals.
        assert layers.mtp and layers.routed_experts == 256
        assert kinds["shared", True] != kinds["routed", True] or kinds["shared", False] != kinds["routed", False]
        return
    assert all(e.loads for e in found.evaluations)
    _check_exact(found, formats)


def _check_exact(found: ExclusionList, formats: dict[str, str]) -> None:
    globs, ignore = found.globs(), found.ignore()
    exact = {e for e in ignore if not e.startswith("re:")}
    patterns = [re.compile(e[3:]) for e in ignore if e.startswith("re:")]
    for module, kind in formats.items():
        assert any(fnmatchcase(module, g) for g in globs) is (kind == "plain"), module
        assert (module in exact or any(p.match(module) for p in patterns)) is (kind == "plain"), module


def _tiny_formats(layers: Layers, choose: Callable[[str, bool], str], experts: int = 2) -> dict[str, str]:
    """Stored formats for every Linear module; each (group, is MTP) in one format."""
    found = {"lm_head": "plain"}
    for layer in [*range(layers.count), *layers.mtp]:
        mtp, p = layer in layers.mtp, f"model.layers.{layer}."
        names = [(f"self_attn.{n}", "attention") for n in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")]
        names += [("self_attn.o_proj", "attention")]
        if mtp or layer in layers.indexer:
            names += [(f"self_attn.indexer.{n}", "indexer") for n in ("wq_b", "wk", "weights_proj")]
        if layer in layers.dense:
            names += [(f"mlp.{n}_proj", "dense") for n in ("gate", "up", "down")]
        else:
            names += [("mlp.gate", "router")]
            names += [(f"mlp.shared_experts.{n}_proj", "shared") for n in ("gate", "up", "down")]
            names += [(f"mlp.experts.{e}.{n}_proj", "routed") for e in range(experts) for n in ("gate", "up", "down")]
        if mtp:
            names += [("eh_proj", "mtp_glue")]
        found |= {p + name: choose(group, mtp) for name, group in names}
    return found

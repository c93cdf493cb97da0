"""What real releases were seen to answer, pinned: each row was executed with the engine's own code."""

from __future__ import annotations

import pytest

from glmquant.checkpoint.layers import Layers
from glmquant.engines.sglang import Sglang
from glmquant.exclusions import answers

GLM = Layers(78, (78,), frozenset({0, 1, 2}), frozenset({0, 1, 2, 6}), 256, 1)
RELEASES = Sglang().releases()
SHARED = "mlp.shared_experts.gate_proj"


def asks(exclude: list[str], module: str, release: str, layers: Layers = GLM) -> bool | str:
    return answers(exclude, module, f"sglang {release}", layers)[module]


# sglang 0.5.23, fused target and draft (which entries veto): layers/quantization/quark/quark.py:1085-1119.
@pytest.mark.parametrize(
    ("entry", "target", "draft"),
    [
        (f"model.layers.5.{SHARED}", False, False),
        (f"model.layers.78.{SHARED}", True, True),
        (f"model.decoder.{SHARED}", False, False),
        (r"re:model\.decoder\..*", True, True),
        (r"re:model\.layers\.78\..*", True, True),
        (r"re:model\.layers\.78\.mlp\.shared_experts\..*", False, False),
        (r"re:model\.decoder\.mlp\.shared_experts\..*", False, False),
        ("*shared_experts*", False, False),
        (f"language_model.model.layers.78.{SHARED}", False, False),
        ("model.layers.5.mlp.shared_expert_gate", True, True),
    ],
)
def test_entries_that_switch_fusion_off(entry: str, target: bool, draft: bool) -> None:
    found = [Sglang().fuses(role, "0.5.23", [entry], GLM) for role in ("target", "draft")]
    assert found == [target, draft]


def test_fusion_by_release() -> None:
    own_shared = [f"model.layers.78.{SHARED}"]
    fused = {r: tuple(Sglang().fuses(role, r, own_shared, GLM) for role in ("target", "draft")) for r in RELEASES}
    assert fused == {
        **dict.fromkeys(("0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"), (True, True)),
        **dict.fromkeys(("0.5.16", "0.5.17"), (True, False)),
        "0.5.18": (False, False),
        **dict.fromkeys(("0.5.19", "0.5.20", "0.5.21"), (True, False)),
        **dict.fromkeys(("0.5.22", "0.5.23"), (True, True)),
    }


def test_a_language_model_prefix_is_taken_off_for_the_draft_in_every_release() -> None:
    """Found by the differential test: every draft class has a name mapper, and with it quark.py adds these names."""
    for release in Sglang().releases():
        assert (
            asks(["language_model.model.decoder.self_attn.o_proj"], "model.decoder.self_attn.o_proj", release) is True
        )
        assert (
            asks(["language_model.model.layers.3.self_attn.o_proj"], "model.layers.3.self_attn.o_proj", release)
            is False
        )


def test_the_drafts_of_old_releases_take_layer_61s_entries_for_their_own() -> None:
    exclude, module = ["model.layers.61.self_attn.o_proj"], "model.decoder.self_attn.o_proj"
    assert asks(exclude, module, "0.5.15.post1") is True
    assert asks(exclude, module, "0.5.16") is False


@pytest.mark.parametrize("entry", ["model.layers.78", r"re:.*layers\.78.*", r"re:model\.layers\.78(\..*)?$"])
def test_an_excluded_mtp_layer_leaves_the_whole_draft_of_old_releases_un_quantized(entry: str) -> None:
    assert asks([entry], "model.eh_proj", "0.5.15.post1") is True
    assert asks([entry], "model.eh_proj", "0.5.16") is False


def test_one_expert_excludes_its_container_from_0_5_21_on() -> None:
    exclude, module = ["model.layers.5.mlp.experts.7.up_proj"], "model.layers.5.mlp.experts"
    assert [asks(exclude, module, release) for release in ("0.5.20", "0.5.21")] == [False, True]
    assert answers(exclude, module, "vllm 0.33.0", GLM) == {module: True}


def test_half_a_pair_raises_and_a_fused_name_counts_from_0_5_21_on() -> None:
    module = "model.layers.5.self_attn.fused_qkv_a_proj_with_mqa"
    assert "different quantization schemes" in str(asks(["model.layers.5.self_attn.q_a_proj"], module, "0.5.23"))
    assert [asks([module], module, release) for release in ("0.5.20", "0.5.21")] == [False, True]


def test_regexes_are_anchored_at_the_start_only_and_globs_and_parents_match_nothing() -> None:
    module = "model.layers.55.self_attn.o_proj"
    assert asks([r"re:model\.layers\.5"], module, "0.5.23") is True
    assert asks([r"re:layers\.55"], module, "0.5.23") is False
    assert asks(["*self_attn*", "model.layers.55.self_attn", "model.layers.55"], module, "0.5.23") is False


def test_atom_reads_parents_globs_and_regexes_anywhere_and_half_a_pair_as_the_whole() -> None:
    """Read in ROCm/ATOM atom/config.py at 00afbe32, not executed."""
    module = "model.layers.55.self_attn.o_proj"
    for entry in ("model.layers.55", "*self_attn*", r"re:layers\.55\.", "model.layers.55.self_attn.*"):
        assert answers([entry], module, "atom 2026.10", GLM)[module] is True, entry
    fused = "model.layers.55.self_attn.fused_qkv_a_proj"
    assert answers(["model.layers.55.self_attn.q_a_proj"], fused, "atom 2026.10", GLM)[fused] is True

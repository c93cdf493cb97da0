"""The model of Quark's importer, against Quark's own matching of a module name."""

from __future__ import annotations

import random

import pytest

import glmquant
from glmquant.checkpoint.layers import Layers
from glmquant.engines.targets import ENGINES, parse_targets
from glmquant.exclusions import resolve
from glmquant.recipe import load_architecture

LAYERS = Layers(4, (4,), frozenset({0}), frozenset({0, 1, 3}), 2, 1)
LEAVES = (
    *(f"self_attn.{p}" for p in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wk")),
    *(f"mlp.{p}" for p in ("gate_proj", "down_proj", "gate", "experts", "shared_experts.up_proj")),
    *("mlp.experts.0.up_proj", "mlp.experts.1.down_proj", "mlp.experts.*", "mlp.experts.?.gate_proj", "eh_proj"),
)


def random_list(rng: random.Random) -> list[str]:
    def entry() -> str:
        name = f"model.layers.{rng.choice('0123456*?')}.{rng.choice(LEAVES)}"
        return rng.choice(
            (name, name, name, f"*{rng.choice(LEAVES)}", f"re:{name}", name[:-1] + "[a-m]", "*mlp*", "lm_head")
        )

    return [entry() for _ in range(rng.choice((0, 1, 3, 8)))]


def test_our_model_answers_as_quark_itself() -> None:
    from quark.torch import LLMTemplate
    from quark.torch.export.main_export.quant_config_parser import get_layer_quant_config
    from torch import nn

    config = LLMTemplate.get("glm_moe_dsa").get_config(scheme="mxfp4")
    rng = random.Random(20261130)
    for _ in range(400):
        config.exclude = random_list(rng)
        for module, answer in ENGINES["quark"].answers("0.13", config.exclude, LAYERS):
            names = [module.prefix]
            if module.kind == "experts":
                names = [f"{module.prefix}.{e}.{p}_proj" for e in range(2) for p in ("gate", "up", "down")]
            theirs = {get_layer_quant_config(config, nn.Linear, name) is None for name in names}
            expected = theirs.pop() if len(theirs) == 1 else "some"
            assert (answer if isinstance(answer, bool) else "some") == expected, (module.prefix, config.exclude)


def test_only_spelled_out_names_serve_quark_and_the_engines_alike() -> None:
    """Quark knows no regex, so with it among the targets the short form is refused."""
    formats = {"lm_head": "plain"}
    for layer in range(5):
        p = f"model.layers.{layer}."
        formats |= {p + f"self_attn.{n}": "plain" for n in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")}
        if layer:
            formats |= {p + f"mlp.experts.{e}.{n}_proj": "mxfp4" for e in range(2) for n in ("gate", "up", "down")}
    glm, targets = load_architecture("glm_moe_dsa"), parse_targets("sglang>=0.5.13,vllm,quark")
    assert all(e.loads for e in resolve(formats, LAYERS, glm, targets).evaluations)
    with pytest.raises(glmquant.ExclusionError, match=r"(?s)no exclude list loads on quark 0\.13.*Try --form auto"):
        resolve(formats, LAYERS, glm, targets, "regex")

"""Random exclude lists, put to our engine models and to the engines' own code: no disagreement is allowed."""

from __future__ import annotations

import os
import random
from typing import Any

import ckpt
import harness
import pytest

from glmquant.checkpoint.layers import read_layers
from glmquant.engines.model import RuntimeModule
from glmquant.engines.sglang import Sglang
from glmquant.engines.single_list import Vllm

pytestmark = pytest.mark.conformance

CASES = int(os.environ.get("GLMQUANT_DIFFERENTIAL_CASES", "5000"))
SEED = int(os.environ.get("GLMQUANT_DIFFERENTIAL_SEED", "20261130"))
ENGINES = {"sglang": Sglang(), "vllm": Vllm()}

# 61 and 62 meet the rewriting of layer 61 (made for DeepSeek) from both sides.
LAYER_COUNTS = (4, 8, 61, 62, 78)


def layers_config(rng: random.Random) -> dict[str, Any]:
    count = rng.choice(LAYER_COUNTS)
    return {
        "num_hidden_layers": count,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": rng.choice((8, 256, 256, 256)),
    }


def random_entry(rng: random.Random, count: int) -> str:
    """One line such as people and tools write them: right, nearly right, and wrong."""
    layer = rng.choice((0, 1, 2, 3, 5, 6, count - 1, count, count, count, 61, rng.randrange(90)))
    leaf = rng.choice(LEAVES).format(e=rng.randrange(256))
    name = rng.choice((f"model.layers.{layer}.{leaf}",) * 6 + (f"model.decoder.{leaf}", f"model.{leaf}", leaf))
    kind = rng.randrange(14)
    if kind < 6:
        return name
    if kind == 6:
        return rng.choice((f"model.layers.{layer}", f"model.layers.{layer}.", "model.decoder", "lm_head", "model", ""))
    if kind == 7:  # parents and containers
        return name.rpartition(".")[0]
    if kind == 8:  # globs
        return rng.choice((f"*{leaf}", f"model.layers.{layer}.*", f"{name}*", f"*layers.{layer}*", f"{name}.*"))
    if kind == 9:  # prefixes of other models and habits
        return rng.choice(("language_model.", "mtp.", "model.mtp.", "re", "RE:", " ")) + name
    if kind == 10:  # typos
        at = rng.randrange(len(name)) if name else 0
        return name[:at] + rng.choice("xX._") + name[at + 1 :]
    escaped = name.replace(".", r"\.")
    return "re:" + rng.choice(
        (
            name,  # unescaped dots
            escaped,
            f"{escaped}$",
            rf"model\.layers\.{layer}\..*",
            rf"model\.layers\.{layer}(\..*)?$",
            rf"model\.layers\.\d+\.{leaf.rpartition('.')[0]}.*".replace("..", "."),
            rf".*{leaf.rpartition('.')[2]}$",
            rf".*\.{leaf.partition('.')[0]}\..*",
            r"model\.decoder\..*",
            r".*self_attn.*",
            r".*shared_experts.*",
            r"model\.layers\.(?!.*experts).*",
            rf"model\.layers\.[0-{layer % 10}]\.mlp\..*",
            rf".*\.mlp\.experts\.{rng.randrange(9)}\..*",
            r".*mlp\.experts$",
            "",
        )
    )


LEAVES = (
    *(f"self_attn.{p}" for p in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")),
    *(f"self_attn.{p}" for p in ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj", "attn_mqa")),
    *(f"self_attn.indexer.{p}" for p in ("wq_b", "wk", "weights_proj", "k_norm")),
    *(f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "gate", "experts")),
    *(f"mlp.shared_experts.{p}" for p in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")),
    *(f"mlp.experts.{{e}}.{p}" for p in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")),
    *("mlp.shared_expert_gate", "eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"),
)


def random_list(rng: random.Random, config: dict[str, Any]) -> list[str]:
    count = config["num_hidden_layers"]
    entries = [random_entry(rng, count) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 20)))]
    if rng.random() < 0.3:  # a list that is nearly right
        full = ckpt.config(experts=8, layers=4)
        entries += rng.sample(ckpt.unquantized(full, ckpt.VARIANTS[rng.choice("ABCD")]), 20)
    return entries


@pytest.mark.parametrize(("engine", "release"), [(e, r) for e in ENGINES for r in harness.releases(e)])
def test_our_model_answers_as_the_engine_itself(engine: str, release: str) -> None:
    rng = random.Random(f"{SEED} {engine} {release}")
    model = ENGINES[engine]
    cases, ours = [], []
    for _ in range(CASES):
        config = layers_config(rng)
        exclude = random_list(rng, config)
        layers = read_layers(ckpt.config() | config | {"mlp_layer_types": None, "indexer_types": None})
        answers = model.answers(release, exclude, layers)
        chosen = rng.sample(answers, 14) + [a for a in answers if a[0].role == "draft"]
        roles = {role: [a for a in chosen if a[0].role == role] for role in ("target", "draft")}
        cases.append(
            {
                "exclude": exclude,
                "config": config,
                "prefixes": [module.prefix for module, _ in roles["target"]],
                "draft_prefixes": [module.prefix for module, _ in roles["draft"]],
            }
        )
        ours.append(
            {role: [_short(answer) for _, answer in found] for role, found in roles.items()}
            | ({f"fuse_{r}": model.fuses(r, release, exclude, layers) for r in roles} if engine == "sglang" else {})
        )
    theirs = harness.match(engine, release, cases)
    wrong = []
    for case, mine, real in zip(cases, ours, theirs, strict=True):
        for key, value in mine.items():
            expected = [_short(answer) for answer in real[key]] if isinstance(real[key], list) else real[key]
            if value != expected:
                wrong.append((case, key, value, expected))
    assert not wrong, f"seed {SEED}: {len(wrong)} of {CASES} disagree; the first: {_first(*wrong[0])}"
    print(f"{engine} {release}: {CASES} lists, 0 disagreements (seed {SEED})")


def _short(answer: bool | str) -> bool | str:
    """An error is compared as an error; its wording has its own test."""
    return "error" if isinstance(answer, str) else answer


def _first(case: dict[str, Any], key: str, mine: Any, real: Any) -> str:
    if isinstance(mine, list):
        prefixes = case["prefixes" if key == "target" else "draft_prefixes"]
        rows = [(p, m, r) for p, m, r in zip(prefixes, mine, real, strict=True) if m != r]
        return f"{key}: (prefix, ours, theirs) {rows[:3]} with {case['exclude']} and {case['config']}"
    return f"{key}: ours {mine}, theirs {real} with {case['exclude']} and {case['config']}"


def test_both_halves_of_a_pair_must_agree_in_the_words_of_each_engine() -> None:
    """The text we print is the text that the engine raises."""
    for engine, model in ENGINES.items():
        for release in harness.releases(engine):
            layers = read_layers(ckpt.config())
            exclude = ["model.layers.1.self_attn.q_a_proj"]
            module, answer = next(a for a in model.answers(release, exclude, layers) if isinstance(a[1], str))
            assert isinstance(module, RuntimeModule)
            case = {"exclude": exclude, "config": {"num_hidden_layers": 4}, "prefixes": [module.prefix]}
            real = harness.match(engine, release, [case])[0]["target"][0]
            assert isinstance(answer, str)
            start = "Found a different quantization schemes" if "a different" in real else "Found different"
            assert start.split()[-1] in real and module.prefix in real and module.prefix in answer

"""Random exclude lists, put to our engine models and to the engines' own code: no disagreement is allowed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ckpt
import harness
import pytest
from siblings import full_size_glm5_next

from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.engines.model import RuntimeModule
from glmquant.engines.sglang import Sglang
from glmquant.engines.single_list import Vllm
from glmquant.recipe import load_architecture

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


def random_entry(rng: random.Random, count: int, leaves: Sequence[str] = ()) -> str:
    """One line such as people and tools write them: right, nearly right, and wrong."""
    layer = rng.choice((0, 1, 2, 3, 5, 6, count - 1, count, count, count, 61, rng.randrange(90)))
    leaf = rng.choice(leaves or LEAVES).format(e=rng.randrange(256))
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

KDA_LEAVES = tuple(f"self_attn.{p}_proj" for p in ("q", "k", "v", "qkv", "b", "f_a", "f_b", "g_a", "g_b", "o"))
VISION_LEAVES = ("attn.qkv", "attn.qkv_proj", "attn.proj", "mlp.gate_proj", "mlp.gate_up_proj", "mlp.down_proj")


def random_list(rng: random.Random, config: dict[str, Any]) -> list[str]:
    count = config["num_hidden_layers"]
    entries = [random_entry(rng, count) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 20)))]
    if rng.random() < 0.3:  # a list that is nearly right
        full = ckpt.config(experts=8, layers=4)
        entries += rng.sample(ckpt.unquantized(full, ckpt.VARIANTS[rng.choice("ABCD")]), 20)
    return entries


@pytest.mark.parametrize(("engine", "release"), [(e, r) for e in ENGINES for r in harness.releases(e)])
def test_our_model_answers_as_the_engine_itself(engine: str, release: str) -> None:
    def lists(rng: random.Random) -> Iterator[tuple[list[str], dict[str, Any], Layers]]:
        for _ in range(CASES):
            config = layers_config(rng)
            exclude = random_list(rng, config)
            yield (
                exclude,
                config,
                read_layers(ckpt.config() | config | {"mlp_layer_types": None, "indexer_types": None}),
            )

    compare(engine, release, lists)


def test_our_model_of_glm5_next_answers_as_sglang_itself(tmp_path: Path) -> None:
    """At the published size, on four ranks, where its shared-expert gate is open."""
    config = full_size_glm5_next()
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = read_layers(config, load_architecture("glm5_next").keys)

    def lists(rng: random.Random) -> Iterator[tuple[list[str], dict[str, Any], Layers]]:
        for _ in range(CASES):
            entries = [glm5_next_entry(rng) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 20)))]
            yield entries, {}, layers

    compare("sglang", "0.5.23", lists, tmp_path / "config.json")


def glm5_next_entry(rng: random.Random) -> str:
    """One line about GLM-5.3-Flash, by the names of its checkpoint, of the engine, or of neither."""
    if rng.randrange(8) == 0:
        block = f"visual.blocks.{rng.randrange(26)}."
        name = rng.choice(
            (
                *(block + leaf for leaf in VISION_LEAVES),
                "visual.merger.proj",
                "visual.merger.up_proj",
                "visual",
                "lm_head",
            )
        )
        name = rng.choice(("model.", "model.", "")) + name
        return rng.choice((name, name, name, "re:" + name.replace(".", r"\."), f"re:{name}.*"))
    entry = random_entry(rng, 45, (*LEAVES, *KDA_LEAVES))
    if rng.randrange(3):
        entry = entry.replace("model.layers", "model.language_model.layers")
        entry = entry.replace(r"model\.layers", r"model\.language_model\.layers")
    return entry


def compare(
    engine: str,
    release: str,
    lists: Callable[[random.Random], Iterator[tuple[list[str], dict[str, Any], Layers]]],
    config_file: Path | None = None,
) -> None:
    rng = random.Random(f"{SEED} {engine} {release}")
    model = ENGINES[engine]
    cases, ours, halves = [], [], []
    for exclude, config, layers in lists(rng):
        answers = model.answers(release, exclude, layers)
        halves.append(any(isinstance(answer, str) for module, answer in answers if module.shared))
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
    theirs = harness.match(engine, release, cases, config_file)
    wrong = []
    for case, mine, half, real in zip(cases, ours, halves, theirs, strict=True):
        for key, value in mine.items():
            if real["target"] is None and key.endswith("target") and "Found different" in real["target_error"]:
                # its gate asks about a pair whose halves differ; building that pair would raise the same
                if not half:
                    wrong.append((case, key, value, real["target_error"]))
                continue
            expected = [_short(answer) for answer in real[key]] if isinstance(real[key], list) else real[key]
            if value != expected:
                wrong.append((case, key, value, expected))
    assert not wrong, f"seed {SEED}: {len(wrong)} of {CASES} disagree; the first: {_first(*wrong[0])}"
    fused = sum(mine.get("fuse_target", False) for mine in ours)
    print(f"{engine} {release}: {CASES} lists, 0 disagreements, {fused} leave the target fused (seed {SEED})")


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

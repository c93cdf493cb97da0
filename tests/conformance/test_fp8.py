"""Block-scaled FP8 beside MXFP4: what released engines read of --keep-fp8, and what they do about mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ckpt
import harness
import pytest

import glmquant
from glmquant.mxfp4.config import block_fp8_spec

pytestmark = pytest.mark.conformance

# Blocks of 128 x 128 fit; kv_a_proj_with_mqa has a ragged last one.
SIZES = {
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 64,
    "index_head_dim": 128,
    "head_dim": 64,
}
# sglang only considers fusing the shared expert with 256 routed ones.
MANY = {
    "n_routed_experts": 256,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full"] * 2,
}
# The last one that reads no FP8 beside MXFP4, and those that do; older ones differ in nothing that matters here.
READERS = [release for release in harness.releases("sglang") if release >= "0.5.20"]
RECIPES = ("moe", "moe-mtp", "routed", "routed-mtp")
SGLANG, NEWEST, VLLM = "sglang>=0.5.21", "sglang>=0.5.23", "vllm"
PLAIN = ("lm_head", "embed_tokens", "mlp.gate", "eh_proj", "weights_proj")


def to_fp8(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """As zai-org/GLM-5.2-FP8: everything but PLAIN, with random scales."""
    import torch

    for name in [n for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2]:
        if not name.removesuffix(".weight").endswith(PLAIN):
            rows, columns = tensors[name].shape
            tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.01 + 0.001
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An output of --keep-fp8, made once per recipe, targets and number of experts."""
    root = tmp_path_factory.mktemp("fp8")

    @cache
    def source(many: bool) -> Path:
        config = ckpt.config(**SIZES, **(MANY if many else {}))
        return ckpt.write(root / f"source-{many}", None, frozenset(), cfg=config, mutate=to_fp8)

    @cache
    def output(recipe: str, targets: str, many: bool = False) -> Path:
        out = root / f"{recipe}-{len(list(root.iterdir()))}"
        done = glmquant.quantize(source(many), out, recipe=recipe, keep_fp8=True, targets=targets, base_model="tiny")
        assert done.report and done.report.ok
        return out

    return output


def edited(folder: Path, to: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """The same shards under another config.json."""
    to.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json" and not path.is_dir():
            (to / path.name).hardlink_to(path)
    config = json.loads((folder / "config.json").read_bytes())
    edit(config["quantization_config"])
    (to / "config.json").write_text(json.dumps(config))
    return to


def judge(engine: str, release: str, folders: list[Path]) -> list[tuple[str, str]]:
    """What the validator says of each, after the engine was asked: (the engine's own answer, ours)."""
    found = []
    for folder, answer in zip(folders, harness.load(engine, release, folders), strict=True):
        report = glmquant.validate(folder, targets=f"{engine}=={release}")
        raised = any(answer[role]["error"] for role in ("target", "draft"))
        real = "ok" if answer["ok"] else "crash" if raised else "silent misload"
        # a verdict may suppose a launch flag, without which it does not load
        flagged = f"{engine} {release}" in report.flags
        found.append((real, "crash" if flagged else report.verdicts[f"{engine} {release}"].value))
    return found


@pytest.mark.parametrize("release", harness.releases("sglang"))
def test_sglang_reads_what_was_made_for_it(release: str, make: Callable[..., Path]) -> None:
    both = f"{NEWEST},{VLLM}"
    made = [(NEWEST, make(recipe, NEWEST)) for recipe in RECIPES]
    made += [(targets, make(recipe, targets)) for targets in (SGLANG, VLLM, both) for recipe in ("moe", "routed")]
    made += [(SGLANG, make(recipe, SGLANG, many=True)) for recipe in RECIPES]
    made += [(both, make("routed", both, many=True))]
    answers = judge("sglang", release, [folder for _, folder in made])
    number = tuple(int(part) for part in release.split(".")[:3])
    for (targets, folder), (real, ours) in zip(made, answers, strict=True):
        assert real == ours, (folder.name, targets)
        loads = number >= {SGLANG: (0, 5, 21), VLLM: (9,)}.get(targets, (0, 5, 23))
        assert (real == "ok") is loads, (folder.name, targets)


@pytest.mark.parametrize("release", harness.releases("vllm"))
def test_vllm_reads_what_was_made_for_it(release: str, make: Callable[..., Path]) -> None:
    both = f"{NEWEST},{VLLM}"
    made = [(targets, make(recipe, targets)) for targets in (VLLM, both, NEWEST) for recipe in RECIPES]
    for (targets, folder), (real, ours) in zip(made, judge("vllm", release, [f for _, f in made]), strict=True):
        assert (real, ours) == (("crash", "crash") if targets == NEWEST else ("ok", "ok")), (folder.name, targets)


KEYS, SPEC = "layer_quant_config", block_fp8_spec()
MTP = "model.layers.4"
MISTAKES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no keys": lambda q: q.update({KEYS: {}}),
    "no key for the row-parallel o_proj": lambda q: q[KEYS].pop("*.self_attn.o_proj"),
    "no key for q_b_proj": lambda q: q[KEYS].pop("*.self_attn.q_b_proj"),
    "no key for the indexer": lambda q: q[KEYS].pop("*.self_attn.indexer.wq_b"),
    "no keys for the pair": lambda q: [q[KEYS].pop(f"*.mlp.{n}_proj") for n in ("gate", "up")],
    "no key for experts": lambda q: q[KEYS].pop(f"{MTP}.mlp.experts*"),
    "half a pair": lambda q: q[KEYS].pop("*.mlp.up_proj"),
    "o_proj excluded": lambda q: q["exclude"].append("re:.*o_proj"),
    "q_b_proj excluded": lambda q: q["exclude"].append("re:.*q_b_proj"),
    "attention pair excluded": lambda q: q["exclude"].extend(["re:.*q_a_proj", "re:.*kv_a_proj_with_mqa"]),
    "MLP pair excluded": lambda q: q["exclude"].extend(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")),
    "experts excluded": lambda q: q["exclude"].extend([f"{MTP}.mlp.experts", "model.decoder.mlp.experts"]),
    "keys for MXFP4 experts": lambda q: q[KEYS].update({"*.mlp.experts": SPEC}),
    "keys for MXFP4 shared experts": lambda q: q[KEYS].update({"*.mlp.shared_experts.*": SPEC}),
    "experts one by one": lambda q: (
        q[KEYS].update(
            {
                f"{MTP}.mlp.experts.{e}.{n}_proj": q[KEYS][f"{MTP}.mlp.experts*"]
                for e in range(8)
                for n in ("gate", "up", "down")
            }
        )
        or q[KEYS].pop(f"{MTP}.mlp.experts*")
    ),
    "a spec that only sglang reads": lambda q: q[KEYS].update(
        {"*.self_attn.o_proj": {**SPEC, "input_tensors": {**SPEC["input_tensors"], "group_size": 32}}}
    ),
}


@pytest.mark.parametrize(
    ("engine", "release"),
    [("sglang", release) for release in READERS] + [("vllm", r) for r in harness.releases("vllm")],
)
@pytest.mark.parametrize("made_for", [NEWEST, VLLM])
def test_mistakes_have_the_verdict_that_the_engine_gives(
    engine: str, release: str, made_for: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    good = make("moe", made_for)
    folders = [edited(good, tmp_path / str(n), edit) for n, edit in enumerate(MISTAKES.values())]
    wrong = {
        name: answers
        for name, answers in zip(MISTAKES, judge(engine, release, folders), strict=True)
        if answers[0] != answers[1]
    }
    assert not wrong


FUSION = {
    "*.mlp.shared_experts.*": (0, 5, 22),
    "*.mlp.shared_expert*": (0, 5, 21),
    "model.layers.1.mlp.shared_experts.*": (9,),
}


@pytest.mark.parametrize("release", READERS)
def test_keys_of_the_shared_expert_switch_fusion_off_or_not(
    release: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    good = make("routed-mtp", SGLANG, many=True)
    more = {f"model.layers.2.mlp.shared_experts.{n}_proj": SPEC for n in ("gate", "up", "down")}

    def respell(key: str) -> Callable[[dict[str, Any]], object]:
        return lambda q: q.update({KEYS: {k: v for k, v in q[KEYS].items() if "shared" not in k} | more | {key: SPEC}})

    folders = [edited(good, tmp_path / str(n), respell(key)) for n, key in enumerate(FUSION)]
    number = tuple(int(part) for part in release.split(".")[:3])
    for (key, since), (real, ours) in zip(FUSION.items(), judge("sglang", release, folders), strict=True):
        assert real == ours, key
        assert (real == "ok") is (number >= since), key

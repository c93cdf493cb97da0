"""Tiny checkpoints of the sibling models, quantized by glmquant, whole and with one thing wrong.

Rope scaling is left out of the configs: it owns no tensor, and sglang computes YaRN's table on a GPU only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import glmquant
from glmquant.checkpoint.header import TensorInfo
from glmquant.engines.targets import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
CONFIGS = ROOT / "tests/data/siblings"
# 256 wide experts need no padding in either engine, which would hide what happens at the real sizes.
SMALL: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "rope_scaling": None}
# sglang considers fusing the shared expert with 256 experts or 384; DeepSeek's MTP layer has another name at 61.
FUSING = SMALL | {"hidden_size": 64, "n_routed_experts": 256, "num_hidden_layers": 2}
AT_61 = FUSING | {"num_hidden_layers": 61, "first_k_dense_replace": 60}
# Both engines read keys that transformers has no default for; only hyper-connections and no rope fit what is stored.
GLM5_NEXT: dict[str, Any] = {
    "dtype": "bfloat16",  # sglang takes float16 without
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "mhc": True,
    "index_kpool_compress": True,
    "indexer_rope_interleave": True,
    "mla_use_nope": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True)
class Sibling:
    """A config of tests/data/siblings, with what is changed in it."""

    name: str
    config: str
    changes: dict[str, Any] = field(default_factory=lambda: SMALL)
    engines: tuple[str, ...] = ("sglang", "vllm")
    form: str = "auto"

    @property
    def full(self) -> dict[str, Any]:
        """The config as published."""
        config: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        return config

    @property
    def has_mtp(self) -> bool:
        return bool(self.full.get("text_config", self.full).get("num_nextn_predict_layers"))

    def source(self, folder: Path) -> Path:
        from make_tiny import make_tiny

        config = self.full
        if "vision_config" in config:
            config["vision_config"] |= SWIGLU_LIMIT
        make_tiny(config, folder, changes=self.changes)
        return folder


# transformers' default, which sglang wants to read in config.json.
SWIGLU_LIMIT = {"swiglu_limit": 10.0}


def full_size_glm5_next() -> dict[str, Any]:
    """Its published config, with what sglang wants besides."""
    config: dict[str, Any] = json.loads((CONFIGS / "glm5_next.json").read_text())
    config["text_config"] |= {key: value for key, value in GLM5_NEXT.items() if not key.endswith("_size")}
    config["vision_config"] |= SWIGLU_LIMIT
    return config


SIBLINGS = {
    found.name: found
    for found in (
        Sibling("deepseek_v3", "deepseek_v3"),
        Sibling("deepseek_v3 256 experts", "deepseek_v3", FUSING),
        Sibling("deepseek_v3 256 experts 61 layers", "deepseek_v3", AT_61),
        Sibling("deepseek_v32", "deepseek_v32"),
        Sibling("deepseek_v32 256 experts", "deepseek_v32", FUSING),
        Sibling("kimi_k2", "kimi_k2"),
        Sibling("kimi_k2 384 experts", "kimi_k2", FUSING | {"n_routed_experts": 384}),
        Sibling("qwen3_moe", "qwen3_moe"),
        # sglang builds experts on every layer of a Qwen3 model; vLLM asks for gate_up_proj, which only a regex can name
        Sibling("qwen3_moe dense layer", "qwen3_moe", SMALL | {"mlp_only_layers": [1]}, ("vllm",), "regex"),
        Sibling("glm-5", "glm-5", {"hidden_size": 256, "moe_intermediate_size": 256}),
        Sibling("glm5_next", "glm5_next", GLM5_NEXT),
    )
}
ENGINES = (Target("sglang", "0.5.23"), Target("vllm", "0.33.0"))


def targets(sibling: Sibling) -> str:
    return ",".join(f"{t.engine}=={t.release}" for t in ENGINES if t.engine in sibling.engines)


def quantized(sibling: Sibling, source: Path, out: Path, **options: Any) -> Path:
    glmquant.quantize(source, out, targets=targets(sibling), form=sibling.form, **options)
    return out


Change = Callable[[Path], None]


def with_list(change: Callable[[list[str]], list[str]]) -> Change:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["exclude"] = change(config["quantization_config"]["exclude"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def wrong_lists(good: list[str]) -> Iterator[tuple[str, Change]]:
    """Lists with one thing wrong: each kind of entry taken away, and entries for packed modules added."""
    yield "empty", with_list(lambda found: [])
    nested = any(entry.startswith("model.language_model.") for entry in good)
    tails = dict.fromkeys(re.sub(r"^model\.(language_model\.)?(layers\.\d+\.|decoder\.)?", "", entry) for entry in good)
    for tail in tails:
        kept = [entry for entry in good if not entry.endswith(tail)]
        yield f"without {tail}", with_list(lambda found, kept=kept: kept)
    own = "model.language_model.layers.3." if nested else "model.layers.1."
    added = [
        f"{own}mlp.experts",
        f"{own}mlp.experts.0.down_proj",
        f"{own}mlp.shared_experts.gate_proj",
        rf"re:{re.escape(own)}mlp\.shared_experts\..*",
        r"re:.*experts$",
        f"{own}mlp.gate_up_proj",
    ]
    if nested:  # names that an engine asks under, and prefixes that one of its two models does not know
        asked = "language_model.model.layers.3.mlp."
        added += [f"{asked}experts", f"{asked}shared_experts.gate_proj", rf"re:{re.escape(asked)}experts.*"]
        added += ["model.layers.3.mlp.experts", r"re:model\.layers\.3\.mlp.*", r"re:.*shared_experts\.gate_up_proj"]
        for prefix in ("model.layers.", "model.language_model.layers.4.", "model.language_model.layers.0."):
            kept = [entry for entry in good if not entry.startswith(prefix)]
            yield f"without {prefix}*", with_list(lambda found, kept=kept: kept)
        regexes = [
            *(entry for entry in good if not entry.startswith("model.language_model.layers.0.")),
            r"re:model\.language_model\.layers\.0\..*",
        ]
        yield "layer 0 by a regex on its own name", with_list(lambda found: regexes)
        renamed = [entry.replace("model.language_model.", "language_model.model.") for entry in good]
        yield "the engine's names", with_list(lambda found: renamed)
    for entry in added:
        yield f"with {entry}", with_list(lambda found, entry=entry: [*found, entry])


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load all tensors, change them, and write them as one shard."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()


def wrong_tensors(names: list[str]) -> Iterator[tuple[str, Change]]:
    """One tensor of each kind missing, one unknown."""
    seen: dict[str, str] = {}
    for name in sorted(names):
        main = re.sub(r"^model\.(language_model\.)?layers\.[0-2]\.", "main ", name)
        seen.setdefault(re.sub(r"(experts|visual\.blocks)\.\d+\.", r"\1.", main), name)
    for name in seen.values():
        if "rotary" not in name and not re.search(r"layers\.\d+\.(embed_tokens|shared_head\.head)", name):
            yield f"no {name}", lambda folder, name=name: rewrite(folder, lambda found: found.pop(name))
    yield "unknown", lambda folder: rewrite(folder, _unknown)


def _unknown(tensors: dict[str, Any]) -> None:
    import torch

    nested = any(name.startswith("model.language_model.") for name in tensors)
    name = f"model.{'language_model.' if nested else ''}layers.1.self_attn.surprise.weight"
    tensors[name] = torch.zeros(2, 2, dtype=torch.bfloat16)


def damaged_tensors(names: Mapping[str, TensorInfo], moe: str) -> Iterator[tuple[str, Change, bool]]:
    """Tensors misshapen, misnamed, missing or too many; and whether their own data cannot be right.

    Args:
        names: what the checkpoint has; what is not in it is left out.
        moe: what the names of one MoE layer begin with, its routed and shared experts packed.
    """
    import torch

    there = set(names)
    dense = next((n.removesuffix("gate_proj.weight") for n in sorted(there) if ".0.mlp.gate_proj.weight" in n), "")
    attention = f"{moe}self_attn."

    def on(name: str, change: Callable[[Any], Any]) -> Change:
        return lambda folder: rewrite(folder, lambda found: found.update({name: change(found[name])}))

    def renamed(name: str, to: str) -> Change:
        return lambda folder: rewrite(folder, lambda found: found.update({to: found.pop(name)}))

    def more(name: str, tensor: Any) -> Change:
        return lambda folder: rewrite(folder, lambda found: found.update({name: tensor.clone()}))

    def without(*gone: str) -> Change:
        return lambda folder: rewrite(folder, lambda found: [found.pop(name) for name in gone] and None)

    half_rows, half_columns = (lambda t: t[: len(t) // 2].clone()), (lambda t: t[:, : t.shape[1] // 2].clone())
    twice_rows, twice_columns = (lambda t: torch.cat([t, t])), (lambda t: torch.cat([t, t], 1))
    shapes = (("half the rows", half_rows), ("half the columns", half_columns))
    shapes += (("double rows", twice_rows), ("double columns", twice_columns))
    for place in ("experts.3.down_proj", "experts.3.up_proj", "shared_experts.down_proj", "shared_experts.gate_proj"):
        weight = f"{moe}mlp.{place}.weight"
        scale = f"{weight}_scale"
        if scale not in there:
            continue
        yield f"{place} without scale", without(scale), False
        yield f"{place} without weight", without(weight), False
        yield f"{place} without either", without(weight, scale), False
        yield f"{place} weight_scale_inv", renamed(scale, f"{scale}_inv"), False
        yield f"{place} weight_packed", renamed(weight, f"{weight}_packed"), False
        yield f"{place} input_scale too", more(f"{weight.removesuffix('weight')}input_scale", torch.ones(1)), False
        yield f"{place} scale f32", on(scale, lambda t: t.float()), False
        yield f"{place} scale e8m0", on(scale, lambda t: t.view(torch.float8_e8m0fnu)), False
        yield f"{place} weight fp4", on(weight, lambda t: t.view(torch.float4_e2m1fn_x2)), False
        yield f"{place} scale [out, 1]", on(scale, lambda t: t[:, :1].clone()), True
        yield f"{place} scale flat", on(scale, lambda t: t.flatten()), True
        for what, change in shapes:
            yield f"{place} weight {what}", on(weight, change), True
            yield f"{place} scale {what}", on(scale, change), True
    latent, linear = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"), re.sub(r"\d+\.$", "0.", moe)
    for name in dict.fromkeys(
        (
            *(f"{attention}{part}.weight" for part in (*latent, "q_proj", "k_proj", "v_proj", "o_proj")),
            *(f"{attention}indexer.{part}.weight" for part in ("wq_b", "wk", "weights_proj")),
            *(f"{linear}self_attn.{part}_proj.weight" for part in ("q", "k", "o", "b", "f_a", "g_a", "f_b", "g_b")),
            *(f"{dense}{part}_proj.weight" for part in ("up", "down")),
            *sorted(name for name in there if name.endswith(".eh_proj.weight")),
        )
    ):
        if name not in there:
            continue
        yield f"{name} _scale too", more(f"{name}_scale", torch.ones(256, 1)), False
        yield f"{name} _scale_inv too", more(f"{name}_scale_inv", torch.ones(2, 2)), False
        yield f"{name} f32", on(name, lambda t: t.float()), False
        for what, change in shapes:
            yield f"{name} {what}", on(name, change), True
    for name in sorted(name for name in there if re.match(r"model\.visual\.(?!blocks\.0)", name)):
        yield f"{name} f32", on(name, lambda t: t.float()), False
        for what, change in shapes if len(names[name].shape) == 2 else shapes[::2]:
            yield f"{name} {what}", on(name, change), True
    gate = f"{moe}mlp.gate."
    yield "router too low", on(f"{gate}weight", lambda t: t[:4].clone()), True
    if f"{gate}e_score_correction_bias" in there:
        yield "router bias bf16", on(f"{gate}e_score_correction_bias", lambda t: t.bfloat16()), True
    yield "router scale", more(f"{gate}weight_scale", torch.ones(1)), False
    yield "norm too short", on(f"{moe}input_layernorm.weight", lambda t: t[:32].clone()), True
    yield "one expert too many", more(f"{moe}mlp.experts.99.up_proj.weight", torch.zeros(8, 8).byte()), False
    yield "one layer too many", more(re.sub(r"\d+\.$", "9.mlp.gate.weight", moe), torch.zeros(2, 2)), False
    yield "rotary", more(f"{attention}rotary_emb.inv_freq", torch.ones(8)), False


def copy(folder: Path, out: Path, change: Change) -> Path:
    shutil.copytree(folder, out)
    change(out)
    return out

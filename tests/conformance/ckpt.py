"""Write a tiny checkpoint with the layout of GLM-5.2 and random data: bf16, or AMD-Quark MXFP4.

Every projection is there under its real name and with its real role; only the sizes are small. Names that
the exclude list of a checkpoint needs come from `unquantized`, in checkpoint names; which list to write is
the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]
    Mutation = Callable[[Tensors, dict[str, Any]], None]

GROUPS = ("routed", "shared", "mtp_routed", "mtp_shared")
# The four recipes that conformance tests speak of.
VARIANTS: dict[str, frozenset[str]] = {
    "A": frozenset({"routed", "mtp_routed"}),
    "B": frozenset({"routed", "shared"}),
    "C": frozenset({"routed", "shared", "mtp_routed"}),
    "D": frozenset(GROUPS),
}

_FP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "symmetric": None,
    "round_method": "half_even",
    "scale_type": "float",
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
    "mx_element_dtype": None,
    "is_scale_quant": False,
    "observer_cls": "PerBlockMXObserver",
}


def config(experts: int = 8, layers: int = 4, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny GLM-5.2; sglang only considers fusing the shared expert with 256 `experts`."""
    full = [max(i - 1, 0) % 2 == 0 for i in range(layers)]  # offset 2, every 2nd layer
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [1, 2],
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 256,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 2,
        "index_topk": 16,
        "index_topk_freq": 2,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if f else "shared" for f in full],
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 64,
        "max_position_embeddings": 1024,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 64,
        "qk_head_dim": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.12.0",
        "use_cache": True,
        "v_head_dim": 32,
        "vocab_size": 512,
    } | overrides


def quantization_config(exclude: Iterable[str]) -> dict[str, Any]:
    """The block that AMD Quark writes for MXFP4 weights and dynamic MXFP4 activations."""
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": "0.13",
        "algo_config": None,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "softmax_quant_spec": None,
        "global_quant_config": {
            "weight": _FP4 | {"is_dynamic": False},
            "input_tensors": _FP4 | {"is_dynamic": True},
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "exclude": list(exclude),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def modules(cfg: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape of its weight, kind) of every module; kind: "linear", a group, or what else it is."""
    hidden, layers, vocab = cfg["hidden_size"], cfg["num_hidden_layers"], cfg["vocab_size"]
    out: list[tuple[str, tuple[int, ...], str]] = [
        ("model.embed_tokens", (vocab, hidden), "embedding"),
        ("model.norm", (hidden,), "norm"),
        ("lm_head", (vocab, hidden), "linear"),
    ]
    for i in range(layers + 1):
        p = f"model.layers.{i}"
        out += [(f"{p}.{n}", (hidden,), "norm") for n in ("input_layernorm", "post_attention_layernorm")]
        out += _attention(cfg, f"{p}.self_attn", indexer=i == layers or cfg["indexer_types"][i] == "full")
        mtp = "mtp_" if i == layers else ""
        if i < cfg["first_k_dense_replace"]:
            out += _mlp(f"{p}.mlp", hidden, cfg["intermediate_size"], "linear")
        else:
            inner = cfg["moe_intermediate_size"]
            out += [(f"{p}.mlp.gate", (cfg["n_routed_experts"], hidden), "router")]
            for e in range(cfg["n_routed_experts"]):
                out += _mlp(f"{p}.mlp.experts.{e}", hidden, inner, f"{mtp}routed")
            out += _mlp(f"{p}.mlp.shared_experts", hidden, inner * cfg["n_shared_experts"], f"{mtp}shared")
        if mtp:
            out += [(f"{p}.eh_proj", (hidden, 2 * hidden), "linear")]
            out += [(f"{p}.{n}", (hidden,), "norm") for n in ("enorm", "hnorm", "shared_head.norm")]
    return out


def _attention(cfg: dict[str, Any], p: str, indexer: bool) -> list[tuple[str, tuple[int, ...], str]]:
    hidden, heads, q, kv = (cfg[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"], cfg["v_head_dim"]
    out: list[tuple[str, tuple[int, ...], str]] = [
        (f"{p}.q_a_proj", (q, hidden), "linear"),
        (f"{p}.q_a_layernorm", (q,), "norm"),
        (f"{p}.q_b_proj", (heads * (nope + rope), q), "linear"),
        (f"{p}.kv_a_proj_with_mqa", (kv + rope, hidden), "linear"),
        (f"{p}.kv_a_layernorm", (kv,), "norm"),
        (f"{p}.kv_b_proj", (heads * (nope + v), kv), "linear"),
        (f"{p}.o_proj", (hidden, heads * v), "linear"),
    ]
    if indexer:
        n, d = cfg["index_n_heads"], cfg["index_head_dim"]
        out += [
            (f"{p}.indexer.wq_b", (n * d, q), "linear"),
            (f"{p}.indexer.wk", (d, hidden), "linear"),
            (f"{p}.indexer.k_norm", (d,), "norm with bias"),
            (f"{p}.indexer.weights_proj", (n, hidden), "linear"),
        ]
    return out


def _mlp(p: str, hidden: int, inner: int, kind: str) -> list[tuple[str, tuple[int, ...], str]]:
    up = [(f"{p}.{n}_proj", (inner, hidden), kind) for n in ("gate", "up")]
    return [*up, (f"{p}.down_proj", (hidden, inner), kind)]


def unquantized(cfg: dict[str, Any], fp4: Collection[str]) -> list[str]:
    """Every linear module, the router included, whose weight stays bf16, under its checkpoint name."""
    linear = {"linear", "router", *GROUPS} - set(fp4)
    return [name for name, _, kind in modules(cfg) if kind in linear]


def write(
    out: Path,
    exclude: Iterable[str] | None,
    fp4: Collection[str] = VARIANTS["A"],
    *,
    cfg: dict[str, Any] | None = None,
    mutate: Mutation | None = None,
    seed: int = 0,
) -> Path:
    """Write the checkpoint to the folder `out`; `exclude` None (with `fp4` empty) writes a bf16 source.

    `mutate` may change the tensors and the config in place before they are written.
    """
    import torch
    from safetensors.torch import save_file

    unknown = set(fp4) - set(GROUPS)
    if unknown:
        raise ValueError(f"no such groups: {sorted(unknown)}; there are {GROUPS}")
    cfg = json.loads(json.dumps(cfg or config()))
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.05

    def byte(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=random)

    tensors: Tensors = {}
    for name, shape, kind in modules(cfg):
        if kind in fp4:
            tensors[f"{name}.weight"] = byte(0, 256, shape[0], shape[1] // 2)
            tensors[f"{name}.weight_scale"] = byte(110, 125, shape[0], shape[1] // 32)
            continue
        tensors[f"{name}.weight"] = normal(*shape).bfloat16()
        if kind == "norm with bias":
            tensors[f"{name}.bias"] = normal(*shape).bfloat16()
        if kind == "router":
            tensors[f"{name}.e_score_correction_bias"] = normal(shape[0])
    if exclude is not None:
        cfg["quantization_config"] = quantization_config(exclude)
    if mutate:
        mutate(tensors, cfg)

    out.mkdir(parents=True, exist_ok=True)
    shard = "model-00001-of-00001.safetensors"
    save_file({k: t.contiguous() for k, t in tensors.items()}, out / shard, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), shard)}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (out / "config.json").write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")
    return out

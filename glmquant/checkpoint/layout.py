"""The tensors that a model's config.json promises: names and un-quantized shapes, layer by layer.

Written from the config, not taken from a checkpoint, so that what is missing can be told from what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glmquant.checkpoint.layers import Layers

Shape = tuple[int, ...]


def expected_tensors(model_type: str, config: Mapping[str, Any], layers: Layers) -> dict[str, Shape]:
    """Tensor name -> shape before packing; empty when the model type or one of its size keys is not known.

    The MTP layer takes embedding and head from the main model, so it is not expected to have its own.
    """
    if model_type != "glm_moe_dsa":
        return {}
    try:
        return dict(_glm_moe_dsa(_Sizes(config), layers))
    except KeyError:
        return {}


class _Sizes:
    """config.json's sizes as attributes; KeyError where one is no natural number."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getattr__(self, key: str) -> int:
        value = self._config.get(key)
        if type(value) is not int or value < 1:
            raise KeyError(key)
        return value


def _glm_moe_dsa(c: _Sizes, layers: Layers) -> Iterator[tuple[str, Shape]]:
    """zai-org/GLM-5.2 as published (revision b4734de4)."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    for layer in (*range(layers.count), *layers.mtp):
        prefix = f"model.layers.{layer}."
        is_mtp = layer in layers.mtp
        yield f"{prefix}input_layernorm.weight", (c.hidden_size,)
        yield f"{prefix}post_attention_layernorm.weight", (c.hidden_size,)
        yield from _attention(c, f"{prefix}self_attn.", is_mtp or layer in layers.indexer)
        if layer in layers.dense:
            yield from _mlp(f"{prefix}mlp.", c.hidden_size, c.intermediate_size)
        else:
            yield f"{prefix}mlp.gate.weight", (layers.routed_experts, c.hidden_size)
            yield f"{prefix}mlp.gate.e_score_correction_bias", (layers.routed_experts,)
            for expert in range(layers.routed_experts):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", c.hidden_size, c.moe_intermediate_size)
            if layers.shared_experts:
                inner = c.moe_intermediate_size * layers.shared_experts
                yield from _mlp(f"{prefix}mlp.shared_experts.", c.hidden_size, inner)
        if is_mtp:
            yield f"{prefix}eh_proj.weight", (c.hidden_size, 2 * c.hidden_size)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{prefix}{norm}.weight", (c.hidden_size,)


def _attention(c: _Sizes, prefix: str, has_indexer: bool) -> Iterator[tuple[str, Shape]]:
    heads, queries, latent = c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    yield f"{prefix}q_a_proj.weight", (queries, c.hidden_size)
    yield f"{prefix}q_a_layernorm.weight", (queries,)
    yield f"{prefix}q_b_proj.weight", (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), queries)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (latent + c.qk_rope_head_dim, c.hidden_size)
    yield f"{prefix}kv_a_layernorm.weight", (latent,)
    yield f"{prefix}kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
    yield f"{prefix}o_proj.weight", (c.hidden_size, heads * c.v_head_dim)
    if has_indexer:
        yield f"{prefix}indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, queries)
        yield f"{prefix}indexer.wk.weight", (c.index_head_dim, c.hidden_size)
        yield f"{prefix}indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size)
        yield f"{prefix}indexer.k_norm.weight", (c.index_head_dim,)
        yield f"{prefix}indexer.k_norm.bias", (c.index_head_dim,)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)

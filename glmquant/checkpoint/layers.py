"""Layer numbers and their kinds, from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glmquant.checkpoint.header import MAX_TENSORS
from glmquant.errors import CheckpointError
from glmquant.text import short

# A config comes from a stranger, and everything is computed per layer and expert: GLM-5.2 has 79 layers, 256 experts.
MAX_LAYERS = 2000
MAX_EXPERTS = 10_000


@dataclass(frozen=True, slots=True)
class Layers:
    """Which decoder layers are what. MTP layers come after the main ones: indices count, count + 1, ...

    Attributes:
        count: number of main decoder layers (num_hidden_layers; 78 in GLM-5.2).
        mtp: indices of the MTP layers ((78,) in GLM-5.2).
        dense: main layers with a dense MLP (0, 1, 2 in GLM-5.2).
        indexer: main layers with a sparse-attention indexer of their own ("full" ones).
        routed_experts, shared_experts: per MoE layer.
    """

    count: int
    mtp: tuple[int, ...]
    dense: frozenset[int]
    indexer: frozenset[int]
    routed_experts: int
    shared_experts: int

    @property
    def moe(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.count) if layer not in self.dense)


def read_layers(config: Mapping[str, Any]) -> Layers:
    """Layer numbers of a glm_moe_dsa (or DeepSeek-like) config.

    An explicit per-layer list (`mlp_layer_types`, `indexer_types`) wins over the formula keys, as in
    transformers 5.24 GlmMoeDsaConfig.__post_init__ and sglang >= 0.5.20 (configs/model_config.py).

    Raises:
        CheckpointError: a key is missing or of the wrong type; names the key.
    """
    count = _natural(config, "num_hidden_layers", most=MAX_LAYERS)
    nextn = _natural(config, "num_nextn_predict_layers", 0, MAX_LAYERS)
    experts = _natural(config, "n_routed_experts", 0, MAX_EXPERTS)
    if (count + nextn) * experts * 3 > MAX_TENSORS:
        raise CheckpointError(f"config.json: {count + nextn} layers of n_routed_experts {experts} are no real model")
    types = config.get("mlp_layer_types")
    if types is not None:
        dense = {i for i, kind in enumerate(_list(config, "mlp_layer_types", count)) if kind == "dense"}
    else:
        dense = set(range(_natural(config, "first_k_dense_replace", 0, MAX_LAYERS)))
    return Layers(
        count=count,
        mtp=tuple(range(count, count + nextn)),
        dense=frozenset(dense),
        indexer=frozenset(_indexer_layers(config, count)),
        routed_experts=experts,
        shared_experts=_natural(config, "n_shared_experts", 0, MAX_EXPERTS),
    )


def _indexer_layers(config: Mapping[str, Any], count: int) -> set[int]:
    if config.get("indexer_types") is not None:
        return {i for i, kind in enumerate(_list(config, "indexer_types", count)) if kind == "full"}
    return indexer_formula(config, count)


def indexer_formula(config: Mapping[str, Any], count: int) -> set[int]:
    """Indexer layers from the schedule keys: pattern ('F' full, 'S' shared), else frequency and offset.

    Source: transformers 5.24 configuration_glm_moe_dsa.py; sglang 0.5.13.post1 models/deepseek_v2.py:1566.
    """
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, (str, list)):
        if len(pattern) > MAX_LAYERS:
            raise CheckpointError(f"config.json: index_topk_pattern is for {len(pattern):,} layers")
        return {i for i, kind in enumerate(pattern) if kind in ("F", "full")}
    frequency = _natural(config, "index_topk_freq", 1) or 1
    offset = _natural(config, "index_skip_topk_offset", 0)
    return {i for i in range(count) if max(i - offset + 1, 0) % frequency == 0}


def _natural(config: Mapping[str, Any], key: str, default: int | None = None, most: int = 1_000_000) -> int:
    value = config.get(key, default)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: {key} is {short(value)}, a natural number is needed")
    if value > most:
        raise CheckpointError(f"config.json: {key} is {short(value)}; the limit is {most:,}")
    return value


def _list(config: Mapping[str, Any], key: str, count: int) -> list[Any]:
    value = config[key]
    if not isinstance(value, list) or len(value) != count:
        raise CheckpointError(f"config.json: {key} must be a list with one item per layer ({count})")
    return value

"""Layer numbers and their kinds, from config.json alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        family: which rows of the engines' YAML files speak of this model (`family` of the architecture's file).
        prefix: names of a layer's modules begin so, with {layer} for its number.
        container: of the routed experts, behind the prefix; '' where a model has none.
        shared: of the shared expert, likewise.
        sets: main layers of further kinds, by name.
        mtp_sets: the kinds that an MTP layer is of (it has experts, and an indexer where there are any).
        vision: number of blocks of the vision tower, whose names do not begin with `prefix`.
    """

    count: int
    mtp: tuple[int, ...]
    dense: frozenset[int]
    indexer: frozenset[int]
    routed_experts: int
    shared_experts: int
    family: str = "glm_moe_dsa"
    prefix: str = "model.layers.{layer}."
    container: str = "mlp.experts"
    shared: str = "mlp.shared_experts"
    sets: tuple[tuple[str, frozenset[int]], ...] = ()
    mtp_sets: frozenset[str] = frozenset({"moe", "indexer"})
    vision: int = 0

    @property
    def moe(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.count) if layer not in self.dense)

    def main(self, kind: str) -> Sequence[int]:
        """The main layers of a kind: `all`, `moe`, `mtp` (none), or the name of a set; `vision`: the tower's blocks.

        Raises:
            KeyError: no such kind.
        """
        known: dict[str, Sequence[int]] = {
            "all": range(self.count),
            "moe": self.moe,
            "mtp": (),
            "vision": range(self.vision),
        }
        if kind in known:
            return known[kind]
        sets = {"dense": self.dense, "indexer": self.indexer, **dict(self.sets)}
        return sorted(sets[kind])

    def also_mtp(self, kind: str) -> bool:
        """Whether the MTP layers are of a kind."""
        return kind in ("all", "mtp") or kind in self.mtp_sets

    def at(self, layer: int) -> str:
        """What the names of a layer's modules begin with."""
        return self.prefix.replace("{layer}", str(layer))

    def number(self, name: str) -> int | None:
        """The layer that a module or tensor belongs to."""
        found = _numbered(self.prefix).match(name)
        return int(found[1]) if found else None


@lru_cache
def _numbered(prefix: str) -> re.Pattern[str]:
    return re.compile(re.escape(prefix).replace(r"\{layer\}", r"(\d+)"))


@dataclass(frozen=True, slots=True)
class SetRule:
    """One way in which a config says which layers are of a kind.

    Attributes:
        kind: `words` (the key holds a word a layer; those in `values` count), `pattern` (the same, as a text or list
            of any length), `below` (layers with a lower number), `every` (layers where max(number - offset + 1, 0) is a
            multiple of the key), `not_every` (the others), `numbers` (a list of them), `all`, or `any` of `rules`.
        key: of config.json; '' for `all` and `any`.
        offset: key of the offset, or the offset itself.
    """

    kind: str
    key: str = ""
    values: tuple[str, ...] = ()
    offset: str | int = 0
    rules: tuple[SetRule, ...] = ()


DENSE = (SetRule("words", "mlp_layer_types", ("dense",)), SetRule("below", "first_k_dense_replace"))
INDEXER = (
    SetRule("words", "indexer_types", ("full",)),
    SetRule("pattern", "index_topk_pattern", ("F", "full")),
    SetRule("every", "index_topk_freq", offset="index_skip_topk_offset"),
)


@dataclass(frozen=True, slots=True)
class VisionKeys:
    """Where a config speaks of its vision tower.

    Attributes:
        inside: key of the map that does.
        blocks: key in it of the number of blocks.
        defaults: what the keys are that it leaves out, in the order of their names.
    """

    inside: str
    blocks: str
    defaults: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """Where a model type's config.json says what; from `config` in its YAML file. The defaults are GLM-5.2's.

    Attributes:
        inside: key of the map that holds the language model's keys; '' if they are at the top.
        layers, mtp, experts, shared_experts: keys of these numbers; '' where a model has none.
        sets: kind of layer -> the rules that say which; the first whose key the config has decides, else the last.
        vision: of the vision tower, for models that have one.
    """

    inside: str = ""
    layers: str = "num_hidden_layers"
    mtp: str = "num_nextn_predict_layers"
    experts: str = "n_routed_experts"
    shared_experts: str = "n_shared_experts"
    sets: tuple[tuple[str, tuple[SetRule, ...]], ...] = (("dense", DENSE), ("indexer", INDEXER))
    mtp_sets: frozenset[str] = frozenset({"moe", "indexer"})
    family: str = "glm_moe_dsa"
    prefix: str = "model.layers.{layer}."
    container: str = "mlp.experts"
    shared: str = "mlp.shared_experts"
    vision: VisionKeys | None = None

    def of(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a config that holds the language model's keys.

        Raises:
            CheckpointError: it should be in a map of its own, and is not there.
        """
        if not self.inside:
            return config
        inner = config.get(self.inside)
        if not isinstance(inner, dict):
            raise CheckpointError(f"config.json: {self.inside} is {short(inner)}, a map is needed")
        return inner

    def tower(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a config says of its vision tower, defaults filled in; empty if it has none."""
        found = config.get(self.vision.inside) if self.vision else None
        return {**dict(self.vision.defaults), **found} if self.vision and isinstance(found, dict) else {}


GLM = LayerKeys()


def read_layers(config: Mapping[str, Any], keys: LayerKeys = GLM) -> Layers:
    """Layer numbers of a config, read as `keys` say.

    An explicit per-layer list (`mlp_layer_types`, `indexer_types`) wins over the formula keys, as in
    transformers 5.24 GlmMoeDsaConfig.__post_init__ and sglang >= 0.5.20 (configs/model_config.py).

    Raises:
        CheckpointError: a key is missing or of the wrong type; names the key.
    """
    tower = keys.tower(config)
    vision = _natural(tower, keys.vision.blocks, most=MAX_LAYERS) if keys.vision and tower else 0
    config = keys.of(config)
    count = _natural(config, keys.layers, most=MAX_LAYERS)
    nextn = _natural(config, keys.mtp, 0, MAX_LAYERS) if keys.mtp else 0
    experts = _natural(config, keys.experts, 0, MAX_EXPERTS) if keys.experts else 0
    if (count + nextn) * experts * 3 > MAX_TENSORS:
        raise CheckpointError(f"config.json: {count + nextn} layers of {keys.experts} {experts} are no real model")
    sets = {name: frozenset(layers_of(rules, config, count)) for name, rules in keys.sets}
    return Layers(
        count=count,
        mtp=tuple(range(count, count + nextn)),
        dense=sets.pop("dense", frozenset()),
        indexer=sets.pop("indexer", frozenset()),
        routed_experts=experts,
        shared_experts=_natural(config, keys.shared_experts, 0, MAX_EXPERTS) if keys.shared_experts else 0,
        family=keys.family,
        prefix=keys.prefix,
        container=keys.container,
        shared=keys.shared,
        sets=tuple(sets.items()),
        mtp_sets=keys.mtp_sets,
        vision=vision,
    )


def layers_of(rules: Sequence[SetRule], config: Mapping[str, Any], count: int) -> set[int]:
    """The layers that the first rule whose key is in the config names, else the last rule."""
    for rule in rules[:-1]:
        if _speaks(rule, config):
            return _layers_of(rule, config, count)
    return _layers_of(rules[-1], config, count) if rules else set()


def _speaks(rule: SetRule, config: Mapping[str, Any]) -> bool:
    if rule.kind == "pattern":
        return isinstance(config.get(rule.key), (str, list))
    return not rule.key or config.get(rule.key) is not None


def _layers_of(rule: SetRule, config: Mapping[str, Any], count: int) -> set[int]:
    match rule.kind:
        case "all":
            return set(range(count))
        case "any":
            return {layer for inner in rule.rules for layer in _layers_of(inner, config, count)}
        case "words":
            words = _list(config, rule.key, count) if config.get(rule.key) is not None else ()
            return {i for i, word in enumerate(words) if word in rule.values}
        case "pattern":
            pattern = config.get(rule.key) or ()
            if len(pattern) > MAX_LAYERS:
                raise CheckpointError(f"config.json: {rule.key} is for {len(pattern):,} layers")
            return {i for i, word in enumerate(pattern) if word in rule.values}
        case "below":
            return set(range(_natural(config, rule.key, 0, MAX_LAYERS)))
        case "numbers":
            return set(_numbers(config, rule.key))
        case _:  # every, not_every
            step = _natural(config, rule.key, 1) or 1
            offset = _natural(config, rule.offset, 0) if isinstance(rule.offset, str) else rule.offset
            every = {i for i in range(count) if max(i - offset + 1, 0) % step == 0}
            return every if rule.kind == "every" else set(range(count)) - every


def indexer_formula(config: Mapping[str, Any], count: int) -> set[int]:
    """Indexer layers from the schedule keys: pattern ('F' full, 'S' shared), else frequency and offset.

    Source: transformers 5.24 configuration_glm_moe_dsa.py; sglang 0.5.13.post1 models/deepseek_v2.py:1566.
    """
    return layers_of(INDEXER[1:], config, count)


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


def _numbers(config: Mapping[str, Any], key: str) -> Iterator[int]:
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list) or len(value) > MAX_LAYERS or any(type(n) is not int or n < 0 for n in value):
        raise CheckpointError(f"config.json: {key} is {short(value)}, a list of layer numbers is needed")
    yield from value

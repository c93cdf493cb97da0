"""Block-scaled FP8 beside MXFP4: which releases read it, under which names, and what becomes of a checkpoint with it.

A Quark checkpoint says of single modules that they are stored otherwise, in quantization_config.layer_quant_config. Who
reads what is data: block_fp8.yaml. The verdicts here are about what this touches, engine.evaluate's about all else.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import yaml
from packaging.version import Version

from glmquant.checkpoint.formats import BLOCK_FP8, FP8_BLOCK, FP8_SCALES, fp8_scales
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.layers import Layers
from glmquant.engines.matching import remap
from glmquant.engines.model import (
    DISABLE_FUSION,
    Engine,
    Fp8Layers,
    ModuleVerdict,
    RuntimeModule,
    Stored,
    Verdict,
    build_modules,
    family_rules,
    rules_for,
)
from glmquant.engines.patterns import BUDGET, check_list, compile_entry
from glmquant.engines.sglang import Sglang, draft_name
from glmquant.errors import ExclusionError
from glmquant.text import short

_DTYPES = ("fp8_e4m3", "fp8_e4m3fn")
_ORDER = list(Verdict)


class Release(Protocol):
    """One release of one engine: targets.Target."""

    @property
    def engine(self) -> str: ...

    @property
    def release(self) -> str: ...


@cache
def _facts(engine: str) -> dict[str, Any]:
    data = yaml.safe_load((Path(__file__).parent / "block_fp8.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = data[engine]
    return found


def _since(rows: Sequence[Mapping[str, Any]], release: str) -> Mapping[str, Any]:
    """The newest row that is not newer than a release; empty if there is none."""
    usable = [row for row in rows if Version(str(row["release"])) <= Version(release)]
    return usable[-1] if usable else {}


def _names_of(engine: str, release: str, module: str, layers: Layers) -> tuple[str, ...]:
    """Under which names a release reads the scale of a module that asks; empty: it cannot be block-scaled FP8."""
    facts = _facts(engine)
    if layers.family not in facts["families"]:
        return ()
    row = _since(facts["names"], release)
    endings = [key for key in row if key != "release" and (not key or f".{module}".endswith("." + key))]
    return tuple(row[max(endings, key=len)]) if endings else ()


@lru_cache
def scale_names(engine: str, release: str, layers: Layers) -> Mapping[str, frozenset[str]]:
    """Checkpoint module (or expert container) -> the names under which a release reads its scale, if it can be FP8."""
    found: dict[str, frozenset[str]] = {}
    for module in build_modules(engine, layers):
        names = frozenset(_names_of(engine, release, module.prefix, layers))
        for part in module.parts:
            found[part] = found.get(part, names) & names
    if layers.family in _facts(engine)["families"]:
        for tail, unasked in _facts(engine)["unasked"].items():
            for layer in range(layers.count + len(layers.mtp)):
                found[layers.at(layer) + tail] = frozenset(unasked)
    return found


@lru_cache
def names_read(engine: str, release: str, layers: Layers) -> tuple[str, ...]:
    """All names under which a release reads scales of modules that ask; empty: it reads no FP8 beside MXFP4."""
    found = {n for m in build_modules(engine, layers) for n in _names_of(engine, release, m.prefix, layers)}
    return tuple(name for name in FP8_SCALES if name in found)


def unreadable(engine: str, release: str, layers: Layers) -> str:
    """What a release that reads none does about it."""
    if layers.family not in _facts(engine)["families"]:
        return f"not modelled for {layers.family}"
    return _effect(engine, release, "fp8.unread")[1]


# Which modules of a source can stay FP8


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a module must become bf16.

    Attributes:
        why: `unread` (by these targets), `names` (each target reads it, but no two names of its scale agree), `blocks`
            (of 128 x 128 do not fit its neighbours) or `together` (what it is side by side with cannot stay FP8).
    """

    why: str
    targets: tuple[Release, ...] = ()


def keepable(
    shapes: Mapping[str, tuple[int, int]], linears: Iterable[str], layers: Layers, targets: Sequence[Release]
) -> tuple[dict[str, str], dict[str, Dropped]]:
    """Which modules every target reads as block-scaled FP8.

    Args:
        shapes: FP8 modules that are to stay so -> [out, in] of their weights, in blocks of 128 x 128.
        linears: all Linear modules of the source.

    Returns:
        Module -> the name of its scale (the source's own, weight_scale_inv, where there is a choice), and the modules
        that must become bf16. Nothing is kept where all that could be is what an engine turns into bf16 anyway.
    """
    per_target = [(target, scale_names(target.engine, target.release, layers)) for target in targets]
    units: dict[str, list[str]] = {}
    for module in linears:
        units.setdefault(_container(module, layers), []).append(module)
    possible: dict[str, set[str]] = {}
    dropped: dict[str, Dropped] = {}
    for unit, modules in units.items():
        if not any(module in shapes for module in modules):
            continue
        names = {name for name in FP8_SCALES if all(name in read.get(unit, ()) for _, read in per_target)}
        unread = tuple(target for target, read in per_target if not read.get(unit))
        if not names:
            dropped[unit] = Dropped("unread", unread) if unread else Dropped("names", tuple(targets))
        elif not all(module in shapes for module in modules):
            dropped[unit] = Dropped("together")
        else:
            possible[unit] = names
    # One name for all where that is possible.
    order = sorted(FP8_SCALES, key=lambda name: -sum(name in names for names in possible.values()))
    kept = {unit: min(names, key=order.index) for unit, names in possible.items()}
    engines = list(dict.fromkeys(target.engine for target in targets))
    for asking in (module for engine in engines for module in build_modules(engine, layers)):
        inside = [m for part in asking.parts for m in units.get(part, ())]
        if not _fits(asking, [shapes.get(m, (0, 0)) for m in inside], inside):
            dropped |= {part: Dropped("blocks") for part in asking.parts if part in kept}
            kept = {unit: name for unit, name in kept.items() if unit not in asking.parts}
    fused = [module.parts for engine in engines for module in build_modules(engine, layers) if module.kind == "fused"]
    for group, whole in [*((parts, True) for parts in fused), *((group, False) for group in _experts(units, layers))]:
        ours = [unit for unit in group if unit in kept]
        rest = [unit for unit in group if unit in units and unit not in kept]
        # The routed experts may be MXFP4 beside an FP8 shared expert: keys that say so switch fusion off.
        if ours and (rest if whole else any(unit in dropped for unit in rest)):
            dropped |= {unit: Dropped("together") for unit in ours}
            kept = {unit: name for unit, name in kept.items() if unit not in ours}
    asked = [{part for module in build_modules(engine, layers) for part in module.parts} for engine in engines]
    if not any(all(unit in parts for parts in asked) for unit in kept):
        kept = {}
    return (
        {module: kept[unit] for unit in kept for module in units[unit]},
        {module: why for unit, why in dropped.items() for module in units[unit] if module in shapes},
    )


def _experts(units: Iterable[str], layers: Layers) -> Iterable[list[str]]:
    """What an engine may fuse into one container: a layer's routed experts, and its shared expert."""
    found: dict[int | None, list[str]] = {}
    for unit in units:
        tail = _tail(unit, layers)
        if tail == layers.container or (layers.shared and tail.startswith(layers.shared + ".")):
            found.setdefault(layers.number(unit), []).append(unit)
    return found.values()


def _fits(module: RuntimeModule, shapes: Sequence[tuple[int, int]], names: Sequence[str]) -> bool:
    """Whether the blocks of modules side by side are those of each: sglang fp8.py validate_block_quant_shapes (0.5.23:
    570-610) and vLLM utils/fp8_utils.py validate_fp8_block_shape (0.33:1296-1344), validate_fp8_block_shape_moe."""
    rows, columns = FP8_BLOCK
    if module.kind == "experts":  # of which only those that are FP8 have a shape
        downs = [shape for name, shape in zip(names, shapes, strict=True) if name.endswith(".down_proj")]
        ups = [shape for name, shape in zip(names, shapes, strict=True) if not name.endswith(".down_proj")]
        return all(out % rows == 0 for out, _ in ups) and all(inner % columns == 0 for _, inner in downs)
    if module.kind != "fused":
        return True
    last = shapes[-1:] if module.prefix.endswith("gate_up_proj") else []  # q_a_proj + kv_a_proj: the last may be ragged
    return all(out % rows == 0 for out, _ in [*shapes[:-1], *last])


def _container(module: str, layers: Layers) -> str:
    """The module, or the expert container that it is in."""
    head, found, _ = module.partition(f".{layers.container}.") if layers.container else (module, "", "")
    return head + found.rstrip(".") if found else module


def layer_keys(formats: Mapping[str, str], layers: Layers) -> list[str]:
    """Keys of layer_quant_config that find the FP8 modules, and no others.

    Globs over all layers where all modules of that name are FP8: sglang renames for its draft model what begins with
    the MTP layer's own name, and decides on shared-expert fusion by what the keys say of layer 0, which has none.
    """
    units: dict[str, set[str]] = {}
    for module, kind in formats.items():
        units.setdefault(_container(module, layers), set()).add(kind)
    tails: dict[str, set[str]] = {}
    for unit, kinds in units.items():
        tails.setdefault(_tail(unit, layers), set()).update(kinds)
    everywhere = {tail for tail, kinds in tails.items() if kinds == {BLOCK_FP8}}
    shared = {tail for tail in tails if tail.startswith(layers.shared + ".")}
    keys: dict[str, None] = {}
    for unit, kinds in units.items():
        tail = _tail(unit, layers)
        if kinds != {BLOCK_FP8}:
            continue
        if shared and shared <= everywhere and tail in shared:
            # Without the s: sglang 0.5.21 asks for "shared_expert" when it decides on fusion.
            keys[f"*.{layers.shared.removesuffix('s')}*"] = None
        else:
            star = "*" if tail == layers.container else ""  # Quark and ATOM ask for the experts in it
            keys[(f"*.{tail}" if tail in everywhere and layers.number(unit) is not None else unit) + star] = None
    return list(keys)


def _tail(module: str, layers: Layers) -> str:
    number = layers.number(module)
    return module if number is None else module.removeprefix(layers.at(number))


def is_block_fp8(spec: Any, engine: str = "") -> bool:
    """Whether a layer_quant_config entry is what an engine calls block-scaled FP8; without one, what any of them does.

    Source: sglang 0.5.23 quark.py _get_block_fp8_config:433-462; vLLM 0.33 quark.py _is_fp8_w8a8:404-452.
    """
    weight, inputs = (spec.get(key) for key in ("weight", "input_tensors")) if isinstance(spec, dict) else (None, None)
    if not (isinstance(weight, dict) and isinstance(inputs, dict)):
        return False
    common = (
        not spec.get("output_tensors")
        and not spec.get("bias")
        and weight.get("dtype") in _DTYPES
        and inputs.get("dtype") in _DTYPES
        and weight.get("qscheme") == "per_block"
        and weight.get("is_dynamic") is False
        and inputs.get("is_dynamic") is True
        and weight.get("block_size") == list(FP8_BLOCK)
    )
    if not common or engine != "vllm":
        return common
    return (
        weight["dtype"] == inputs["dtype"] == "fp8_e4m3"
        and inputs.get("qscheme") == "per_group"
        and inputs.get("group_size") == FP8_BLOCK[1]
        and weight.get("symmetric") is True
        and inputs.get("symmetric") is True
    )


# What becomes of a checkpoint


def on_disk(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], formats: Mapping[str, str]
) -> Fp8Layers | None:
    """What a checkpoint says and holds of block-scaled FP8, or None if neither; `config` is its config.json."""
    block = config.get("quantization_config")
    said = block.get("layer_quant_config") if isinstance(block, dict) else None
    listed = {key: spec for key, spec in said.items() if isinstance(spec, dict)} if isinstance(said, dict) else {}
    if not any(map(is_block_fp8, listed.values())) and BLOCK_FP8 not in formats.values():
        return None
    default = block.get("global_quant_config") if isinstance(block, dict) else None
    return Fp8Layers(listed, default, fp8_scales(tensors, formats))


class _Keys:
    """Which key of a layer_quant_config finds a name first."""

    def __init__(self, keys: tuple[str, ...], lookup: str) -> None:
        check_list(keys)
        special = "*" if lookup == "substring" else "*?["
        self._globs = [
            (i, key, compile_entry(key, True)[0].match) for i, key in enumerate(keys) if set(special) & set(key)
        ]
        globs = {i for i, _, _ in self._globs}
        self._literals = [(i, key) for i, key in enumerate(keys) if i not in globs]
        self._exact = {key: i for i, key in reversed(self._literals)}
        self._substring = lookup == "substring"
        self._text = "\n".join(key for _, key in self._literals)
        self._starts: list[int] = []
        position = 0
        for _, key in self._literals:
            self._starts.append(position)
            position += len(key) + 1
        self._left = BUDGET
        self._found: dict[str, int | None] = {}

    def first(self, name: str) -> int | None:
        """Its index.

        Raises:
            ExclusionError: the keys took too much time.
        """
        if name not in self._found:
            self._found[name] = self._first(name)
        return self._found[name]

    def _first(self, name: str) -> int | None:
        begun = time.perf_counter()
        found = [self._literal(name)] if self._literals else []
        for i, key, match in self._globs:
            if found and found[0] is not None and found[0] < i:
                break
            if match(name):
                found.append(i)
                break
            if time.perf_counter() - begun > self._left:
                raise ExclusionError(f"layer_quant_config key {short(key)} takes too long", "Write fewer keys.")
        self._left -= time.perf_counter() - begun
        return min((i for i in found if i is not None), default=None)

    def _literal(self, name: str) -> int | None:
        if not self._substring or "\n" in name:
            return self._exact.get(name)
        at = self._text.find(name)
        if at < 0:
            return None
        return self._literals[bisect_right(self._starts, at) - 1][0]

    def below(self, prefix: str) -> list[int]:
        """The literal keys of what is in a container."""
        return [i for i, key in self._literals if key.startswith(prefix + ".")]


@lru_cache(64)
def _keys(keys: tuple[str, ...], lookup: str) -> _Keys:
    return _Keys(keys, lookup)


class _Lookup:
    """How one release reads a layer_quant_config, for its target or its draft model."""

    def __init__(self, engine: str, release: str, role: str, fp8: Fp8Layers, layers: Layers) -> None:
        self._engine, self._fp8 = engine, fp8
        facts, rules = _facts(engine), family_rules(engine, layers.family)
        self._packed: Mapping[str, Sequence[str]] = rules.get("packed_modules", {})
        names = list(fp8.config)
        if shards := rules.get("shard_to_fused"):
            names = [remap(name, shards) for name in names]
        own = rules_for(engine, release, layers.family)
        if role == "draft" and own.get("draft_list") == "literals":
            mtp = layers.at(layers.count).rstrip(".")
            names = [draft_name(n, mtp, layers.family) if n.startswith(mtp + ".") else n for n in names]
        self._specs = list(fp8.config.values())
        self._keys = _keys(tuple(names), facts["lookup"])
        self._glob = facts["lookup"] == "glob"

    def spec(self, name: str, container: bool = False) -> Any:
        """What is said of a module that asks; a text where the engine raises instead."""
        last = name.rpartition(".")[2]
        if last in self._packed:
            specs = [self.spec(name.replace(last, shard)) for shard in self._packed[last]]
            if any(spec != specs[0] for spec in specs):
                text: str = _facts(self._engine)["mistakes"]["fp8.pair"]
                return text.format(shards=list(self._packed[last]), module=name)
            return specs[0]
        at = self._keys.first(name)
        if at is None and container and self._glob:
            below = self._keys.below(name)
            if any(self._specs[i] != self._specs[below[0]] for i in below):
                return f"ValueError: Found different quantization configurations among the experts of {name}"
            at = below[0] if below else None
        return self._fp8.default if at is None else self._specs[at]


def faults(
    engine: Engine, release: str, exclude: Sequence[str], stored: Stored, flags: Iterable[str] = ()
) -> list[ModuleVerdict]:
    """What a release does wrong with modules that are FP8, or that the config calls so; empty without any.

    Raises:
        ExclusionError: layer_quant_config is too costly to match.
    """
    fp8, layers = stored.fp8, stored.layers
    if fp8 is None:
        return []
    fused = _fused(engine, release, exclude, stored, DISABLE_FUSION in flags)
    lookups = {role: _Lookup(engine.name, release, role, fp8, layers) for role in ("target", "draft")}
    found: list[ModuleVerdict] = []
    shared: dict[str, list[RuntimeModule]] = {}
    for module, _ in engine.answers(release, exclude, layers):
        if module.shared and fused[module.role]:
            shared.setdefault(module.role + _layer(module.parts[0], layers), []).append(module)
    for module, answer in engine.answers(release, exclude, layers):
        if isinstance(answer, str) or (module.shared and fused[module.role]):
            continue
        spec = fp8.default if answer else lookups[module.role].spec(module.prefix, module.kind == "experts")
        if isinstance(spec, str):
            found.append(ModuleVerdict(module.role, module.prefix, Verdict.CRASH, spec, module.parts))
            continue
        together = shared.get(module.role + _layer(module.parts[0], layers), []) if module.kind == "experts" else []
        for member in (module, *together):
            built = "plain" if answer else _built(spec, engine.name)
            if verdict := _worst(engine.name, release, module, member, built, stored, fp8):
                found.append(verdict)
                break
    return found


def _layer(module: str, layers: Layers) -> str:
    return f" {layers.number(module)}"


def _built(spec: Any, engine: str) -> str:
    if is_block_fp8(spec):
        return "fp8" if is_block_fp8(spec, engine) else "unread"
    weight = spec.get("weight") if isinstance(spec, dict) else None
    return "mxfp4" if isinstance(weight, dict) and weight.get("dtype") == "fp4" else "other"


def _worst(
    engine: str, release: str, place: RuntimeModule, member: RuntimeModule, built: str, stored: Stored, fp8: Fp8Layers
) -> ModuleVerdict | None:
    """The worst that becomes of what is stored for `member` (the module itself, or a shared expert fused into it)."""
    kinds = {kind for _, kind in stored.parts(member)}
    if not kinds or (BLOCK_FP8 not in kinds and built not in ("fp8", "unread")):
        return None
    names = {fp8.scales.get(part) for part in _fp8_parts(member, stored)} - {None}
    read = _names_of(engine, release, place.prefix, stored.layers)
    wrong: set[str] = set()
    if built == "unread" or (built == "fp8" and not names_read(engine, release, stored.layers)):
        wrong.add(f"fp8.unread.{place.kind}")
    elif built == "fp8":
        wrong |= {f"fp8.over_{kind}.{place.kind}" for kind in kinds & {"mxfp4", "plain"}}
        wrong |= {f"fp8.name.{place.kind}.{name}.{_last(place)}" for name in names if name not in read}
    elif built in ("mxfp4", "plain"):
        wrong |= {f"fp8.built_{built}.{place.kind}.{name}.{_last(place)}" for name in names}
    if not wrong:
        return None
    verdict, text = max(
        (_effect(engine, release, key) for key in sorted(wrong)), key=lambda found: _ORDER.index(found[0])
    )
    if member is not place:
        text = str(_facts(engine)["mistakes"]["fp8.shared"]).format(error=text)
    return ModuleVerdict(place.role, place.prefix, verdict, text, member.parts)


def _fp8_parts(module: RuntimeModule, stored: Stored) -> Iterator[str]:
    for part in module.parts:
        if module.kind != "experts":
            yield part
        elif BLOCK_FP8 in stored.containers.get(part, ()):
            yield from (name for name in stored.formats if name.startswith(part + "."))


def _last(module: RuntimeModule) -> str:
    return module.prefix.rpartition(".")[2]


def _fused(engine: Engine, release: str, exclude: Sequence[str], stored: Stored, off: bool) -> dict[str, bool]:
    """Whether the shared expert is fused into the routed ones, by the list and by what layer_quant_config says."""
    if not isinstance(engine, Sglang) or off or stored.fp8 is None:
        return {"target": False, "draft": False}
    gated = _gate(engine.name, release, stored.fp8, stored.layers)
    return {role: not gated and engine.fuses(role, release, exclude, stored.layers) for role in ("target", "draft")}


def _gate(engine: str, release: str, fp8: Fp8Layers, layers: Layers) -> bool:
    """Whether layer_quant_config switches fusion off: quark.py can_fuse_shared_expert (0.5.22:1067-1095)."""
    row = _since(_facts(engine)["gate"], release)
    if not row or not fp8.config:
        return False
    lookup = _Lookup(engine, release, "target", fp8, layers)
    shared = "shared_experts" if any(".shared_experts." in key for key in fp8.config) else "shared_expert"
    for base in row["bases"]:
        routed = lookup.spec(f"{base}.experts", container=True)
        for part in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"):
            said = lookup.spec(f"{base}.{shared if 'shared_experts' in row['shared'] else 'shared_expert'}.{part}")
            if isinstance(routed, str) or isinstance(said, str) or said != routed:
                return True
    return False


def _effect(engine: str, release: str, key: str) -> tuple[Verdict, str]:
    """As model.consequence, from block_fp8.yaml."""
    mistakes = _facts(engine)["mistakes"]
    while key and key not in mistakes:
        key = key.rpartition(".")[0]
    entry = mistakes.get(key, "block-scaled FP8 beside MXFP4 is not modelled")
    for item in entry if isinstance(entry, list) else [entry]:
        if isinstance(item, str):
            return Verdict.CRASH, item
        if "until" in item and Version(release) > Version(str(item["until"])):
            continue
        for word, verdict in (("crash", Verdict.CRASH), ("silent", Verdict.SILENT)):
            if word in item:
                return verdict, item[word]
    raise KeyError(f"{key}: nothing said about {engine} {release}")

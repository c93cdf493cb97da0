"""What every engine model has in common: runtime modules, verdicts, and comparing answers with what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import yaml
from packaging.version import Version

from glmquant.checkpoint.layers import Layers

_EXPERTS = ".mlp.experts."
DISABLE_FUSION = "--disable-shared-experts-fusion"


class Verdict(str, Enum):
    """What happens when an engine loads a module, from best to worst."""

    OK = "ok"
    SLOW = "slow"
    SILENT = "silent misload"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class RuntimeModule:
    """A module that asks the engine's quantization config how it is stored.

    Attributes:
        role: `target` or `draft`.
        prefix: the name it asks under.
        kind: `linear`, `fused` (several checkpoint modules side by side), `row` (row-parallel, whose loader
            truncates instead of refusing), `experts` (one container of all routed experts).
        parts: checkpoint modules loaded into it; for `experts` the container's own name.
        shared: whether it is part of a shared expert (and vanishes when that is fused into the container).
    """

    role: str
    prefix: str
    kind: str
    parts: tuple[str, ...]
    shared: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds: Linear module -> `mxfp4`, `plain` or another word for anything else.

    Routed experts are summed up per container: `containers` maps `...mlp.experts` to the set of formats in it;
    `units` is `formats` with each container that is all of one format as one item.
    """

    formats: Mapping[str, str]
    containers: Mapping[str, frozenset[str]]
    units: Mapping[str, str]
    layers: Layers

    @staticmethod
    def of(formats: Mapping[str, str], layers: Layers) -> Stored:
        containers: dict[str, set[str]] = {}
        for module, kind in formats.items():
            head, marker, _ = module.partition(_EXPERTS)
            if marker:
                containers.setdefault(head + _EXPERTS[:-1], set()).add(kind)
        units = {name: next(iter(kinds)) for name, kinds in containers.items() if len(kinds) == 1}
        for module, kind in formats.items():
            head, marker, _ = module.partition(_EXPERTS)
            if not marker or head + _EXPERTS[:-1] not in units:
                units[module] = kind
        frozen = {name: frozenset(kinds) for name, kinds in containers.items()}
        return Stored(formats, frozen, units, layers)

    def kinds(self, module: RuntimeModule) -> frozenset[str]:
        """Formats found for a runtime module; empty when the checkpoint has nothing for it."""
        if module.kind == "experts":
            return self.containers.get(module.parts[0], frozenset())
        return frozenset(self.formats[part] for part in module.parts if part in self.formats)


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    role: str
    prefix: str
    verdict: Verdict
    message: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one release of an engine does with a checkpoint and its exclude list.

    `faults` are the modules that do not load right (or only slowly); `asked` counts all that asked.
    `flags` are the launch flags assumed.
    """

    engine: str
    release: str
    faults: tuple[ModuleVerdict, ...]
    asked: int
    fused_target: bool
    fused_draft: bool
    flags: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        order = list(Verdict)
        return max((fault.verdict for fault in self.faults), key=order.index, default=Verdict.OK)

    @property
    def loads(self) -> bool:
        return self.verdict in (Verdict.OK, Verdict.SLOW)


Answers = Sequence[tuple[RuntimeModule, bool | str]]
"""What an engine decides per asking module: un-quantized or not; a text where it raises instead."""


class Engine(Protocol):
    """One engine's model: its releases, what each makes of a list, and what then happens to a checkpoint."""

    name: str

    def releases(self) -> Sequence[str]: ...

    def answers(self, release: str, exclude: Sequence[str], layers: Layers) -> Answers: ...

    def evaluate(
        self, release: str, exclude: Sequence[str], stored: Stored, flags: Iterable[str] = ()
    ) -> Evaluation: ...


@lru_cache
def load_rules(name: str) -> dict[str, Any]:
    """An engine's YAML file; each release inherits what the one before it says."""
    data: dict[str, Any] = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
    merged: dict[str, Any] = {}
    releases: dict[str, dict[str, Any]] = {}
    for entry in data["releases"]:
        merged = {**merged, **{k: v for k, v in entry.items() if k != "release"}}
        releases[str(entry["release"])] = merged
    data["releases"] = releases
    return data


def rules_for(name: str, release: str) -> dict[str, Any]:
    """The rules of the newest listed release that is not newer than `release`."""
    wanted = Version(release)
    releases = load_rules(name)["releases"]
    usable = [known for known in releases if Version(known) <= wanted]
    if not usable:
        raise ValueError(f"{name} {release} is older than the oldest modelled release {next(iter(releases))}")
    rules: dict[str, Any] = releases[max(usable, key=Version)]
    return rules


@lru_cache
def build_modules(name: str, layers: Layers) -> tuple[RuntimeModule, ...]:
    """An engine's asking modules for target and draft, from its YAML rows and the layer numbers."""
    data = load_rules(name)
    prefix_of = data["draft_prefixes"]
    modules = []
    for row in data["modules"]:
        where = row["layers"]
        if where == "top":
            modules.append(RuntimeModule("target", row["name"], row["kind"], tuple(row["parts"]), False))
            continue
        main = {
            "all": range(layers.count),
            "dense": sorted(layers.dense),
            "moe": layers.moe,
            "indexer": sorted(layers.indexer),
            "mtp": (),
        }[where]
        for layer in main:
            modules.append(_runtime("target", f"model.layers.{layer}.", row, layer))
        if where != "dense":
            for layer in layers.mtp:
                draft = prefix_of["glue" if where == "mtp" else "decoder"].format(layer=layer)
                modules.append(_runtime("draft", draft, row, layer))
    return tuple(modules)


def _runtime(role: str, prefix: str, row: Mapping[str, Any], layer: int) -> RuntimeModule:
    parts = tuple(f"model.layers.{layer}.{part}" for part in row["parts"])
    return RuntimeModule(role, prefix + row["name"], row["kind"], parts, bool(row.get("shared")))


def compare(
    module: RuntimeModule, answer: bool | str, kinds: frozenset[str], texts: Mapping[str, str]
) -> ModuleVerdict:
    """Verdict for one module: what the engine builds (`answer`: un-quantized?) against what is stored.

    `answer` is a text where the engine raises while deciding; `texts` holds the engine's real messages.
    """
    if isinstance(answer, str):
        return ModuleVerdict(module.role, module.prefix, Verdict.CRASH, answer, module.parts)
    built = "plain" if answer else "mxfp4"
    if not kinds or kinds == {built}:
        return ModuleVerdict(module.role, module.prefix, Verdict.OK, "", module.parts)
    if len(kinds) > 1:
        verdict, key = Verdict.CRASH, "mixed"
    elif built == "plain":
        verdict, key = Verdict.CRASH, f"{module.kind}.built_plain"
    elif module.kind == "row" and kinds == {"plain"}:
        verdict, key = Verdict.SILENT, "row.built_mxfp4"
    else:
        verdict, key = Verdict.CRASH, f"{module.kind}.built_mxfp4"
    return ModuleVerdict(module.role, module.prefix, verdict, texts[key], module.parts)


def never_quantized(name: str, stored: Stored) -> list[ModuleVerdict]:
    """Packed modules that an engine always builds un-quantized, whatever the list says."""
    data = load_rules(name)
    tails = tuple("." + tail for tail in data["never_quantized"])
    mtp = tuple(f"model.layers.{layer}." for layer in stored.layers.mtp)
    return [
        ModuleVerdict("draft" if m.startswith(mtp) else "target", m, Verdict.CRASH, data["texts"]["never"], (m,))
        for m, kind in stored.units.items()
        if kind == "mxfp4" and f".{m}".endswith(tails)
    ]

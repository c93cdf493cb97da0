"""What every engine model has in common: runtime modules, verdicts, and comparing answers with what is stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import yaml
from packaging.version import Version

from glmquant.checkpoint.layers import Layers
from glmquant.errors import GlmquantError

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
        group: what it is to people (`attention`, `routed`, ...), as in exclusions/<model_type>.yaml.
    """

    role: str
    prefix: str
    kind: str
    parts: tuple[str, ...]
    shared: bool
    group: str


@dataclass(frozen=True, slots=True)
class Fp8Layers:
    """What a checkpoint says and holds of block-scaled FP8 modules; see block_fp8.py.

    Attributes:
        config: quantization_config.layer_quant_config: pattern -> how the modules that it finds are stored.
        default: quantization_config.global_quant_config: how all others are.
        scales: FP8 module -> the name of its scale, without the module's.
    """

    config: Mapping[str, Any]
    default: Any
    scales: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds: Linear module -> `mxfp4`, `plain` or another word for anything else.

    Routed experts are summed up per container: `containers` maps its name (`...mlp.experts`) to the set of formats
    in it, `projections` to the set of (last part of the name, format);
    `units` is `formats` with each container that is all of one format as one item.
    """

    formats: Mapping[str, str]
    containers: Mapping[str, frozenset[str]]
    projections: Mapping[str, frozenset[tuple[str, str]]]
    units: Mapping[str, str]
    layers: Layers
    fp8: Fp8Layers | None = None

    @staticmethod
    def of(formats: Mapping[str, str], layers: Layers, fp8: Fp8Layers | None = None) -> Stored:
        experts = f".{layers.container}." if layers.container else " "  # a blank is in no module's name
        projections: dict[str, set[tuple[str, str]]] = {}
        for module, kind in formats.items():
            head, marker, tail = module.partition(experts)
            if marker:
                projections.setdefault(head + experts[:-1], set()).add((tail.rpartition(".")[2], kind))
        containers = {name: frozenset(kind for _, kind in pairs) for name, pairs in projections.items()}
        units = {name: next(iter(kinds)) for name, kinds in containers.items() if len(kinds) == 1}
        for module, kind in formats.items():
            head, marker, _ = module.partition(experts)
            if not marker or head + experts[:-1] not in units:
                units[module] = kind
        frozen = {name: frozenset(pairs) for name, pairs in projections.items()}
        return Stored(formats, containers, frozen, units, layers, fp8)

    def parts(self, module: RuntimeModule) -> frozenset[tuple[str, str]]:
        """(last part of the name, format) of what is stored for a runtime module; empty when there is nothing."""
        if module.kind == "experts":
            return self.projections.get(module.parts[0], frozenset())
        return frozenset((part.rpartition(".")[2], self.formats[part]) for part in module.parts if part in self.formats)


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
    """One engine's model: its releases, what each makes of a list, and what then happens to a checkpoint.

    A release may only be asked about layers of a family that it is modelled for (`unmodelled` is '').
    """

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


@cache
def family_rules(name: str, family: str) -> dict[str, Any]:
    """What an engine does with a family of models, whatever the release: its own rules over the common ones.

    Raises:
        GlmquantError: the family is not modelled.
    """
    data = load_rules(name)
    rules = data["families"].get(family, {})
    if "blocks" not in rules:
        raise GlmquantError(f"{name} is not modelled for {family}", "Name other engines with --targets.")
    return {**data["common"], **rules}


def notes_on(name: str, family: str) -> tuple[str, ...]:
    """What an engine does with a family of models whatever the list says, worth knowing before it is served."""
    return tuple(family_rules(name, family).get("notes", ()))


@cache
def unmodelled(name: str, release: str, family: str) -> str:
    """Why nothing is said about a release and a family of models; '' where the release is modelled for it."""
    rules = load_rules(name)["families"].get(family)
    if rules is None:
        return f"not modelled for {family}"
    if "not_modelled" in rules:
        return f"not modelled for {family}: {rules['not_modelled']}"
    if Version(release) < Version(str(rules["since"])):
        return f"not modelled for {family} before {rules['since']}"
    return ""


@cache
def rules_for(name: str, release: str, family: str = "glm_moe_dsa") -> dict[str, Any]:
    """The rules of the newest listed release that is not newer than `release`; a family's own rules win.

    Raises:
        ValueError: the release is older than all that are modelled.
        GlmquantError: the release is not modelled for the family.
    """
    if reason := unmodelled(name, release, family):
        raise GlmquantError(f"{name} {release}: {reason}", "Name other engines or releases with --targets.")
    wanted = Version(release)
    releases = load_rules(name)["releases"]
    usable = [known for known in releases if Version(known) <= wanted]
    if not usable:
        raise ValueError(f"{name} {release} is older than the oldest modelled release {next(iter(releases))}")
    rules: dict[str, Any] = {**releases[max(usable, key=Version)]}
    for entry in family_rules(name, family).get("releases", ()):
        if Version(str(entry["release"])) <= wanted:
            rules |= {key: value for key, value in entry.items() if key != "release"}
    return rules


@lru_cache
def build_modules(name: str, layers: Layers) -> tuple[RuntimeModule, ...]:
    """An engine's asking modules for target and draft, from its YAML rows and the layer numbers."""
    rules, blocks = family_rules(name, layers.family), load_rules(name)["blocks"]
    prefix_of, target_prefix = rules["draft_prefixes"], rules.get("target_prefix", layers.prefix)
    rows: list[dict[str, Any]] = []
    modules: list[RuntimeModule] = []
    for item in rules["blocks"]:
        block, where = item if isinstance(item, list) else (item, "")
        rows += [{**row, "layers": where or row["layers"]} for row in blocks[block]]
    for row in rows:
        where = row["layers"]
        if where == "top":
            modules.append(_whole(row, ""))
            continue
        if where == "vision":
            modules += [_whole(row, str(number)) for number in layers.main(where)]
            continue
        for layer in layers.main(where):
            modules.append(_runtime("target", target_prefix.format(layer=layer), row, layers.at(layer)))
        if layers.also_mtp(where) and prefix_of:
            for layer in layers.mtp:
                draft = prefix_of["glue" if where == "mtp" else "decoder"].format(layer=layer)
                modules.append(_runtime("draft", draft, row, layers.at(layer)))
    return tuple(modules)


def _runtime(role: str, prefix: str, row: Mapping[str, Any], own: str) -> RuntimeModule:
    parts = tuple(own + part for part in row["parts"])
    return RuntimeModule(role, prefix + row["name"], row["kind"], parts, bool(row.get("shared")), row["group"])


def _whole(row: Mapping[str, Any], number: str) -> RuntimeModule:
    """A module whose names in the YAML file are whole; {layer} is the number of a block of the vision tower."""
    parts = tuple(part.replace("{layer}", number) for part in row["parts"])
    return RuntimeModule("target", row["name"].replace("{layer}", number), row["kind"], parts, False, row["group"])


@lru_cache
def containers_of(name: str, layers: Layers) -> dict[str, str]:
    """Role -> the prefix of all its expert containers at once, with * for the layer's number, where it has any."""
    found = {m.role: m.prefix for m in build_modules(name, layers) if m.kind == "experts"}
    return {role: re.sub(r"\.\d+\.", ".*.", prefix, count=1) for role, prefix in found.items()}


@cache
def consequence(name: str, release: str, key: str, family: str = "glm_moe_dsa") -> tuple[Verdict, str]:
    """What a release does about a mistake, in its own words, from `mistakes` of its YAML file.

    A family's own `mistakes` come first; the common ones hold for it too unless it says `common_mistakes: false`.

    `key` is looked up as it is, then without its last part behind a dot, and so on: `scale-shape.narrow.down`,
    `scale-shape.narrow`, `scale-shape`. A value is a text (it crashes with that), or a map `{ok: text}` or
    `{silent: text}`; or a list of these, each up to the release named by `until`.

    Raises:
        KeyError: the file does not know the mistake.
    """
    rules = family_rules(name, family)
    mistakes = {
        **(load_rules(name)["mistakes"] if rules.get("common_mistakes", True) else {}),
        **rules.get("mistakes", {}),
    }
    while key not in mistakes:
        if "." not in key:
            raise KeyError(key)
        key = key.rpartition(".")[0]
    entry = mistakes[key]
    for item in entry if isinstance(entry, list) else [entry]:
        if isinstance(item, str):
            return Verdict.CRASH, item
        if "until" in item and Version(release) > Version(str(item["until"])):
            continue
        for word, verdict in (("crash", Verdict.CRASH), ("silent", Verdict.SILENT), ("ok", Verdict.OK)):
            if word in item:
                return verdict, item[word]
    raise KeyError(f"{key}: nothing said about {name} {release}")


def compare(
    name: str, release: str, family: str, module: RuntimeModule, answer: bool | str, parts: Iterable[tuple[str, str]]
) -> ModuleVerdict:
    """Verdict for one module: what the engine builds (`answer`: un-quantized?) against what is stored.

    `answer` is a text where the engine raises while deciding; `parts` is what Stored.parts says.
    """
    if isinstance(answer, str):
        return ModuleVerdict(module.role, module.prefix, Verdict.CRASH, answer, module.parts)
    built = "plain" if answer else "mxfp4"
    wrong = {
        f"{module.kind}.built_{built}.{'down' if projection == 'down_proj' else 'other'}"
        for projection, kind in parts
        if kind != built and kind in ("plain", "mxfp4")  # other dtypes are no matter of the list
    }
    verdict, text = Verdict.OK, ""
    if wrong:
        verdict, text = max((consequence(name, release, key, family) for key in sorted(wrong)), key=_severity)
    return ModuleVerdict(module.role, module.prefix, verdict, text, module.parts)


def _severity(found: tuple[Verdict, str]) -> int:
    return list(Verdict).index(found[0])


def unserved(name: str, layers: Layers) -> list[ModuleVerdict]:
    """Layers of a kind that an engine builds as if they were of another, whatever the list says."""
    return [
        ModuleVerdict("target", layers.at(layer).rstrip("."), Verdict.SILENT, text, ())
        for kind, text in family_rules(name, layers.family).get("unserved", {}).items()
        for layer in layers.main(kind)
    ]


def never_quantized(name: str, release: str, stored: Stored) -> list[ModuleVerdict]:
    """Packed modules that an engine always builds un-quantized, whatever the list says."""
    family = stored.layers.family
    tails = tuple("." + tail for tail in family_rules(name, family)["never_quantized"])
    mtp = tuple(stored.layers.at(layer) for layer in stored.layers.mtp)
    return [
        ModuleVerdict("draft" if m.startswith(mtp) else "target", m, *consequence(name, release, "never", family), (m,))
        for m, kind in stored.units.items()
        if kind == "mxfp4" and f".{m}".endswith(tails)
    ]

"""sglang's Quark loader: matching of exclude entries, the draft's list, and the shared-expert fusion gate.

Rules that differ by release are data (sglang.yaml); sources are named there and below, relative to sglang/srt/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from glmquant.checkpoint.layers import Layers
from glmquant.engines.matching import ShardMatcher, renamed
from glmquant.engines.model import (
    DISABLE_FUSION,
    Answers,
    Evaluation,
    ModuleVerdict,
    RuntimeModule,
    Stored,
    Verdict,
    build_modules,
    compare,
    containers_of,
    family_rules,
    load_rules,
    never_quantized,
    rules_for,
    unserved,
)


class Sglang:
    """The Engine of sglang; stateless."""

    name = "sglang"

    def releases(self) -> Sequence[str]:
        return list(load_rules(self.name)["releases"])

    def answers(self, release: str, exclude: Sequence[str], layers: Layers) -> Answers:
        rules = rules_for(self.name, release, layers.family)
        target = _matcher(_as_read("target", exclude, rules, layers), rules, layers)
        matchers = {"target": target, "draft": draft_matcher(exclude, rules, layers)}
        return [
            (module, True if matcher is None else matcher.ignored(module.prefix, module.kind == "experts"))
            for module in build_modules(self.name, layers)
            for matcher in (matchers[module.role],)
        ]

    def evaluate(self, release: str, exclude: Sequence[str], stored: Stored, flags: Iterable[str] = ()) -> Evaluation:
        family = stored.layers.family
        rules, flags = rules_for(self.name, release, family), tuple(flags)
        fused = {
            role: DISABLE_FUSION not in flags and self.fuses(role, release, exclude, stored.layers)
            for role in ("target", "draft")
        }
        layers = stored.layers
        if rules["indexer_everywhere"]:  # matters where a shared layer brings indexer tensors all the same
            layers = replace(layers, indexer=frozenset(range(layers.count)))
        answers = self.answers(release, exclude, layers)
        shared_of = _shared_by_container(stored.layers)
        verdicts: list[ModuleVerdict] = []
        for module, answer in answers:
            if module.shared and fused[module.role]:
                continue
            verdict = compare(self.name, release, family, module, answer, stored.parts(module))
            if verdict.verdict is Verdict.OK and module.kind == "experts" and fused[module.role]:
                verdict = self._fused_verdict(release, module, answer, shared_of[module.parts[0]], stored)
            verdicts.append(verdict)
        verdicts += self._lost_fusion(rules, exclude, stored, flags) + never_quantized(self.name, release, stored)
        verdicts += unserved(self.name, stored.layers)
        faults = tuple(v for v in verdicts if v.verdict is not Verdict.OK)
        return Evaluation(self.name, release, faults, len(answers), fused["target"], fused["draft"], flags)

    def fuses(self, role: str, release: str, exclude: Iterable[str], layers: Layers) -> bool:
        """Whether the shared expert of `target` or `draft` is fused into the container of routed experts."""
        rules = rules_for(self.name, release, layers.family)
        if role == "draft" and not (rules["draft_fuses"] and layers.mtp):
            return False
        own, exclude = family_rules(self.name, layers.family), tuple(exclude)
        if role in own.get("never_fuses", ()) or not self._eligible(layers):
            return False
        if own.get("fuses_unlisted_only") and any(
            answer is not False
            for module, answer in self.answers(release, exclude, layers)
            if module.role == role and (module.shared or module.kind == "experts")
        ):
            return False
        return veto(_as_read(role, exclude, rules, layers), rules, layers) is None

    def _has_draft(self, rules: Mapping[str, Any], layers: Layers) -> bool:
        return bool(rules["draft_fuses"] and layers.mtp)

    def _eligible(self, layers: Layers) -> bool:
        data = family_rules(self.name, layers.family)
        return (
            layers.routed_experts in data["fusion_routed_experts"]
            and layers.shared_experts == data["fusion_shared_experts"]
        )

    def _fused_verdict(
        self,
        release: str,
        module: RuntimeModule,
        answer: bool | str,
        shared: Sequence[RuntimeModule],
        stored: Stored,
    ) -> ModuleVerdict:
        """The shared expert as one more expert of its container, which is built as the list says of the container."""
        pairs = {pair for m in shared for pair in stored.parts(m)}
        verdict = compare(self.name, release, stored.layers.family, module, answer, pairs)
        if verdict.verdict is Verdict.OK:
            return verdict
        text = load_rules(self.name)["mistakes"]["fused_shared"].format(error=verdict.message)
        parts = tuple(part for m in shared for part in m.parts)
        return ModuleVerdict(module.role, module.prefix, verdict.verdict, text, parts)

    def _lost_fusion(
        self, rules: Mapping[str, Any], exclude: Sequence[str], stored: Stored, flags: Sequence[str]
    ) -> list[ModuleVerdict]:
        """Fusion that the formats would allow but an entry vetoes: costs speed only."""
        layers = stored.layers
        never = family_rules(self.name, layers.family).get("never_fuses", ())
        roles = [r for r in ("target", "draft") if r not in never and (r == "target" or self._has_draft(rules, layers))]
        vetoes = {role: veto(_as_read(role, exclude, rules, layers), rules, layers) for role in roles}
        if not any(vetoes.values()) or not self._eligible(layers):
            return []
        modules = build_modules(self.name, layers)
        kinds = {
            role: {
                k for m in modules if m.role == role and (m.shared or m.kind == "experts") for _, k in stored.parts(m)
            }
            for role in ("target", "draft")
        }
        if len(kinds["target"]) != 1:  # the veto is needed: the gate answers for the whole model
            return []
        text, prefix = load_rules(self.name)["mistakes"]["unfused"], containers_of(self.name, layers)
        return [
            ModuleVerdict(role, prefix[role], Verdict.SLOW, text.format(entry=entry), (entry,))
            for role, entry in vetoes.items()
            if entry is not None and len(kinds[role]) == 1
        ]


def _as_read(role: str, exclude: Iterable[str], rules: Mapping[str, Any], layers: Layers) -> list[str]:
    """The list as the class of `target` or `draft` renames it, before anything reads it.

    Source: model_loader/loader.py 0.5.23:266-280, layers/quantization/quark/quark.py apply_weight_name_mapper
    (0.5.13:101-108, 0.5.23:404-411), which every draft class has.
    """
    own = family_rules("sglang", layers.family)
    if role == "target" and not own["mapper"]:
        return list(exclude)
    mapper = _mapper(role, rules, layers)
    names = [renamed(entry, mapper) for entry in exclude]
    return [*names, *(name.removeprefix("language_model.") for name in names if name.startswith("language_model."))]


def _mapper(role: str, rules: Mapping[str, Any], layers: Layers) -> Mapping[str, Mapping[str, str]]:
    own = family_rules("sglang", layers.family)
    if role == "target":
        return own["mapper"]  # type: ignore[no-any-return]
    if rules["draft_list"] != "mapped":
        return {}
    mappers = (own["mapper"], own["draft_mapper"])
    return {
        kind: {old.replace("{mtp}", str(layers.count)): new for m in mappers for old, new in m.get(kind, {}).items()}
        for kind in ("substrings", "prefixes", "suffixes")
    }


def veto(exclude: Iterable[str], rules: Mapping[str, Any], layers: Layers) -> str | None:
    """The first entry that switches shared-expert fusion off, if any.

    Source: layers/quantization/quark/quark.py can_fuse_shared_expert (0.5.18:898-907, 0.5.19:910-945,
    0.5.23:1085-1119): a substring test on the entries' text, whatever they match.
    """
    if rules["veto"] == "none":
        return None
    exempt = ["mtp."]
    if rules["veto"] == "not_mtp":
        exempt += [f"model.layers.{layer}." for layer in layers.mtp]
    for entry in exclude:
        if "shared_expert" in entry and "shared_expert_gate" not in entry and not entry.startswith(tuple(exempt)):
            return entry
    return None


def _matcher(exclude: Iterable[str], rules: Mapping[str, Any], layers: Layers) -> ShardMatcher:
    return ShardMatcher(
        exclude,
        family_rules("sglang", layers.family)["packed_modules"],
        fused_name=rules["fused_name"],
        container_leaf=rules["container_leaf"],
        conflict=load_rules("sglang")["mistakes"]["pair"],
    )


def draft_matcher(exclude: Sequence[str], rules: Mapping[str, Any], layers: Layers) -> ShardMatcher | None:
    """The matcher over the draft's own list; None where the whole draft is built un-quantized.

    Source: models/deepseek_nextn.py:327-366 (<= 0.5.15.post1), models/glm4_moe.py:1489-1536 (>= 0.5.16);
    models/glm5_next_nextn.py:36-53.
    """
    layer_prefix = f"model.layers.{layers.count}"
    exclude = _as_read("draft", exclude, rules, layers)
    if rules["draft_list"] == "mapped":
        matcher = _matcher(exclude, rules, layers)
        return None if matcher.entry(renamed(layer_prefix, _mapper("draft", rules, layers))) else matcher
    own = [entry for entry in exclude if entry.startswith(layer_prefix + ".")]
    names = [*exclude, *(draft_name(entry, layer_prefix, layers.family) for entry in own)]
    if any(".mlp.experts." in entry for entry in own):
        names.append("model.decoder.mlp.experts")
    return _matcher(names, rules, layers)


def draft_name(name: str, layer_prefix: str, family: str = "glm_moe_dsa") -> str:
    """`_map_mtp_ckpt_name` of models/glm4_moe.py (0.5.16:1481)."""
    glue = any(part in name for part in family_rules("sglang", family)["draft_glue"])
    return name.replace(layer_prefix, "model" if glue else "model.decoder", 1)


@lru_cache
def _shared_by_container(layers: Layers) -> dict[str, list[RuntimeModule]]:
    """Expert container -> the shared expert's modules of the same layer, by checkpoint name."""
    modules = build_modules("sglang", layers)
    found: dict[str, list[RuntimeModule]] = {m.parts[0]: [] for m in modules if m.kind == "experts"}
    for module in modules:
        if module.shared:
            found[module.parts[0].partition(f".{layers.shared}.")[0] + f".{layers.container}"].append(module)
    return found

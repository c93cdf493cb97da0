"""Engines that read one list under the checkpoint's own names: vLLM, ATOM and Quark's importer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from glmquant.checkpoint.layers import Layers
from glmquant.engines.matching import AtomMatcher, GlobMatcher, Matcher, ShardMatcher, renamed
from glmquant.engines.model import (
    Answers,
    Evaluation,
    Stored,
    Verdict,
    build_modules,
    compare,
    family_rules,
    load_rules,
    never_quantized,
    rules_for,
    unserved,
)


class SingleListEngine(ABC):
    """Shared by engines that differ only in how an entry matches."""

    name: str

    def releases(self) -> Sequence[str]:
        return list(load_rules(self.name)["releases"])

    @abstractmethod
    def matcher(self, release: str, exclude: Sequence[str], layers: Layers) -> Matcher:
        """How this engine reads the list."""

    def answers(self, release: str, exclude: Sequence[str], layers: Layers) -> Answers:
        matcher = self.matcher(release, exclude, layers)
        return [(m, matcher.ignored(m.prefix, m.kind == "experts")) for m in build_modules(self.name, layers)]

    def evaluate(self, release: str, exclude: Sequence[str], stored: Stored, flags: Iterable[str] = ()) -> Evaluation:
        answers, family = self.answers(release, exclude, stored.layers), stored.layers.family
        verdicts = [compare(self.name, release, family, asking, how, stored.parts(asking)) for asking, how in answers]
        verdicts += never_quantized(self.name, release, stored) + unserved(self.name, stored.layers)
        faults = tuple(v for v in verdicts if v.verdict is not Verdict.OK)
        return Evaluation(self.name, release, faults, len(answers), False, False, tuple(flags))


class Vllm(SingleListEngine):
    """vLLM on ROCm; see vllm.yaml."""

    name = "vllm"

    def matcher(self, release: str, exclude: Sequence[str], layers: Layers) -> Matcher:
        rules, own = rules_for(self.name, release, layers.family), family_rules(self.name, layers.family)
        return ShardMatcher(
            [renamed(entry, own.get("mapper", {})) for entry in exclude],
            own["packed_modules"],
            fused_name=rules["fused_name"],
            container_leaf=rules["container_leaf"],
            conflict=load_rules(self.name)["mistakes"]["pair"],
        )


class Atom(SingleListEngine):
    """ROCm/ATOM; see atom.yaml."""

    name = "atom"

    def matcher(self, release: str, exclude: Sequence[str], layers: Layers) -> Matcher:
        return AtomMatcher(exclude, family_rules(self.name, layers.family)["shard_to_fused"])


class QuarkImporter(SingleListEngine):
    """AMD Quark's importer over transformers' model; see quark.yaml."""

    name = "quark"

    def matcher(self, release: str, exclude: Sequence[str], layers: Layers) -> Matcher:
        return GlobMatcher(exclude, layers.routed_experts, load_rules(self.name)["mistakes"]["some"])

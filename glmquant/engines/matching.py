"""How one exclude list answers for one module prefix: the matchers of sglang and vLLM, and of ATOM.

Differences between releases are arguments; which release has which is in the engines' YAML files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from glmquant.engines.patterns import any_of, check_list

PackedModules = Mapping[str, Sequence[str]]


class Matcher(Protocol):
    """Answers whether a module is un-quantized; a text where the engine raises instead."""

    def ignored(self, prefix: str, is_container: bool) -> bool | str: ...


def _has_below(ordered: Sequence[str], parent: str) -> bool:
    """Whether a sorted list has an entry below a module."""
    at = bisect_left(ordered, parent + ".")
    return at < len(ordered) and ordered[at].startswith(parent + ".")


def _regexes(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(entry for entry in entries if entry.startswith("re:"))


class ShardMatcher:
    """`should_ignore_layer` of the compressed-tensors family: exact names, `re:` patterns, fused names by shard.

    Source: sglang srt/layers/quantization/quark/utils.py (0.5.13-0.5.23),
    vLLM 0.33.0 model_executor/layers/quantization/quark/utils.py and utils/config_utils.py.

    Args:
        packed: fused name -> names of its shards.
        fused_name: whether the fused name itself, or a regex on it, matches first.
        container_leaf: whether one literal entry below an expert container excludes the container.
        conflict: text of the error when shards disagree, with {shards} and {module}.
    """

    def __init__(
        self, exclude: Iterable[str], packed: PackedModules, *, fused_name: bool, container_leaf: bool, conflict: str
    ) -> None:
        entries = check_list(exclude)
        self._literals = {entry for entry in entries if not entry.startswith("re:")}
        self._matches = any_of(_regexes(entries), "match")
        self._experts = sorted(entry for entry in self._literals if ".experts." in entry)
        self._packed, self._conflict = packed, conflict
        self._fused_name, self._container_leaf = fused_name, container_leaf

    def entry(self, name: str) -> bool:
        """Exact, or `re.match` (anchored at the start only) after `re:`."""
        return name in self._literals or self._matches(name)

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        last = prefix.rpartition(".")[2]
        if self._fused_name and self.entry(prefix):
            return True
        if self._container_leaf and is_container and _has_below(self._experts, prefix):
            return True
        if last not in self._packed:
            return self.entry(prefix)
        answers = {self.entry(prefix.replace(last, shard)) for shard in self._packed[last]}
        if len(answers) > 1:
            return self._conflict.format(shards=list(self._packed[last]), module=prefix)
        return answers.pop()


class AtomMatcher:
    """ATOM's exclude list: exact names and parents, globs, `re:` with re.search, children of expert containers.

    Entries are first rewritten to fused names (`.gate_proj` to `.gate_up_proj`), so half a pair excludes the whole.
    Source: ROCm/ATOM atom/config.py QuantizationConfig._is_excluded, _matches_exclude, remap_layer_name (00afbe32).
    """

    def __init__(self, exclude: Iterable[str], shard_to_fused: Mapping[str, str]) -> None:
        entries = check_list(remap(entry, shard_to_fused) for entry in exclude)
        self._found = any_of(_regexes(entries), "search")
        plain = [entry for entry in entries if not entry.startswith("re:")]
        globs = [entry for entry in plain if "*" in entry or "?" in entry]
        self._globs = any_of((*globs, *(glob + ".*" for glob in globs)), "glob")
        self._literals = {entry for entry in plain if not ("*" in entry or "?" in entry)}
        self._ordered = sorted(entries)

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        if is_container and _has_below(self._ordered, prefix):
            return True
        parts = prefix.split(".")
        return (
            any(".".join(parts[: i + 1]) in self._literals for i in range(len(parts)))
            or self._found(prefix)
            or self._globs(prefix)
        )


def renamed(entry: str, mapper: Mapping[str, Mapping[str, str]]) -> str:
    """An entry as the WeightsMapper of a model class rewrites it: once by `substrings`, `prefixes` and `suffixes` each.

    The longest that fits wins, so a regex, whose dots are escaped, mostly stays as it is.
    Source: sglang 0.5.23 srt/models/utils.py:54-103 and quark.py apply_weight_name_mapper; vLLM 0.33.0
    model_executor/models/utils.py:131-136 and quark.py:133-161, which tries the prefixes one after the other.
    """

    def longest(kind: str) -> Sequence[tuple[str, str]]:
        return sorted(mapper.get(kind, {}).items(), key=lambda rule: -len(rule[0]))

    for old, new in longest("substrings"):
        if old in entry:
            entry = entry.replace(old, new, 1)
            break
    for old, new in longest("prefixes"):
        if entry.startswith(old):
            entry = new + entry.removeprefix(old)
            break
    for old, new in longest("suffixes"):
        if entry.endswith(old):
            entry = entry.removesuffix(old) + new
            break
    return entry


def remap(entry: str, shard_to_fused: Mapping[str, str]) -> str:
    for shard, fused in shard_to_fused.items():
        if f".{shard}" in entry:
            return entry.replace(shard, fused, 1)
    return entry


class GlobMatcher:
    """Quark's own reading: every entry is a glob over the checkpoint name; an expert container is its experts.

    Source: Quark 0.13 torch/export/main_export/quant_config_parser.py:61-98 (get_layer_quant_config).

    Args:
        experts: experts per container.
        some: the answer where only some experts of a container match.
    """

    def __init__(self, exclude: Iterable[str], experts: int, some: str) -> None:
        entries = check_list(exclude)
        special = set("*?[")
        self._globs = any_of(tuple(entry for entry in entries if special & set(entry)), "glob")
        self._literals = {entry for entry in entries if not special & set(entry)}
        self._some = some
        self._leaves = [f".{e}.{part}_proj" for e in range(experts) for part in ("gate", "up", "down")]

    def _entry(self, name: str) -> bool:
        return name in self._literals or self._globs(name)

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        if not is_container:
            return self._entry(prefix)
        answers = {self._entry(prefix + leaf) for leaf in self._leaves}
        return self._some if len(answers) > 1 else answers == {True}

"""How one exclude list answers for one module prefix: the matchers of sglang and vLLM, and of ATOM.

Differences between releases are arguments; which release has which is in the engines' YAML files.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from glmquant.errors import ExclusionError

PackedModules = Mapping[str, Sequence[str]]


class Matcher(Protocol):
    """Answers whether a module is un-quantized; a text where the engine raises instead."""

    def ignored(self, prefix: str, is_container: bool) -> bool | str: ...


def _patterns(entries: Iterable[str]) -> list[re.Pattern[str]]:
    """The `re:` entries compiled; engines raise re.error here while they build the model."""
    found = []
    for entry in entries:
        if entry.startswith("re:"):
            try:
                found.append(re.compile(entry[3:]))
            except (re.error, RecursionError, OverflowError) as err:
                raise ExclusionError(f"entry {entry!r} is not a valid regular expression: {err}") from err
    return found


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
        entries = list(dict.fromkeys(exclude))
        self._literals = {entry for entry in entries if not entry.startswith("re:")}
        self._patterns = _patterns(entries)
        self._containers = {
            entry[: found.end() - 1] for entry in self._literals for found in re.finditer(r"\.experts\.", entry)
        }
        self._packed, self._conflict = packed, conflict
        self._fused_name, self._container_leaf = fused_name, container_leaf

    def entry(self, name: str) -> bool:
        """Exact, or `re.match` (anchored at the start only) after `re:`."""
        return name in self._literals or any(pattern.match(name) for pattern in self._patterns)

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        last = prefix.rpartition(".")[2]
        if self._fused_name and self.entry(prefix):
            return True
        if self._container_leaf and is_container and prefix in self._containers:
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
        entries = list(dict.fromkeys(_remap(entry, shard_to_fused) for entry in exclude))
        self._patterns = _patterns(entries)
        plain = [entry for entry in entries if not entry.startswith("re:")]
        self._globs = [entry for entry in plain if "*" in entry or "?" in entry]
        self._literals = {entry for entry in plain if not ("*" in entry or "?" in entry)}
        self._parents = {entry[: dot.start()] for entry in entries for dot in re.finditer(r"\.", entry)}

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        if is_container and prefix in self._parents:
            return True
        parts = prefix.split(".")
        return (
            any(".".join(parts[: i + 1]) in self._literals for i in range(len(parts)))
            or any(pattern.search(prefix) for pattern in self._patterns)
            or any(fnmatch.fnmatch(prefix, g) or fnmatch.fnmatch(prefix, g + ".*") for g in self._globs)
        )


def _remap(entry: str, shard_to_fused: Mapping[str, str]) -> str:
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
        entries = list(dict.fromkeys(exclude))
        special = set("*?[")
        self._globs = [re.compile(fnmatch.translate(entry)) for entry in entries if special & set(entry)]
        self._literals = {entry for entry in entries if not special & set(entry)}
        self._some = some
        self._leaves = [f".{e}.{part}_proj" for e in range(experts) for part in ("gate", "up", "down")]

    def _entry(self, name: str) -> bool:
        return name in self._literals or any(glob.match(name) for glob in self._globs)

    def ignored(self, prefix: str, is_container: bool = False) -> bool | str:
        if not is_container:
            return self._entry(prefix)
        answers = {self._entry(prefix + leaf) for leaf in self._leaves}
        return self._some if len(answers) > 1 else answers == {True}

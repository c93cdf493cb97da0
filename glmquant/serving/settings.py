"""profiles.yaml as values: what a row says, and whether it applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

# What profiles.yaml has; named here too, so that --help need not read it.
ENGINES = ("sglang", "vllm", "atom")
PROFILES = ("latency", "throughput")


@dataclass(frozen=True, slots=True)
class Profile:
    """How a node is divided: `tp` GPUs for each of `dp` replicas; the MTP layer drafts `draft_depth` tokens ahead."""

    name: str
    about: str
    tp: int
    dp: int
    draft_depth: int


@dataclass(frozen=True, slots=True)
class Row:
    """An environment variable or a flag, and when it applies; `value` is None for a switch."""

    name: str
    value: str | None
    reason: str
    source: str
    when: str = ""
    profiles: tuple[str, ...] = ()
    releases: str = ""

    def applies(self, profile: str, release: str, conditions: Mapping[str, bool]) -> bool:
        return (
            (not self.when or conditions[self.when])
            and (not self.profiles or profile in self.profiles)
            and in_range(release, self.releases)
        )


@dataclass(frozen=True, slots=True)
class DraftLimit:
    """The deepest draft that a range of releases can run well; `guard`: unless fused_metadata_copy.cuh is mended."""

    releases: str
    depth: int
    reason: str
    source: str
    guard: bool


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All rows of one engine.

    Attributes:
        package: what its release is looked up under.
        expert_parallel: `any` number of ranks, or `all` (tp x dp) or none.
    """

    name: str
    releases: str
    package: str
    expert_parallel: str
    command: tuple[str, ...]
    env: tuple[Row, ...]
    flags: tuple[Row, ...]
    draft_limits: tuple[DraftLimit, ...]
    notes: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A node: GPUs, bytes of memory of one, and what its kernels are looked up under."""

    gpus: int
    memory: int
    gfx: str
    compute_units: int


def in_range(release: str, specifier: str) -> bool:
    return not specifier or SpecifierSet(specifier).contains(Version(release).public, prereleases=True)


def profiles() -> Mapping[str, Profile]:
    return {name: Profile(name, **values) for name, values in _data()["profiles"].items()}


def hardware() -> Hardware:
    return Hardware(**_data()["hardware"])


def engine_settings(name: str) -> EngineSettings:
    data = _data()["engines"][name]
    return EngineSettings(
        name,
        data["releases"],
        data["package"],
        data["expert_parallel"],
        tuple(data["command"]),
        _rows(data["env"], "name"),
        _rows(data["flags"], "flag"),
        tuple(
            DraftLimit(row["releases"], row["depth"], row["reason"], row["source"], row.get("guard", False))
            for row in data["draft_limits"]
        ),
        tuple(Row("", None, row["text"], "", row.get("when", "")) for row in data["notes"]),
    )


def _rows(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[Row, ...]:
    return tuple(
        Row(
            row[key],
            row.get("value"),
            row["reason"],
            row["source"],
            row.get("when", ""),
            tuple(row.get("profiles", ())),
            row.get("releases", ""),
        )
        for row in rows
    )


@lru_cache
def _data() -> Any:
    return yaml.safe_load((Path(__file__).parent / "profiles.yaml").read_text(encoding="utf-8"))

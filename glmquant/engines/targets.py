"""Target engines by name and release range, e.g. `sglang>=0.5.13,vllm`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from glmquant.engines.block_fp8 import faults
from glmquant.engines.model import DISABLE_FUSION, Engine, Evaluation, Stored, notes_on, unmodelled
from glmquant.engines.sglang import Sglang
from glmquant.engines.single_list import Atom, QuarkImporter, Vllm
from glmquant.errors import GlmquantError

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Sglang(), Vllm(), Atom(), QuarkImporter())}
DEFAULT_TARGETS = "sglang>=0.5.13,vllm"


@dataclass(frozen=True, slots=True)
class Target:
    """One release of one engine."""

    engine: str
    release: str

    def __str__(self) -> str:
        return f"{self.engine} {self.release}"


def parse_targets(text: str) -> tuple[Target, ...]:
    """Modelled releases that a comma-separated list of `engine[PEP 440 specifier]` names; items are united.

    Raises:
        GlmquantError: unknown engine, bad specifier, or no modelled release in the range.
    """
    targets: list[Target] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([a-z]+)\s*([<>=!~].*)?", item)
        if not found or found[1] not in ENGINES:
            raise GlmquantError(
                f"unknown target {item!r}", f"Write e.g. {DEFAULT_TARGETS!r}; engines: {', '.join(ENGINES)}."
            )
        engine, spec = ENGINES[found[1]], found[2] or ""
        try:
            accepted = SpecifierSet(spec)
        except InvalidSpecifier as err:
            raise GlmquantError(f"target {item!r}: {err}") from err
        releases = [r for r in engine.releases() if r in accepted]
        if not releases:
            raise GlmquantError(f"target {item!r}: no known release", f"Known: {', '.join(engine.releases())}.")
        targets += [Target(engine.name, release) for release in releases]
    if not targets:
        raise GlmquantError("no target given", f"Write e.g. {DEFAULT_TARGETS!r}.")
    return tuple(dict.fromkeys(targets))


def split_modelled(targets: Sequence[Target], family: str) -> tuple[list[Target], dict[str, list[Target]]]:
    """The targets whose models know a family of models, and reason -> the others: nothing is guessed about those."""
    known: list[Target] = []
    unknown: dict[str, list[Target]] = {}
    for target in targets:
        if reason := unmodelled(target.engine, target.release, family):
            unknown.setdefault(reason, []).append(target)
        else:
            known.append(target)
    return known, unknown


def engine_notes(targets: Sequence[Target], family: str) -> dict[str, list[Target]]:
    """What some of the (modelled) targets do with a family of models whatever the list says."""
    found: dict[str, list[Target]] = {}
    for target in targets:
        for note in notes_on(target.engine, family):
            found.setdefault(note, []).append(target)
    return found


def evaluate(target: Target, exclude: Sequence[str], stored: Stored) -> Evaluation:
    """A release's verdict; with the launch flag that makes it load, if it does not load without."""
    plain = _evaluate(target, exclude, stored)
    if plain.loads:
        return plain
    flagged = _evaluate(target, exclude, stored, [DISABLE_FUSION])
    return flagged if flagged.loads else plain


def _evaluate(target: Target, exclude: Sequence[str], stored: Stored, flags: Sequence[str] = ()) -> Evaluation:
    engine = ENGINES[target.engine]
    found = engine.evaluate(target.release, exclude, stored, flags)
    return replace(found, faults=(*found.faults, *faults(engine, target.release, exclude, stored, flags)))


def span(targets: Sequence[Target]) -> str:
    """Short text for a run of releases: `sglang 0.5.13.post1-0.5.17, vllm 0.33.0`."""
    parts = []
    for name in dict.fromkeys(target.engine for target in targets):
        wanted = {target.release for target in targets if target.engine == name}
        for hit, run in groupby(ENGINES[name].releases(), key=wanted.__contains__):
            releases = list(run)
            if hit:
                parts.append(f"{name} {releases[0]}" + (f"-{releases[-1]}" if len(releases) > 1 else ""))
    return ", ".join(parts)

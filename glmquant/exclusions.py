"""Which modules are un-quantized, spelled so that every target engine release hears it.

The list is the complement of what is packed, never written by hand. Names in the main layers are the checkpoint's
own; for the MTP layer, which draft models rename, several forms are tried and each is put to the engine models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glmquant.checkpoint.layers import Layers
from glmquant.engines.model import DISABLE_FUSION, Evaluation, Stored, Verdict
from glmquant.engines.targets import ENGINES, Target, span
from glmquant.errors import ExclusionError
from glmquant.recipe import Architecture


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the exclude list.

    Attributes:
        text: what is written; a literal module name, or a regex after `re:`.
        origin: `checkpoint` (the module's own name), `container` (all routed experts of a layer), `alias` (the name
            an engine's draft model uses) or `regex` (stands for a whole layer under one of its names).
        module: the checkpoint module or layer it stands for.
        source: the alias rule it comes from, '' for checkpoint names.
    """

    text: str
    origin: str
    module: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What a user must do for some releases: `flag` is a launch flag, '' if there is only something to know."""

    releases: str
    flag: str
    reason: str

    def __str__(self) -> str:
        return f"{self.releases}: {'needs ' + self.flag + ': ' if self.flag else ''}{self.reason}"


@dataclass(frozen=True)
class ExclusionList:
    """A list that every target loads with, and what it costs where.

    Attributes:
        form: the name of the chosen form for the MTP layer.
        needs: launch flags and speed notes, per range of releases.
        evaluations: what the engine models say per target.
    """

    entries: tuple[Entry, ...]
    form: str
    targets: tuple[Target, ...]
    needs: tuple[Need, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def texts(self) -> list[str]:
        """The strings for quantization_config.exclude."""
        return [entry.text for entry in self.entries]


def resolve(
    formats: Mapping[str, str], layers: Layers, architecture: Architecture, targets: Sequence[Target]
) -> ExclusionList:
    """Choose the list for a set of stored formats.

    Args:
        formats: Linear checkpoint module -> `mxfp4` or `plain`.
        targets: engine releases that must load the checkpoint.

    Raises:
        ExclusionError: no form loads on every target, not even with a launch flag. The message names the release,
            the module and the engine's error.
    """
    stored = Stored.of(formats, layers)
    main = list(_main_entries(stored, architecture))
    best: tuple[tuple[int, ...], ExclusionList, list[Evaluation]] | None = None
    for number, (form, mtp) in enumerate(_mtp_forms(stored, architecture)):
        entries = tuple({entry.text: entry for entry in [*main, *mtp]}.values())
        texts = [entry.text for entry in entries]
        evaluations, broken = [], []
        for target in targets:
            outcome = _evaluate(target, texts, stored)
            evaluations.append(outcome)
            if not outcome.loads:
                broken.append(outcome)
        flagged = sum(bool(e.flags) for e in evaluations)
        slow = sum(e.verdict is Verdict.SLOW for e in evaluations)
        found = ExclusionList(entries, form, tuple(targets), tuple(_needs(evaluations)), tuple(evaluations))
        score = (len(broken), flagged, slow, number)
        if best is None or score < best[0]:
            best = (score, found, broken)
    assert best is not None, "there is always at least one form"
    _, chosen, broken = best
    if broken:
        raise _conflict(broken)
    return chosen


def _evaluate(target: Target, texts: Sequence[str], stored: Stored) -> Evaluation:
    engine = ENGINES[target.engine]
    plain = engine.evaluate(target.release, texts, stored)
    if plain.loads:
        return plain
    flagged = engine.evaluate(target.release, texts, stored, [DISABLE_FUSION])
    return flagged if flagged.loads else plain


def _main_entries(stored: Stored, architecture: Architecture) -> Iterator[Entry]:
    for module in _natural_order(stored.formats):
        if stored.formats[module] == "plain" and not _is_mtp(module, stored, architecture):
            yield from _literal(module, stored, "checkpoint")


def _literal(module: str, stored: Stored, origin: str) -> Iterator[Entry]:
    """A module's entry; a wholly un-quantized expert container stands for all its experts.

    Engines ask for the container: sglang < 0.5.21 knows no expert by name, so leaves alone would not match.
    """
    head, marker, _ = module.partition(".mlp.experts.")
    container = head + ".mlp.experts"
    if marker and stored.containers[container] == {"plain"}:
        yield Entry(container, "container", container)
    else:
        yield Entry(module, origin, module)


def _mtp_forms(stored: Stored, architecture: Architecture) -> Iterator[tuple[str, list[Entry]]]:
    """Ways to say which MTP modules are un-quantized, best liked first."""
    modules = [m for m in _natural_order(stored.formats) if _is_mtp(m, stored, architecture)]
    plain = [m for m in modules if stored.formats[m] == "plain"]
    if not plain:
        yield "none", []
        return
    if len(plain) == len(modules):
        yield "regex", list(_whole_layer_regexes(plain, stored.layers, architecture))
    leaves = [entry for module in plain for entry in _literal(module, stored, "checkpoint")]
    aliases = [
        Entry(name, "alias", entry.text, alias.source)
        for entry in dict.fromkeys(leaves)
        for name, alias in architecture.mtp_aliases(entry.text, stored.layers)
    ]
    quiet = [entry for entry in aliases if "shared_expert" not in entry.text]
    yield "literal", leaves + quiet
    yield "literal, shared experts under every alias", leaves + aliases
    bare = [
        Entry(architecture.mtp_prefix.format(layer=layer).rstrip("."), "alias", f"layer {layer}")
        for layer in stored.layers.mtp
    ]
    yield "literal and bare layer", leaves + bare
    yield "literal under checkpoint names", leaves


def _whole_layer_regexes(plain: Sequence[str], layers: Layers, architecture: Architecture) -> Iterator[Entry]:
    """One entry per name the layer goes by. None has the text `shared_expert`, so fusion stays on."""
    for layer in layers.mtp:
        prefix = architecture.mtp_prefix.format(layer=layer).rstrip(".")
        yield Entry(rf"re:{re.escape(prefix)}(\..*)?$", "regex", prefix)
    for alias in architecture.aliases:
        if alias.modules == ("*",):
            yield Entry(f"re:{re.escape(alias.to.format(rest=''))}.*", "regex", "the MTP layer", alias.source)
            continue
        for module in plain:
            for name, rule in architecture.mtp_aliases(module, layers):
                if rule is alias:
                    yield Entry(name, "alias", module, alias.source)


def _is_mtp(module: str, stored: Stored, architecture: Architecture) -> bool:
    return any(module.startswith(architecture.mtp_prefix.format(layer=n)) for n in stored.layers.mtp)


def _natural_order(modules: Iterable[str]) -> list[str]:
    """Layer 2 before layer 10: the list is read by people."""
    return sorted(
        modules,
        key=lambda name: [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")],
    )


def _needs(evaluations: Sequence[Evaluation]) -> Iterator[Need]:
    flagged: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        for flag in evaluation.flags:
            flagged.setdefault(flag, []).append(evaluation)
    for flag, group in flagged.items():
        reason = "the bf16 shared expert would be fused into the MXFP4 experts, and these releases have no check for it"
        yield Need(_span(group), flag, reason)
    slow: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        for fault in evaluation.faults:
            if fault.verdict is Verdict.SLOW:
                slow.setdefault(f"{fault.role}: {fault.message}", []).append(evaluation)
    for message, group in slow.items():
        yield Need(_span(group), "", message)


def _span(evaluations: Iterable[Evaluation]) -> str:
    return span([Target(e.engine, e.release) for e in evaluations])


def _conflict(broken: Sequence[Evaluation]) -> ExclusionError:
    lines = []
    for evaluation in broken:
        fault = next(f for f in evaluation.faults if f.verdict in (Verdict.CRASH, Verdict.SILENT))
        lines.append(f"{evaluation.engine} {evaluation.release}: {fault.role} {fault.prefix}: {fault.message}")
    common = Counter(line.split(": ", 1)[1] for line in lines).most_common(3)
    detail = "; ".join(text for text, _ in common)
    return ExclusionError(
        f"no exclude list loads on {_span(broken)}: {detail}",
        "Store each fused module and each layer's experts in one format (change --quantize/--keep), "
        "or drop these releases from the targets.",
    )

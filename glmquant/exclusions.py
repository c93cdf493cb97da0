"""Which modules are un-quantized, spelled so that every target engine release hears it.

The list is the complement of what is packed, never written by hand. Several spellings are tried (spelling.py); each
is put to the engine models, and the best one that every target loads is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glmquant.checkpoint.layers import Layers
from glmquant.engines.block_fp8 import Dropped, Release
from glmquant.engines.model import DISABLE_FUSION, Evaluation, Fp8Layers, Stored, Verdict
from glmquant.engines.targets import ENGINES, Target, engine_notes, evaluate, span, split_modelled
from glmquant.errors import ExclusionError
from glmquant.recipe import Architecture
from glmquant.spelling import FORMS, Entry, as_globs, as_regexes, forms


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
        form: how the MTP layer is spelled.
        targets: those whose models know this family of models, and were asked.
        needs: launch flags and speed notes, per range of releases; and which releases were not asked.
        evaluations: what the engine models say per target.
    """

    entries: tuple[Entry, ...]
    form: str
    targets: tuple[Target, ...]
    needs: tuple[Need, ...]
    evaluations: tuple[Evaluation, ...]
    stored: Stored
    architecture: Architecture

    @property
    def texts(self) -> list[str]:
        """The strings for quantization_config.exclude."""
        return [entry.text for entry in self.entries]

    def matches(self, module: str, target: Target | str) -> dict[str, bool | str]:
        """What an engine release answers for one module: asking prefix -> un-quantized, or the error it raises.

        Args:
            module: a checkpoint module (`model.layers.78.self_attn.q_a_proj`) or a runtime prefix
                (`model.decoder.self_attn.fused_qkv_a_proj_with_mqa`). Empty result: it never asks.
            target: e.g. `sglang 0.5.23`.
        """
        return answers(self.texts, module, target, self.stored.layers)

    def globs(self) -> list[str]:
        """The same decision for Quark's own --exclude_layers or ModelOpt's ignore, as globs."""
        return as_globs(self.stored, self.architecture)

    def ignore(self) -> list[str]:
        """The same decision as compressed-tensors' `ignore` list."""
        return as_regexes(self.stored, self.architecture)


def answers(exclude: Sequence[str], module: str, target: Target | str, layers: Layers) -> dict[str, bool | str]:
    """`ExclusionList.matches` for a list of texts."""
    if isinstance(target, str):
        name, _, release = target.partition(" ")
        target = Target(name, release)
    container = module.partition(f".{layers.container}.")[0] + f".{layers.container}"
    return {
        asking.prefix: answer
        for asking, answer in ENGINES[target.engine].answers(target.release, exclude, layers)
        if module in (asking.prefix, *asking.parts) or (asking.kind == "experts" and container in asking.parts)
    }


def resolve(
    formats: Mapping[str, str],
    layers: Layers,
    architecture: Architecture,
    targets: Sequence[Target],
    form: str = "auto",
    fp8: Fp8Layers | None = None,
) -> ExclusionList:
    """Choose the list for a set of stored formats.

    Args:
        formats: Linear checkpoint module -> `mxfp4`, `plain` or `fp8`.
        targets: engine releases that must load the checkpoint.
        form: `auto`, `literal` or `regex`, see spelling.forms.
        fp8: what the config says of the FP8 modules, if there are any.

    Releases that are not modelled for this family of models are not asked; `needs` says so. With no other target the
    list has the names of the checkpoint, and nobody was asked.

    Raises:
        ExclusionError: no spelling loads on every target, not even with a launch flag. The message names the
            releases, the module and the engine's error, and what to drop.
    """
    if form not in FORMS:
        raise ExclusionError(f"unknown form {form!r}", f"Known: {', '.join(FORMS)}.")
    stored = Stored.of(formats, layers, fp8)
    asked, unknown = split_modelled(targets, layers.family)
    unasked = [
        Need(span(skipped), "", f"{reason}; this list was not checked for it") for reason, skipped in unknown.items()
    ]
    for note, concerned in engine_notes(asked, layers.family).items():
        unasked.append(Need(span(concerned), "", note))
    tried: list[tuple[tuple[int, ...], ExclusionList]] = []
    for name, entries in forms(stored, architecture, form):
        texts = [entry.text for entry in entries]
        evaluations = tuple(evaluate(target, texts, stored) for target in asked)
        needs = (*_needs(evaluations), *unasked)
        found = ExclusionList(tuple(entries), name, tuple(asked), needs, evaluations, stored, architecture)
        cost = (
            sum(not e.loads for e in evaluations),
            sum(bool(e.flags) for e in evaluations),
            sum(_fragile(e, texts, stored) for e in evaluations),
            sum(e.verdict is Verdict.SLOW for e in evaluations),
            len(tried) if asked else -len(tried),  # the last form is the plainest
        )
        tried.append((cost, found))
    lowest, best = min(tried, key=lambda row: row[0])
    if lowest[0]:
        raise _conflict(best, [found for _, found in tried], form)
    return best


def _fragile(evaluation: Evaluation, texts: Sequence[str], stored: Stored) -> bool:
    """Whether a list that loads with shared experts fused would not load when the user switches fusion off."""
    if not (evaluation.fused_target or evaluation.fused_draft):
        return False
    engine = ENGINES[evaluation.engine]
    return not engine.evaluate(evaluation.release, texts, stored, [DISABLE_FUSION]).loads


def _needs(evaluations: Sequence[Evaluation]) -> Iterator[Need]:
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for evaluation in evaluations:
        for flag in evaluation.flags:
            reason = "it would fuse the bf16 shared expert into the MXFP4 experts, and has no check for it"
            groups.setdefault((flag, reason), []).append(evaluation)
        for fault in evaluation.faults:
            if fault.verdict is Verdict.SLOW:
                groups.setdefault(("", f"{fault.role}: {fault.message}"), []).append(evaluation)
    for (flag, reason), group in groups.items():
        yield Need(_span(group), flag, reason)


def fp8_notes(bf16: Mapping[str, Dropped], layers: Layers) -> list[Need]:
    """What did not stay FP8, and why; see planner.Plan.bf16."""
    found: dict[Dropped, dict[str, None]] = {}
    experts = f".{layers.container}." if layers.container else " "
    for module, why in bf16.items():
        number = layers.number(module)
        name = module if number is None else module.replace(layers.at(number), layers.prefix.replace("{layer}", "*"))
        head, inside, _ = name.partition(experts)
        found.setdefault(why, {})[head + inside + "*" if inside else name] = None
    return [
        Need(
            _releases(why.targets) if why.targets else "all targets",
            "",
            f"became bf16, {_WHY[why.why]}: {', '.join(names)}",
        )
        for why, names in found.items()
    ]


_WHY = {
    "unread": "which these cannot read as FP8",
    "names": "of which these read the scale under different names",
    "blocks": "whose blocks of 128 x 128 do not fit those beside them",
    "together": "since what they are fused with is not FP8",
}


def _releases(targets: Iterable[Release]) -> str:
    return span([Target(target.engine, target.release) for target in targets])


def _span(evaluations: Iterable[Evaluation]) -> str:
    return span([Target(e.engine, e.release) for e in evaluations])


def _conflict(best: ExclusionList, tried: Sequence[ExclusionList], form: str) -> ExclusionError:
    """Either some releases load with no list (the formats are wrong), or no one list serves all of them."""
    broken = [e for e in best.evaluations if not e.loads]
    loadable = {(e.engine, e.release) for found in tried for e in found.evaluations if e.loads}
    hopeless = [e for e in broken if (e.engine, e.release) not in loadable]
    shown = hopeless or broken
    reasons = Counter(
        f"{fault.role} {fault.prefix}: {fault.message}"
        for e in shown
        for fault in e.faults
        if fault.verdict in (Verdict.CRASH, Verdict.SILENT)
    )
    worst = "; ".join(text for text, _ in reasons.most_common(3))
    if hopeless:
        return ExclusionError(
            f"no exclude list loads on {_span(hopeless)}: {worst}",
            ("Try --form auto. " if form != "auto" else "")
            + "Store each fused module and each layer's experts in one format (change the recipe, --quantize or "
            "--keep), or drop these releases from --targets.",
        )
    served = [e for e in best.evaluations if e.loads]
    return ExclusionError(
        f"no one exclude list serves both {_span(broken)} and {_span(served)}; the list that serves the latter fails "
        f"the former at {worst}",
        f"Drop {_span(broken)} or {_span(served)} from --targets, or change the recipe for these modules.",
    )

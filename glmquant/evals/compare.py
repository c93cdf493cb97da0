"""Two sets of scores -> a verdict for each eval: equivalent within the margin, worse, better or undecided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Literal

from glmquant.evals import intervals
from glmquant.evals.intervals import Arm, Bounds
from glmquant.evals.results import EvalsError, Scores
from glmquant.text import short

Verdict = Literal["equivalent", "worse", "better", "undecided"]
MARGIN, ALPHA, POWER = 0.02, 0.05, 0.9
# What makes it another measurement. Not the release of lm-eval: it numbers its tasks' versions.
SETTINGS = ("task", "task_version", "fewshot", "filter", "metric", "temperature", "max_tokens", "api")


@dataclass(frozen=True)
class Comparison:
    """One eval of B (the candidate) against A (the reference). Rates and differences are shares, B minus A.

    Attributes:
        verdict: equivalent: the (1 - 2 alpha) interval lies within the margin (TOST); worse, better: not so, and a
            difference is shown at alpha (two-sided, after Holm over the evals); undecided: neither.
        method: of the interval.
        paired: questions that both answered and that were compared one by one; 0: unpaired.
        low, high: the (1 - alpha) interval.
        inner_low, inner_high: the (1 - 2 alpha) interval, which decides equivalence.
        normal_low, normal_high: the (1 - alpha) interval of the textbook's normal approximation, where unpaired.
        gained, lost: paired with one answer each: questions only B, only A has right.
        p_equivalent: of TOST, the larger of its two; p_different: two-sided; p_holm: the same after Holm.
        not_worse: it is shown (at alpha, one-sided) that B is not worse by more than the margin.
        needed: questions an arm (pairs, if paired) to show "not worse" with the asked power if there is no
            difference; needed_both: to show "equivalent".
        more: `needed` (or, if not worse is shown, `needed_both`) less what there is; 0 unless undecided.
    """

    name: str
    verdict: Verdict
    margin: float
    method: str
    rate_a: float
    rate_b: float
    count_a: int
    count_b: int
    runs_a: int
    runs_b: int
    paired: int
    difference: float
    low: float
    high: float
    inner_low: float
    inner_high: float
    normal_low: float | None
    normal_high: float | None
    gained: int | None
    lost: int | None
    p_equivalent: float
    p_different: float
    p_holm: float
    not_worse: bool
    needed: int
    needed_both: int
    more: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparisons:
    """All evals that both have, and the verdict over them.

    `verdict`: worse if any eval is worse; equivalent if all are (no correction: each must pass, an intersection-union
    test); better if none is worse or undecided and one is better; else undecided. `left_out`: evals of one only.
    """

    verdict: Verdict
    margin: float
    alpha: float
    power: float
    evals: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing is lost, and that is shown."""
        return self.verdict in ("equivalent", "better")


def compare(
    a: Mapping[str, Scores],
    b: Mapping[str, Scores],
    *,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    power: float = POWER,
    known: Mapping[str, int] | None = None,
    ignore_settings: bool = False,
) -> Comparisons:
    """Compare every eval that both have.

    Args:
        a, b: the reference's and the candidate's scores by eval.
        margin: share; the largest difference that does not matter. To be chosen before the results are seen.
        alpha: error rate of the tests. power: of the sample sizes that are asked for.
        known: questions that an eval has at all, by name.

    Raises:
        EvalsError: no eval in common, other settings, or a number that makes no sense.
    """
    if not (0 < margin < 1 and 0 < alpha < 0.5 and 0.5 <= power < 1):
        raise EvalsError(f"margin {margin}, alpha {alpha} and power {power} are not all shares that make sense")
    common = [name for name in a if name in b]
    if not common:
        raise EvalsError(
            f"no eval in common: A has {short(', '.join(a))}, B has {short(', '.join(b))}",
            "An eval is matched by its name.",
        )
    if not ignore_settings:
        for name in common:
            _check_settings(a[name], b[name])
    raw = [_compare(a[name], b[name], margin, alpha, power, (known or {}).get(name)) for name in common]
    adjusted = intervals.holm([one.p_different for one in raw])
    done = tuple(_judge(one, p, alpha, len(raw)) for one, p in zip(raw, adjusted, strict=True))
    verdicts = {one.verdict for one in done}
    overall: Verdict = "undecided"
    if "worse" in verdicts:
        overall = "worse"
    elif "undecided" not in verdicts:
        overall = "better" if "better" in verdicts else "equivalent"
    return Comparisons(overall, margin, alpha, power, done, tuple(sorted(a.keys() ^ b.keys())))


def _check_settings(a: Scores, b: Scores) -> None:
    if not (a.settings and b.settings):
        return
    for key in SETTINGS:
        if a.settings.get(key) != b.settings.get(key):
            raise EvalsError(
                f"{a.name}: A was asked with {key} {short(a.settings.get(key))}, B with {short(b.settings.get(key))}",
                "Ask both the same way (or --ignore-settings).",
            )


@dataclass(frozen=True)
class _Design:
    """How the difference is estimated; `at` gives the interval of no difference with this many questions."""

    method: str
    difference: float
    bounds: Bounds
    deviation: float
    at: Callable[[float], Bounds]
    have: int
    paired: int = 0
    gained: int | None = None
    lost: int | None = None
    plain: Bounds | None = None
    notes: tuple[str, ...] = ()


def _compare(a: Scores, b: Scores, margin: float, alpha: float, power: float, known: int | None) -> Comparison:
    shared = a.questions.keys() & b.questions.keys()
    # Fewer shared questions than that are two samples that happen to overlap.
    pairable = len(shared) * 2 >= min(len(a.questions), len(b.questions)) and len(shared) >= 2
    design = _paired(a, b, sorted(shared)) if pairable else _unpaired(a, b)
    z, inner = intervals.quantile(1 - alpha / 2), intervals.quantile(1 - alpha)
    low, high = design.bounds(z)
    inner_low, inner_high = design.bounds(inner)
    p_not_worse = intervals.p_above(design.bounds, -margin)
    p_equivalent = max(p_not_worse, intervals.p_below(design.bounds, margin))
    if design.gained is not None and design.lost is not None:
        p_different = intervals.mcnemar(design.gained, design.lost)
    else:
        p_different = min(1.0, 2 * min(intervals.p_above(design.bounds, 0), intervals.p_below(design.bounds, 0)))
    needed, needed_both = (_needed(design, margin, alpha, power, both) for both in (False, True))
    not_worse = p_not_worse <= alpha
    notes = [*design.notes, *_fixed(a, b, design, needed, margin, alpha, power, known)]
    for arm, s in (("A", a), ("B", b)):
        if s.unanswered:
            notes.append(f"{arm}: nothing was found in {s.unanswered} answers, which count as wrong")
    return Comparison(
        name=a.name,
        verdict="equivalent" if p_equivalent <= alpha else "undecided",
        margin=margin,
        method=design.method,
        rate_a=a.rate,
        rate_b=b.rate,
        count_a=a.count,
        count_b=b.count,
        runs_a=a.runs,
        runs_b=b.runs,
        paired=design.paired,
        difference=design.difference,
        low=low,
        high=high,
        inner_low=inner_low,
        inner_high=inner_high,
        normal_low=design.plain(z)[0] if design.plain else None,
        normal_high=design.plain(z)[1] if design.plain else None,
        gained=design.gained,
        lost=design.lost,
        p_equivalent=p_equivalent,
        p_different=p_different,
        p_holm=p_different,
        not_worse=not_worse,
        needed=needed,
        needed_both=needed_both,
        more=max(0, (needed_both if not_worse else needed) - design.have),
        notes=tuple(notes),
    )


def _judge(one: Comparison, p_holm: float, alpha: float, evals: int) -> Comparison:
    verdict: Verdict = one.verdict
    notes = list(one.notes)
    if verdict == "undecided" and p_holm <= alpha:
        verdict = "worse" if one.difference < 0 else "better"
        if verdict == "worse" and one.high > -one.margin:
            notes.append("that B is worse is shown, not that it is worse by more than the margin")
    elif verdict == "undecided" and one.p_different <= alpha:
        notes.append(f"a difference is shown by this eval alone, not as one of {evals} (Holm)")
    elif verdict == "equivalent" and one.p_different <= alpha:
        notes.append("there is a difference, and it is smaller than the margin")
    if verdict == "undecided" and one.not_worse:
        notes.append("that B is not worse by more than the margin is shown; that it is not better by more is not")
    more = one.more if verdict == "undecided" else 0
    return replace(one, verdict=verdict, p_holm=p_holm, more=more, notes=tuple(notes))


def _unpaired(a: Scores, b: Scores) -> _Design:
    arm_a, arm_b = _arm(a), _arm(b)
    worth_a, worth_b = arm_a.size / a.count, arm_b.size / b.count  # independent answers a question
    middle = (arm_a.rate + arm_b.rate) / 2
    variances = arm_a.rate * (1 - arm_a.rate) / worth_a + arm_b.rate * (1 - arm_b.rate) / worth_b
    notes = []
    if a.questions and b.questions:
        notes.append("the questions do not match, so that nothing is paired: ask both models the same ones")
    else:
        notes.append("no answers by question, so that nothing is paired: `glmquant evals run` keeps them")
    if any(not s.questions and s.runs > 1 for s in (a, b)):
        notes.append("runs of the same question are not independent; without them each question counts once")
    return _Design(
        method="Newcombe's score interval, unpaired",
        difference=b.rate - a.rate,
        bounds=intervals.newcombe(arm_a, arm_b),
        deviation=math.sqrt(variances),
        at=lambda n: intervals.newcombe(Arm(middle, n * worth_a), Arm(middle, n * worth_b)),
        have=min(a.count, b.count),
        plain=intervals.normal(arm_a, arm_b),
        notes=tuple(notes),
    )


def _arm(scores: Scores) -> Arm:
    return intervals.arm_of(list(scores.questions.values())) if scores.questions else Arm(scores.rate, scores.count)


def _paired(a: Scores, b: Scores, shared: list[str]) -> _Design:
    pairs = len(shared)
    rows = [(a.questions[question], b.questions[question]) for question in shared]
    differences = [fmean(right) - fmean(left) for left, right in rows]
    dropped = [s.count - pairs for s in (a, b)]
    notes = (
        (f"left out: {dropped[0]} questions that only A answered, {dropped[1]} that only B did",)
        if any(dropped)
        else ()
    )
    if all(len(row) == 1 and row[0] in (0, 1) for pair in rows for row in pair):
        gained, lost = differences.count(1), differences.count(-1)
        half = (gained + lost) / 2 / pairs
        return _Design(
            method="Tango's score interval, paired",
            difference=(gained - lost) / pairs,
            bounds=intervals.tango(gained, lost, pairs),
            deviation=math.sqrt((gained + lost) / pairs),
            at=lambda n: intervals.tango(half * n, half * n, n),
            have=pairs,
            paired=pairs,
            gained=gained,
            lost=lost,
            notes=notes,
        )
    squares = fmean([d * d for d in differences])
    return _Design(
        method="Bonett and Price's interval, paired, runs clustered by question",
        difference=fmean(differences),
        bounds=intervals.laplace(differences),
        deviation=math.sqrt(squares),
        at=lambda n: _laplace_at(squares, intervals.padding(differences), n),
        have=pairs,
        paired=pairs,
        notes=notes,
    )


def _laplace_at(squares: float, size: float, count: float) -> Bounds:
    """`intervals.laplace` of `count` differences around 0 with this mean square."""
    error = math.sqrt(squares * count + 2 * size * size) / (count + 2)
    return lambda z: (-z * error, z * error)


def _needed(design: _Design, margin: float, alpha: float, power: float, both_ways: bool) -> int:
    """Enough for the power, and enough that a difference of exactly 0 passes (matters where all answers agree).

    The wider side of its interval counts, so that it does not matter which of the two is called A.
    """
    z = intervals.quantile(1 - alpha)

    def too_few(count: int) -> bool:
        low, high = design.at(count)(z)
        return max(-low, high) >= margin

    enough = 1
    while too_few(enough) and enough < 10**9:
        enough *= 2
    low = enough // 2
    while enough - low > 1:
        middle = (low + enough) // 2
        low, enough = (middle, enough) if too_few(middle) else (low, middle)
    return max(enough, math.ceil(intervals.questions_needed(design.deviation, margin, alpha, power, both_ways)))


def _fixed(
    a: Scores, b: Scores, design: _Design, needed: int, margin: float, alpha: float, power: float, known: int | None
) -> Iterable[str]:
    """What to do where the eval has no more questions."""
    if known is None or needed <= known:
        return
    yield f"{a.name} has {known:,} questions, fewer than needed"
    if not design.paired:
        yield "put the same questions to both and keep the answers: paired, far fewer are needed"
        return
    if a.runs < 2 or b.runs < 2:
        yield "ask each several times at a temperature above 0: chance in the answers averages out"
        return
    shared = sorted(a.questions.keys() & b.questions.keys())
    within = sum(fmean([variance(s.questions[question]) for question in shared]) for s in (a, b))
    allowed = known / intervals.questions_needed(1.0, margin, alpha, power, both_ways=False)
    if within:
        yield f"at least about {math.ceil(within / allowed):,} runs of each of the {known:,} are needed"

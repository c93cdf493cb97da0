"""Intervals and tests for the difference of two success rates. Pure; standard library only.

A method is a `Bounds`: from a normal quantile z to the two ends of the interval for B minus A that has this z.
Every p-value is read off the same interval (the largest z whose interval leaves the null out), so an interval
and a verdict cannot contradict each other. Rates and differences are shares (0.02 is 2 points).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

Bounds = Callable[[float], tuple[float, float]]

_MOST_Z = 38.0  # beyond it the normal tail is below the smallest float


@dataclass(frozen=True)
class Arm:
    """A success rate and the number of independent yes/no answers that it is worth.

    Attributes:
        rate: share of successes, 0 to 1.
        size: effective sample size; with several runs a question, between the questions and all answers.
    """

    rate: float
    size: float


def quantile(probability: float) -> float:
    """Of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def arm_of(scores: Sequence[Sequence[float]]) -> Arm:
    """The arm of answers clustered by question: one row a question, one score (0 to 1) a run.

    The effective size is what gives the binomial the variance of the question means (a design effect, as in
    Kish, Survey Sampling, 1965): runs that always agree count once, independent runs count each.
    """
    means = [fmean(row) for row in scores]
    rate, count = fmean(means), len(means)
    answers = sum(len(row) for row in scores)
    spread = rate * (1 - rate)
    if all(len(row) == 1 and row[0] in (0, 1) for row in scores) or spread == 0 or count < 2:
        return Arm(rate, count)
    error = variance(means) / count
    return Arm(rate, answers if error == 0 else min(max(spread / error, count - 1), answers))


def newcombe(a: Arm, b: Arm) -> Bounds:
    """Unpaired: the hybrid score interval, method 10 of Newcombe, Statistics in Medicine 17:873 (1998)."""

    def bounds(z: float) -> tuple[float, float]:
        low_a, high_a = _wilson(a, z)
        low_b, high_b = _wilson(b, z)
        difference = b.rate - a.rate
        return (
            difference - math.hypot(b.rate - low_b, high_a - a.rate),
            difference + math.hypot(high_b - b.rate, a.rate - low_a),
        )

    return bounds


def _wilson(arm: Arm, z: float) -> tuple[float, float]:
    shrink = z * z / arm.size
    centre = (arm.rate + shrink / 2) / (1 + shrink)
    half = math.sqrt(shrink * arm.rate * (1 - arm.rate) + shrink * shrink / 4) / (1 + shrink)
    return max(0.0, centre - half), min(1.0, centre + half)


def normal(a: Arm, b: Arm) -> Bounds:
    """Unpaired: the textbook interval (Wald). Too narrow near 0 and 1; shown because tables are read with it."""
    error = math.sqrt(a.rate * (1 - a.rate) / a.size + b.rate * (1 - b.rate) / b.size)
    return lambda z: (b.rate - a.rate - z * error, b.rate - a.rate + z * error)


def tango(gained: float, lost: float, pairs: float) -> Bounds:
    """Paired, one answer each: the score interval of Tango, Statistics in Medicine 17:891 (1998).

    Args:
        gained: questions that B has right and A wrong.
        lost: questions that A has right and B wrong.
        pairs: questions.
    """

    def statistic(difference: float) -> float:
        linear = -(gained + lost) + (2 * pairs - gained + lost) * difference
        constant = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, linear * linear - 8 * pairs * constant)) - linear) / (4 * pairs)
        squared = pairs * (2 * share + difference * (1 - difference))
        excess = gained - lost - pairs * difference
        if squared <= 0:
            return math.copysign(math.inf, excess) if excess else 0.0
        return excess / math.sqrt(squared)

    def bounds(z: float) -> tuple[float, float]:
        centre = (gained - lost) / pairs
        return (
            _last(lambda d: statistic(d) <= z, centre, -1.0),
            _last(lambda d: statistic(d) >= -z, centre, 1.0),
        )

    return bounds


def laplace(differences: Sequence[float]) -> Bounds:
    """Paired, several runs: the mean of one difference (-1 to 1) a question, with two made up, one up and one down.

    With one yes/no answer each this is the interval of Bonett and Price, J. Educ. Behav. Stat. 37:479 (2012). The two
    are as large as a difference is where there is one (root mean square; 1 where there is none): they keep it honest
    where few questions differ, and stop it from having no width.
    """
    size = padding(differences)
    padded = [*differences, size, -size]
    centre = fmean(padded)
    error = math.sqrt(sum((x - centre) ** 2 for x in padded)) / len(padded)
    return lambda z: (centre - z * error, centre + z * error)


def padding(differences: Sequence[float]) -> float:
    """Size of the two differences that `laplace` adds."""
    squares = [x * x for x in differences if x]
    return math.sqrt(fmean(squares)) if squares else 1.0


def p_above(bounds: Bounds, null: float) -> float:
    """One-sided p-value of "B minus A is at most `null`": small when the data say that it is above."""
    if bounds(0)[0] >= null:
        return NormalDist().cdf(-_last(lambda z: bounds(z)[0] >= null, 0.0, _MOST_Z))
    return 1 - NormalDist().cdf(-_last(lambda z: bounds(z)[1] <= null, 0.0, _MOST_Z))


def p_below(bounds: Bounds, null: float) -> float:
    """One-sided p-value of "B minus A is at least `null`"."""
    return p_above(lambda z: (-bounds(z)[1], -bounds(z)[0]), -null)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value of "as many gained as lost" (binomial, 1/2)."""
    discordant = gained + lost
    tail: int = sum(math.comb(discordant, k) for k in range(min(gained, lost) + 1))
    return float(min(1.0, 2 * tail / (1 << discordant)))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for being one of several (Holm, Scand. J. Statist. 6:65, 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, most = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = most
    return adjusted


def questions_needed(deviation: float, margin: float, alpha: float, power: float, both_ways: bool) -> float:
    """Questions at which a true difference of 0 is shown to be within the margin with this power.

    Args:
        deviation: standard deviation of a question's share in the difference (unpaired: of both arms together).
        margin: the largest difference that does not matter.
        alpha: error rate of each one-sided test.
        power: probability to succeed.
        both_ways: neither worse nor better (two tests, TOST), else only not worse (one).
    """
    miss = (1 - power) / 2 if both_ways else 1 - power
    return ((quantile(1 - alpha) + quantile(1 - miss)) * deviation / margin) ** 2


def _last(holds: Callable[[float], bool], start: float, end: float) -> float:
    """The farthest point from `start` towards `end` where `holds`, which is true first and false after."""
    if holds(end):
        return end
    good, bad = start, end
    for _ in range(60):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good

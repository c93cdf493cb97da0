"""evals: intervals against scipy and by simulation, verdicts, files of others, runs with lm-eval played by a script.

tests/conformance/test_evals.py runs lm-eval itself.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai_server import serving
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest

from glmquant.cli import main
from glmquant.errors import OutputError
from glmquant.evals import intervals
from glmquant.evals.compare import Comparison, Comparisons, compare
from glmquant.evals.intervals import Arm
from glmquant.evals.results import Answer, EvalsError, Scores, load, read_answers, write_answers
from glmquant.evals.run import Definition, Endpoint, choose, definitions, endpoint_root, lm_eval_config, run

Z = 1.959963984540054


def scores(rows: Iterable[Iterable[float]], name: str = "e", start: int = 0) -> dict[str, Scores]:
    table = {f"q{i}": tuple(map(float, row)) for i, row in enumerate(rows, start)}
    rate = fmean(fmean(row) for row in table.values())
    return {name: Scores(name, table, rate, len(table), len(next(iter(table.values()))))}


def paired(both: int, gained: int, lost: int, neither: int, name: str = "e") -> tuple[dict, dict]:
    a = [[1]] * both + [[0]] * gained + [[1]] * lost + [[0]] * neither
    b = [[1]] * both + [[1]] * gained + [[0]] * lost + [[0]] * neither
    return scores(a, name), scores(b, name)


def only(done: Comparisons) -> Comparison:
    (one,) = done.evals
    return one


# --- intervals against other code, and published values


def test_newcombe_gives_the_published_intervals() -> None:
    """Newcombe 1998, table II, method 10, contrasts (a) and (d)."""
    assert intervals.newcombe(Arm(48 / 80, 80), Arm(56 / 70, 70))(Z) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert intervals.newcombe(Arm(3 / 10, 10), Arm(9 / 10, 10))(Z) == pytest.approx((0.1705, 0.8090), abs=5e-5)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 300), st.integers(1, 300))
def test_newcombe_is_made_of_the_wilson_intervals_of_scipy(k: int, m: int, n: int, o: int) -> None:
    k, m = min(k, n), min(m, o)
    a, b = (binomtest(x, y).proportion_ci(0.95, "wilson") for x, y in ((k, n), (m, o)))
    d = m / o - k / n
    low = d - math.sqrt((m / o - b.low) ** 2 + (a.high - k / n) ** 2)
    high = d + math.sqrt((b.high - m / o) ** 2 + (k / n - a.low) ** 2)
    assert intervals.newcombe(Arm(k / n, n), Arm(m / o, o))(Z) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(("gained", "lost", "pairs"), [(3, 9, 200), (0, 4, 60), (12, 5, 40), (1, 1, 1000)])
def test_the_ends_of_tango_are_where_the_score_statistic_of_a_numerical_fit_is_z(
    gained: int, lost: int, pairs: int
) -> None:
    """At an end, the likelihood is maximized over the nuisance parameter by scipy, and z comes out."""
    for end, sign in zip(intervals.tango(gained, lost, pairs)(Z), (1, -1), strict=True):

        def minus_log_likelihood(share: float, end: float = end) -> float:
            cells = ((gained, share + end), (lost, share), (pairs - gained - lost, 1 - 2 * share - end))
            return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

        limits = (max(0.0, -end), (1 - end) / 2)
        share = minimize_scalar(minus_log_likelihood, bounds=limits, method="bounded", options={"xatol": 1e-12}).x
        z = (gained - lost - pairs * end) / math.sqrt(pairs * (2 * share + end - end * end))
        assert z == pytest.approx(sign * Z, abs=1e-3)


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_binomial_test(gained: int, lost: int) -> None:
    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert intervals.mcnemar(gained, lost) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_holm_is_the_closed_test_of_bonferroni(p: list[float]) -> None:
    """The adjusted p of one: the largest Bonferroni p of all sets of hypotheses that it is in."""
    sets = [s for k in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), k)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(len(p))]
    assert intervals.holm(p) == pytest.approx(closed)


@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n))),
    st.floats(-0.5, 0.5),
)
@settings(max_examples=40, deadline=None)
def test_a_p_value_is_small_exactly_where_the_interval_leaves_the_null_out(
    counts: tuple[int, int, int], null: float
) -> None:
    k, m, n = counts
    for bounds in (intervals.newcombe(Arm(k / n, n), Arm(m / n, n)), intervals.tango(min(k, n - m), 0, n)):
        low, high = bounds(Z)
        p = intervals.p_above(bounds, null), intervals.p_below(bounds, null)
        if abs(low - null) > 1e-6 and abs(high - null) > 1e-6:
            assert (p[0] < 0.025) == (low > null) and (p[1] < 0.025) == (high < null)


def test_p_values_are_normal_tails_where_the_interval_is_normal() -> None:
    bounds = intervals.normal(Arm(0.5, 100), Arm(0.6, 100))
    z = 0.1 / math.sqrt(0.25 / 100 + 0.24 / 100)
    assert intervals.p_above(bounds, 0) == pytest.approx(NormalDist().cdf(-z), rel=1e-6)
    assert intervals.p_below(bounds, 0) == pytest.approx(NormalDist().cdf(z), rel=1e-6)


def test_runs_that_always_agree_count_once_and_independent_ones_each() -> None:
    rng = random.Random(1)
    same = [[float(rng.random() < 0.8)] * 4 for _ in range(500)]
    assert intervals.arm_of(same).size == pytest.approx(499, abs=2)
    independent = [[float(rng.random() < 0.8) for _ in range(4)] for _ in range(500)]
    assert 1600 < intervals.arm_of(independent).size <= 2000
    assert intervals.arm_of([[1.0, 1.0]] * 50) == Arm(1.0, 50)


def test_with_one_answer_each_the_interval_of_runs_is_bonett_and_prices() -> None:
    gained, lost, n = 3, 9, 200
    p, q = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    found = intervals.laplace([1.0] * gained + [-1.0] * lost + [0.0] * (n - gained - lost))(Z)
    assert found == pytest.approx((p - q - half, p - q + half))


def test_a_few_questions_that_agree_in_all_runs_prove_nothing() -> None:
    rows = [[1.0] * 8] * 20
    assert only(compare(scores(rows), scores(rows))).verdict == "undecided"


def test_the_interval_of_clustered_runs_is_that_of_a_bootstrap_over_questions() -> None:
    rng = np.random.default_rng(5)
    chances = rng.beta(6, 1, 400)
    runs = rng.random((2, 4, 400)) < np.stack([chances, chances - 0.05 * (chances > 0.5)])[:, None]
    differences = runs[1].mean(0) - runs[0].mean(0)
    means = differences[rng.integers(0, 400, (4000, 400))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    assert intervals.laplace(differences.tolist())(Z) == pytest.approx((low, high), abs=0.1 * (high - low))


# --- what they promise, by simulation: 95% intervals hold the truth, a true loss of a margin passes in 5%

SIMULATIONS = 1500


def simulate(kind: str, difference: float, rng: random.Random) -> intervals.Bounds:
    """One experiment at a true difference: 200 questions, answers of A and B alike in most."""
    n = 200
    if kind == "unpaired":
        a, b = (sum(rng.random() < p for _ in range(n)) / n for p in (0.95, 0.95 + difference))
        return intervals.newcombe(Arm(a, n), Arm(b, n))
    if kind == "paired":
        lost = 0.03 - difference / 2
        drawn = [rng.random() for _ in range(n)]
        return intervals.tango(sum(x > 1 - lost - difference for x in drawn), sum(x < lost for x in drawn), n)
    if kind == "runs, rare flips":
        # eight runs that nearly always agree, and one question in fifty that B loses or gains altogether
        flips = [rng.choice((-1, 1)) if rng.random() < 0.02 else 0 for _ in range(n)]
        noise = [(rng.random() < 0.03) - (rng.random() < 0.03) for _ in range(n)]
        return intervals.laplace([flip or dust / 8 for flip, dust in zip(flips, noise, strict=True)])
    # four runs: every question has its own chance, the same for both but where B is worse
    rows = []
    for _ in range(n):
        p = min(1.0, rng.betavariate(6, 1))
        q = p - (rng.random() < -difference / 0.5) * 0.5 * (p >= 0.5)
        rows.append([[float(rng.random() < x) for _ in range(4)] for x in (p, q)])
    if kind == "runs, unpaired":
        others = [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(6, 1) for _ in range(n))]
        return intervals.newcombe(intervals.arm_of(others), intervals.arm_of([b for _, b in rows]))
    return intervals.laplace([fmean(b) - fmean(a) for a, b in rows])


@pytest.mark.parametrize("kind", ["unpaired", "paired", "runs, paired", "runs, unpaired", "runs, rare flips"])
def test_95_percent_intervals_hold_the_truth_in_95_percent(kind: str) -> None:
    rng = random.Random(f"coverage {kind}")
    inside = sum(low <= 0 <= high for low, high in (simulate(kind, 0.0, rng)(Z) for _ in range(SIMULATIONS)))
    # three standard errors below; and not so wide as to be of no use
    assert 0.933 < inside / SIMULATIONS < 0.985


@pytest.mark.parametrize("kind", ["unpaired", "paired"])
def test_a_loss_of_exactly_the_margin_passes_as_equivalent_in_at_most_5_percent(kind: str) -> None:
    rng, margin = random.Random(f"type I {kind}"), 0.06
    z = intervals.quantile(0.95)
    found = [simulate(kind, -margin, rng)(z) for _ in range(SIMULATIONS)]
    assert 0 < sum(low > -margin and high < margin for low, high in found) / SIMULATIONS < 0.067


def test_the_questions_needed_give_the_power() -> None:
    rng, margin = random.Random("power"), 0.02
    wanted = math.ceil(intervals.questions_needed(math.sqrt(2 * 0.96 * 0.04), margin, 0.05, 0.9, both_ways=False))
    assert wanted == 1645
    z, passed = intervals.quantile(0.95), 0
    for _ in range(400):
        a, b = (sum(rng.random() < 0.96 for _ in range(wanted)) / wanted for _ in range(2))
        passed += intervals.newcombe(Arm(a, wanted), Arm(b, wanted))(z)[0] > -margin
    assert 0.85 < passed / 400 < 0.95


# --- verdicts


def test_the_published_table_is_undecided(capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 and MXFP4 of the write-up: GSM8K of 200, GPQA-Diamond of 198 with 2 seeds."""
    table = ["gsm8k=193/200,gpqa_diamond=0.9217@198x2", "gsm8k=191/200,gpqa_diamond=0.9026@198x2"]
    assert main(["evals", "compare", *table]) == 1
    gsm8k, gpqa = capsys.readouterr().out.split("gpqa_diamond: ")
    assert gsm8k.startswith("gsm8k: undecided at 2 points\n")
    assert "difference -0.010" in gsm8k
    assert "95% interval -0.052 to +0.031 (Newcombe" in gsm8k
    assert "normal approximation -0.048 to +0.028" in gsm8k
    assert "needs about 1,600 questions an arm for 90% power" in gsm8k
    assert "gsm8k has 1,319 questions, fewer than needed" in gsm8k
    assert gpqa.startswith("undecided at 2 points\n")
    assert "difference -0.019" in gpqa and "needs about 3,400 questions an arm" in gpqa
    assert gpqa.endswith("all 2 evals: undecided\n")
    assert main(["evals", "compare", "--json", *table]) == 1
    done = json.loads(capsys.readouterr().out)
    assert (done["ok"], done["verdict"], done["evals"][0]["needed"]) == (False, "undecided", 1644)


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((990, 0, 0, 10), "equivalent"),
        ((1800, 10, 12, 178), "equivalent"),
        ((900, 2, 40, 58), "worse"),
        ((900, 40, 2, 58), "better"),
        ((180, 4, 5, 11), "undecided"),
        ((20, 0, 0, 0), "undecided"),  # twenty questions prove nothing, however well they agree
    ],
)
def test_paired_verdicts(counts: tuple[int, int, int, int], verdict: str) -> None:
    done = compare(*paired(*counts))
    one = only(done)
    assert (done.verdict, one.verdict) == (verdict, verdict)
    assert (one.paired, one.gained, one.lost) == (sum(counts), counts[1], counts[2])
    assert done.ok == (verdict in ("equivalent", "better"))
    assert (one.more > 0) == (verdict == "undecided")


def test_a_loss_that_is_real_but_small_is_equivalent_and_says_so() -> None:
    one = only(compare(*paired(9800, 5, 40, 155)))
    assert one.verdict == "equivalent" and one.p_different < 0.001 and one.high < 0
    assert any("smaller than the margin" in note for note in one.notes)


def test_a_loss_that_is_shown_but_may_be_below_the_margin_is_worse_and_says_so() -> None:
    one = only(compare(*paired(480, 2, 14, 4)))
    assert one.verdict == "worse" and -0.02 < one.high < 0
    assert any("not that it is worse by more than the margin" in note for note in one.notes)


def test_pairing_finds_what_two_samples_cannot() -> None:
    a, b = paired(900, 2, 22, 76)
    other = scores(a["e"].questions.values(), start=10_000)
    assert only(compare(a, b)).verdict == "worse"
    unpaired = only(compare(other, b))
    assert unpaired.verdict == "undecided" and unpaired.paired == 0 and unpaired.needed > only(compare(a, b)).needed
    assert any("questions do not match" in note for note in unpaired.notes)


def test_one_bad_eval_of_many_is_judged_after_holm() -> None:
    pairs = [paired(300, 3, 14, 83, "bad"), *(paired(1000, 0, 0, 0, f"good{i}") for i in range(5))]
    alone = compare(*pairs[0])
    assert alone.verdict == "worse" and 0.01 < only(alone).p_different < 0.05
    done = compare({k: v for a, _ in pairs for k, v in a.items()}, {k: v for _, b in pairs for k, v in b.items()})
    assert [one.verdict for one in done.evals] == ["undecided", *["equivalent"] * 5]
    assert done.verdict == "undecided" and any("Holm" in note for note in done.evals[0].notes)


def test_equivalent_over_all_needs_every_one() -> None:
    same, short_, worse = paired(1000, 0, 0, 0, "a"), paired(30, 0, 0, 0, "b"), paired(800, 0, 60, 0, "c")
    assert compare(same[0], same[1]).verdict == "equivalent"
    assert compare(same[0] | short_[0], same[1] | short_[1]).verdict == "undecided"
    assert compare(same[0] | short_[0] | worse[0], same[1] | short_[1] | worse[1]).verdict == "worse"


@given(st.lists(st.tuples(*[st.tuples(*[st.integers(0, 1)] * 2)] * 2), min_size=2, max_size=60), st.integers(1, 2))
@example([((0, 0), (0, 1)), ((0, 0), (1, 1)), ((0, 0), (1, 1))], 2)  # unpaired, one arm's runs worth more
@settings(max_examples=40, deadline=None)
def test_swapping_the_arms_mirrors_everything(rows: list, runs: int) -> None:
    a, b = (scores([pair[side][:runs] for pair in rows]) for side in (0, 1))
    for left, right in ((a, b), (a, scores(b["e"].questions.values(), start=1000))):
        there, back = only(compare(left, right)), only(compare(right, left))
        assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
        assert back.p_equivalent == pytest.approx(there.p_equivalent, abs=1e-9)
        assert back.p_different == pytest.approx(there.p_different, abs=1e-9)
        assert (back.needed, back.needed_both) == (there.needed, there.needed_both)
        assert back.verdict == {"worse": "better", "better": "worse"}.get(there.verdict, there.verdict)
        assert (there.verdict == "equivalent") == (there.inner_low > -0.02 and there.inner_high < 0.02)


def test_runs_are_clustered_by_question_and_the_runs_that_average_chance_out_are_named() -> None:
    rng = random.Random(3)
    chances = [rng.betavariate(5, 1) for _ in range(198)]
    a, b = (scores([[float(rng.random() < p) for _ in range(2)] for p in chances], "gpqa_diamond") for _ in "ab")
    one = only(compare(a, b, known={"gpqa_diamond": 198}))
    assert one.verdict == "undecided" and one.paired == 198 and "clustered" in one.method
    (note,) = [note for note in one.notes if "at least" in note]
    more = int(re.search(r"about ([\d,]+) runs", note)[1].replace(",", ""))
    passed = 0
    for _ in range(20):
        a, b = ([[float(rng.random() < p) for _ in range(more)] for p in chances] for _ in "ab")
        passed += only(compare(scores(a), scores(b))).not_worse
    assert 20 <= more <= 32 and passed >= 14


def test_questions_that_only_one_answered_are_named() -> None:
    a, b = paired(1000, 0, 0, 0)
    b["e"] = replace(b["e"], questions=dict(list(b["e"].questions.items())[:900]), count=900)
    one = only(compare(a, b))
    assert one.paired == 900 and "left out: 100 questions that only A answered, 0 that only B did" in one.notes


def test_what_was_asked_differently_is_not_compared() -> None:
    a, b = paired(100, 0, 0, 0)
    a["e"], b["e"] = replace(a["e"], settings={"fewshot": 5}), replace(b["e"], settings={"fewshot": 0})
    with pytest.raises(EvalsError, match="A was asked with fewshot 5, B with 0"):
        compare(a, b)
    assert only(compare(a, b, ignore_settings=True)).paired == 100


@pytest.mark.parametrize("bad", [{"margin": 0}, {"margin": float("nan")}, {"alpha": 0.6}, {"power": 1.0}])
def test_numbers_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(EvalsError, match="make sense"):
        compare(*paired(100, 0, 0, 0), **bad)


def test_no_eval_in_common() -> None:
    with pytest.raises(EvalsError, match="no eval in common"):
        compare(load("a=1/2"), load("b=1/2"))


# --- results of others


def lm_eval_row(i: int, name: str, right: bool, taken: str = "7") -> dict:
    """As lm-eval 0.4.13 writes it."""
    return {
        "doc_id": i,
        "doc": {"question": f"What is {i}?", "answer": "#### 7"},
        "target": "7",
        "arguments": {"gen_args_0": {"arg_0": "..."}},
        "resps": [["So 7"]],
        "filtered_resps": [taken],
        "filter": name,
        "metrics": ["exact_match"],
        "doc_hash": f"{i}",
        "prompt_hash": "p",
        "target_hash": "t",
        "exact_match": float(right),
    }


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_samples_of_lm_eval_are_read_with_the_flexible_filter(tmp_path: Path) -> None:
    rows = [
        lm_eval_row(i, f, right)
        for i in range(3)
        for f, right in (("strict-match", False), ("flexible-extract", i < 2))
    ]
    rows.append(lm_eval_row(3, "flexible-extract", False, "[invalid]"))
    write_rows(tmp_path / "model/samples_gsm8k_2026-01-31T12-00-00.000000.jsonl", rows)
    write_rows(tmp_path / "model/samples_gsm8k_2026-02-01T12-00-00.000000.jsonl", rows)
    found = load(str(tmp_path))["gsm8k"]
    assert (found.count, found.runs, found.rate, found.unanswered) == (4, 2, 0.5, 2)
    assert found.questions == {q: (s, s) for q, s in zip(found.questions, (1.0, 1.0, 0.0, 0.0), strict=True)}


def test_the_same_question_is_recognized_whatever_lm_eval_hashed(tmp_path: Path) -> None:
    """GPQA's choices are shuffled with the seed of the process: doc_hash changes, the question does not."""
    row = lm_eval_row(0, "none", True)
    one, two = (
        read_answers(write_rows(tmp_path / f"samples_gpqa_{k}.jsonl", [row | {"doc_hash": k, "doc": {"Question": q}}]))
        for k, q in (("x", "Why?"), ("y", "Why?"))
    )
    other = read_answers(write_rows(tmp_path / "samples_z.jsonl", [row | {"doc": {"Question": "How?"}}]))
    assert one[0].question == two[0].question != other[0].question


def tau2(rewards: dict[str, list[float | None]]) -> dict:
    simulations = [
        {"id": f"{task}-{trial}", "task_id": task, "trial": trial, "termination_reason": "user_stop",
         "reward_info": None if reward is None else {"reward": reward}}
        for task, row in rewards.items() for trial, reward in enumerate(row)
    ]  # fmt: skip
    return {"info": {"environment_info": {"domain_name": "retail"}}, "tasks": [], "simulations": simulations}


def test_results_of_tau2_are_compared_and_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "retail.json"
    file.write_text(json.dumps(tau2({"0": [1.0, 0.0], "1": [1.0, 1.0]})))
    found = load(str(file))["tau2_retail"]
    assert (found.count, found.runs, found.rate, found.questions["0"]) == (2, 2, 0.75, (1.0, 0.0))
    assert main(["evals", "import", str(file), str(tmp_path / "out")]) == 0
    assert "tau2_retail.imported.jsonl: 4 answers" in capsys.readouterr().out
    assert load(str(tmp_path / "out")) == {"tau2_retail": found}
    assert main(["evals", "import", str(file), str(tmp_path / "out")]) == 1
    assert "exists" in capsys.readouterr().err


def test_a_simulation_that_was_never_scored_is_no_zero(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(tau2({"0": [1.0, None]})))
    with pytest.raises(EvalsError, match="simulation 2 was not scored"):
        load(str(tmp_path / "r.json"))


def test_our_lines_come_back_as_they_were(tmp_path: Path) -> None:
    answers = [Answer("e", "q\u2028\x1b", run_, 0.5, "t", "a", "é") for run_ in range(2)]
    write_answers(tmp_path, "e.jsonl", answers)
    assert read_answers(tmp_path / "e.jsonl") == answers


GOOD = asdict(Answer("e", "q", 0, 1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no answer"),
        ("{", "cannot be read as lines of JSON"),
        ("[1]", "is no JSON object"),
        ("[" * 100_000, "cannot be read as lines of JSON"),
        (json.dumps(GOOD | {"score": 2}), "not between 0 and 1"),
        (json.dumps(GOOD | {"score": float("nan")}), "not between 0 and 1"),
        (json.dumps(GOOD | {"score": True}), "score is True"),
        (json.dumps(GOOD | {"run": "0"}), "run is '0'"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "two answers in run 0"),
        ("\n".join(json.dumps(GOOD | x) for x in ({}, {"run": 1}, {"question": "r"})), "asked 1 to 2 times"),
        (json.dumps(lm_eval_row(0, "none", True) | {"exact_match": None}), "score of None"),
        (json.dumps({"doc_id": 0, "filter": "none", "metrics": ["acc"]}), "has no 'acc'"),
    ],
)
def test_damaged_results_are_an_error_that_says_where(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(text)
    assert main(["evals", "compare", str(path), str(path)]) == 1
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(
    "text", ["gsm8k=201/200", "gsm8k=0.9", "gsm8k=1/0", "=1/2", "gsm8k=1/2,", "x=0.5@9x0", "nothing"]
)
def test_tables_in_words_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evals", "compare", text, "e=1/2"]) == 1
    assert "glmquant: error" in capsys.readouterr().err


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalsError, match="holds no results"):
        load(str(tmp_path))


# --- running: lm-eval played by a script, and lm-eval itself

SUMS = Definition("sums", 2, "flexible-extract", "exact_match", 1.0, 2, 64, None, "")

STAND_IN = '''#!{python}
"""Plays an interpreter with lm-eval: reads its configuration, asks the endpoint, writes its samples."""
import json, pathlib, sys, urllib.request
if sys.argv[1] == "-c":
    print("0.4.13")
    raise SystemExit
config = json.loads(pathlib.Path(sys.argv[-1]).read_text())
args = config["model_args"]
out = pathlib.Path(config["output_path"], args["model"])
out.mkdir()
rows = []
for i in range(config.get("limit") or 4):
    body = dict(model=args["model"], prompt=str(i), seed=args["seed"], temperature=config["gen_kwargs"]["temperature"])
    post = urllib.request.Request(args["base_url"], json.dumps(body).encode(), dict(h="x"))
    text = json.load(urllib.request.urlopen(post))["choices"][0]["text"]
    rows.append(dict(doc_id=i, doc=dict(question=str(i)), target=str(i), resps=[[text]], filtered_resps=[text],
                     filter="flexible-extract", metrics=["exact_match"], exact_match=float(text == str(i))))
task, = config["tasks"]
(out / f"samples_{{task}}_2026-01-31T12-00-00.000000.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
'''


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "python-with-lm-eval"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def echo(prompt: str, body: dict) -> dict:
    return {"text": prompt if int(prompt) or body["seed"] != 1235 else "wrong"}


def test_a_run_asks_each_question_with_a_seed_of_its_own_and_keeps_the_answers(stand_in: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(echo) as server:
        found = run(Endpoint(server.url, "tiny", "completions"), out, {"sums": SUMS}, python=stand_in)
        assert [(body["seed"], body["temperature"]) for _, body in server.requests] == [(1234, 1.0)] * 4 + [
            (1235, 1.0)
        ] * 4
    assert found["sums"].questions["0-5feceb66ffc8"] == (1.0, 0.0) and found["sums"].rate == 7 / 8
    assert sorted(p.name for p in out.iterdir()) == ["run.json", "sums.run0.jsonl", "sums.run1.jsonl"]
    assert load(str(out)) == found and found["sums"].settings["fewshot"] == 2


def test_a_run_that_was_interrupted_is_continued_and_one_that_differs_refused(stand_in: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(echo) as server:
        where = Endpoint(server.url, "tiny", "completions")
        server.fail = 1
        with pytest.raises(EvalsError, match=r"lm-eval ended with 1: .*HTTP Error 500") as failed:
            run(where, out, {"sums": SUMS}, python=stand_in)
        assert "Traceback" in (out / "sums.run0.log").read_text() and "sums.run0.log" in failed.value.hint
        with pytest.raises(EvalsError, match="sums is unfinished: run 0 of 2 is missing"):
            load(str(out))
        whole = run(where, out, {"sums": SUMS}, python=stand_in)
        (out / "sums.run1.jsonl").unlink()
        server.requests.clear()
        told: list[str] = []
        assert run(where, out, {"sums": SUMS}, python=stand_in, tell=told.append) == whole
        assert len(server.requests) == 4 and told == ["sums: run 1 of 2 is there already", "sums: run 2 of 2 ..."]
        with pytest.raises(OutputError, match="asked with fewshot 2, now 5"):
            run(where, out, {"sums": replace(SUMS, fewshot=5)}, python=stand_in)
        more = run(where, out, {"sums": replace(SUMS, runs=3)}, python=stand_in)
        assert more["sums"].runs == 3 and more["sums"].rate == pytest.approx(11 / 12)


def test_a_folder_with_other_things_is_refused(stand_in: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with serving(echo) as server, pytest.raises(OutputError, match="is not empty"):
        run(Endpoint(server.url, "tiny"), tmp_path, {"sums": SUMS}, python=stand_in)


def test_what_is_wrong_with_the_endpoint_is_said_before_anything_is_asked(stand_in: str, tmp_path: Path) -> None:
    with serving(echo) as server, pytest.raises(EvalsError, match="serves no model 'huge'") as wrong:
        run(Endpoint(server.url, "huge"), tmp_path / "out", {"sums": SUMS}, python=stand_in)
    assert "'tiny'" in wrong.value.hint
    with pytest.raises(EvalsError, match="refused"):
        run(Endpoint(server.url, "tiny"), tmp_path / "out", {"sums": SUMS}, python=stand_in)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_without_lm_eval_the_error_says_how_to_get_it(python: str, tmp_path: Path) -> None:
    with pytest.raises(EvalsError, match=python) as missing:
        run(Endpoint("http://127.0.0.1:1", "tiny"), tmp_path, {"sums": SUMS}, python=python)
    assert "glmquant[evals]" in missing.value.hint


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:30000", "http://h:30000"),
        ("http://h:30000/v1/", "http://h:30000"),
        ("https://h/api/v1/chat/completions", "https://h/api"),
        ("https://h/v1/completions", "https://h"),
    ],
)
def test_any_form_of_the_url_will_do(url: str, root: str) -> None:
    assert endpoint_root(url) == root
    assert Endpoint(root, "m").url == f"{root}/v1/chat/completions"


@pytest.mark.parametrize("url", ["h:30000", "ftp://h", "http://u:p@h", "http://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(EvalsError):
        endpoint_root(url)


def test_the_evals_are_asked_as_the_write_up_did() -> None:
    known = definitions()
    gsm8k, gpqa = known["gsm8k"], known["gpqa_diamond"]
    assert (gsm8k.fewshot, gsm8k.temperature, gsm8k.runs) == (5, 0.0, 1)
    assert (gpqa.temperature, gpqa.questions) == (1.0, 198) and gpqa.runs > 1
    config = lm_eval_config(Endpoint("http://h", "m"), gpqa, 3, None, "out")
    assert config["gen_kwargs"]["temperature"] == 1.0 and config["model_args"]["seed"] == 1237
    assert choose(known, ["gsm8k", "gpqa_diamond"], runs=8)["gsm8k"].runs == 1
    with pytest.raises(EvalsError, match="no eval 'mmlu'"):
        choose(known, ["mmlu"])


FORM = """\
version: 1
evals:
  x: {{task: t, filter: f, metric: m, max_tokens: 1, fewshot: {fewshot}, temperature: 0, runs: {runs}}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evals: {}", "needs version: 1"),
        ("version: 1\nevals: {x: {task: t}}", "'fewshot' is missing"),
        ("version: 1\nevals: {'../x': {}}", "is no name"),
        (FORM.format(fewshot=-1, runs=1), "fewshot is -1"),
        (FORM.format(fewshot=0, runs=2), "greedy"),
        (": :", "cannot be read"),
    ],
)
def test_definitions_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(EvalsError, match=message):
        definitions(tmp_path / "my.yaml")

"""evals: run, compare, import."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, verb
from glmquant.evals.compare import ALPHA, MARGIN, POWER, Comparison, Comparisons
from glmquant.findings import JSON_VERSION

COMPARE_EPILOG = """\
A and B: a folder of `glmquant evals run`, lm-eval's samples, tau2's results, or a table in words:
  NAME=RIGHT/ASKED              gsm8k=193/200
  NAME=RATE@QUESTIONS[xRUNS]    gpqa_diamond=0.9217@198x2       several with commas

verdicts, an eval each and one over all:
  equivalent  the difference is shown to be smaller than the margin (two one-sided tests)
  worse       B is shown to be worse than A, and equivalence is not shown
  better      the same upwards
  undecided   the data can show neither; the questions that would be enough are named
"Within the error bars" is undecided, not equivalent. Choose the margin before you see the results.
exit code: 0 equivalent or better, 1 worse or undecided.
"""


def add(verbs: Any) -> None:
    top = verbs.add_parser("evals", help=VERBS["evals"])
    steps = top.add_subparsers(metavar="STEP", required=True)
    _add_run(steps)
    _add_compare(steps)
    _add_import(steps)


def _add_run(steps: Any) -> None:
    parser = verb(steps, "run", _run, "ask an endpoint the questions of evals through lm-eval, and keep every answer")
    parser.add_argument("out", metavar="OUT", help="folder for the results; the same call continues an interrupted run")
    parser.add_argument(
        "--endpoint", required=True, metavar="URL", help="OpenAI-compatible, e.g. http://127.0.0.1:30000"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name there")
    parser.add_argument(
        "--evals",
        default="gsm8k,gpqa_diamond",
        metavar="LIST",
        help="gsm8k (5 examples, greedy), gpqa_diamond (temperature 1.0, 4 runs), or your own (default: both)",
    )
    parser.add_argument(
        "--definitions", metavar="FILE", help="your own evals, in the form of glmquant/evals/evals.yaml"
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help="times each question is asked, where the answer can change"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each eval")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer, reasoning included")
    parser.add_argument(
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="chat (default): the server applies the chat template; completions: plain text",
    )
    parser.add_argument("--concurrent", type=int, default=16, metavar="N", help="requests at once (default 16)")
    parser.add_argument(
        "--model-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="further argument of lm-eval's model, e.g. timeout=3600 or think_end_token=</think>",
    )
    parser.add_argument("--python", metavar="FILE", help="interpreter that has lm-eval (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_compare(steps: Any) -> None:
    parser = verb(steps, "compare", _compare, "tell whether B is equivalent to A within a margin, worse, or undecided")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = COMPARE_EPILOG
    parser.add_argument("a", metavar="A", help="the reference's results")
    parser.add_argument("b", metavar="B", help="the candidate's results")
    parser.add_argument(
        "--margin",
        type=float,
        default=MARGIN,
        metavar="SHARE",
        help=f"the largest difference that does not matter (default {MARGIN}: {MARGIN * 100:g} points)",
    )
    parser.add_argument("--alpha", type=float, default=ALPHA, metavar="P", help=f"error rate (default {ALPHA})")
    parser.add_argument(
        "--power", type=float, default=POWER, metavar="P", help=f"for the questions needed (default {POWER})"
    )
    parser.add_argument("--definitions", metavar="FILE", help="your own evals: how many questions they have")
    parser.add_argument("--ignore-settings", action="store_true", help="compare although they were asked differently")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_import(steps: Any) -> None:
    parser = verb(steps, "import", _import, "bring results of tau2 or lm-eval into a folder, a line for each answer")
    parser.add_argument("file", metavar="FILE", help="tau2's results (JSON) or lm-eval's samples_*.jsonl")
    parser.add_argument("out", metavar="OUT", help="folder of results, new or not")
    parser.add_argument("--name", default="", metavar="NAME", help="call the eval so")


def _run(args: argparse.Namespace) -> int:
    from glmquant import operate

    scores = operate.run_evals(
        args.endpoint,
        args.model,
        args.out,
        evals=tuple(name.strip() for name in args.evals.split(",")),
        definitions=args.definitions,
        runs=args.runs,
        limit=args.limit,
        max_tokens=args.max_tokens,
        api=args.api,
        concurrent=args.concurrent,
        model_args=dict(map(_model_arg, args.model_arg)),
        python=args.python,
        tell=lambda line: say(line, to=sys.stderr),
    )
    if args.json:
        rows = {name: {**dataclasses.asdict(one), "questions": one.count} for name, one in scores.items()}
        print_json({"version": JSON_VERSION, "folder": str(Path(args.out)), "evals": rows})
        return 0
    for one in scores.values():
        nothing = f"; nothing was found in {one.unanswered} answers" if one.unanswered else ""
        say(f"{one.name}: {one.rate:.4f} of {one.count:,} questions, {one.runs} run{'s' * (one.runs > 1)}{nothing}")
    return 0


def _model_arg(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _import(args: argparse.Namespace) -> int:
    from glmquant import operate

    for file, answers in operate.import_evals(args.file, args.out, name=args.name).items():
        say(f"{file}: {answers:,} answers")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from glmquant import operate

    done = operate.compare_evals(
        args.a,
        args.b,
        margin=args.margin,
        alpha=args.alpha,
        power=args.power,
        definitions=args.definitions,
        ignore_settings=args.ignore_settings,
    )
    if args.json:
        print_json({"version": JSON_VERSION, "ok": done.ok, **dataclasses.asdict(done)})
    else:
        say(*_lines(done))
    return 0 if done.ok else 1


def _lines(done: Comparisons) -> list[str]:
    lines = [line for one in done.evals for line in _eval_lines(one, done)]
    if done.left_out:
        lines.append(f"only one of the two has {', '.join(done.left_out)}")
    if len(done.evals) > 1:
        lines.append(f"all {len(done.evals)} evals: {done.verdict}")
    return lines


def _eval_lines(one: Comparison, done: Comparisons) -> list[str]:
    what = {
        "equivalent": f"equivalent within {_points(done.margin)}",
        "undecided": f"undecided at {_points(done.margin)}",
    }
    asked = [
        f"{rate:.4f} of {count:,}" + (f" x {runs} runs" if runs > 1 else "")
        for rate, count, runs in ((one.rate_a, one.count_a, one.runs_a), (one.rate_b, one.count_b, one.runs_b))
    ]
    lines = [
        f"{one.name}: {what.get(one.verdict, one.verdict)}",
        f"  A {asked[0]}, B {asked[1]}: difference {_signed(one.difference)}",
        f"  {100 - 100 * done.alpha:g}% interval {_signed(one.low)} to {_signed(one.high)} ({one.method})",
    ]
    if one.normal_low is not None and one.normal_high is not None:
        lines.append(f"  by the normal approximation {_signed(one.normal_low)} to {_signed(one.normal_high)}")
    lines.append(
        f"  {100 - 200 * done.alpha:g}% interval {_signed(one.inner_low)} to {_signed(one.inner_high)}; "
        f"p of equivalence {_p(one.p_equivalent)}, of a difference {_p(one.p_different)}"
        + (f" ({_p(one.p_holm)} as one of {len(done.evals)}, Holm)" if len(done.evals) > 1 else "")
    )
    if one.gained is not None:
        lines.append(f"  of {one.paired:,} questions only A has {one.lost:,} right, only B {one.gained:,}")
    if one.verdict == "undecided":
        unit = "questions, paired," if one.paired else "questions an arm"
        lines.append(
            f"  needs about {_about(one.needed)} {unit} for {100 * done.power:g}% power to show that B is not worse by "
            f"more than {_points(done.margin)}, {_about(one.needed_both)} that it is not better either"
            + (f": {_about(one.more)} more" if one.more else "")
        )
    return [*lines, *(f"  note: {note}" for note in one.notes)]


def _points(share: float) -> str:
    return f"{share * 100:g} point{'s' * (share != 0.01)}"


def _signed(share: float) -> str:
    return f"{share:+.3f}" if abs(share) >= 0.0005 or not share else f"{share:+.1g}"


def _p(value: float) -> str:
    return f"{value:.2g}" if value > 1e-16 else "below 1e-16"


def _about(count: int) -> str:
    """Two digits, as no more are known: 1,644 is 1,600."""
    return f"{int(float(f'{count:.1e}')):,}"

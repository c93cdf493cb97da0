#!/usr/bin/env python3
"""Speed of a served model: a ladder of loads, a single stream, the knee, and what a million tokens cost.

    python scripts/bench_serving.py ladder OUT --base-url http://127.0.0.1:30000 --model NAME --tokenizer FOLDER
    python scripts/bench_serving.py single OUT --base-url http://127.0.0.1:30000 --model NAME --tokenizer FOLDER
    python scripts/bench_serving.py table OUT [--ttft-limit 5]
    python scripts/bench_serving.py cost --system 'MI355X,20,OUT' --system 'B200,60,3192'
    python scripts/bench_serving.py cost --price-ratio B200=0.4 --throughput-ratio B200=0.82

ladder: 20,000 tokens in, 1,000 out, 60% of the input shared by a group of requests, requests arriving at random
(Poisson) 0.5 to 2.4 a second. single: one request after another, 10,000 in, 1,500 out. Both call sglang's own
benchmark (--python: an interpreter that has sglang) against any OpenAI-compatible endpoint, keep each of its results
as OUT/raw/NAME.jsonl, and write OUT/results.json, OUT/table.md and, for a ladder, OUT/plot.svg. The same call again
continues: what was measured is kept.

tok/s are output tokens a second of one node. The knee is the highest load up to which every step keeps its TTFT
within the limit and answers (nearly) everything. TTFT counts answered requests only, so read it with the success.

cost: dollars a million output tokens = price of a node-hour / tokens an hour. From ratios it only answers if price
and throughput are against the same reference: a price against one part and a throughput against another say nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LADDER = "0.5,0.8,1.0,1.2,1.5,1.8,2.0,2.2,2.4"
INSTALL = (
    "sglang is not installed for {python}. Its client needs no GPU, but sglang's imports are many: use the "
    "interpreter of the serving image or environment with --python."
)
# Where the client is: sglang.bench_serving is deprecated since 0.5.23, which has it as sglang.benchmark.serving.
FIND = """\
import importlib.metadata, importlib.util, pathlib
spec = importlib.util.find_spec("sglang")
place = pathlib.Path(spec.submodule_search_locations[0]) if spec else pathlib.Path("nowhere")
for name in ("benchmark/serving", "bench_serving"):
    if (place / (name + ".py")).is_file():
        print("sglang." + name.replace("/", "."), importlib.metadata.version("sglang"))
        break
"""


# What the client says when its requests went out and none was answered (0.5.13 to 0.5.23); all else is its own fault.
NOTHING_ANSWERED = ("Warmup failed", "All requests failed")


class BenchError(Exception):
    """What the user has to mend."""


@dataclass(frozen=True)
class Load:
    """What is asked of the server in one step. Lengths in tokens; `rate`: requests a second, 0: one after another."""

    input: int
    output: int
    shared: float
    group: int
    prompts: int
    rate: float

    @property
    def name(self) -> str:
        return f"rate-{self.rate:g}" if self.rate else "single"

    @property
    def prefix(self) -> int:
        """Tokens shared in a group. Its first request misses the cache, so that the shared part must be longer."""
        return min(self.input - 1, round(self.input * self.shared * self.group / max(1, self.group - 1)))

    @property
    def groups(self) -> int:
        return math.ceil(self.prompts / self.group)


@dataclass(frozen=True)
class Step:
    """A step's result; times in seconds, tok_s: output tokens a second and node; 0 where nothing was answered."""

    load: Load
    asked: int
    answered: int
    duration: float
    tok_s: float
    total_tok_s: float
    request_s: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def success(self) -> float:
        return self.answered / self.asked


def command(python: str, module: str, args: argparse.Namespace, load: Load, output: Path) -> list[str]:
    """The call of sglang's client (flags as in 0.5.13 to 0.5.23)."""
    # A seed of its own for each step: with one seed all steps send the same prompts, and every step after the first
    # finds them whole in the server's prefix cache. The tokenizer takes part because the client keeps prompts on disk
    # under a name that does not have it.
    seed = zlib.crc32(f"{args.seed} {load} {args.tokenizer}".encode()) % 2**31
    words = [python, "-m", module, "--backend", args.backend, "--base-url", args.base_url, "--model", args.model]
    words += ["--tokenizer", args.tokenizer, "--dataset-name", "generated-shared-prefix", "--seed", str(seed)]
    words += ["--gsp-num-groups", str(load.groups), "--gsp-prompts-per-group", str(load.group)]
    words += ["--gsp-system-prompt-len", str(load.prefix), "--gsp-question-len", str(load.input - load.prefix)]
    words += ["--gsp-output-len", str(load.output), "--num-prompts", str(load.groups * load.group)]
    words += ["--request-rate", f"{load.rate:g}" if load.rate else "inf"]
    words += [] if load.rate else ["--max-concurrency", "1"]
    words += ["--output-file", str(output), "--output-details", "--disable-tqdm"]
    return words + (["--extra-request-body", args.extra_request_body] if args.extra_request_body else [])


def find_client(python: str) -> tuple[str, str]:
    """Module and release of sglang's client."""
    try:
        done = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=False)
    except OSError as err:
        raise BenchError(f"{python}: {err.strerror}") from err
    module, _, release = done.stdout.strip().partition(" ")
    if done.returncode or not module:
        raise BenchError(INSTALL.format(python=python))
    return module, release


def check_endpoint(base_url: str, model: str) -> None:
    try:
        with urllib.request.urlopen(f"{base_url}/v1/models", timeout=30) as answer:
            names = [each["id"] for each in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise BenchError(f"{base_url}/v1/models: {getattr(err, 'reason', err)}. Is the server up?") from err
    if model not in names:
        raise BenchError(f"{base_url} serves {', '.join(names)}, not {model}")


def measure(args: argparse.Namespace, loads: Sequence[Load], tell: Callable[[str], None]) -> list[Step]:
    """Run every step that is not there yet; a step in which nothing is answered is a result, too."""
    args.base_url = re.sub(r"(/v1)?/*$", "", args.base_url)
    module, release = find_client(args.python)
    check_endpoint(args.base_url, args.model)
    out = Path(args.out)
    keep = {"model": args.model, "tokenizer": args.tokenizer, "backend": args.backend, "nodes": args.nodes,
            "seed": args.seed, "extra_request_body": args.extra_request_body, "sglang": release,
            "loads": [asdict(load) for load in loads]}  # fmt: skip
    settings = out / "settings.json"
    if settings.is_file():
        if read_json(settings) != keep:
            raise BenchError(f"{out}: was measured with other settings; choose another folder")
    elif out.is_dir() and any(out.iterdir()):
        raise BenchError(f"{out}: is not empty; choose another folder")
    (out / "raw").mkdir(parents=True, exist_ok=True)
    replace(settings, json.dumps(keep, indent=2) + "\n")
    for load in loads:
        done = out / "raw" / f"{load.name}.jsonl"
        if done.is_file():
            tell(f"{load.name}: measured already")
            continue
        tell(f"{load.name}: {load.groups * load.group} requests ...")
        temporary = done.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        with open(out / "raw" / f"{load.name}.log", "w") as log:
            words = command(args.python, module, args, load, temporary.resolve())
            try:
                code = subprocess.run(words, stdout=log, stderr=log, timeout=args.step_timeout, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if not temporary.is_file():  # the client writes nothing where nothing was answered
            name = out / "raw" / f"{load.name}.log"
            if code != -1 and not any(word in name.read_text(errors="replace") for word in NOTHING_ANSWERED):
                raise BenchError(f"sglang's client failed, not the server: {last_error(name)}\n  Its log is {name}.")
            why = last_error(name) if code != -1 else f"not done in {args.step_timeout} s"
            temporary.write_text(json.dumps({"completed": 0, "glmquant_error": why}) + "\n")
            check_endpoint(args.base_url, args.model)  # a dead server is no result: nothing is kept
        os.replace(temporary, done)
    return read_steps(out)


def last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = [i for i, line in enumerate(lines) if re.search(r"Error\b", line)] or [len(lines) - 1]
    return " ".join(lines[found[-1] : found[-1] + 2])[:300] if lines else "it said nothing"


def read_steps(out: Path) -> list[Step]:
    settings = read_json(out / "settings.json")
    try:
        loads = [Load(**each) for each in settings["loads"]]
        nodes = int(settings["nodes"])
    except (KeyError, TypeError, ValueError) as err:
        raise BenchError(f"{out / 'settings.json'}: not written by this script") from err
    steps = [step_of(out / "raw" / f"{load.name}.jsonl", load, nodes) for load in loads]
    return sorted(steps, key=lambda step: step.load.rate)


def step_of(path: Path, load: Load, nodes: int) -> Step:
    """From the client's line (sglang 0.5.23, benchmark/serving.py)."""
    asked = load.groups * load.group
    try:
        lines = path.read_text().splitlines()
        row = json.loads(lines[-1])
        answered = int(row["completed"])
        if not answered:
            errors = [text for text in row.get("errors", []) if text]
            why = row.get("glmquant_error") or (
                errors[0].strip().splitlines()[-1][:300] if errors else "nothing answered"
            )
            return Step(load, asked, 0, 0, 0, 0, 0, 0, 0, 0, why)
        number = {key: float(row[key]) for key in ("duration", "output_throughput", "total_throughput",
                  "request_throughput", "median_tpot_ms")}  # fmt: skip
        # percentiles from the requests themselves: p95 is not in the client's line before 0.5.2x
        ttfts = sorted(t for t, n in zip(row["ttfts"], row["output_lens"], strict=True) if n and t)
        counted, retokenized = int(row["total_output_tokens"]), int(row["total_output_tokens_retokenized"])
        sent = int(row["total_input_tokens"]) / answered
    except (OSError, ValueError, KeyError, TypeError, IndexError) as err:
        raise BenchError(f"{path}: is no result of sglang's client: {err!r}") from err
    errors = [text.strip().splitlines()[-1][:300] for text in row.get("errors", []) if text and text.strip()]
    notes = []
    if counted > retokenized * 1.1 + 10:
        notes.append(
            f"tokens counted {counted:,}, in the text {retokenized:,}: no usage from the server, or it cut short"
        )
    if abs(sent - load.input) > 0.05 * load.input:
        notes.append(
            f"prompts have {sent:,.0f} tokens, not {load.input:,}: the tokenizer does not give back what it made"
        )
    if counted < 0.98 * answered * load.output:
        notes.append(f"answers are shorter than asked: {counted / answered:.0f} tokens of {load.output:,}")
    return Step(
        load,
        asked,
        answered,
        number["duration"],
        number["output_throughput"] / nodes,
        number["total_throughput"] / nodes,
        number["request_throughput"] / nodes,
        percentile(ttfts, 50),
        percentile(ttfts, 95),
        number["median_tpot_ms"] / 1000,
        errors[0] if errors else "",
        tuple(notes),
    )


def percentile(ordered: Sequence[float], p: float) -> float:
    """By linear interpolation, as numpy's."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Knee:
    """The highest load that is served well; `step` None: none is. `reached`: the next one is not."""

    step: Step | None
    reached: bool


def knee(steps: Sequence[Step], limit: float, p: int, success: float) -> Knee:
    good: Step | None = None
    for step in steps:
        ttft = step.ttft_p95 if p == 95 else step.ttft_p50
        if not step.answered or step.success < success or ttft > limit:
            return Knee(good, True)
        good = step
    return Knee(good, False)


def knee_words(found: Knee, limit: float, p: int, success: float) -> str:
    under = f"TTFT p{p} <= {limit:g} s and {success:.1%} answered"
    if found.step is None:
        return f"No load keeps {under}."
    at = f"{found.step.load.rate:g} requests/s, {found.step.tok_s:,.0f} tok/s/node"
    return f"Knee ({under}): {at}." if found.reached else f"No knee up to {at} ({under}): the ladder ends too early."


def table(steps: Sequence[Step]) -> str:
    """Markdown."""
    if not steps[0].load.rate:
        (step,) = steps
        decode = 1 / step.tpot_p50 if step.tpot_p50 else 0.0
        lines = [
            "| in / out | tok/s, decode | tok/s, whole | TTFT p50 s | TTFT p95 s | success |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        lines.append(
            f"| {step.load.input:,} / {step.load.output:,} | {decode:,.1f} | {step.tok_s:,.1f} | {step.ttft_p50:.3f} | "
            f"{step.ttft_p95:.3f} | {step.success:.1%} |"
        )
    else:
        lines = [
            "| requests/s | answered/s | tok/s/node | in + out tok/s/node | TTFT p50 s | TTFT p95 s | success |",
            "|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for step in steps:
            ttft = (f"{step.ttft_p50:.2f}", f"{step.ttft_p95:.2f}") if step.answered else ("-", "-")
            lines.append(
                f"| {step.load.rate:g} | {step.request_s:.2f} | {step.tok_s:,.0f} | {step.total_tok_s:,.0f} | "
                f"{' | '.join(ttft)} | {step.success:.1%} |"
            )
    notes = [f"- {step.load.name}: {text}" for step in steps for text in (*step.notes, step.error) if text]
    return "\n".join([*lines, *([""] if notes else []), *(re.sub(r"[|<>`\x00-\x1f\x7f-\x9f]", " ", n) for n in notes)])


def plot(steps: Sequence[Step], limit: float) -> str:
    """SVG, nothing from elsewhere: throughput above, TTFT below (log), over the offered load."""
    width, height, left, gap = 720, 250, 70, 60
    most_rate = max(step.load.rate for step in steps) * 1.05
    most = max([step.tok_s for step in steps if step.answered] or [1.0]) * 1.1 or 1.0
    times = [t for step in steps if step.answered for t in (step.ttft_p50, step.ttft_p95) if t > 0] + [limit]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)) + 1e-9)
    high += high == low

    def x(rate: float) -> float:
        return left + rate / most_rate * (width - left - 20)

    def upper(value: float) -> float:
        return 30 + height - value / most * height

    def lower(value: float) -> float:
        return 30 + height + gap + height * (1 - (math.log10(max(value, 10**low)) - low) / (high - low))

    def text(px: float, py: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

    def line(points: Sequence[tuple[float, float]], colour: str) -> str:
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'

    def rule(y: float, colour: str = "#ddd") -> str:
        return f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'

    total = 2 * height + gap + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{total}" fill="white"/>',
        text(left, 20, "output tokens/s and node", "start"),
        text(left, 20 + height + gap, "TTFT, seconds: ", "start"),
        text(left + 95, 20 + height + gap, "p50", "start", "#1b6ca8"),
        text(left + 130, 20 + height + gap, "p95", "start", "#c8553d"),
        text(left + 165, 20 + height + gap, f"limit {limit:g}", "start", "#777"),
        text((left + width) / 2, total - 12, "requests/s offered (crossed: not all were answered)"),
    ]
    for k in range(5):
        parts += [rule(upper(most * k / 4)), text(left - 6, upper(most * k / 4) + 4, f"{most * k / 4:,.0f}", "end")]
    for power in range(low, high + 1):
        parts += [rule(lower(10.0**power)), text(left - 6, lower(10.0**power) + 4, f"{10.0**power:g}", "end")]
    parts.append(rule(lower(limit), "#777"))
    answered = [step for step in steps if step.answered]
    parts.append(line([(x(step.load.rate), upper(step.tok_s)) for step in answered], "#2a7f4f"))
    parts.append(line([(x(step.load.rate), lower(step.ttft_p50)) for step in answered], "#1b6ca8"))
    parts.append(line([(x(step.load.rate), lower(step.ttft_p95)) for step in answered], "#c8553d"))
    for step in steps:
        parts.append(text(x(step.load.rate), lower(10.0**low) + 18, f"{step.load.rate:g}"))
        if step.answered < step.asked:
            parts.append(text(x(step.load.rate), upper(step.tok_s) - 8, "\u00d7", colour="#c8553d"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_results(out: Path, steps: Sequence[Step], args: argparse.Namespace) -> str:
    """results.json, table.md, plot.svg; returns what to print."""
    words = table(steps)
    value: dict[str, Any] = {
        "version": 1,
        "settings": read_json(out / "settings.json"),
        "steps": [{**asdict(step), "success": step.success} for step in steps],
    }
    if steps[0].load.rate:
        found = knee(steps, args.ttft_limit, args.ttft_percentile, args.min_success)
        words += "\n\n" + knee_words(found, args.ttft_limit, args.ttft_percentile, args.min_success)
        value["knee"] = {
            "rate": found.step.load.rate if found.step else None,
            "tok_s": found.step.tok_s if found.step else None,
            "reached": found.reached,
            "ttft_limit": args.ttft_limit,
            "ttft_percentile": args.ttft_percentile,
            "min_success": args.min_success,
        }
        replace(out / "plot.svg", plot(steps, args.ttft_limit))
    replace(out / "results.json", json.dumps(value, indent=2) + "\n")
    replace(out / "table.md", words + "\n")
    return words


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise BenchError(f"{path}: cannot be read: {err}") from err


@dataclass(frozen=True)
class System:
    """A node: dollars an hour, output tokens a second at its knee, and what it was measured with ("": not said)."""

    name: str
    price: float
    tok_s: float
    measured: str = ""


def system(text: str) -> System:
    """`NAME,DOLLARS_AN_HOUR,TOK_S` or `NAME,DOLLARS_AN_HOUR,FOLDER` of a ladder."""
    name, price, rate, *more = [part.strip() for part in text.split(",")] + [""] * 2
    if not name or any(more) or not rate:
        raise BenchError(f"{text!r} is not NAME,DOLLARS_AN_HOUR,TOK_S nor NAME,DOLLARS_AN_HOUR,FOLDER")
    if re.fullmatch(r"[\d.e+]+", rate):
        return System(name, positive(price), positive(rate))
    value = read_json(Path(rate) / "results.json")
    try:
        found = value["knee"]
        load = {k: value["settings"]["loads"][0][k] for k in ("input", "output", "shared")}
        limits = {k: found[k] for k in ("ttft_limit", "ttft_percentile", "min_success")}
    except (KeyError, TypeError, IndexError) as err:
        raise BenchError(f"{rate}: holds no ladder") from err
    if found["tok_s"] is None:
        raise BenchError(f"{name}: no load of {rate} keeps the limits, so that it has no cost under them")
    return System(name, positive(price), float(found["tok_s"]), json.dumps({**load, **limits}, sort_keys=True))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise BenchError(f"{text!r} is no number above 0")
    return value


def cost_of_systems(systems: Sequence[System]) -> str:
    """Dollars a million output tokens, each against the first."""
    measured = {one.measured for one in systems if one.measured}
    if len(measured) > 1:
        raise BenchError("the ladders have different loads or limits: " + " and ".join(sorted(measured)))
    if len({one.name for one in systems}) < len(systems):
        raise BenchError("two systems have the same name")
    first = systems[0]
    lines = [
        f"| system | $/node-hour | tok/s/node | $/million output tokens | price / {first.name} | tok/s / {first.name} "
        f"| cost / {first.name} |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for one in systems:
        dollars = cost(one)
        lines.append(
            f"| {one.name} | {one.price:g} | {one.tok_s:,.0f} | {dollars:.3f} | {one.price / first.price:.2f} | "
            f"{one.tok_s / first.tok_s:.2f} | {dollars / cost(first):.2f} |"
        )
    given = [one.name for one in systems if not one.measured]
    if given:
        lines += [
            "",
            f"Given, not measured here: {', '.join(given)}. That load and limits are the same is yours to know.",
        ]
    return "\n".join(lines)


def cost(one: System) -> float:
    return one.price / (one.tok_s * 3600) * 1e6


def cost_of_ratios(price: str, throughput: str) -> str:
    """`REFERENCE=RATIO` twice: of this system to the reference. Refuses two references."""
    named = []
    for text in (price, throughput):
        reference, _, ratio = text.rpartition("=")
        if not reference.strip():
            raise BenchError(f"{text!r} names no reference: REFERENCE=RATIO, for example B200=0.4")
        named.append((reference.strip(), positive(ratio)))
    (one, cheap), (other, fast) = named
    if one != other:
        raise BenchError(
            f"the price ratio is against {one}, the throughput ratio against {other}: no cost follows from them. "
            f"Give both against {one}, or both against {other}."
        )
    return f"cost per token / {one} = {cheap:g} (price) / {fast:g} (throughput) = {cheap / fast:.3f}"


def numbers(text: str) -> list[float]:
    return sorted({positive(part) for part in text.split(",")})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("ladder", "rising loads"), ("single", "one request after another")):
        sub = verbs.add_parser(verb, help=text)
        add = sub.add_argument
        add("out", metavar="OUT", help="folder for the results")
        add("--base-url", required=True, metavar="URL", help="OpenAI-compatible endpoint")
        add("--model", required=True, metavar="NAME", help="the model's name there")
        add("--tokenizer", required=True, metavar="FOLDER", help="the model's folder: prompts are made of its tokens")
        add("--python", default=sys.executable, metavar="FILE", help="interpreter that has sglang (default: this one)")
        add(
            "--backend",
            default="sglang-oai",
            help="of sglang's client: sglang-oai (default), sglang-oai-chat, vllm ...",
        )
        add("--input", type=int, default=20_000 if verb == "ladder" else 10_000, metavar="N", help="tokens in")
        add("--output", type=int, default=1_000 if verb == "ladder" else 1_500, metavar="N", help="tokens out")
        add("--nodes", type=int, default=1, metavar="N", help="nodes behind the endpoint (default 1)")
        add("--seed", type=int, default=1, metavar="N", help="of prompts and arrivals")
        add("--step-timeout", type=float, default=3600, metavar="S", help="seconds until a step counts as failed")
        add("--extra-request-body", default="", metavar="JSON", help="further fields of each request")
        if verb == "ladder":
            add("--rates", default=LADDER, metavar="LIST", help=f"requests a second (default {LADDER})")
            add("--shared", type=float, default=0.6, metavar="SHARE", help="of the input, in the cache (default 0.6)")
            add("--group", type=int, default=16, metavar="N", help="requests that share a prefix (default 16)")
            add("--seconds", type=float, default=240, metavar="S", help="length of a step (default 240)")
        else:
            add("--prompts", type=int, default=8, metavar="N", help="requests (default 8)")
        if verb == "ladder":
            knee_options(sub)
    again = verbs.add_parser("table", help="table, knee and plot of what was measured")
    again.add_argument("out", metavar="OUT")
    knee_options(again)
    money = verbs.add_parser("cost", help="dollars a million tokens, or a ratio of costs")
    money.add_argument("--system", action="append", default=[], metavar="NAME,$/H,TOK_S|OUT", help="a node; repeat")
    money.add_argument("--price-ratio", metavar="REF=RATIO", help="price of this node / price of the reference")
    money.add_argument("--throughput-ratio", metavar="REF=RATIO", help="tok/s of this node / tok/s of the reference")
    args = parser.parse_args(argv)
    try:
        print(run(args))
        return 0
    except BenchError as err:  # may quote the server, whose words must not act on the terminal
        print(re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "?", f"bench_serving: error: {err}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_serving: interrupted; the same call continues", file=sys.stderr)
        return 130


def knee_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft-limit", type=float, default=5.0, metavar="S", help="of the knee (default 5)")
    parser.add_argument("--ttft-percentile", type=int, choices=(50, 95), default=95, help="of the knee (default 95)")
    parser.add_argument("--min-success", type=float, default=0.99, metavar="SHARE", help="of the knee (default 0.99)")


def run(args: argparse.Namespace) -> str:
    if args.verb == "cost":
        if bool(args.price_ratio) != bool(args.throughput_ratio) or bool(args.system) == bool(args.price_ratio):
            raise BenchError("give --system (one or more), or --price-ratio and --throughput-ratio")
        if args.system:
            return cost_of_systems([system(text) for text in args.system])
        return cost_of_ratios(args.price_ratio, args.throughput_ratio)
    if args.verb == "table":
        return write_results(Path(args.out), read_steps(Path(args.out)), args)
    if min(args.input, args.output, args.nodes) < 1 or args.input < 2:
        raise BenchError("--input, --output and --nodes are counts")
    if args.verb == "single":
        loads = [Load(args.input, args.output, 0.5, 1, args.prompts, 0.0)]
    else:
        if not 0 <= args.shared < 1 or args.group < 2:
            raise BenchError("--shared is a share below 1, --group at least 2")
        loads = [
            Load(args.input, args.output, args.shared, args.group, max(args.group, round(rate * args.seconds)), rate)
            for rate in numbers(args.rates)
        ]
    steps = measure(args, loads, lambda line: print(line, file=sys.stderr, flush=True))
    return write_results(Path(args.out), steps, args)


if __name__ == "__main__":
    sys.exit(main())

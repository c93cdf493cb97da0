"""What an eval answered, question by question, and where that is read from: our JSONL, lm-eval, tau2, a table."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from glmquant.checkpoint.writer import create_folder, write_file
from glmquant.errors import GlmquantError, OutputError
from glmquant.text import short

RUN_FILE = "run.json"
VERSION = 1
NO_ANSWER = ("", "[invalid]")  # lm-eval's word for "the filter found nothing in the text"


class EvalsError(GlmquantError):
    """Results of an eval are missing, damaged or not comparable, or the eval could not be run."""


@dataclass(frozen=True)
class Answer:
    """One answer to one question: a line of our JSONL.

    Attributes:
        eval: name of the eval, e.g. gsm8k.
        question: what identifies it whatever the order and the run; paired by it.
        run: 0, 1, ... where a question is asked several times.
        score: 0 (wrong) to 1 (right).
        answer: what was taken from the response; `response` is the whole text (empty where not kept).
    """

    eval: str
    question: str
    run: int
    score: float
    target: str = ""
    answer: str = ""
    response: str = ""


@dataclass(frozen=True)
class Scores:
    """The scores of one eval of one model.

    Attributes:
        questions: question -> scores, one a run; empty where only a rate is known.
        rate: mean score over questions.
        count: questions.
        runs: times each was asked.
        settings: how it was asked, where known; two evals with other settings are other evals.
        unanswered: answers in which nothing was found, counted as wrong.
    """

    name: str
    questions: Mapping[str, tuple[float, ...]]
    rate: float
    count: int
    runs: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    unanswered: int = 0


def load(text: str) -> dict[str, Scores]:
    """Scores by eval, of a folder or a file of results, or of a table in words.

    Args:
        text: a folder of `glmquant evals run`; a folder or file of lm-eval (`samples_*.jsonl`) or tau2 (JSON);
            or `gsm8k=193/200,gpqa_diamond=0.9217@198x2`: right of asked, or rate@questions and runs of each.

    Raises:
        EvalsError: nothing is there, or it cannot be understood.
    """
    path = Path(text)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return score(read_answers(path))
    if "=" in text:
        return {one.name: one for one in map(_in_words, text.split(","))}
    raise EvalsError(
        f"{text}: no such folder or file, and no table in words",
        "Give a folder of `glmquant evals run`, lm-eval's samples, tau2's JSON, or NAME=RIGHT/ASKED.",
    )


def read_answers(path: Path, name: str = "") -> list[Answer]:
    """The answers in one file of ours, of lm-eval (`samples_TASK_TIME.jsonl`) or of tau2; `name` renames the eval.

    Raises:
        EvalsError: it cannot be read, or is none of them.
    """
    if path.suffix == ".jsonl":
        rows = list(_rows(path))
        if rows and "doc_id" in rows[0]:
            answers = list(_of_lm_eval(rows, path, name or _task_of(path)))
        else:
            answers = [_ours(row, path, line) for line, row in enumerate(rows, 1)]
    else:
        answers = list(_of_tau2(_json(path), path))
    if not answers:
        raise EvalsError(f"{path}: holds no answer")
    return [Answer(**{**asdict(answer), "eval": name}) for answer in answers] if name else answers


def write_answers(folder: Path, file: str, answers: Iterable[Answer]) -> None:
    """One JSON object a line, atomically. Raises OutputError."""
    create_folder(folder)
    write_file(folder, file, "".join(json.dumps(asdict(answer)) + "\n" for answer in answers).encode())


def add_answers(folder: Path, answers: Sequence[Answer]) -> dict[str, int]:
    """Write `EVAL.imported.jsonl` for each eval among them, and say how many answers each holds.

    Raises:
        OutputError: the folder has that file already, or cannot be written.
    """
    evals: dict[str, list[Answer]] = {}
    for answer in answers:
        evals.setdefault(answer.eval, []).append(answer)
    files = {f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.imported.jsonl": rows for name, rows in evals.items()}
    for file in files:
        if (folder / file).exists():
            raise OutputError(f"{folder / file}: exists", "Nothing is overwritten: remove it, or choose a --name.")
    for file, rows in files.items():
        write_answers(folder, file, rows)
    return {file: len(rows) for file, rows in files.items()}


def score(answers: Sequence[Answer], settings: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Scores]:
    """Group answers by eval and question.

    Raises:
        EvalsError: a question was answered twice in a run, or was not asked as often as the others.
    """
    table: dict[str, dict[str, dict[int, float]]] = {}
    unanswered: dict[str, int] = {}
    for each in answers:
        runs = table.setdefault(each.eval, {}).setdefault(each.question, {})
        if each.run in runs:
            raise EvalsError(f"{each.eval}: question {each.question} has two answers in run {each.run}")
        runs[each.run] = each.score
        if not each.score and each.answer in NO_ANSWER and (each.answer or each.response):
            unanswered[each.eval] = unanswered.get(each.eval, 0) + 1
    found = {}
    for name, questions in table.items():
        often = {len(runs) for runs in questions.values()}
        if len(often) > 1:
            least = min(questions, key=lambda question: len(questions[question]))
            raise EvalsError(
                f"{name}: questions were asked {min(often)} to {max(often)} times, e.g. {least} only "
                f"{len(questions[least])}",
                "An answer that is missing is no answer that is wrong: run the eval to its end.",
            )
        rows = {question: tuple(runs[run] for run in sorted(runs)) for question, runs in questions.items()}
        rate = fmean(fmean(row) for row in rows.values())
        asked = (settings or {}).get(name, {})
        found[name] = Scores(name, rows, rate, len(rows), often.pop(), asked, unanswered.get(name, 0))
    return found


def samples_to_answers(
    path: Path, name: str, run: int, chosen: str | None = None, metric: str | None = None
) -> list[Answer]:
    """The answers in lm-eval's samples file, of one of its filters, as run `run` of eval `name`. Raises EvalsError."""
    return list(_of_lm_eval(list(_rows(path)), path, name, run, chosen, metric))


def _load_folder(folder: Path) -> dict[str, Scores]:
    ours = sorted(p for p in folder.glob("*.jsonl") if not p.name.startswith("samples_"))
    settings = {}
    if (folder / RUN_FILE).is_file():
        settings = read_run(folder)["evals"]
        for name, asked in settings.items():
            missing = [run for run in range(asked["runs"]) if not (folder / answers_file(name, run)).is_file()]
            if missing:
                raise EvalsError(
                    f"{folder}: {name} is unfinished: run {missing[0]} of {asked['runs']} is missing",
                    "Run the same `glmquant evals run` again: it does what is missing.",
                )
        kept = {answers_file(name, run) for name, asked in settings.items() for run in range(asked["runs"])}
        ours = [path for path in ours if path.name in kept or not _RUN_NAME.search(path.name)]
    answers = [answer for path in ours for answer in read_answers(path)]
    repeats: dict[str, int] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        task = _task_of(path)
        answers += samples_to_answers(path, task, repeats.setdefault(task, 0))
        repeats[task] += 1
    for path in sorted(folder.glob("*.json")):
        if path.name != RUN_FILE and isinstance(content := _json(path), dict) and "simulations" in content:
            answers += _of_tau2(content, path)
    if not answers:
        raise EvalsError(f"{folder}: holds no results", "Expected *.jsonl, lm-eval's samples_*.jsonl or tau2's JSON.")
    return score(answers, settings)


_RUN_NAME = re.compile(r"\.run\d+\.jsonl$")


def answers_file(name: str, run: int) -> str:
    """Name of the file that holds a run of an eval."""
    return f"{name}.run{run}.jsonl"


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a folder of `glmquant evals run`. Raises EvalsError."""
    value = _json(folder / RUN_FILE)
    evals = value.get("evals") if isinstance(value, dict) else None
    good = isinstance(evals, dict) and all(
        isinstance(asked, dict) and isinstance(asked.get("runs"), int) and 0 < asked["runs"] < 10_000
        for asked in evals.values()
    )
    if not good or value.get("version") != VERSION:
        raise EvalsError(f"{folder / RUN_FILE}: not written by this glmquant")
    return dict(value)


def _in_words(text: str) -> Scores:
    """`NAME=RIGHT/ASKED[xRUNS]` or `NAME=RATE@QUESTIONS[xRUNS]`."""
    form = r"\s*([\w.-]+)\s*=\s*(?:(\d+)\s*/|([01]?\.\d+|[01])\s*@)\s*(\d+)\s*(?:x\s*(\d+))?\s*"
    found = re.fullmatch(form, text)
    if not found:
        raise EvalsError(
            f"{short(text)} is neither NAME=RIGHT/ASKED nor NAME=RATE@QUESTIONS[xRUNS]",
            "For example gsm8k=193/200 or gpqa_diamond=0.9217@198x2. A rate without a count has no interval.",
        )
    name, right, rate, questions, runs = found.groups()
    count, times = int(questions), int(runs or 1)
    share = float(rate) if rate else int(right) / max(1, count)
    if not count or not times or share > 1:
        raise EvalsError(f"{short(text)}: more than all, or of none")
    return Scores(name, {}, share, count, times)


def _ours(row: dict[str, Any], path: Path, line: int) -> Answer:
    kinds: dict[str, type | tuple[type, ...]] = {"eval": str, "question": str, "run": int, "score": (int, float)}
    for key, kind in kinds.items():
        if not isinstance(row.get(key), kind) or isinstance(row[key], bool):
            raise EvalsError(f"{path}, line {line}: {key} is {short(row.get(key))}")
    texts = {key: str(row.get(key, "")) for key in ("target", "answer", "response")}
    return Answer(row["eval"], row["question"], row["run"], _share(row["score"], path, line), **texts)


def _of_lm_eval(
    rows: Sequence[dict[str, Any]],
    path: Path,
    name: str,
    run: int = 0,
    chosen: str | None = None,
    metric: str | None = None,
) -> Iterator[Answer]:
    """lm-eval 0.4.13 (evaluator.py): a line for each question and filter, its metrics as keys."""
    filters = {str(row.get("filter")) for row in rows}
    if chosen is None:
        chosen = "flexible-extract" if "flexible-extract" in filters else min(filters, default="none")
        if len(filters) > 1 and chosen != "flexible-extract":
            raise EvalsError(
                f"{path}: has the filters {', '.join(sorted(filters))}", "Run it with `glmquant evals run`."
            )
    if chosen not in filters:
        raise EvalsError(f"{path}: lm-eval wrote no filter {short(chosen)}, but {', '.join(sorted(filters))}")
    for line, row in enumerate(rows, 1):
        if str(row.get("filter")) != chosen:
            continue
        metrics = row.get("metrics")
        key = metric or (metrics[0] if isinstance(metrics, list) and metrics else "exact_match")
        if key not in row:
            raise EvalsError(f"{path}, line {line}: has no {short(key)}")
        response, taken = _first(row.get("resps")), _first(row.get("filtered_resps"))
        share = _share(row[key], path, line)
        yield Answer(name, _question(row), run, share, str(row.get("target", "")), taken, response)


def _question(row: Mapping[str, Any]) -> str:
    """Place and content. Not lm-eval's doc_hash: GPQA's choices are shuffled, which changes it from run to run."""
    doc = row.get("doc")
    texts = [doc.get(key) for key in ("question", "Question", "problem", "query")] if isinstance(doc, dict) else []
    text = next((text for text in texts if isinstance(text, str)), str(row.get("doc_hash", "")))
    return f"{row.get('doc_id')}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}"


def _first(value: Any) -> str:
    while isinstance(value, list) and value:
        value = value[0]
    return "" if value is None or value == [] else str(value)


def _task_of(path: Path) -> str:
    """lm-eval names the file samples_TASK_2026-01-31T12-00-00.000000.jsonl."""
    return re.sub(r"_\d{4}-\d\d-\d\dT[\d.-]+$", "", path.stem.removeprefix("samples_"))


def _of_tau2(content: Any, path: Path) -> Iterator[Answer]:
    """tau2-bench's results (src/tau2/data_model/simulation.py): the reward of each simulation of a task and trial.

    A simulation without a reward was never scored (its user or service failed): it is an error, not a zero.
    """
    simulations = content.get("simulations") if isinstance(content, dict) else None
    if not isinstance(simulations, list):
        raise EvalsError(f"{path}: is neither tau2's results (no simulations) nor a file of answers")
    info = content.get("info")
    environment = info.get("environment_info") if isinstance(info, dict) else None
    domain = environment.get("domain_name") if isinstance(environment, dict) else None
    for place, each in enumerate(simulations, 1):
        reward = each.get("reward_info") if isinstance(each, dict) else None
        if not isinstance(reward, dict) or not isinstance(reward.get("reward"), (int, float)):
            why = short(each.get("termination_reason")) if isinstance(each, dict) else "not an object"
            raise EvalsError(f"{path}: simulation {place} was not scored ({why})", "Run that task again in tau2.")
        trial = each.get("trial")
        yield Answer(
            f"tau2_{domain}" if isinstance(domain, str) else "tau2",
            str(each.get("task_id")),
            trial if isinstance(trial, int) else 0,
            _share(reward["reward"], path, place),
            response=str(each.get("termination_reason", "")),
            answer=str(each.get("id", "")) or "-",
        )


def _share(value: Any, path: Path, line: int) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= 1:
        raise EvalsError(f"{path}, line {line}: a score of {short(value)} is not between 0 and 1")
    return float(value)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise EvalsError(f"{path}, line {line}: is no JSON object")
                yield row
    except (OSError, ValueError, RecursionError) as err:
        raise EvalsError(f"{path}: cannot be read as lines of JSON: {_why(err)}") from err


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise EvalsError(f"{path}: cannot be read as JSON: {_why(err)}") from err


def _why(err: Exception) -> str:
    return (err.strerror or str(err)) if isinstance(err, OSError) else str(err).splitlines()[0]

"""Run evals through lm-eval, in a process of its own, against an OpenAI-compatible endpoint; keep every answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from glmquant.checkpoint.writer import create_folder, write_file
from glmquant.errors import OutputError
from glmquant.evals.results import (
    RUN_FILE,
    VERSION,
    EvalsError,
    Scores,
    answers_file,
    load,
    read_run,
    samples_to_answers,
    write_answers,
)
from glmquant.text import printable, short

INSTALL = "pip install 'glmquant[evals]', or --python with an interpreter that has lm-eval."
FIRST_SEED = 1234  # lm-eval's own; run k is asked with this + k
DEFINITIONS = Path(__file__).parent / "evals.yaml"


@dataclass(frozen=True)
class Definition:
    """How an eval is asked; see evals.yaml. `include`: folder with the task's own lm-eval files, or empty."""

    task: str
    fewshot: int
    filter: str
    metric: str
    temperature: float
    runs: int
    max_tokens: int
    questions: int | None = None
    include: str = ""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        root: URL up to and without /v1; never with a password (those go in OPENAI_API_KEY).
        model: the name that it serves.
        api: chat (the server applies the chat template) or completions (plain text).
        concurrent: requests at once.
        model_args: further arguments of lm-eval's model, e.g. timeout, max_retries, tokenizer.
    """

    root: str
    model: str
    api: str = "chat"
    concurrent: int = 16
    model_args: Mapping[str, Any] | None = None

    @property
    def url(self) -> str:
        """Where lm-eval posts to."""
        return f"{self.root}/v1/{'chat/' if self.api == 'chat' else ''}completions"


def definitions(path: Path | None = None) -> dict[str, Definition]:
    """The evals of evals.yaml, and those of a file of one's own. Raises EvalsError."""
    found = _read_definitions(DEFINITIONS)
    return found | _read_definitions(path) if path else found


def known_questions(path: Path | None = None) -> dict[str, int]:
    """Questions that each eval has at all."""
    return {name: each.questions for name, each in definitions(path).items() if each.questions}


def choose(
    known: Mapping[str, Definition], names: Sequence[str], runs: int | None = None, max_tokens: int | None = None
) -> dict[str, Definition]:
    """The named evals, with other runs (where answers can change) or longer answers. Raises EvalsError."""
    for what, value in (("runs", runs), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise EvalsError(f"{what} is {value}, and must be at least 1")
    chosen = {}
    for name in names:
        if name not in known:
            raise EvalsError(f"no eval {short(name)}", f"Known: {', '.join(known)}; --definitions adds your own.")
        one = known[name]
        times = runs if runs and one.temperature > 0 else one.runs
        chosen[name] = replace(one, runs=times, max_tokens=max_tokens or one.max_tokens)
    return chosen


def endpoint_root(url: str) -> str:
    """`http://host:port` of any form of an endpoint's URL. Raises EvalsError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EvalsError(f"{short(url)} is no URL of an endpoint", "For example http://127.0.0.1:30000")
    if parts.username or parts.password:
        raise EvalsError("the URL holds a password", "Put the key into the environment: OPENAI_API_KEY.")
    path = re.sub(r"(/v1)?(/chat)?(/completions)?/*$", "", parts.path)
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def run(
    endpoint: Endpoint,
    out: Path,
    asked: Mapping[str, Definition],
    *,
    limit: int | None = None,
    python: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Scores]:
    """Ask every question of every eval, and write `NAME.runK.jsonl` with one line a question.

    A run that is there already is kept: the same call continues what was interrupted.

    Args:
        out: folder for the results; new, or of the same run.
        asked: name of the eval -> how to ask it.
        limit: only the first so many questions.
        python: interpreter that has lm-eval (default: this one).

    Raises:
        EvalsError: no lm-eval, no answer from the endpoint, another model there, or lm-eval failed (its log is kept).
        OutputError: `out` holds something else, or cannot be written.
    """
    interpreter = python or sys.executable
    release = _lm_eval_release(interpreter)
    _check_model(endpoint)
    settings = {name: _settings(one, endpoint, limit) for name, one in asked.items()}
    _open(out, endpoint, settings, release)
    for name, one in asked.items():
        for k in range(one.runs):
            if (out / answers_file(name, k)).is_file():
                tell(f"{name}: run {k + 1} of {one.runs} is there already")
                continue
            tell(f"{name}: run {k + 1} of {one.runs} ...")
            with TemporaryDirectory(prefix="glmquant-evals-") as work:
                config = lm_eval_config(endpoint, one, k, limit, work)
                _run_lm_eval(interpreter, config, Path(work), out / f"{name}.run{k}.log")
                write_answers(out, answers_file(name, k), _answers(Path(work), name, k, one))
    return load(str(out))


def lm_eval_config(endpoint: Endpoint, one: Definition, k: int, limit: int | None, output: str) -> dict[str, Any]:
    """The configuration of run k, as `lm-eval run --config` reads it (lm-eval 0.4.13, config/evaluate_config.py)."""
    arguments: dict[str, Any] = {
        "model": endpoint.model,
        "base_url": endpoint.url,
        "num_concurrent": endpoint.concurrent,
        "seed": FIRST_SEED + k,
        "max_gen_toks": one.max_tokens,
        "timeout": 7200,  # seconds an answer: lm-eval's 300 would end the whole run at the first long one
        # answers are texts: nothing is tokenized here, and no tokenizer is needed
        "tokenizer_backend": None,
        "tokenized_requests": False,
        **(endpoint.model_args or {}),
    }
    config: dict[str, Any] = {
        "model": "local-chat-completions" if endpoint.api == "chat" else "local-completions",
        "model_args": arguments,
        "tasks": [one.task],
        "num_fewshot": one.fewshot,
        "gen_kwargs": {
            "temperature": one.temperature,
            "do_sample": one.temperature > 0,
            "max_gen_toks": one.max_tokens,
        },
        "seed": [0, 1234, 1234, 1234],  # the same examples and order in every run
        "log_samples": True,
        "output_path": output,
    }
    if endpoint.api == "chat":
        config["apply_chat_template"] = True
    if limit is not None:
        config["limit"] = limit
    if one.include:
        config["include_path"] = one.include
    return config


def _settings(one: Definition, endpoint: Endpoint, limit: int | None) -> dict[str, Any]:
    kept = {key: value for key, value in asdict(one).items() if key not in ("questions", "include")}
    return {**kept, "api": endpoint.api, "limit": limit}


def _open(out: Path, endpoint: Endpoint, settings: Mapping[str, Any], release: str) -> None:
    """Write run.json, or see that the one there asks for the same (runs may have become more)."""
    merged = dict(settings)
    if (out / RUN_FILE).exists():
        before = read_run(out)
        if before.get("model") != endpoint.model:
            raise OutputError(f"{out}: holds results of {short(before.get('model'))}", "Choose another folder.")
        for name, old in before["evals"].items():
            new = settings.get(name, old)
            for key in old.keys() | new.keys():
                if key not in ("runs", "task_version") and old.get(key) != new.get(key):
                    raise OutputError(
                        f"{out}: {name} was asked with {key} {short(old.get(key))}, now {short(new.get(key))}",
                        "Choose another folder.",
                    )
            merged[name] = {**new, "runs": max(old["runs"], new["runs"])}
    elif out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out}: is not empty, and holds no results of glmquant", "Choose another folder.")
    create_folder(out)
    record = {
        "version": VERSION,
        "model": endpoint.model,
        "endpoint": endpoint.root,
        "lm_eval": release,
        "evals": merged,
    }
    write_file(out, RUN_FILE, (json.dumps(record, indent=2) + "\n").encode())


def _check_model(endpoint: Endpoint) -> None:
    import http.client
    import urllib.request

    request = urllib.request.Request(f"{endpoint.root}/v1/models")
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            listed = json.loads(answer.read(10_000_000))
        names = [str(each["id"]) for each in listed["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as err:
        why = getattr(err, "reason", None) or err
        raise EvalsError(f"{endpoint.root}/v1/models: {why}", "Is the server up, and is it OpenAI-compatible?") from err
    if endpoint.model not in names:
        raise EvalsError(
            f"{endpoint.root} serves no model {short(endpoint.model)}", f"It serves {', '.join(map(short, names[:5]))}."
        )


def _lm_eval_release(interpreter: str) -> str:
    code = "import importlib.metadata as m; print(m.version('lm_eval'))"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    except OSError as err:
        raise EvalsError(f"{interpreter}: {err.strerror}", INSTALL) from err
    if done.returncode:
        raise EvalsError(f"{interpreter} has no lm-eval", INSTALL)
    return done.stdout.strip()


def _run_lm_eval(interpreter: str, config: Mapping[str, Any], work: Path, log: Path) -> None:
    """Raises EvalsError with the end of its log, which is then kept at `log`."""
    (work / "config.yaml").write_text(json.dumps(config))  # every JSON text is YAML
    command = [interpreter, "-m", "lm_eval", "run", "--config", str(work / "config.yaml")]
    with open(work / "log", "wb+") as file:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
        file.seek(0)
        text = file.read()
    if done.returncode:
        write_file(log.parent, log.name, text)
        lines = [line for line in printable(text.decode(errors="replace")).splitlines() if line.strip()]
        raise EvalsError(
            f"lm-eval ended with {done.returncode}: {lines[-1][:500] if lines else 'without a word'}",
            f"Its log is {log}.",
        )


def _answers(work: Path, name: str, k: int, one: Definition) -> Sequence[Any]:
    files = sorted(work.rglob("samples_*.jsonl"))
    if len(files) != 1:
        raise EvalsError(
            f"{name}: lm-eval wrote {len(files)} files of samples for {one.task}, not one",
            "A group of tasks is several evals: define each.",
        )
    answers = samples_to_answers(files[0], name, k, one.filter, one.metric)
    if not answers:
        raise EvalsError(f"{name}: lm-eval wrote no sample")
    return answers


def _read_definitions(path: Path) -> dict[str, Definition]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as err:
        raise EvalsError(f"{path}: cannot be read: {str(err).splitlines()[0]}") from err
    evals = content.get("evals") if isinstance(content, dict) else None
    if not isinstance(evals, dict) or content.get("version") != 1:
        raise EvalsError(f"{path}: needs version: 1 and evals:", f"Like {DEFINITIONS}")
    return {_name(name, path): _definition(name, value, path) for name, value in evals.items()}


def _name(name: object, path: Path) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
        raise EvalsError(f"{path}: {short(name)} is no name of an eval (letters, digits, _ and -)")
    return name


def _definition(name: str, value: object, path: Path) -> Definition:
    kinds: dict[str, tuple[type, ...]] = {
        "task": (str,), "fewshot": (int,), "filter": (str,), "metric": (str,), "temperature": (int, float),
        "runs": (int,), "max_tokens": (int,), "questions": (int,), "include": (str,),
    }  # fmt: skip
    optional = {"questions", "include"}
    if not isinstance(value, dict):
        raise EvalsError(f"{path}: {name} is {short(value)}")
    wrong = [key for key in kinds if key not in value and key not in optional] + [k for k in value if k not in kinds]
    if wrong:
        raise EvalsError(f"{path}: {name} needs exactly {', '.join(kinds)}: {short(wrong[0])} is missing or unknown")
    for key, kind in kinds.items():
        given = value.get(key, 1 if key == "questions" else "")
        least = 0 if key in ("fewshot", "temperature") else 1
        good = isinstance(given, kind) and not isinstance(given, bool)
        if not good or (isinstance(given, (int, float)) and not given >= least):
            raise EvalsError(f"{path}: {name}: {key} is {short(given)}")
    if not value["temperature"] and value["runs"] > 1:
        raise EvalsError(f"{path}: {name}: greedy answers do not change: runs above 1 need a temperature above 0")
    one = Definition(**value)
    return replace(one, include=str((path.parent / one.include).resolve())) if one.include else one

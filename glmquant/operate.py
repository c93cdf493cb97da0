"""Each verb about a finished checkpoint as one function: from it to a server that is right and fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from glmquant.checkpoint.source import inspect
from glmquant.engines.targets import DEFAULT_TARGETS, ENGINES, parse_targets
from glmquant.errors import CheckpointError, GlmquantError
from glmquant.evals import results as eval_results
from glmquant.evals import run as eval_runs
from glmquant.evals.compare import ALPHA, MARGIN, POWER, Comparisons, compare
from glmquant.evals.results import Scores
from glmquant.pipeline import Folder, progress_bar
from glmquant.reporting import Written, check_outputs, default_page, write_report
from glmquant.reporting.keys import kernel_keys as read_kernel_keys
from glmquant.serving.aiter_tables import open_tables
from glmquant.serving.doctor import (
    FIX,
    Diagnosis,
    Line,
    examine_checkpoint,
    examine_keys,
    examine_stack,
    examine_tables,
)
from glmquant.serving.guard import find_guard
from glmquant.serving.key_report import KeyReport, look_up
from glmquant.serving.launch import Launch, Wish, make_launch
from glmquant.serving.settings import ENGINES as SERVING_ENGINES
from glmquant.serving.settings import engine_settings, hardware, profiles
from glmquant.serving.stack import Stack, open_stack
from glmquant.serving.subject import Subject, nearest, read_subject
from glmquant.streaming import default_workers
from glmquant.validator import validate_inspected


def launch(
    checkpoint: Folder,
    *,
    profile: str = "latency",
    engine: str = "sglang",
    release: str | None = None,
    wish: Wish | None = None,
    site_packages: Sequence[Folder] = (),
) -> Launch:
    """Environment and command that serve a quantized checkpoint; nothing is started.

    Args:
        profile: `latency` or `throughput`; see serving/profiles.yaml.
        engine: `sglang`, `vllm` or `atom`.
        release: of the engine; by default the installed one, else the newest modelled.
        wish: sizes, draft depth, address and further flags, where they differ from the profile's.
        site_packages: folders to look for the installed engine in, instead of this environment.

    Raises:
        CheckpointError: the folder cannot be read, or is no quantized GLM-5.2.
        GlmquantError: the release does not load it, sizes do not divide it (names the legal ones), unknown names.
    """
    stack = open_stack([Path(folder) for folder in site_packages])
    return _start(_subject(checkpoint, engine, release, stack), profile, release, wish, stack)


def _subject(checkpoint: Folder, engine: str, release: str | None, stack: Stack) -> Subject:
    """A checkpoint in the eyes of the release named, else installed, else newest modelled."""
    if engine not in SERVING_ENGINES:
        raise GlmquantError(f"unknown engine {engine!r}", f"Known: {', '.join(SERVING_ENGINES)}.")
    return read_subject(checkpoint, nearest(engine, _release(engine, release, stack)))


def _release(engine: str, release: str | None, stack: Stack) -> str:
    return release or stack.release(engine_settings(engine).package) or list(ENGINES[engine].releases())[-1]


def _start(subject: Subject, profile: str, release: str | None, wish: Wish | None, stack: Stack) -> Launch:
    if profile not in profiles():
        raise GlmquantError(f"unknown profile {profile!r}", f"Known: {', '.join(profiles())}.")
    engine = subject.target.engine
    guard = find_guard(stack) if engine == "sglang" and not release else None
    chosen, present = _release(engine, release, stack), guard.present if guard else None
    settings = engine_settings(engine)
    found = make_launch(subject, settings, profiles()[profile], hardware(), chosen, wish or Wish(), present)
    if release or stack.release(settings.package):
        return found
    note = f"{engine} is not installed here: this is for {chosen}, the newest modelled; --release says another."
    return replace(found, notes=(note, *found.notes))


def kernel_keys(
    checkpoint: Folder,
    *,
    profile: str = "latency",
    engine: str = "sglang",
    release: str | None = None,
    wish: Wish | None = None,
    site_packages: Sequence[Folder] = (),
    max_tokens: int | None = None,
) -> KeyReport:
    """The fused-MoE kernels that a launch will ask AITER for, and which of them its tuned tables have.

    Args:
        max_tokens: computed at once at most; by default the launch's chunk of prefill. Others as `launch`.

    Raises: as `launch`; GlmquantError also where AITER's tables cannot be read, or keys of the engine are not modelled.
    """
    stack = open_stack([Path(folder) for folder in site_packages])
    subject = _subject(checkpoint, engine, release, stack)
    started = _start(subject, profile, release, wish, stack)
    return look_up(subject, started, hardware(), open_tables(stack), max_tokens)


def doctor(
    checkpoint: Folder | None = None,
    *,
    profile: str = "latency",
    engine: str = "sglang",
    release: str | None = None,
    wish: Wish | None = None,
    site_packages: Sequence[Folder] = (),
) -> Diagnosis:
    """Look at the installed serving stack without importing it; with a checkpoint, at what it makes of that.

    Args:
        site_packages: folders to look for packages in, instead of this environment; others as `launch`.

    Raises:
        CheckpointError: the folder cannot be read, or is no quantized GLM-5.2.
    """
    stack = open_stack([Path(folder) for folder in site_packages])
    lines = [*examine_stack(stack)]
    try:
        tables = open_tables(stack)
    except GlmquantError as err:
        tables = None
        lines.append(Line("aiter", FIX, err.message, err.hint))
    else:
        lines += examine_tables(tables)
    if checkpoint is not None:
        subject = _subject(checkpoint, engine, release, stack)
        try:
            started = _start(subject, profile, release, wish, stack)
        except GlmquantError as err:
            lines += examine_checkpoint(subject, err)
        else:
            lines += examine_checkpoint(subject, started)
            lines += examine_keys(subject, started, hardware(), tables)
    return Diagnosis(tuple(lines), find_guard(stack))


def report(
    checkpoint: Folder,
    source: Folder | None = None,
    *,
    html: Folder | None = None,
    jsonl: Folder | None = None,
    sample: float | None = None,
    targets: str = DEFAULT_TARGETS,
    site_packages: Sequence[Folder] = (),
    workers: int | None = None,
    progress: bool = False,
) -> Written:
    """Write a page about a quantized checkpoint of any producer, and a JSONL with a line for each tensor.

    Args:
        source: the checkpoint it was made from; without it no error is measured.
        html: the page; by default `CKPT-report.html` beside the checkpoint. Neither file may exist.
        jsonl: by default the page's name with `.jsonl`.
        sample: share (0 to 1) of each layer's weights of one projection to read, at least one; None: minutes' worth.
        site_packages: folders to look for sglang and AITER in, for the kernel keys, instead of this environment.

    Raises:
        CheckpointError: a folder cannot be read at all; everything else is in the page.
        OutputError: a file exists, lies in a folder that is read, or cannot be written.
    """
    if sample is not None and not 0 <= sample <= 1:
        raise CheckpointError(f"--sample {sample} is not a share between 0 and 1")
    folder, original = Path(checkpoint), Path(source) if source else None
    page = Path(html) if html else default_page(folder)
    lines = Path(jsonl) if jsonl else page.with_suffix(".jsonl")
    check_outputs((page, lines), [folder, *([original] if original else [])])
    read, problems = inspect(folder)
    return write_report(
        read,
        original,
        page,
        lines,
        sample,
        validate_inspected(read, problems, parse_targets(targets)),
        read_kernel_keys(read, problems, [Path(each) for each in site_packages]),
        workers or default_workers(),
        lambda total: progress_bar(total, progress, "reading"),
    )


def run_evals(
    endpoint: str,
    model: str,
    out: Folder,
    *,
    evals: Sequence[str] = ("gsm8k", "gpqa_diamond"),
    definitions: Folder | None = None,
    runs: int | None = None,
    limit: int | None = None,
    max_tokens: int | None = None,
    api: str = "chat",
    concurrent: int = 16,
    model_args: Mapping[str, object] | None = None,
    python: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Scores]:
    """Ask an OpenAI-compatible endpoint the questions of evals through lm-eval; every answer is kept in `out`.

    Args:
        endpoint: URL of the server, with or without /v1; its key, if any, is in OPENAI_API_KEY.
        model: the model's name there.
        evals: names from glmquant/evals/evals.yaml or `definitions`, a file of the same form.
        runs: times each question is asked, where the temperature is above 0; max_tokens: of an answer.
        limit: only the first so many questions.
        api, concurrent, model_args: see evals.run.Endpoint. python: interpreter that has lm-eval.

    Raises:
        EvalsError: an unknown eval, no lm-eval, a dead endpoint, or a failed run.
        OutputError: `out` holds something else.
    """
    known = eval_runs.definitions(Path(definitions) if definitions else None)
    asked = eval_runs.choose(known, evals, runs, max_tokens)
    where = eval_runs.Endpoint(eval_runs.endpoint_root(endpoint), model, api, concurrent, model_args)
    return eval_runs.run(where, Path(out), asked, limit=limit, python=python, tell=tell)


def import_evals(file: Folder, out: Folder, *, name: str = "") -> dict[str, int]:
    """Bring tau2's or lm-eval's results into a folder; the files written and their answers. Raises EvalsError."""
    answers = eval_results.read_answers(Path(file), name)
    return eval_results.add_answers(Path(out), answers)


def compare_evals(
    a: str,
    b: str,
    *,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    power: float = POWER,
    definitions: Folder | None = None,
    ignore_settings: bool = False,
) -> Comparisons:
    """Is B as good as A? See evals.compare; `a` and `b` are what evals.results.load reads. Raises EvalsError."""
    known = eval_runs.known_questions(Path(definitions) if definitions else None)
    return compare(
        eval_results.load(a),
        eval_results.load(b),
        margin=margin,
        alpha=alpha,
        power=power,
        known=known,
        ignore_settings=ignore_settings,
    )

"""Ask real, released serving engines about checkpoints and exclude lists, from the project's own environment.

    harness.load("sglang", "0.5.23", [folder, ...])          # does it load? what went where?
    harness.match("sglang", "0.5.23", [{"exclude": [...], "prefixes": [...]}, ...])

Both install the release first if they must, and raise `EnvironmentUnavailable` only if the package registry
cannot be reached. The answers are documented in the scripts that give them: sglang_load.py, sglang_match.py,
vllm_load.py and vllm_match.py; each call starts one process, so pass many checkpoints or cases at once.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import envs
from envs import EnvironmentUnavailable

__all__ = ["EnvironmentUnavailable", "ensure", "load", "match", "releases"]

HERE = Path(__file__).resolve().parent
_unavailable: dict[tuple[str, str], EnvironmentUnavailable] = {}


def releases(engine: str) -> list[str]:
    """The releases to test, oldest first; fewer when GLMQUANT_CONFORMANCE_QUICK is set."""
    return [e.release for e in envs.engines() if e.name == engine]


def ensure(engine: str, release: str) -> envs.Engine:
    """Install `release` unless it is there; a registry that could not be reached is not tried twice."""
    key = (engine, release)
    if key in _unavailable:
        raise _unavailable[key]
    try:
        return envs.ensure(envs.Engine(*key))
    except EnvironmentUnavailable as e:
        _unavailable[key] = e
        raise


def load(
    engine: str,
    release: str,
    checkpoints: Sequence[Path],
    *,
    roles: Sequence[str] = (),
    engine_args: dict[str, Any] | None = None,
    fuse_shared_experts: bool = False,
) -> list[dict[str, Any]]:
    """One answer per checkpoint folder, in order.

    `engine_args` go to sglang's ServerArgs or to vLLM's EngineArgs. `fuse_shared_experts` is vLLM's switch;
    sglang decides by itself (unless `engine_args` say disable_shared_experts_fusion).
    """
    options = [word for role in roles for word in ("--role", role)]
    if engine_args:
        options += ["--server-args" if engine == "sglang" else "--engine-args", json.dumps(engine_args)]
    if fuse_shared_experts:
        options += ["--fuse-shared-experts"]
    if not checkpoints:
        return []
    answers = _run(engine, release, "load", [*options, *map(str, checkpoints)], "")
    return _counted(answers, len(checkpoints), engine, release)


def match(
    engine: str, release: str, cases: Iterable[dict[str, Any]], config: Path | None = None
) -> list[dict[str, Any]]:
    """One answer per case, in order; `config`: sglang_match.py's CONFIG."""
    lines = [json.dumps(case) for case in cases]
    if not lines:
        return []
    return _counted(
        _run(engine, release, "match", [str(config)] if config else [], "\n".join(lines) + "\n"),
        len(lines),
        engine,
        release,
    )


def _run(engine: str, release: str, verb: str, args: list[str], stdin: str) -> list[dict[str, Any]]:
    env = ensure(engine, release)
    script = HERE / f"{engine}_{verb}.py"
    done = subprocess.run(
        [str(env.python), str(script), *args],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        env=env.environ(),
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} on {engine} {release} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _counted(answers: list[dict[str, Any]], n: int, engine: str, release: str) -> list[dict[str, Any]]:
    if len(answers) != n:
        raise RuntimeError(f"{engine} {release} gave {len(answers)} answers to {n} questions")
    return answers

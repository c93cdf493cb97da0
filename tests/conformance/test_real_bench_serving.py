"""scripts/bench_serving.py with sglang's own benchmark client, over HTTP, and what the fast tests put in its place."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import bench_serving
import harness
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import bench_client  # noqa: E402
from streaming_server import Behaviour, streaming  # noqa: E402

pytestmark = pytest.mark.conformance
TOKENIZER = HERE.parent / "data/tiny-glm/checkpoint"
RELEASES = sorted({harness.releases("sglang")[0], harness.releases("sglang")[-1]})


def interpreter(release: str, folder: Path) -> str:
    """An executable for --python: sglang of this release, on CPU, with a home of its own."""
    engine = harness.ensure("sglang", release)
    settings = {"PYTHONPATH": engine.environ()["PYTHONPATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    words = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    path = folder / "python-with-sglang"
    path.write_text("\n".join(["#!/bin/sh", *words, f'exec {engine.python} {HERE / "sglang_client.py"} "$@"\n']))
    path.chmod(0o755)
    return str(path)


def ladder(python: str, url: str, out: Path, *words: str) -> dict:
    where = ["--base-url", url, "--model", "tiny", "--tokenizer", str(TOKENIZER), "--python", python]
    load = ["--input", "100", "--output", "10", "--group", "2", "--seconds", "1"]
    assert bench_serving.main(["ladder", str(out), *where, *load, *words]) == 0
    return json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("release", RELEASES)
def test_the_real_client_takes_our_flags_and_gives_what_we_read(release: str, tmp_path: Path) -> None:
    behaviour = Behaviour(first=0.1, each=0.01, slots=100, cut=6)
    with streaming(behaviour) as url:
        real = ladder(interpreter(release, tmp_path), url, tmp_path / "real", "--rates", "24")
        sent = len(behaviour.requests)
        behaviour.requests.clear()
        played = ladder(bench_client.install(tmp_path), url, tmp_path / "played", "--rates", "24")
    assert real["settings"]["sglang"] == release and played["settings"]["sglang"] == "0.5.23"
    assert len(behaviour.requests) == sent == 25  # one to warm up
    for found in (real, played):
        (step,) = found["steps"]
        assert (step["asked"], step["answered"]) == (24, 20) and step["error"]
        assert 0.1 <= step["ttft_p50"] <= step["ttft_p95"] < 1 and 0.009 < step["tpot_p50"] < 0.1
        assert step["tok_s"] == pytest.approx(10 * step["request_s"])
    lines = [json.loads((tmp_path / name / "raw/rate-24.jsonl").read_text()) for name in ("real", "played")]
    assert lines[1].keys() <= lines[0].keys()
    for key, value in lines[1].items():
        assert lines[0][key] is None or type(value) is type(lines[0][key]), key
    median = lines[0]["median_ttft_ms"] / 1000
    assert real["steps"][0]["ttft_p50"] == pytest.approx(median, rel=1e-6)


def test_the_real_client_with_a_server_that_answers_nothing_and_one_after_another(tmp_path: Path) -> None:
    python = interpreter(RELEASES[-1], tmp_path)
    with streaming(Behaviour(refuse=True)) as url:
        (step,) = ladder(python, url, tmp_path / "none", "--rates", "8")["steps"]
    assert step["answered"] == 0 and "Warmup failed" in step["error"]
    with streaming(Behaviour(first=0.05, each=0.01, slots=1, queue=0)) as url:
        words = ["single", str(tmp_path / "single"), "--base-url", url, "--model", "tiny", "--prompts", "4"]
        words += ["--tokenizer", str(TOKENIZER), "--python", python, "--input", "100", "--output", "11"]
        assert bench_serving.main(words) == 0
    (step,) = json.loads((tmp_path / "single/results.json").read_text())["steps"]
    assert step["answered"] == 4 and 0.05 <= step["ttft_p50"] < 0.5

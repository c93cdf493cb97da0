"""`glmquant evals run` with lm-eval itself, over HTTP: its gsm8k and gpqa_diamond_cot_zeroshot on questions of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import envs
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from openai_server import serving

from glmquant.cli import main
from glmquant.evals.results import load, read_answers, write_answers
from glmquant.evals.run import definitions

pytestmark = pytest.mark.conformance
LM_EVAL = "lm-eval[api]==0.4.13"


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with lm-eval, in an environment of its own (0.6 GB, without torch)."""
    folder = envs.root() / "lm-eval-0.4.13"
    with envs._building(folder, [LM_EVAL]) as todo:
        if todo:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            envs._pip(folder / "bin/python", LM_EVAL)
    return str(folder / "bin/python")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and a working folder in which a folder ORG/NAME stands for the data set of that name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def data_set(name: str, config: str, splits: dict[str, Iterable[dict]]) -> None:
    folder = Path(name)
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    head = json.dumps({"configs": [{"config_name": config, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{head}\n---\n")


def test_the_tasks_filters_and_metrics_of_our_definitions_are_lm_evals(python: str) -> None:
    code = "import importlib.util as u; print(u.find_spec('lm_eval').submodule_search_locations[0])"
    folder = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    texts = {path: path.read_text() for path in Path(folder, "tasks").rglob("*.yaml")}
    for one in definitions().values():
        (file,) = [path for path, text in texts.items() if re.search(rf"^task: {one.task}$", text, re.M)]
        text = texts[file]
        if found := re.search(r"^include: (\S+)", text, re.M):
            text += (file.parent / found[1]).read_text()
        assert re.search(rf'name: "?{one.filter}"?\n', text) and f"metric: {one.metric}\n" in text


def test_gsm8k_with_five_examples_greedily_and_a_server_that_fails_twice(
    python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(numbers: Iterable[int]) -> list[dict]:
        return [{"question": f"{i} + {i % 7}?", "answer": f"So it is.\n#### {i + i % 7}"} for i in numbers]

    data_set("openai/gsm8k", "main", {"train": rows(range(10)), "test": rows(range(100, 160))})

    def add(prompt: str, body: dict) -> dict:
        a, b = map(int, re.findall(r"(\d+) \+ (\d+)\?", prompt)[-1])
        return {"text": "I do not know" if a == 105 else f" It is {a + b + (a % 10 == 0)}."}

    with serving(add) as server:
        server.fail = 2
        words = ["evals", "run", "b", "--endpoint", server.url, "--model", "tiny", "--evals", "gsm8k"]
        assert main([*words, "--python", python]) == 0, capsys.readouterr().err
        path, body = server.requests[-1]
    assert path == "/v1/chat/completions" and len(server.requests) == 62
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.0, 1234, 16384)
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"] * 5 + ["user"]
    assert "gsm8k: 0.8833 of 60 questions, 1 run; nothing was found in 1 answers" in capsys.readouterr().out
    right = [replace(answer, score=1.0) for answer in read_answers(Path("b/gsm8k.run0.jsonl"))]
    write_answers(Path("a"), "gsm8k.jsonl", right)
    assert main(["evals", "compare", "a", "b"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("gsm8k: worse\n") and "of 60 questions only A has 7 right, only B 0" in out


def test_gpqa_with_two_seeds_at_temperature_1_in_plain_completions(
    python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [f"Incorrect Answer {k}" for k in (1, 2, 3)]
    questions = [
        {"Question": f"What is {i}+1?", "Correct Answer": f"{i + 1}", **{w: f"{i + k}" for k, w in enumerate(wrong, 2)}}
        for i in range(30)
    ]
    data_set("Idavidrein/gpqa", "gpqa_diamond", {"train": questions})

    def answer(prompt: str, body: dict) -> dict:
        """Wrong on other questions with each seed."""
        i = int(re.search(r"What is (\d+)\+1\?", prompt)[1])
        right = re.search(rf"\((.)\) {i + 1}\n", prompt)[1]
        said = right if (i + body["seed"]) % 10 else "BCDA"["ABCD".index(right)]
        return {"text": f"(A) or not (A)? The answer is ({said})."}

    with serving(answer) as server:
        words = ["evals", "run", "out", "--endpoint", server.url, "--model", "tiny", "--evals", "gpqa_diamond"]
        words += ["--runs", "2", "--api", "completions", "--python", python]
        assert main(words) == 0, capsys.readouterr().err
        asked = sorted((path, body["seed"], body["temperature"], body["max_tokens"]) for path, body in server.requests)
    assert asked == [("/v1/completions", seed, 1.0, 65536) for seed in (1234, 1235) for _ in range(30)]
    found = load("out")["gpqa_diamond"]
    assert (found.count, found.runs, found.rate) == (30, 2, pytest.approx(0.9))
    assert sum(row == (0.0, 1.0) for row in found.questions.values()) == 3
    assert sum(row == (1.0, 0.0) for row in found.questions.values()) == 3

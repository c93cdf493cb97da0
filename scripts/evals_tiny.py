#!/usr/bin/env python3
"""`glmquant evals` from end to end on the trained tiny checkpoint of the tests: bf16 against its MXFP4 output.

    python scripts/evals_tiny.py [--recipe moe] [--questions 400] [--python INTERPRETER]

Both are served over HTTP by tests/openai_server.py (transformers cannot load packed MXFP4: the weights are decoded
first), lm-eval asks both which of four lines of code comes next, and `glmquant evals compare` says what that shows.
--python is an interpreter that has lm-eval (pip install 'glmquant[evals]'). A few minutes on two cores.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eval_tiny
import torch
from tokenizers import Tokenizer

import glmquant
from glmquant.cli import main as glmquant_command

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from openai_server import serving  # the tests' own server

LINES = 8  # lines of code before the choice
TASK = """\
task: next_line
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
DEFINITION = """\
version: 1
evals:
  next_line: {task: next_line, fewshot: 0, filter: none, metric: acc, temperature: 0.0, runs: 1,
              max_tokens: 1, include: .}
"""


def questions(text: str, count: int) -> list[dict[str, Any]]:
    """Which line comes next? The true one among four of equal indentation and about equal length."""
    rng = random.Random(0)
    lines = text.splitlines(keepends=True)
    places = [i for i in range(LINES, len(lines)) if len(lines[i].strip()) > 12]
    rng.shuffle(places)
    found = []
    for place in places:
        right = lines[place]
        indent = len(right) - len(right.lstrip())
        alike = [
            lines[i]
            for i in places
            if len(lines[i]) - len(lines[i].lstrip()) == indent
            and abs(len(lines[i]) - len(right)) <= 3
            and lines[i] != right
        ]
        if len(set(alike)) < 3:
            continue
        choices = [right, *rng.sample(sorted(set(alike)), 3)]
        rng.shuffle(choices)
        before = "".join(lines[place - LINES : place])
        found.append({"question": before, "choices": choices, "answer": choices.index(right)})
        if len(found) == count:
            return found
    raise ValueError(f"the text has only {len(found)} such questions")


def chooser(folder: Path, tokenizer: Tokenizer) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """Completions of the checkpoint: log-probabilities of the prompt's tokens and one greedy token, as OpenAI's."""
    model = eval_tiny.load_model(folder).base
    one_at_a_time = threading.Lock()

    def choose(prompt: Any, body: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else prompt
        with one_at_a_time, torch.no_grad():
            logs = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        best = logs.max(-1)
        said = [*ids, int(best.indices[-1])]
        mine = [None, *(float(logs[i, token]) for i, token in enumerate(said[1:]))]
        top = [
            None,
            *({tokenizer.id_to_token(int(t)): float(v)} for v, t in zip(best.values, best.indices, strict=True)),
        ]
        logprobs = {"tokens": [tokenizer.id_to_token(i) for i in said], "token_logprobs": mine, "top_logprobs": top}
        return {"text": tokenizer.decode(said if body.get("echo") else said[-1:]), "logprobs": logprobs}

    return choose


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="moe", help="what to quantize (default moe)")
    parser.add_argument("--questions", type=int, default=400, metavar="N", help="questions (default 400)")
    parser.add_argument("--margin", default="0.02", metavar="SHARE", help="margin of the comparison (default 0.02)")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="interpreter that has lm-eval")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    source = eval_tiny.DATA / "checkpoint"
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows = questions((eval_tiny.DATA / "eval.txt").read_text(), args.questions)
        (work / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (work / "next_line.yaml").write_text(TASK % (work / "lines.jsonl"))
        (work / "my.yaml").write_text(DEFINITION)
        output = glmquant.quantize(source, work / "mxfp4", recipe=args.recipe).output
        for name, checkpoint in (("bf16", source), (args.recipe, output)):
            with serving(chooser(checkpoint, tokenizer), name) as server:
                words = ["evals", "run", work / f"results-{name}", "--endpoint", server.url, "--model", name]
                words += ["--evals", "next_line", "--definitions", work / "my.yaml", "--python", args.python]
                words += ["--api", "completions", "--concurrent", "2", "--model-arg", f"tokenizer={source}"]
                words += ["--model-arg", "tokenizer_backend=huggingface", "--model-arg", "tokenized_requests=true"]
                if code := glmquant_command(list(map(str, words))):
                    return code
        results = [str(work / f"results-{name}") for name in ("bf16", args.recipe)]
        glmquant_command(
            ["evals", "compare", *results, "--margin", args.margin, "--definitions", str(work / "my.yaml")]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

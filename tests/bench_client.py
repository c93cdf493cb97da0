"""Plays an interpreter that has sglang: its benchmark client without sglang, for tests that must be fast.

It reads the flags that scripts/bench_serving.py gives, sends as many requests at the same random times over HTTP, and
writes a line of the same form. tests/conformance/test_bench_serving.py compares it with the real client.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    if argv[0] == "-c":
        print("sglang.benchmark.serving 0.5.23")
        return 0
    assert argv[:2] == ["-m", "sglang.benchmark.serving"], argv
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("backend", "base-url", "model", "tokenizer", "dataset-name", "request-rate", "output-file"):
        parser.add_argument(f"--{flag}", required=True)
    for flag in ("seed", "num-prompts", "gsp-num-groups", "gsp-prompts-per-group", "gsp-system-prompt-len"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("gsp-question-len", "gsp-output-len"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--extra-request-body", default="{}")
    for flag in ("output-details", "disable-tqdm"):
        parser.add_argument(f"--{flag}", action="store_true", required=True)
    args = parser.parse_args(argv[2:])
    assert args.dataset_name == "generated-shared-prefix"
    assert args.num_prompts == args.gsp_num_groups * args.gsp_prompts_per_group
    rng = random.Random(args.seed)
    prompts = []
    for _ in range(args.gsp_num_groups):
        shared = words(rng, args.gsp_system_prompt_len)
        prompts += [shared + words(rng, args.gsp_question_len) for _ in range(args.gsp_prompts_per_group)]
    if not send(args, prompts[0])["ok"]:  # the real one warms up, and gives up if that fails
        print(
            "ValueError: Warmup failed - Please make sure benchmark arguments are correctly specified.", file=sys.stderr
        )
        return 1
    rows: list[dict[str, Any]] = [{} for _ in prompts]

    def one(i: int) -> None:
        rows[i] = send(args, prompts[i])

    begun = time.perf_counter()
    threads = []
    for i in range(len(prompts)):
        if args.max_concurrency == 1:
            one(i)
            continue
        threads.append(threading.Thread(target=one, args=(i,)))
        threads[-1].start()
        time.sleep(0 if args.request_rate == "inf" else rng.expovariate(float(args.request_rate)))
    for thread in threads:
        thread.join()
    line = result(args, rows, time.perf_counter() - begun)
    if not line["completed"]:
        print("UserWarning: All requests failed. This is likely due to a misconfiguration", file=sys.stderr)
        return 1
    with open(args.output_file, "a") as file:
        file.write(json.dumps(line) + "\n")
    return 0


def words(rng: random.Random, count: int) -> str:
    return "".join(rng.choice((" a", " b", " c")) for _ in range(count))


def send(args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """As async_request_openai_completions: without usage, as many tokens as asked for are taken for granted."""
    asked = {"model": args.model, "prompt": prompt, "max_tokens": args.gsp_output_len, "stream": True}
    body = json.dumps(asked | json.loads(args.extra_request_body)).encode()
    begun = time.perf_counter()
    row: dict[str, Any] = {"ok": False, "ttft": 0.0, "tokens": args.gsp_output_len, "texts": 0, "error": ""}
    try:
        request = urllib.request.Request(f"{args.base_url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            done = False
            for chunk in answer:
                done = done or chunk.strip() == b"data: [DONE]"
                text = chunk.strip().decode().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                event = json.loads(text)
                row["ttft"] = row["ttft"] or time.perf_counter() - begun
                row["texts"] += 1
                row["tokens"] = (event.get("usage") or {}).get("completion_tokens", row["tokens"])
        if not done:  # urllib takes a transfer that breaks off for its end; aiohttp does not
            raise ConnectionError("the stream broke off")
        row["ok"] = True
    except Exception as err:
        row["error"] = f"Traceback (most recent call last):\n{type(err).__name__}: {err}"
    row["latency"] = time.perf_counter() - begun
    return row


def result(args: argparse.Namespace, rows: list[dict[str, Any]], duration: float) -> dict[str, Any]:
    good = [row for row in rows if row["ok"]]
    out, length = sum(row["tokens"] for row in good), args.gsp_system_prompt_len + args.gsp_question_len
    tpots = [(row["latency"] - row["ttft"]) / (row["tokens"] - 1) for row in good if row["tokens"] > 1]
    return {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": float(args.request_rate),
        "max_concurrency": args.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "total_input_tokens": length * len(good),
        "total_output_tokens": out,
        "total_output_tokens_retokenized": sum(row["texts"] for row in good),
        "request_throughput": len(good) / duration,
        "output_throughput": out / duration,
        "total_throughput": (out + length * len(good)) / duration,
        "median_ttft_ms": 1000 * statistics.median([row["ttft"] for row in good] or [0]),
        "median_tpot_ms": 1000 * statistics.median(tpots or [0]),
        "output_lens": [row["tokens"] if row["ok"] else 0 for row in rows],
        "ttfts": [row["ttft"] for row in rows],
        "errors": [row["error"] for row in rows],
    }


def install(folder: Path) -> str:
    """An executable that is this program, for --python."""
    path = folder / "python-with-sglang"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

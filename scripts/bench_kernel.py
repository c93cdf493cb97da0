#!/usr/bin/env python3
"""Elements per second on one thread: each kernel, a memory copy, and Quark's own calls, on one [2048, 6144] weight.

usage: scripts/bench_kernel.py [--rounds 15] [--no-quark]

Everything runs in turns, so that a busy machine hurts all alike. CPU time counts what the thread itself did; wall time
also holds what other processes took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from glmquant.mxfp4 import kernel
from glmquant.mxfp4.quark import QuarkBackend

ROWS, COLUMNS = 2048, 6144


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-quark", action="store_true", help="leave out Quark, whose import takes 15 s")
    args = parser.parse_args()
    torch.set_num_threads(1)

    weight = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    source = {
        "BF16": weight.view(torch.int16).numpy(),
        "F16": weight.half().numpy(),
        "F32": weight.float().numpy(),
    }
    packed, scale = np.zeros((ROWS, COLUMNS // 2), np.uint8), np.zeros((ROWS, COLUMNS // 32), np.uint8)
    touched = np.zeros_like(source["BF16"])

    def run(name: str, dtype: str) -> None:
        os.environ[kernel.VARIABLE] = name
        assert kernel.quantize_into(source[dtype].data, dtype, COLUMNS, packed.data, scale.data) == -1

    jobs: dict[str, Callable[[], object]] = {"copy BF16": lambda: np.copyto(touched, source["BF16"])}
    for dtype in source:
        for name in kernel.available():
            jobs[f"{name} {dtype}"] = lambda name=name, dtype=dtype: run(name, dtype)
    if not args.no_quark:
        backend = QuarkBackend()
        jobs["Quark BF16"] = lambda: backend._quantize(weight)

    times: dict[str, list[tuple[float, float]]] = {job: [] for job in jobs}
    for _ in range(args.rounds):
        for job, call in jobs.items():
            wall, cpu = time.perf_counter(), time.thread_time()
            call()
            times[job].append((time.perf_counter() - wall, time.thread_time() - cpu))

    median = {job: [statistics.median(column) for column in zip(*rows, strict=True)] for job, rows in times.items()}
    print(
        f"[{ROWS}, {COLUMNS}], 1 thread of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.rounds} rounds"
    )
    print(f"{'':14}{'G elements/s: wall':>20}{'CPU':>8}{'x Quark: wall':>16}{'CPU':>8}")
    for job, both in median.items():
        rates = [ROWS * COLUMNS / t / 1e9 for t in both]
        line = f"{job:14}{rates[0]:20.3f}{rates[1]:8.3f}"
        if not args.no_quark:
            line += "".join(
                f"{slow / t:{w}.1f}" for slow, t, w in zip(median["Quark BF16"], both, (16, 8), strict=True)
            )
        print(line)


if __name__ == "__main__":
    main()

"""verify."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, verb


def add(verbs: Any) -> None:
    verify = verb(verbs, "verify", _verify, VERBS["verify"])
    verify.add_argument("output", metavar="OUT", help="a folder that quantize has finished")
    verify.add_argument("--source", metavar="SRC", help="also compare with the bf16 checkpoint it was made from")
    verify.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share (0 to 1) of the tensors to compare with SRC (default: all)",
    )
    verify.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    verify.add_argument("--json", action="store_true", help="print JSON")


def _verify(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    done = pipeline.verify(args.output, args.source, sample=args.sample, workers=args.workers, progress=not args.json)
    if args.json:
        errors = [{**dataclasses.asdict(error), "sqnr": error.sqnr} for error in done.errors]
        print_json({**dataclasses.asdict(done), "folder": str(done.folder), "errors": errors, "ok": done.ok})
        return 0 if done.ok else 1
    for problem in done.problems:
        say(f"{problem.code}: {problem.message}", *([f"  {problem.hint}"] if problem.hint else []))
    say(f"{done.folder}: {done.shards} shards, {done.bytes_read:,} bytes, {len(done.problems)} problems")
    if args.source:
        say(f"{done.copied:,} tensors equal the source, {done.requantized:,} weights come out the same again")
    for error in done.errors[:3]:
        say(f"  {error.sqnr:.1f} dB, worst block {error.worst_block:.1%}: {error.name}")
    return 0 if done.ok else 1

"""report."""

from __future__ import annotations

import argparse
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, targets_option, verb
from glmquant.cli.serve import site_packages_option


def add(verbs: Any) -> None:
    report = verb(verbs, "report", _report, VERBS["report"])
    report.epilog = (
        "The page has size by group, error by layer and projection (with --source), the worst weights by name, scales "
        "and codes, and what each engine release makes of it. It is one HTML file without a script; nothing is "
        "fetched. The tensors go into a JSONL beside it. Existing files are never replaced."
    )
    report.add_argument("checkpoint", metavar="CKPT", help="quantized folder of any producer")
    report.add_argument(
        "--source", metavar="SRC", help="bf16, FP8 or fused checkpoint it was made from: to measure the error"
    )
    report.add_argument(
        "--sample",
        type=float,
        metavar="SHARE",
        help="share (0 to 1) of each layer's weights of one projection to read, at least one (default: what takes "
        "minutes: all of a small model, under 1%% of GLM-5.2 with SRC, 7%% without)",
    )
    report.add_argument("--html", metavar="FILE", help="the page (default: CKPT-report.html beside CKPT)")
    report.add_argument(
        "--jsonl", metavar="FILE", help="the tensors, one a line (default: the page's name with .jsonl)"
    )
    targets_option(report, "--engine")
    site_packages_option(report)
    report.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    report.add_argument("--json", action="store_true", help="print what was written, and the main figures, as JSON")


def _report(args: argparse.Namespace) -> int:
    from glmquant import operate

    done = operate.report(
        args.checkpoint,
        args.source,
        html=args.html,
        jsonl=args.jsonl,
        sample=args.sample,
        targets=args.targets,
        site_packages=args.site_packages,
        workers=args.workers,
        progress=not args.json,
    )
    s = done.summary
    errors = sum(finding.severity == "error" for finding in done.validation.findings)
    if args.json:
        print_json(
            {
                "html": str(done.html),
                "jsonl": str(done.jsonl),
                "ok": done.ok,
                "sample": done.sample,
                "tensors": s.tensors,
                "bytes": s.nbytes,
                "packed": s.packed,
                "read": s.read,
                "compared": s.compared,
                "sqnr_db": {"median": s.overall.middle, "worst": s.overall.low} if s.overall else None,
                "beyond_mxfp4": s.beyond,
                "errors": errors,
            }
        )
        return int(not done.ok)
    say(f"{done.html}: {s.tensors:,} tensors, {s.nbytes:,} bytes, {s.packed:,} weights in MXFP4, {s.read:,} read")
    if s.overall:
        say(f"  SQNR: median {s.overall.middle:.2f} dB, worst {s.overall.low:.2f} dB ({s.compared:,} compared)")
    if s.beyond:
        say(f"  {s.beyond:,} weights are further from {args.source} than MXFP4 can be")
    if errors:
        say(f"  {errors:,} errors: see the page, or `glmquant validate {args.checkpoint}`")
    return int(not done.ok)

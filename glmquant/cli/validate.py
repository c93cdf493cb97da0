"""validate."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, targets_option, verb
from glmquant.engines.targets import Target, span
from glmquant.findings import JSON_VERSION, SEVERITIES, Report


def add(verbs: Any) -> None:
    validate = verb(verbs, "validate", _validate, VERBS["validate"])
    validate.add_argument(
        "checkpoint", metavar="CKPT", help="quantized folder of any producer, or org/name[@revision] on the Hub"
    )
    targets_option(validate, "--engine")
    validate.add_argument("--json", action="store_true", help="print JSON")
    validate.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        default="error",
        help="least severity that gives exit code 1 (default: error)",
    )


def _validate(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    report = pipeline.validate(args.checkpoint, targets=args.targets)
    if args.json:
        print_json(
            {
                "version": JSON_VERSION,
                "folder": str(report.folder),
                "ok": not report.failed(args.fail_on),
                "targets": [str(target) for target in report.targets],
                "tensors": report.tensors,
                "bytes": report.nbytes,
                "quantized_modules": report.quantized_modules,
                "verdicts": report.verdicts,
                "flags": report.flags,
                "coverage": report.coverage,
                "tensor_parallel": report.tensor_parallel,
                "findings": [dataclasses.asdict(finding) for finding in report.findings],
            }
        )
    else:
        say(*report_lines(report))
    return int(report.failed(args.fail_on))


def report_lines(report: Report) -> list[str]:
    lines = [
        f"{report.folder}: {report.tensors:,} tensors, {report.nbytes:,} bytes, "
        f"{report.quantized_modules:,} modules in MXFP4"
    ]
    lines += _coverage_lines(report)
    for finding in report.findings:
        where = f" [{finding.targets}]" if finding.targets else ""
        lines.append(f"{finding.severity}: {finding.code}{where}: {finding.message}")
        if finding.names:
            more = finding.count - len(finding.names)
            lines.append(f"    {', '.join(finding.names)}" + (f" and {more} more" if more > 0 else ""))
        lines += [f"    {effect.targets}: {effect.verdict}: {effect.message}" for effect in finding.effects]
        if finding.fix:
            lines.append(f"    fix: {finding.fix}")
    errors = sum(finding.severity == "error" for finding in report.findings)
    lines.append(
        f"{errors} errors, {len(report.findings) - errors} other findings" if report.findings else "no findings"
    )
    return lines


def _coverage_lines(report: Report) -> list[str]:
    """What becomes of the modules that ask, a line for all releases of an engine where it is the same."""
    groups: dict[tuple[str, str], list[Target]] = {}
    for target in report.targets:
        rows = report.coverage.get(str(target), {})
        counts = [(n, verdict, group) for group, row in rows.items() for verdict, n in row.items() if n]
        text = f"{sum(n for n, verdict, _ in counts if verdict == 'ok'):5} modules ok"
        text += "".join(f", {n} {verdict} ({group})" for n, verdict, group in counts if verdict != "ok")
        legal = report.tensor_parallel.get(str(target))
        text += f"; legal tensor-parallel sizes {', '.join(map(str, legal))}" if legal else ""
        if rows:
            groups.setdefault((target.engine, text), []).append(target)
    names = {key: span(targets) for key, targets in groups.items()}
    width = max(map(len, names.values()), default=0)
    return [f"  {names[engine, text]:{width}} {text}" for engine, text in groups]

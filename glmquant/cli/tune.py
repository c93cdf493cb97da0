"""tune-input."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, verb
from glmquant.cli.serve import engine_arguments, engine_options
from glmquant.serving.aiter_tables import ENVIRONMENT, Tables, untuned_csv
from glmquant.serving.key_report import KeyReport, ShapeLine
from glmquant.serving.launch import Wish
from glmquant.serving.output import write_new

EPILOG = """\
AITER looks each fused MoE up by the rank's sizes and a rounded token count; what its tuned tables lack gets a kernel
from a heuristic, which may be much slower. This prints what the checkpoint will ask for and what the installed tables
have, and writes the rest as input for AITER's own tuner, which needs the GPU. The keys depend on the exclude list: with
shared experts fused a rank holds 257 experts of which a token uses 9, else 256 and 8.

examples:
  glmquant tune-input ./GLM-5.2-MXFP4 --profile throughput                     what is asked for, what is tuned
  glmquant tune-input ./GLM-5.2-MXFP4 --profile throughput -o untuned.csv      and the input for the tuner
"""


def add(verbs: Any) -> None:
    tune = verb(verbs, "tune-input", _tune, VERBS["tune-input"])
    tune.formatter_class = argparse.RawDescriptionHelpFormatter
    tune.epilog = EPILOG
    tune.add_argument("checkpoint", metavar="CKPT", help="quantized folder of any producer")
    engine_options(tune)
    tune.add_argument(
        "--draft-depth", type=int, metavar="N", help="as for serve; 0: no draft, no keys of the MTP layer"
    )
    tune.add_argument("--max-tokens", type=int, metavar="N", help="computed at once (default: the chunk of prefill)")
    tune.add_argument("-o", "--output", metavar="FILE", help="write the tuner's input to this new file")
    tune.add_argument("--all", action="store_true", help="tune what is tuned already, too")
    tune.add_argument("--json", action="store_true", help="print JSON")


def _tune(args: argparse.Namespace) -> int:
    from glmquant import operate

    report = operate.kernel_keys(
        args.checkpoint,
        wish=Wish(args.tp, args.dp, args.ep, args.draft_depth),
        **engine_arguments(args),
        max_tokens=args.max_tokens,
    )
    if args.output:
        if report.tables is None:
            say(
                "AITER is not installed here: the tuner's columns are not known.",
                "  Name its environment: --site-packages DIR.",
            )
            return 1
        write_new(Path(args.output), untuned_csv(report.tables, report.wanted(args.all)))
    if args.json:
        print_json(keys_json(report))
    else:
        say(*key_lines(report))
        if args.output and report.tables:
            say(*_how(report.tables, args.output, sum(1 for _ in report.wanted(args.all))))
    return 0


def key_lines(report: KeyReport) -> list[str]:
    """The report for a person."""
    launch, tables = report.launch, report.tables
    lines = [f"{launch.engine} {launch.release}, TP{launch.tp} x DP{launch.dp}, EP{launch.ep}"]
    if tables is None:
        lines.append(
            "AITER is not installed here: nothing is known to be tuned (--site-packages DIR names its environment)"
        )
    else:
        known = "" if tables.known else "; its rounding of token counts is not known, that of newer releases is assumed"
        lines.append(
            f"AITER {tables.release or 'of no release'}: {len(tables.files)} tables, {len(tables.rows):,} rows{known}"
        )
    for line in report.lines:
        lines += _shape_lines(line)
    if report.veto:
        lines.append(
            f"The exclude entry {report.veto!r} alone switches fusion off, and so asks for other keys: "
            "glmquant exclusions fix mends it."
        )
    return lines


def _shape_lines(line: ShapeLine) -> list[str]:
    served = "" if line.served else f" (if shared experts were {'' if line.fused else 'not '}fused)"
    lines = [f"  {line.shape}: {line.tuned}{served}"]
    if line.misses and line.served:
        lines.append(f"    left to the heuristic: {_some(line.misses)} tokens")
    return lines


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _how(tables: Tables, output: str, count: int) -> list[str]:
    """What to do with the file, in a shell on the GPU machine."""
    if not count:
        return [f"{output}: nothing to tune, only the header is in it"]
    models = tables.files[0].parent / "model_configs" / "glm52_mxfp4_tuned_fmoe.csv"
    tuner = f"python3 {shlex.quote(str(tables.tuner))}" if tables.tuner else "python3 (AITER's gemm_moe_tune.py)"
    return [
        f"{output}: {count} rows. On the GPU machine:",
        f"  {tuner} -i {shlex.quote(output)} -o {shlex.quote(str(models))}",
        f"Tables in model_configs are merged in at the next start, unless {ENVIRONMENT} is set: then it replaces all.",
    ]


def keys_json(report: KeyReport) -> dict[str, Any]:
    """The report for a script."""
    tables = report.tables
    return {
        "engine": report.launch.engine,
        "release": report.launch.release,
        "aiter": None
        if tables is None
        else {
            "release": tables.release,
            "known": tables.known,
            "columns": tables.columns,
            "files": [str(path) for path in tables.files],
        },
        "complete": report.complete,
        "veto": report.veto,
        "shapes": [
            {
                "role": line.shape.role,
                "served": line.served,
                "fused": line.fused,
                "key": (tables.values(line.shape, 0) if tables else line.shape.key(0)) | {"token": None},
                "tuned": {str(token): {"kernels": row.kernels, "us": row.us} for token, row in line.hits.items()},
                "untuned": line.misses,
            }
            for line in report.lines
        ],
    }

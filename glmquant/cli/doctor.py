"""doctor."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, verb
from glmquant.cli.serve import engine_arguments, engine_options
from glmquant.serving.guard import patch
from glmquant.serving.launch import Wish
from glmquant.serving.output import write_new

EPILOG = """\
Looks at the packages of this Python environment, or of --site-packages DIR, without importing them; no GPU is needed.
With CKPT also: whether the installed sglang loads it, which flags it needs, and which MoE kernels are tuned for it.
Exit code 1 if a line says fix.

examples:
  glmquant doctor                                           the installed stack
  glmquant doctor ./GLM-5.2-MXFP4 --profile throughput      for one checkpoint, as it would be served
  glmquant doctor --site-packages /opt/venv/lib/python3.10/site-packages --write-patch guard.patch
"""


def add(verbs: Any) -> None:
    doctor = verb(verbs, "doctor", _doctor, VERBS["doctor"])
    doctor.formatter_class = argparse.RawDescriptionHelpFormatter
    doctor.epilog = EPILOG
    doctor.add_argument("checkpoint", nargs="?", metavar="CKPT", help="quantized folder of any producer")
    engine_options(doctor)
    doctor.add_argument("--draft-depth", type=int, metavar="N", help="as for serve")
    doctor.add_argument(
        "--write-patch", metavar="FILE", help="write the patch for a missing USE_ROCM guard to a new file"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")


def _doctor(args: argparse.Namespace) -> int:
    from glmquant import operate

    found = operate.doctor(
        args.checkpoint,
        wish=Wish(args.tp, args.dp, args.ep, args.draft_depth),
        **engine_arguments(args),
    )
    written = ""
    if args.write_patch and found.guard and not found.guard.present:
        write_new(Path(args.write_patch), patch(found.guard))
        written = f"{args.write_patch}: apply with patch -p1 in the folder that holds sglang"
    elif args.write_patch:
        written = "no patch written: there is nothing to mend"
    if args.json:
        print_json({"ok": found.ok, "lines": [dataclasses.asdict(line) for line in found.lines], "patch": written})
        return 0 if found.ok else 1
    for line in found.lines:
        source = f" [{line.source}]" if line.source else ""
        say(f"{line.status:4}  {line.text}{source}", *([f"      {line.fix}"] if line.fix else []))
    if written:
        say(written)
    wrong = sum(line.status == "fix" for line in found.lines)
    say(f"{len(found.lines)} things looked at, {wrong} to fix")
    return 0 if found.ok else 1

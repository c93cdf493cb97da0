"""The command line: parse, call, print, exit code. Everything it does is in pipeline.py; a module for each verb."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from glmquant.checkpoint.source import unfinished
from glmquant.cli.common import VERBS, PrintableLog, say
from glmquant.errors import GlmquantError

MODULES = {"plan": "quantize", "tune-input": "tune"}
"""Where a verb is that is not in a module of its own name."""

EPILOG = """\
exit codes: 0 done, 1 a finding or an error, 2 wrong usage, 130 or 143 interrupted.
examples:
  glmquant plan ./GLM-5.2                              what would be written, to the byte
  glmquant quantize ./GLM-5.2 ./GLM-5.2-MXFP4          do it, on the CPU
  glmquant exclusions ./GLM-5.2 --recipe routed        the exclude list, one entry a line
  glmquant exclusions fix ./SOME-MXFP4 --dry-run       mend the list of an existing checkpoint
  glmquant validate ./GLM-5.2-MXFP4                    prove a checkpoint of any producer
  glmquant serve ./GLM-5.2-MXFP4 --profile latency     the command that serves it, each flag with its reason
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = _parser(words).parse_args(words)
    gc.set_threshold(100_000, 50, 100)  # plans are half a million objects that live on: a quarter of plan's time
    log = logging.StreamHandler()
    log.setFormatter(PrintableLog("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, handlers=[log])
    signals = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except GlmquantError as err:
        if args.verbose:
            logging.getLogger(__name__).exception("failed")
        say(*f"glmquant: error: {err}".split("\n"), to=sys.stderr)
        return 1
    except BrokenPipeError:  # e.g. piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _Interrupted as stop:
        command = unfinished(Path(args.output)) if hasattr(args, "output") else ""
        say("glmquant: interrupted", *([f"  Continue with: {command}"] if command else []), to=sys.stderr)
        return 128 + stop.number
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)


class _Interrupted(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _frame: object) -> None:
    """The first signal stops the run in order, the second at once; either way it can be continued."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: os._exit(128 + number))
    raise _Interrupted(number)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glmquant",
        description="Quantize GLM-5.2 checkpoints (model_type glm_moe_dsa) and their siblings to MXFP4\n"
        "with AMD Quark's numbers, MTP layer included, and prove that serving engines can load the\nresult.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    added: set[str] = set()
    for name, text in VERBS.items():  # only the verb that is asked for is imported
        if name in added:
            continue
        module = MODULES.get(name, name)
        if module in {MODULES.get(word, word) for word in words}:
            import_module(f"glmquant.cli.{module}").add(verbs)
            added |= {other for other in VERBS if MODULES.get(other, other) == module}
        else:
            verbs.add_parser(name, help=text)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata costs start-up time."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        say(f"glmquant {version('glmquant')}")
        parser.exit()

"""What the verbs share: options, and printing text that comes from strangers."""

from __future__ import annotations

import argparse
import json
import logging
import re
from typing import TYPE_CHECKING, Any, TextIO

from glmquant.text import printable

if TYPE_CHECKING:
    from glmquant.exclusions import ExclusionList

# Help lines, here so that no verb has to be imported to list them.
VERBS = {
    "plan": "show what quantizing would write, from headers alone",
    "quantize": "write an MXFP4 checkpoint, then validate it",
    "exclusions": "print the exclude list for a checkpoint; 'fix' mends one in place, 'diff' compares two by effect",
    "validate": "check a quantized checkpoint against what engines ask for",
    "verify": "read a finished output again and compare it with its manifest and source",
    "mtp": "'mtp graft SRC CKPT': give a checkpoint the MTP layer back that it lost",
    "report": "write a page about a quantized checkpoint, and a line for each tensor",
    "evals": "run evals against an endpoint, and tell whether two models are equivalent",
    "serve": "print, or run, the command that serves a checkpoint, each flag with its reason",
    "tune-input": "which MoE kernels a server will ask for, which are tuned, and the tuner's input",
    "doctor": "check the installed serving stack, and what it makes of a checkpoint",
}


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines; names in them come from strangers, and must neither act on the terminal nor look like a line."""
    print("\n".join(printable(line).replace("\n", "\\n") for line in lines), file=to)


class PrintableLog(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))  # ASCII: what a terminal would act on is escaped


def verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and tracebacks of errors")
    parser.set_defaults(run=run)
    return parser


def recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="moe (default), moe-mtp, routed, routed-mtp, or your own file: my.yaml, my.yaml:name",
    )
    parser.add_argument(
        "--quantize",
        dest="also",
        action="append",
        default=[],
        metavar="PATTERN",
        help="quantize these modules too: a glob such as 'model.layers.0.mlp.*', or 're:' and a regex",
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="leave these modules as they are; wins"
    )
    parser.add_argument(
        "--keep-fp8",
        action="store_true",
        help="of a block-scaled FP8 source: leave un-quantized modules FP8 (default: they become bf16) where all "
        "targets read that: 'sglang>=0.5.21', vllm, or fewer modules for 'sglang>=0.5.23,vllm'",
    )


def recipe_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "recipe": args.recipe,
        "quantize": args.also,
        "keep": args.keep,
        "keep_fp8": args.keep_fp8,
        "targets": args.targets,
        "form": args.form,
    }


def shard_size_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=size,
        metavar="SIZE",
        help="pack the output's shards anew, layer by layer, to at most this (5GB, 500MB); default: as the source's",
    )


def size(text: str) -> int:
    """Bytes of `5GB`, `500MB` (powers of 1000, as huggingface_hub reads them) or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB")
    return size


def targets_option(parser: argparse.ArgumentParser, *aliases: str) -> None:
    from glmquant.engines.targets import DEFAULT_TARGETS

    parser.add_argument(
        "--targets",
        *aliases,
        default=DEFAULT_TARGETS,
        metavar="LIST",
        help=f"engine releases that must load the result, e.g. 'sglang>=0.5.16' (default: {DEFAULT_TARGETS})",
    )


def form_option(parser: argparse.ArgumentParser) -> None:
    from glmquant.spelling import FORMS

    parser.add_argument(
        "--form",
        choices=FORMS,
        default="auto",
        help="spelling of the exclude list: literal (no regex), regex (as short as possible), or auto (default): the "
        "main layers by name, the MTP layer as loads best",
    )


def list_lines(exclusions: ExclusionList) -> list[str]:
    from glmquant.engines.targets import span

    served = span(exclusions.targets) or "no modelled engine"
    return [
        f"exclude list  {len(exclusions.entries)} entries, MTP form: {exclusions.form}; for {served}",
        *(f"  note: {need}" for need in exclusions.needs),
    ]

"""exclusions, exclusions fix and exclusions diff."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from glmquant.cli.common import (
    VERBS,
    form_option,
    print_json,
    recipe_arguments,
    recipe_options,
    say,
    targets_option,
    verb,
)
from glmquant.exclusions import ExclusionList


def add(verbs: Any) -> None:
    exclusions = verb(verbs, "exclusions", _exclusions, VERBS["exclusions"])
    exclusions.usage = (
        "glmquant exclusions CKPT [options]\n"
        "       glmquant exclusions fix CKPT [--targets LIST] [--form FORM] [--dry-run]\n"
        "       glmquant exclusions diff A B [--targets LIST] [--json]"
    )
    exclusions.add_argument(
        "words",
        nargs="+",
        metavar="CKPT",
        help="bf16 source, or a quantized folder of any producer; for diff also a config.json or a file with a list",
    )
    recipe_options(exclusions)
    targets_option(exclusions, "--engine")
    form_option(exclusions)
    exclusions.add_argument(
        "--format",
        choices=("text", "json", "table", "quark-globs", "compressed-tensors"),
        default="text",
        help="text: one entry a line; json: as in config.json; table: with the origin of each entry; quark-globs: the "
        "same decision for Quark's --exclude_layers or ModelOpt; compressed-tensors: as its ignore list",
    )
    exclusions.add_argument("--dry-run", action="store_true", help="fix: show what would change, write nothing")
    exclusions.add_argument("--json", action="store_true", help="diff: print JSON")


def _exclusions(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    verb, *rest = args.words
    if verb == "fix" and len(rest) == 1:
        return _fix(args, rest[0])
    if verb == "diff" and len(rest) == 2:
        return _diff(args, *rest)
    if rest:
        say("glmquant exclusions: error: give one CKPT, or fix CKPT, or diff A B", to=sys.stderr)
        return 2
    found = pipeline.resolve_exclusions(verb, **recipe_arguments(args))
    if args.format == "json":
        print_json(found.texts)
    elif args.format == "table":
        width = max((len(entry.text) for entry in found.entries), default=0)
        for entry in found.entries:
            say(f"{entry.text:{width}}  {entry.origin:10}  {entry.module}  {entry.source}".rstrip())
    else:
        texts = {"quark-globs": found.globs, "compressed-tensors": found.ignore}.get(args.format, lambda: found.texts)
        say(*texts())
    _print_notes(found)
    return 0


def _fix(args: argparse.Namespace, folder: str) -> int:
    from glmquant import pipeline

    done = pipeline.fix_exclusions(folder, targets=args.targets, form=args.form, dry_run=args.dry_run)
    for sign, entries in (("-", done.removed), ("+", done.added)):
        for entry in entries:
            say(f"{sign} {entry}")
    if done.backup:
        say(f"{folder}/config.json mended; the old one is {done.backup.name}", to=sys.stderr)
    elif tuple(done.exclusions.texts) == done.before:
        say("nothing to do: the list is already the one that loads", to=sys.stderr)
    else:
        say("dry run: nothing was written", to=sys.stderr)
    _print_notes(done.exclusions)
    return 0


def _diff(args: argparse.Namespace, a: str, b: str) -> int:
    from glmquant import pipeline

    rows = pipeline.diff_exclusions(a, b, targets=args.targets)
    if args.json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        for row in rows:
            say(f"{row.targets}: {row.role} {row.prefix}: {row.a} -> {row.b}")
        say(f"{len(rows)} differences" if rows else "no difference on any target", to=sys.stderr)
    return int(bool(rows))


def _print_notes(found: ExclusionList) -> None:
    for need in found.needs:
        say(f"note: {need}", to=sys.stderr)

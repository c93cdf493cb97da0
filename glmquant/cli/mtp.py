"""mtp graft."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from glmquant.cli.common import VERBS, form_option, print_json, say, targets_option, verb
from glmquant.cli.validate import report_lines
from glmquant.graft import Graft
from glmquant.text import short

ABOUT = """\
Adds the tensors of the MTP (speculative decoding) layer that CKPT lost, in place. The new tensors go to new shards
model-mtp-*.safetensors; the old shards are not touched, and index and config.json are replaced last, with a backup
(.bak) of each. The exclude list, total_size and num_nextn_predict_layers are put right, then CKPT is validated. Given
again after a kill, it ends what it began; given for a checkpoint that has its MTP layer, it does nothing.

SRC is the model that CKPT was made from, bf16 or block-scaled FP8: a folder in which config.json and the shards with
the MTP layer are enough, or org/name[@revision] on the Hub, of which only these shards are fetched (into CKPT/.glmquant
until the end). Tensors that both have un-quantized are compared, because an MTP layer drafts badly for another
fine-tune; --force grafts all the same.
"""


def add(verbs: Any) -> None:
    graft = verb(verbs, "mtp", _mtp, VERBS["mtp"])
    graft.usage = (
        "glmquant mtp graft SRC CKPT [--quantized] [--targets LIST] [--form FORM] [--force] [--allow-zeros]\n"
        "                          [--workers N] [--dry-run] [--json]"
    )
    graft.description, graft.formatter_class = ABOUT, argparse.RawDescriptionHelpFormatter
    graft.add_argument("action", choices=("graft",), help="the one thing there is to do")
    graft.add_argument(
        "source", metavar="SRC", help="the model that CKPT was made from: a folder, or org/name[@revision] on the Hub"
    )
    graft.add_argument("checkpoint", metavar="CKPT", help="folder of a checkpoint without MTP layer; changed in place")
    graft.add_argument(
        "--quantized",
        action="store_true",
        help="MTP experts in MXFP4 where the main layers' are (default: everything as SRC has it, FP8 as bf16)",
    )
    targets_option(graft)
    form_option(graft)
    graft.add_argument("--force", action="store_true", help="graft although SRC and CKPT are not the same weights")
    graft.add_argument(
        "--allow-zeros", action="store_true", help="accept weights that are all zeros (normally a damaged download)"
    )
    graft.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    graft.add_argument("--dry-run", action="store_true", help="show what would be done, write nothing")
    graft.add_argument("--json", action="store_true", help="print JSON")


def _mtp(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    done = pipeline.graft_mtp(
        args.source,
        args.checkpoint,
        quantized=args.quantized,
        targets=args.targets,
        form=args.form,
        force=args.force,
        allow_zeros=args.allow_zeros,
        dry_run=args.dry_run,
        workers=args.workers,
        progress=not args.json,
    )
    if args.json:
        print_json(_json(done))
        return int(not done.ok)
    say(*_lines(done))
    if done.report:
        say(*report_lines(done.report))
    if args.dry_run:
        say("dry run: nothing was written", to=sys.stderr)
    return int(not done.ok)


def _lines(done: Graft) -> list[str]:
    if done.nothing_to_do:
        return [f"{done.folder}: nothing to do: all {done.there:,} tensors of the MTP layer are there"]
    lines = [f"MTP layer     {done.there:,} tensors there, {len(done.missing):,} missing"]
    if done.compared:
        differ = f"{len(done.different):,} differ, {done.different[0]} first" if done.different else "all equal"
        lines.append(f"compared      {done.compared:,} un-quantized tensors with SRC: {differ}")
    if done.fetched:
        what = "to be fetched" if done.dry_run else "fetched"
        lines.append(f"from the Hub  {len(done.fetched):,} shards {what}: {done.fetched_bytes:,} bytes")
    if done.shards:
        packed = f", {done.quantized:,} weights in MXFP4" if done.quantized else ""
        files = done.shards[0] + (f" ... {done.shards[-1]}" if len(done.shards) > 1 else "")
        lines.append(f"new shards    {files}: {done.tensors:,} tensors, {done.nbytes:,} bytes{packed}")
    if done.index:
        lines.append("index         names them, total_size is the sum of all tensors")
    lines += [f"config.json   {key}: {short(old)} -> {short(new)}" for key, (old, new) in done.config.items()]
    if done.exclusions and done.list_changes:
        after, before = done.exclusions.texts, set(done.before)
        new = sum(entry not in before for entry in after)
        gone = len(before - set(after))
        lines.append(f"exclude list  {len(after):,} entries: {new:,} new, {gone:,} of the old ones gone")
    elif done.exclusions:
        lines.append("exclude list  stays as it is")
    if done.exclusions:
        lines += [f"  note: {need}" for need in done.exclusions.needs]
    if done.backups:
        lines.append(f"backups       {', '.join(path.name for path in done.backups)}")
    return lines


def _json(done: Graft) -> dict[str, Any]:
    return {
        "folder": str(done.folder),
        "ok": done.ok,
        "dry_run": done.dry_run,
        "nothing_to_do": done.nothing_to_do,
        "there": done.there,
        "missing": list(done.missing),
        "shards": list(done.shards),
        "tensors": done.tensors,
        "bytes": done.nbytes,
        "quantized": done.quantized,
        "fetched": list(done.fetched),
        "fetched_bytes": done.fetched_bytes,
        "compared": done.compared,
        "different": list(done.different),
        "index": done.index,
        "config": {key: {"before": old, "after": new} for key, (old, new) in done.config.items()},
        "exclude": done.exclusions.texts if done.exclusions and done.list_changes else None,
        "backups": [path.name for path in done.backups],
        "findings": [f"{f.severity}: {f.code}: {f.message}" for f in done.report.findings] if done.report else [],
    }

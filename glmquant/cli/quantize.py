"""plan and quantize."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from glmquant.cli.common import (
    VERBS,
    form_option,
    list_lines,
    print_json,
    recipe_arguments,
    recipe_options,
    say,
    shard_size_option,
    size,
    targets_option,
    verb,
)
from glmquant.cli.validate import report_lines
from glmquant.errors import OutputError
from glmquant.mxfp4.choose import BACKENDS
from glmquant.pipeline import PlanResult


def add(verbs: Any) -> None:
    plan = verb(verbs, "plan", _plan, VERBS["plan"])
    plan.add_argument(
        "source", metavar="SRC", help="folder of a bf16 or FP8 checkpoint, hub-cache snapshot, or org/name[@revision]"
    )
    recipe_options(plan)
    targets_option(plan)
    form_option(plan)
    shard_size_option(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")

    quantize = verb(verbs, "quantize", _quantize, VERBS["quantize"])
    quantize.add_argument(
        "source", metavar="SRC", help="folder of a bf16 or FP8 checkpoint, hub-cache snapshot, or org/name[@revision]"
    )
    quantize.add_argument("output", metavar="OUT", help="a new or empty folder; with --resume an unfinished one")
    recipe_options(quantize)
    targets_option(quantize)
    form_option(quantize)
    shard_size_option(quantize)
    quantize.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="quark: AMD Quark's own code; fused: this project's kernel, the same bits without torch; "
        "auto (default): fused on the CPU, Quark on a GPU",
    )
    quantize.add_argument(
        "--device", default="cpu", help="cpu (default), or a torch device for Quark: cuda, cuda:1, cuda:0,1"
    )
    quantize.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    quantize.add_argument(
        "--check-backend",
        type=float,
        default=0.0,
        metavar="RATE",
        help="quantize this share (0 to 1) of the chunks with AMD Quark too, and fail on a differing bit",
    )
    quantize.add_argument("--base-model", metavar="ORG/NAME", help="the source's name on the Hub, for the model card")
    quantize.add_argument(
        "--resume",
        action="store_true",
        help="continue an unfinished OUT after a kill, a full disk or Ctrl-C; finished shards are checked and kept",
    )
    quantize.add_argument(
        "--verify-source",
        action="store_true",
        help="first compare SRC with its checksums: hub-cache names, `hf download` metadata or SHA256SUMS",
    )
    quantize.add_argument(
        "--allow-zeros", action="store_true", help="accept weights that are all zeros (normally a damaged download)"
    )
    quantize.add_argument(
        "--delete-source-shards",
        action="store_true",
        help="remove each shard of SRC once its output is on disk and was read back: for a disk that cannot hold both",
    )
    quantize.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: write shards as tasks of a Ray cluster that sees SRC and OUT (pip install 'glmquant[ray]')",
    )
    quantize.add_argument("--address", default="", help="of the Ray cluster, e.g. auto or ray://host:10001")
    quantize.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="with --world-size: of several processes that write one OUT, write every WORLD-th shard from the N-th on "
        "(default: SLURM_PROCID and SLURM_NTASKS, or torchrun's RANK and WORLD_SIZE)",
    )
    quantize.add_argument("--world-size", type=int, metavar="WORLD", help="how many processes there are")
    quantize.add_argument(
        "--max-disk",
        type=size,
        metavar="SIZE",
        help="from the Hub: how much of the source may be on disk at once (default: two shards a worker)",
    )
    quantize.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="upload finished shards meanwhile (to a private repository if there is none yet), and config.json last, "
        "once the validator has found no error",
    )
    quantize.add_argument(
        "--drop-pushed",
        action="store_true",
        help="remove each shard of OUT once the Hub has it: for a disk that cannot hold the output",
    )
    quantize.add_argument("--quiet", action="store_true", help="no progress bar and no summary")


def _plan(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    result = pipeline.plan(args.source, **recipe_arguments(args), max_shard_size=args.max_shard_size)
    if args.json:
        print_json(_plan_json(result))
    else:
        say(*_plan_lines(result))
    return 0


def _quantize(args: argparse.Namespace) -> int:
    from glmquant import pipeline

    rank, world_size = _rank(args)
    result = pipeline.quantize(
        args.source,
        args.output,
        **recipe_arguments(args),
        max_shard_size=args.max_shard_size,
        backend=args.backend,
        device=args.device,
        workers=args.workers,
        check_backend=args.check_backend,
        base_model=args.base_model,
        resume=args.resume,
        verify_source=args.verify_source,
        allow_zeros=args.allow_zeros,
        delete_source_shards=args.delete_source_shards,
        rank=rank,
        world_size=world_size,
        ray=args.address if args.engine == "ray" else None,
        max_disk=args.max_disk,
        push_to_hub=args.push_to_hub,
        drop_pushed=args.drop_pushed,
        progress=not args.quiet,
    )
    if not args.quiet:
        rate = result.plan.bytes_in / max(result.seconds, 1e-9) / 1e6
        say(f"wrote {result.output} in {result.seconds:.1f} s ({rate:,.0f} MB/s of source)")
        if args.push_to_hub and result.ok:
            say(f"all of it is in {args.push_to_hub}" + (", the shards only there" if args.drop_pushed else ""))
        say(*_table(result.plan), "", *list_lines(result.exclusions))
    if result.report is None:
        say(f"rank {rank} of {world_size} is done; {result.missing} shards are left to other ranks")
    elif not args.quiet or not result.report.ok:
        say(*report_lines(result.report))
    return 0 if result.ok else 1


def _rank(args: argparse.Namespace) -> tuple[int, int]:
    """From the options, else from what a launcher has set."""
    if (args.rank is None) != (args.world_size is None):
        raise OutputError("--rank and --world-size belong together")
    if args.rank is not None:
        return args.rank, args.world_size
    for rank, world in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(world, "").isdigit():
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def _plan_json(result: PlanResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "recipe": plan.recipe.name,
        "groups": [dataclasses.asdict(row) for row in plan.groups()],
        "shards": len(plan.shards),
        "tensors_in": len(plan.jobs),
        "tensors_out": len(plan.weight_map),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.total_size,
        "disk_needed": result.disk_needed,
        "quantized_share": _share(result),
        "exclude_entries": len(result.exclusions.entries),
        "exclude_form": result.exclusions.form,
        "targets": [str(target) for target in result.exclusions.targets],
        "needs": [dataclasses.asdict(need) for need in result.exclusions.needs],
    }


def _share(result: PlanResult) -> float:
    rows = result.plan.groups()
    return sum(row.parameters for row in rows if row.dtype_out == "MXFP4") / sum(row.parameters for row in rows)


def _plan_lines(result: PlanResult) -> list[str]:
    plan = result.plan
    return [
        f"{result.checkpoint.folder}: {result.checkpoint.model_type}, {plan.layers.count} layers"
        + (f" + MTP layer {', '.join(map(str, plan.layers.mtp))}" if plan.layers.mtp else ", no MTP layer"),
        f"recipe {plan.recipe.name}: {plan.recipe.about}",
        *(f"  {override}" for override in plan.recipe.overrides),
        "",
        *_table(plan),
        "",
        f"compression   {plan.bytes_in / plan.total_size:.2f}x",
        f"quantized     {_share(result):.2%} of parameters",
        f"disk needed   {result.disk_needed:,} bytes in {len(plan.shards)} shards",
        *list_lines(result.exclusions),
    ]


def _table(plan: Any) -> list[str]:
    rows = [("group", "tensors", "bytes in", "bytes out", "dtype")]
    for row in plan.groups():
        dtype = row.dtype_out if row.dtype_in == row.dtype_out else f"{row.dtype_in} -> {row.dtype_out}"
        rows.append((row.group, f"{row.tensors:,}", f"{row.bytes_in:,}", f"{row.bytes_out:,}", dtype))
    rows.append(("total", f"{len(plan.weight_map):,}", f"{plan.bytes_in:,}", f"{plan.total_size:,}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]).rstrip()
        for row in rows
    ]

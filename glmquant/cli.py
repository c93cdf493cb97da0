"""The command line: parse, call, print, exit code. Everything it does is in pipeline.py."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from glmquant import pipeline
from glmquant.checkpoint.source import unfinished
from glmquant.engines.targets import DEFAULT_TARGETS, Target, span
from glmquant.errors import GlmquantError, OutputError
from glmquant.exclusions import ExclusionList
from glmquant.findings import JSON_VERSION, SEVERITIES, Report
from glmquant.mxfp4.choose import BACKENDS
from glmquant.pipeline import PlanResult
from glmquant.spelling import FORMS
from glmquant.text import printable

EPILOG = """\
exit codes: 0 done, 1 a finding or an error, 2 wrong usage, 130 or 143 interrupted.
examples:
  glmquant plan ./GLM-5.2                              what would be written, to the byte
  glmquant quantize ./GLM-5.2 ./GLM-5.2-MXFP4          do it, on the CPU
  glmquant exclusions ./GLM-5.2 --recipe routed        the exclude list, one entry a line
  glmquant exclusions fix ./SOME-MXFP4 --dry-run       mend the list of an existing checkpoint
  glmquant validate ./GLM-5.2-MXFP4                    prove a checkpoint of any producer
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(argv)
    gc.set_threshold(100_000, 50, 100)  # plans are half a million objects that live on: a quarter of plan's time
    log = logging.StreamHandler()
    log.setFormatter(_PrintableLog("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, handlers=[log])
    signals = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except GlmquantError as err:
        if args.verbose:
            logging.getLogger(__name__).exception("failed")
        _say(*f"glmquant: error: {err}".split("\n"), to=sys.stderr)
        return 1
    except BrokenPipeError:  # e.g. piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _Interrupted as stop:
        command = unfinished(Path(args.output)) if hasattr(args, "output") else ""
        _say("glmquant: interrupted", *([f"  Continue with: {command}"] if command else []), to=sys.stderr)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glmquant",
        description="Quantize GLM-5.2 checkpoints (model_type glm_moe_dsa) to MXFP4 with AMD Quark's numbers, MTP "
        "layer included, and prove that serving engines can load the result.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    plan = _verb(verbs, "plan", _plan, "show what quantizing would write, from headers alone")
    plan.add_argument(
        "source", metavar="SRC", help="folder of a bf16 or FP8 checkpoint, hub-cache snapshot, or org/name[@revision]"
    )
    _recipe_options(plan)
    _targets_option(plan)
    _form_option(plan)
    _shard_size_option(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")

    quantize = _verb(verbs, "quantize", _quantize, "write an MXFP4 checkpoint, then validate it")
    quantize.add_argument(
        "source", metavar="SRC", help="folder of a bf16 or FP8 checkpoint, hub-cache snapshot, or org/name[@revision]"
    )
    quantize.add_argument("output", metavar="OUT", help="a new or empty folder; with --resume an unfinished one")
    _recipe_options(quantize)
    _targets_option(quantize)
    _form_option(quantize)
    _shard_size_option(quantize)
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
        type=_size,
        metavar="SIZE",
        help="from the Hub: how much of the source may be on disk at once (default: two shards a worker)",
    )
    quantize.add_argument("--quiet", action="store_true", help="no progress bar and no summary")

    exclusions = _verb(
        verbs,
        "exclusions",
        _exclusions,
        "print the exclude list for a checkpoint; 'fix' mends one in place, 'diff' compares two by what they do",
    )
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
    _recipe_options(exclusions)
    _targets_option(exclusions, "--engine")
    _form_option(exclusions)
    exclusions.add_argument(
        "--format",
        choices=("text", "json", "table", "quark-globs", "compressed-tensors"),
        default="text",
        help="text: one entry a line; json: as in config.json; table: with the origin of each entry; quark-globs: the "
        "same decision for Quark's --exclude_layers or ModelOpt; compressed-tensors: as its ignore list",
    )
    exclusions.add_argument("--dry-run", action="store_true", help="fix: show what would change, write nothing")
    exclusions.add_argument("--json", action="store_true", help="diff: print JSON")

    validate = _verb(verbs, "validate", _validate, "check a quantized checkpoint against what engines ask for")
    validate.add_argument("checkpoint", metavar="CKPT", help="quantized folder of any producer")
    _targets_option(validate, "--engine")
    validate.add_argument("--json", action="store_true", help="print JSON")
    validate.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        default="error",
        help="least severity that gives exit code 1 (default: error)",
    )

    verify = _verb(verbs, "verify", _verify, "read a finished output again and compare it with its manifest and source")
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
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata costs start-up time."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        _say(f"glmquant {version('glmquant')}")
        parser.exit()


def _verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and tracebacks of errors")
    parser.set_defaults(run=run)
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
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


def _shard_size_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="pack the output's shards anew, layer by layer, to at most this (5GB, 500MB); default: as the source's",
    )


def _size(text: str) -> int:
    """Bytes of `5GB`, `500MB` (powers of 1000, as huggingface_hub reads them) or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB")
    return size


def _targets_option(parser: argparse.ArgumentParser, *aliases: str) -> None:
    parser.add_argument(
        "--targets",
        *aliases,
        default=DEFAULT_TARGETS,
        metavar="LIST",
        help=f"engine releases that must load the result, e.g. 'sglang>=0.5.16' (default: {DEFAULT_TARGETS})",
    )


def _form_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="auto",
        help="spelling of the exclude list: literal (no regex), regex (as short as possible), or auto (default): the "
        "main layers by name, the MTP layer as loads best",
    )


def _recipe_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {"recipe": args.recipe, "quantize": args.also, "keep": args.keep, "targets": args.targets, "form": args.form}


def _plan(args: argparse.Namespace) -> int:
    result = pipeline.plan(args.source, **_recipe_arguments(args), max_shard_size=args.max_shard_size)
    if args.json:
        _print_json(_plan_json(result))
    else:
        _say(*_plan_lines(result))
    return 0


def _quantize(args: argparse.Namespace) -> int:
    rank, world_size = _rank(args)
    result = pipeline.quantize(
        args.source,
        args.output,
        **_recipe_arguments(args),
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
        progress=not args.quiet,
    )
    if not args.quiet:
        rate = result.plan.bytes_in / max(result.seconds, 1e-9) / 1e6
        _say(f"wrote {result.output} in {result.seconds:.1f} s ({rate:,.0f} MB/s of source)")
        _say(*_table(result.plan), "", *_list_lines(result.exclusions))
    if result.report is None:
        _say(f"rank {rank} of {world_size} is done; {result.missing} shards are left to other ranks")
    elif not args.quiet or not result.report.ok:
        _say(*_report_lines(result.report))
    return 0 if result.ok else 1


def _rank(args: argparse.Namespace) -> tuple[int, int]:
    """From the options, else from what a launcher has set."""
    if (args.rank is None) != (args.world_size is None):
        raise OutputError("--rank and --world-size belong together")
    if args.rank is not None:
        return args.rank, args.world_size
    for rank, size in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _verify(args: argparse.Namespace) -> int:
    done = pipeline.verify(args.output, args.source, sample=args.sample, workers=args.workers, progress=not args.json)
    if args.json:
        errors = [{**dataclasses.asdict(error), "sqnr": error.sqnr} for error in done.errors]
        _print_json({**dataclasses.asdict(done), "folder": str(done.folder), "errors": errors, "ok": done.ok})
        return 0 if done.ok else 1
    for problem in done.problems:
        _say(f"{problem.code}: {problem.message}", *([f"  {problem.hint}"] if problem.hint else []))
    _say(f"{done.folder}: {done.shards} shards, {done.bytes_read:,} bytes, {len(done.problems)} problems")
    if args.source:
        _say(f"{done.copied:,} tensors equal the source, {done.requantized:,} weights come out the same again")
    for error in done.errors[:3]:
        _say(f"  {error.sqnr:.1f} dB, worst block {error.worst_block:.1%}: {error.name}")
    return 0 if done.ok else 1


def _exclusions(args: argparse.Namespace) -> int:
    verb, *rest = args.words
    if verb == "fix" and len(rest) == 1:
        return _fix(args, rest[0])
    if verb == "diff" and len(rest) == 2:
        return _diff(args, *rest)
    if rest:
        _say("glmquant exclusions: error: give one CKPT, or fix CKPT, or diff A B", to=sys.stderr)
        return 2
    found = pipeline.resolve_exclusions(verb, **_recipe_arguments(args))
    if args.format == "json":
        _print_json(found.texts)
    elif args.format == "table":
        width = max((len(entry.text) for entry in found.entries), default=0)
        for entry in found.entries:
            _say(f"{entry.text:{width}}  {entry.origin:10}  {entry.module}  {entry.source}".rstrip())
    else:
        texts = {"quark-globs": found.globs, "compressed-tensors": found.ignore}.get(args.format, lambda: found.texts)
        _say(*texts())
    _print_notes(found)
    return 0


def _fix(args: argparse.Namespace, folder: str) -> int:
    done = pipeline.fix_exclusions(folder, targets=args.targets, form=args.form, dry_run=args.dry_run)
    for sign, entries in (("-", done.removed), ("+", done.added)):
        for entry in entries:
            _say(f"{sign} {entry}")
    if done.backup:
        _say(f"{folder}/config.json mended; the old one is {done.backup.name}", to=sys.stderr)
    elif tuple(done.exclusions.texts) == done.before:
        _say("nothing to do: the list is already the one that loads", to=sys.stderr)
    else:
        _say("dry run: nothing was written", to=sys.stderr)
    _print_notes(done.exclusions)
    return 0


def _diff(args: argparse.Namespace, a: str, b: str) -> int:
    rows = pipeline.diff_exclusions(a, b, targets=args.targets)
    if args.json:
        _print_json([dataclasses.asdict(row) for row in rows])
    else:
        for row in rows:
            _say(f"{row.targets}: {row.role} {row.prefix}: {row.a} -> {row.b}")
        _say(f"{len(rows)} differences" if rows else "no difference on any target", to=sys.stderr)
    return int(bool(rows))


def _print_notes(found: ExclusionList) -> None:
    for need in found.needs:
        _say(f"note: {need}", to=sys.stderr)


def _validate(args: argparse.Namespace) -> int:
    report = pipeline.validate(args.checkpoint, targets=args.targets)
    if args.json:
        _print_json(
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
        _say(*_report_lines(report))
    return int(report.failed(args.fail_on))


def _say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines; names in them come from strangers, and must neither act on the terminal nor look like a line."""
    print("\n".join(printable(line).replace("\n", "\\n") for line in lines), file=to)


class _PrintableLog(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))  # ASCII: what a terminal would act on is escaped


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
    jobs = result.plan.jobs
    return sum(job.source.numel for job in jobs if job.quantized) / sum(job.source.numel for job in jobs)


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
        *_list_lines(result.exclusions),
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


def _list_lines(exclusions: ExclusionList) -> list[str]:
    return [
        f"exclude list  {len(exclusions.entries)} entries, MTP form: {exclusions.form}; for {span(exclusions.targets)}",
        *(f"  note: {need}" for need in exclusions.needs),
    ]


def _report_lines(report: Report) -> list[str]:
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

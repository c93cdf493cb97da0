"""serve."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
from typing import Any

from glmquant.cli.common import VERBS, print_json, say, verb
from glmquant.errors import GlmquantError
from glmquant.serving.launch import Launch, Setting, Wish
from glmquant.serving.settings import ENGINES, PROFILES

EPILOG = """\
profiles (glmquant/serving/profiles.yaml):
  latency      TP8, MTP drafts 5 tokens ahead: one stream, or few, as fast as possible
  throughput   TP4 x DP2, 3 ahead: many requests, bound by prefill (20k tokens in, 1k out, 60% of them cached)

What it does not know it does not guess: a release that is newer than those modelled is answered for by the newest
modelled one, with a note. Nothing here was run on an MI355X by this project; every reason names its source.

examples:
  glmquant serve ./GLM-5.2-MXFP4 --profile latency                     for the installed sglang, else the newest known
  glmquant serve ./GLM-5.2-MXFP4 --profile throughput --release 0.5.16
  glmquant serve ./GLM-5.2-MXFP4 --profile latency --run --flags='--max-running-requests 64'
"""


def add(verbs: Any) -> None:
    serve = verb(verbs, "serve", _serve, VERBS["serve"])
    serve.formatter_class = argparse.RawDescriptionHelpFormatter
    serve.epilog = EPILOG
    serve.add_argument("checkpoint", metavar="CKPT", help="quantized folder of any producer")
    engine_options(serve)
    serve.add_argument("--draft-depth", type=int, metavar="N", help="tokens that the MTP layer drafts ahead; 0: none")
    serve.add_argument("--host", help="address to listen on (default: the engine's)")
    serve.add_argument("--port", type=int, help="port to listen on (default: the engine's)")
    serve.add_argument("--gpus", type=int, metavar="N", help="GPUs of the node (default: 8)")
    serve.add_argument(
        "--flags",
        default="",
        metavar="TEXT",
        help="more flags for the engine, as a shell reads them; write --flags='...'",
    )
    serve.add_argument("--run", dest="start", action="store_true", help="start the server in place of this process")
    serve.add_argument("--json", action="store_true", help="print JSON")


def engine_options(parser: argparse.ArgumentParser) -> None:
    """What decides which engine runs, and how it is divided over GPUs."""
    parser.add_argument(
        "--profile", choices=PROFILES, default="latency", help="what the server is for (default: latency)"
    )
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="default: sglang")
    parser.add_argument(
        "--release", metavar="X.Y.Z", help="of the engine (default: the installed one, else the newest known)"
    )
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size (default: the profile's)")
    parser.add_argument("--dp", type=int, metavar="N", help="replicas (default: the profile's)")
    parser.add_argument("--ep", type=int, metavar="N", help="expert-parallel size (default: 1)")
    site_packages_option(parser)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """`engine_options`, but for the sizes, as arguments of operate's functions."""
    return {
        "profile": args.profile,
        "engine": args.engine,
        "release": args.release,
        "site_packages": args.site_packages,
    }


def site_packages_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site-packages",
        action="append",
        default=[],
        metavar="DIR",
        help="look at the packages in this folder instead of this environment's; may be given more than once",
    )


def _serve(args: argparse.Namespace) -> int:
    from glmquant import operate

    wish = Wish(args.tp, args.dp, args.ep, args.draft_depth, args.host, args.port, args.gpus, _words(args.flags))
    launch = operate.launch(
        args.checkpoint,
        wish=wish,
        **engine_arguments(args),
    )
    if args.json:
        print_json({**dataclasses.asdict(launch), "argv": launch.argv, "environ": launch.environ})
    else:
        say(*_comments(launch))
        say(*launch.script().split("\n"))
    if not args.start:
        return 0
    if not shutil.which(launch.program[0]):
        raise GlmquantError(f"{launch.program[0]!r} is not on the PATH", "Run it in the engine's environment.")
    sys.stdout.flush()
    os.execvpe(launch.program[0], launch.argv, os.environ | launch.environ)


def _words(flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as err:
        raise GlmquantError(f"--flags: {err}", "Quotes must be closed.") from err


def _comments(launch: Launch) -> list[str]:
    sizes = (
        f"TP{launch.tp}"
        + (f" x DP{launch.dp}" if launch.dp > 1 else "")
        + (f", EP{launch.ep}" if launch.ep > 1 else "")
    )
    draft = f"drafts {launch.draft_depth} ahead" if launch.draft_depth else "no drafts"
    fused = "fused" if launch.fused else "not fused"
    lines = [f"# {launch.engine} {launch.release}, {launch.profile}: {sizes}, {draft}, shared experts {fused}"]
    lines += [f"# note: {note}" for note in launch.notes]
    lines += [f"# {_shown(setting)}: {_why(setting)}" for setting in (*launch.env, *launch.flags)]
    return lines


def _shown(setting: Setting) -> str:
    if setting.value is None:
        return setting.name
    return f"{setting.name}{' ' if setting.name.startswith('-') else '='}{setting.value}"


def _why(setting: Setting) -> str:
    return setting.reason + (f" [{setting.source}]" if setting.source else "")

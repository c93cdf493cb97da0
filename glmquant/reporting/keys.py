"""MoE kernel keys as rows for the page: what each launch profile will ask AITER for, and what is tuned for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glmquant.checkpoint.source import Checkpoint, Problem
from glmquant.engines.targets import ENGINES
from glmquant.errors import GlmquantError
from glmquant.serving.aiter_tables import open_tables
from glmquant.serving.kernel_keys import rules
from glmquant.serving.key_report import KeyReport, ShapeLine, look_up
from glmquant.serving.launch import Wish, make_launch
from glmquant.serving.settings import engine_settings, hardware, profiles
from glmquant.serving.stack import open_stack
from glmquant.serving.subject import nearest, subject_of

_ENGINE = "sglang"


def kernel_keys(
    checkpoint: Checkpoint, problems: Sequence[Problem], site_packages: Sequence[Path] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Rows with the same columns, and a sentence about them; none where no profile can serve the checkpoint.

    Args:
        checkpoint, problems: from checkpoint.source.inspect.
        site_packages: folders to look for sglang and AITER in, instead of this environment. Without sglang the newest
            modelled release is asked; without AITER nothing is known to be tuned.
    """
    try:
        settings, stack = engine_settings(_ENGINE), open_stack(site_packages)
        release = stack.release(settings.package) or list(ENGINES[_ENGINE].releases())[-1]
        subject, tables = subject_of(checkpoint, problems, nearest(_ENGINE, release)), open_tables(stack)
    except GlmquantError:  # not quantized, another model, or tables that cannot be read: `tune-input` says which
        return [], ""
    rows = []
    for name, profile in profiles().items():
        try:
            launch = make_launch(subject, settings, profile, hardware(), release, Wish())
            found = look_up(subject, launch, hardware(), tables)
        except GlmquantError:  # a profile whose sizes do not divide this model
            continue
        rows += [_row(name, found, line) for line in found.lines]
    where = "AITER is not installed here, so what is tuned is not known"
    if tables:
        where = f"the tables of AITER {tables.release or 'without a release'} have {len(tables.rows):,} rows"
    return rows, (
        f"Under what a fused MoE is looked up, for {_ENGINE} {release}: {where}. What is not tuned gets a kernel "
        "from a heuristic. glmquant tune-input has the whole keys, and writes the tuner's input."
    )


def _row(profile: str, report: KeyReport, line: ShapeLine) -> dict[str, Any]:
    shape, launch = line.shape, report.launch
    return {
        "profile": f"{profile}, TP{launch.tp} x DP{launch.dp}",
        "model": shape.role,
        "shared experts": ("" if line.served else "if ") + ("fused" if line.fused else "apart"),
        "weights": "MXFP4" if shape.q_type == rules()["mxfp4"]["q_type"] else "bf16",
        "model_dim": shape.model_dim,
        "inter_dim": shape.inter_dim,
        "experts": shape.expert,
        "topk": shape.topk,
        "tuned": f"{len(line.hits)} of {len(line.hits) + len(line.misses)}" if report.tables else "",
        "token counts not tuned": ", ".join(map(str, line.misses)) if report.tables else "",
    }

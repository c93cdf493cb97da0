"""glmquant: bf16 GLM-5.2 checkpoints to MXFP4 with AMD Quark's numbers, loadable by every engine version you name.

The verbs of the command line as functions; importing this package imports neither torch nor quark.
"""

from glmquant.errors import (
    BackendError,
    CheckpointError,
    ExclusionError,
    GlmquantError,
    OutputError,
    RecipeError,
)
from glmquant.exclusions import ExclusionList
from glmquant.findings import Finding, Report
from glmquant.graft import Graft
from glmquant.mend import Difference, Fix
from glmquant.pipeline import (
    PlanResult,
    QuantizeResult,
    diff_exclusions,
    fix_exclusions,
    graft_mtp,
    plan,
    quantize,
    resolve_exclusions,
    validate,
    verify,
)
from glmquant.planner import Plan
from glmquant.spelling import Entry
from glmquant.verifier import Verification

__all__ = [
    "BackendError",
    "CheckpointError",
    "Difference",
    "Entry",
    "ExclusionError",
    "ExclusionList",
    "Finding",
    "Fix",
    "GlmquantError",
    "Graft",
    "OutputError",
    "Plan",
    "PlanResult",
    "QuantizeResult",
    "RecipeError",
    "Report",
    "Verification",
    "diff_exclusions",
    "fix_exclusions",
    "graft_mtp",
    "plan",
    "quantize",
    "resolve_exclusions",
    "validate",
    "verify",
]

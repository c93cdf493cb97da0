"""glmquant: bf16 GLM-5.2 checkpoints to MXFP4 with AMD Quark's numbers, loadable by every engine version you name.

The four verbs of the command line as functions; importing this package imports neither torch nor quark.
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
from glmquant.mend import Difference, Fix
from glmquant.pipeline import (
    PlanResult,
    QuantizeResult,
    diff_exclusions,
    fix_exclusions,
    plan,
    quantize,
    resolve_exclusions,
    validate,
)
from glmquant.planner import Plan
from glmquant.spelling import Entry

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
    "OutputError",
    "Plan",
    "PlanResult",
    "QuantizeResult",
    "RecipeError",
    "Report",
    "diff_exclusions",
    "fix_exclusions",
    "plan",
    "quantize",
    "resolve_exclusions",
    "validate",
]

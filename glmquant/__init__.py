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
from glmquant.pipeline import PlanResult, QuantizeResult, plan, quantize, resolve_exclusions, validate
from glmquant.planner import Plan
from glmquant.spelling import Entry
from glmquant.validator import Finding, Report

__all__ = [
    "BackendError",
    "CheckpointError",
    "Entry",
    "ExclusionError",
    "ExclusionList",
    "Finding",
    "GlmquantError",
    "OutputError",
    "Plan",
    "PlanResult",
    "QuantizeResult",
    "RecipeError",
    "Report",
    "plan",
    "quantize",
    "resolve_exclusions",
    "validate",
]

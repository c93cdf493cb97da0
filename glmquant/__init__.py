"""glmquant: bf16 GLM-5.2 checkpoints to MXFP4 with AMD Quark's numbers, loadable by every engine version you name.

The verbs of the command line as functions. Names are imported when they are first used, so that importing this package
costs nothing; none of it imports torch or quark before a weight is quantized with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from glmquant.operate import compare_evals, doctor, import_evals, kernel_keys, launch, report, run_evals
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

_HOMES = {
    "errors": ["BackendError", "CheckpointError", "ExclusionError", "GlmquantError", "OutputError", "RecipeError"],
    "exclusions": ["ExclusionList"],
    "findings": ["Finding", "Report"],
    "graft": ["Graft"],
    "mend": ["Difference", "Fix"],
    "operate": ["compare_evals", "doctor", "import_evals", "kernel_keys", "launch", "report", "run_evals"],
    "pipeline": [
        "PlanResult",
        "QuantizeResult",
        "diff_exclusions",
        "fix_exclusions",
        "graft_mtp",
        "plan",
        "quantize",
        "resolve_exclusions",
        "validate",
        "verify",
    ],
    "planner": ["Plan"],
    "spelling": ["Entry"],
    "verifier": ["Verification"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
    "compare_evals",
    "diff_exclusions",
    "doctor",
    "fix_exclusions",
    "graft_mtp",
    "import_evals",
    "kernel_keys",
    "launch",
    "plan",
    "quantize",
    "report",
    "resolve_exclusions",
    "run_evals",
    "validate",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"glmquant.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What `validate` says: findings with stable codes, and the report they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from glmquant.engines.model import Verdict
from glmquant.engines.targets import Target

SEVERITIES = ("info", "warning", "error")
JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Effect:
    """What some targets do about a finding: their verdict, and their own message."""

    targets: str
    verdict: str
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, or worth knowing.

    Attributes:
        code: stable, for scripts.
        severity: `error` (does not load, or loads wrong), `warning` (slow, or needs a launch flag) or `info`.
        message: what is wrong.
        names: the first few tensors, modules, entries or files concerned; `count` is how many there are.
        targets: the engine releases concerned, '' where it is wrong for any.
        fix: what to do.
        effects: what each target does about it.
    """

    code: str
    severity: str
    message: str
    names: tuple[str, ...] = ()
    count: int = 0
    targets: str = ""
    fix: str = ""
    effects: tuple[Effect, ...] = ()


Coverage = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class Report:
    """What `validate` found.

    Attributes:
        coverage: target -> `target <group>` or `draft <group>` -> verdict (`ok`, `slow`, `silent misload`, `crash`)
            -> number of modules; empty if the exclude list cannot be read.
        tensor_parallel: target -> sizes at which no MXFP4 block is cut apart, of 1 to 16.
        verdicts: target -> the worst that happens to any module, with the launch flags in `flags`.
        flags: target -> launch flags without which it does not load; only targets that need one.
    """

    folder: Path
    targets: tuple[Target, ...]
    findings: tuple[Finding, ...]
    tensors: int
    nbytes: int
    quantized_modules: int
    coverage: Coverage = field(default_factory=dict)
    tensor_parallel: dict[str, list[int]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)

    def failed(self, fail_on: str = "error") -> bool:
        """Whether there is a finding at or above a severity."""
        limit = SEVERITIES.index(fail_on)
        return any(SEVERITIES.index(finding.severity) >= limit for finding in self.findings)

    @property
    def ok(self) -> bool:
        return not self.failed()

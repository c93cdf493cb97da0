"""Kernel keys of a launch against the installed tables: what is tuned, what is not, and what fusion does to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glmquant.errors import GlmquantError
from glmquant.serving.aiter_tables import Row, Tables
from glmquant.serving.kernel_keys import KernelShape, buckets, kernel_shapes, most_tokens, rules
from glmquant.serving.launch import Launch
from glmquant.serving.settings import Hardware
from glmquant.serving.subject import Subject


@dataclass(frozen=True)
class ShapeLine:
    """One shape and its buckets. `served`: asked for as the launch is; else what it would be with fusion on or off."""

    shape: KernelShape
    fused: bool
    served: bool
    hits: dict[int, Row]
    misses: tuple[int, ...]

    @property
    def tuned(self) -> str:
        return f"{len(self.hits)} of {len(self.hits) + len(self.misses)} token counts tuned"


@dataclass(frozen=True)
class KeyReport:
    """What a launch asks AITER for. `tables` is None where AITER is not installed; then nothing hits.

    Attributes:
        veto: the exclude entry that switches shared-expert fusion off although the formats allow it, '' if none.
    """

    launch: Launch
    tables: Tables | None
    lines: tuple[ShapeLine, ...]
    veto: str

    def wanted(self, everything: bool = False) -> Iterator[tuple[KernelShape, int]]:
        """Shapes and token counts to tune: those without a row, or all."""
        for line in self.lines:
            if line.served:
                for token in sorted([*line.misses, *(line.hits if everything else ())]):
                    yield line.shape, token

    @property
    def complete(self) -> bool:
        return self.tables is not None and not any(line.misses for line in self.lines if line.served)


def look_up(
    subject: Subject, launch: Launch, hardware: Hardware, tables: Tables | None, max_tokens: int | None = None
) -> KeyReport:
    """Look every key up that a launch will ask for, and those that it would with the shared experts the other way.

    Raises: as kernel_shapes; GlmquantError also for max_tokens below 1.
    """
    most = most_tokens(launch) if max_tokens is None else max_tokens
    if most < 1:
        raise GlmquantError(f"{most} tokens at once are none", "--max-tokens wants a positive number.")
    counts = buckets(tables.rule if tables else rules()["unknown"], most)
    served = kernel_shapes(subject, launch, hardware)
    lines = [_line(shape, served=True, tables=tables, counts=counts, base=subject) for shape in served]
    if subject.fusable:
        other = kernel_shapes(subject, launch, hardware, fused=not launch.fused)
        lines += [
            _line(shape, served=False, tables=tables, counts=counts, base=subject)
            for shape in other
            if shape not in served
        ]
    vetoes = [
        f.parts[0] for f in subject.evaluation.faults if f.role == "target" and f.verdict.value == "slow" and f.parts
    ]
    return KeyReport(launch, tables, tuple(lines), vetoes[0] if vetoes and not launch.fused else "")


def _line(
    shape: KernelShape, *, served: bool, tables: Tables | None, counts: tuple[int, ...], base: Subject
) -> ShapeLine:
    found = {token: tables.lookup(shape, token) if tables else None for token in counts}
    fused = shape.topk != base.config["num_experts_per_tok"]
    hits = {token: row for token, row in found.items() if row}
    return ShapeLine(shape, fused, served, hits, tuple(token for token, row in found.items() if not row))

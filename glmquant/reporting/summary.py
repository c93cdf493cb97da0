"""The rows of a report, summed up as they stream by: what the page needs, whatever the number of tensors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from glmquant.mxfp4.error import WORST_BLOCK
from glmquant.reporting.rows import MXFP4, Codes, Row

WORST = 20
_NOTES = 10


@dataclass(frozen=True, slots=True)
class Group:
    """A line of the size table. `plain_bytes`: with two bytes an element where it is MXFP4."""

    group: str
    format: str
    tensors: int
    parameters: int
    nbytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """SQNR in dB of the weights of one layer and projection."""

    count: int
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Summary:
    """What the page shows of all rows.

    Attributes:
        groups: largest first; everything of the MTP layer is in group `mtp`, as in `glmquant plan`.
        packed, read, compared: weights in MXFP4; of these looked at; of these compared with the source.
        sqnr: `routed gate_proj` -> layer -> spread; MTP layers are those in `mtp`.
        worst: rows that stand out, worst first: by SQNR, or without a source by zero blocks and saturation.
        beyond: compared weights with a block that is further off than MXFP4 can be.
        notes: the first few weights that could not be read or compared; `noted` is how many there are.
    """

    groups: tuple[Group, ...]
    packed: int
    read: int
    compared: int
    codes: Codes
    sqnr: Mapping[str, Mapping[int, Spread]]
    mtp: frozenset[int]
    overall: Spread | None
    pooled: float
    worst: tuple[Row, ...]
    beyond: int
    notes: tuple[Row, ...]
    noted: int

    @property
    def tensors(self) -> int:
        return sum(group.tensors for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def plain_bytes(self) -> int:
        return sum(group.plain_bytes for group in self.groups)

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)


def summarize(rows: Iterable[Row]) -> Summary:
    """One pass; keeps a number a compared weight, and the few rows that are shown by name."""
    sizes: dict[tuple[str, str], list[int]] = {}
    series: dict[str, dict[int, list[float]]] = {}
    every: list[float] = []
    mtp: set[int] = set()
    codes = Codes()
    packed = read = compared = beyond = noted = 0
    signal = noise = 0.0
    worst: list[tuple[tuple[float, ...], str, Row]] = []
    notes: list[Row] = []
    for row in rows:
        module = row.module
        add = (1, row.parameters, row.nbytes, 2 * row.parameters if row.format == MXFP4 else row.nbytes)
        size = sizes.setdefault(("mtp" if module.is_mtp else module.group, row.format), [0] * 4)
        for i, more in enumerate(add):
            size[i] += more
        packed += row.format == MXFP4
        if module.is_mtp and module.layer is not None:
            mtp.add(module.layer)
        if row.note:
            noted += 1
            notes += [row] if len(notes) < _NOTES else []
        if row.codes is None:
            continue
        read += 1
        codes += row.codes
        rank = (-math.inf, row.codes.zero_share, row.codes.saturated_share)
        if row.error:
            compared += 1
            beyond += row.error.worst_block > WORST_BLOCK
            signal, noise = signal + row.error.signal, noise + row.error.noise
            rank = (-row.error.sqnr, *rank[1:])
            if math.isfinite(row.error.sqnr):
                every.append(row.error.sqnr)
                if module.layer is not None and row.projection:
                    layers = series.setdefault(f"{module.group} {row.projection}", {})
                    layers.setdefault(module.layer, []).append(row.error.sqnr)
        push = heapq.heappush if len(worst) < WORST else heapq.heappushpop
        push(worst, (rank, row.name, row))
    found = [row for _, _, row in sorted(worst, key=lambda item: item[:2], reverse=True)]
    if compared:  # a few that could not be compared must not look like the best or the worst
        found = [row for row in found if row.error]
    groups = [Group(group, kind, *size) for (group, kind), size in sizes.items()]
    return Summary(
        groups=tuple(sorted(groups, key=lambda g: (-g.nbytes, g.group, g.format))),
        packed=packed,
        read=read,
        compared=compared,
        codes=codes,
        sqnr={name: {n: _spread(v) for n, v in sorted(series[name].items())} for name in sorted(series, key=_place)},
        mtp=frozenset(mtp),
        overall=_spread(every) if every else None,
        pooled=10 * math.log10(signal / noise) if signal and noise else math.inf,
        worst=tuple(found),
        beyond=beyond,
        notes=tuple(notes),
        noted=noted,
    )


def _place(series: str) -> tuple[str, int, str]:
    """Gate, up and down as in the formula of the MLP; all else by name."""
    group, _, projection = series.partition(" ")
    known = ("gate_proj", "up_proj", "down_proj")
    return group, known.index(projection) if projection in known else len(known), projection


def _spread(values: list[float]) -> Spread:
    return Spread(len(values), min(values), median(values), max(values))

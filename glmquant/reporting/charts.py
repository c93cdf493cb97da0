"""Small SVG charts, written by hand. Each is 380 units wide, so that its text has its size on a phone too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from glmquant.reporting.summary import Spread

_WIDTH, _HEIGHT = 380, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 34


def spreads(layers: Mapping[int, Spread], low: float, high: float, mtp: frozenset[int], label: str) -> str:
    """SQNR by layer: a line from the worst to the best weight, a dot at the median. `low` to `high` is the axis, dB."""
    first, last = min(layers), max(layers)
    x = _scale(first, last, _LEFT + 8, _WIDTH - _RIGHT - 8)
    y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    marks = []
    for layer, spread in layers.items():
        at, kind = x(layer), " mtp" if layer in mtp else ""
        what = f"layer {layer}: {spread.low:.2f} to {spread.high:.2f} dB, median {spread.middle:.2f}"
        marks.append(
            f'<g class="mark{kind}"><title>{what} ({spread.count} weights)</title>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(spread.low):.1f}" y2="{y(spread.high):.1f}"/>'
            f'<circle cx="{at:.1f}" cy="{y(spread.middle):.1f}" r="2.2"/></g>'
        )
    ticks = [(y(value), f"{value:g}") for value in steps(low, high, 5)]
    below = [(x(value), f"{value:g}") for value in steps(first, last, 6) if value == int(value)]
    return _chart(label, ticks, below, "dB", "layer", marks)


def bars(values: Sequence[tuple[str, float]], label: str, below: str, logarithmic: bool = False) -> str:
    """A bar for each (name, share, 0 to 1); `logarithmic` shows the rare ones too."""
    known = [value for _, value in values if value > 0]
    high = max(known, default=1.0)
    low = 10.0 ** math.floor(math.log10(min(known, default=0.1))) if logarithmic else 0.0
    if logarithmic:
        high = 10.0 ** math.ceil(math.log10(high))
        low = min(low, high / 10)
        scale = _scale(math.log10(low), math.log10(high), _HEIGHT - _BOTTOM, _TOP)
        decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
        step = max(1, math.ceil(len(decades) / 5))
        ticks = [(scale(n), _percent(10.0**n)) for n in decades if (n - decades[0]) % step == 0]
    else:
        scale = _scale(0, high, _HEIGHT - _BOTTOM, _TOP)
        ticks = [(scale(value), _percent(value)) for value in steps(0, high, 4)]
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    each = max(1, math.ceil((8 + 6 * max(len(name) for name, _ in values)) / pitch)) if values else 1  # room for a name
    marks, names = [], []
    for i, (name, value) in enumerate(values):
        left = _LEFT + i * pitch
        if value > 0:
            top = scale(math.log10(value) if logarithmic else value)
            marks.append(
                f'<rect class="bar" x="{left + pitch * 0.1:.1f}" y="{top:.1f}" width="{pitch * 0.8:.1f}" '
                f'height="{max(1.0, _HEIGHT - _BOTTOM - top):.1f}">'
                f"<title>{escape(name)}: {_percent(value)}</title></rect>"
            )
        if i % each == 0:
            names.append((left + pitch / 2, name))
    return _chart(label, ticks, names, "", below, marks)


def steps(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, some `about` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    count = int((high - low) / step) + 2
    found = [round((math.ceil(low / step) + i) * step, 10) for i in range(count)]
    return [value for value in found if value <= high]


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, high, start, end)


class _Scale:
    """A straight map of low..high to start..end; their middle where there is no range."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._factor = (end - start) / (high - low) if high > low else 0.0
        self._middle = (start + end) / 2

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor if self._factor else self._middle


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _chart(
    label: str,
    left: Iterable[tuple[float, str]],
    below: Iterable[tuple[float, str]],
    unit: str,
    axis: str,
    marks: Sequence[str],
) -> str:
    floor, middle = _HEIGHT - _BOTTOM, (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    for y, text in left:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
    for x, text in below:
        parts.append(f'<text x="{x:.1f}" y="{floor + 14}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    parts += marks
    if unit:
        parts.append(f'<text class="unit" x="2" y="{_TOP + 2}">{escape(unit)}</text>')
    parts.append(f'<text class="unit" x="{middle:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(axis)}</text>')
    return "".join(parts) + "</svg>"

"""The page: one HTML text, well-formed as XML too, without a script, an image or a request.

Names come from a stranger's files: every text goes through `text`, and the page forbids itself scripts and requests
(Content-Security-Policy), so that a missed one would be inert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from glmquant.engines.targets import Target, span
from glmquant.findings import Finding, Report
from glmquant.reporting import charts
from glmquant.reporting.rows import Row
from glmquant.reporting.style import CSS
from glmquant.reporting.summary import Spread, Summary
from glmquant.text import printable

# What a hostile checkpoint can make long; GLM-5.2 has 79 layers and, when all is well, no finding.
_MOST_LAYERS, _MOST_FINDINGS, _MOST_KEYS, _MOST_TEXT = 200, 50, 200, 300


@dataclass(frozen=True)
class Facts:
    """What a page is made of.

    Attributes:
        sample: the share asked for, of each layer's weights of one projection.
        keys: rows of MoE kernel keys, each with the same columns; no rows, no section.
        keys_note: a sentence above them.
    """

    checkpoint: Path
    source: Path | None
    sample: float
    summary: Summary
    validation: Report
    jsonl: str
    version: str
    keys: Sequence[Mapping[str, Any]] = ()
    keys_note: str = ""


def make_page(facts: Facts) -> str:
    """The whole page; its size depends on layers and releases, not on the number of tensors."""
    name = text(facts.checkpoint.resolve().name)
    parts = [
        f'<header><p class="over">glmquant report</p><h1>{name}</h1><p class="sub">{_subtitle(facts)}</p></header>',
        _tiles(facts),
        _findings(facts.validation.findings),
        _sizes(facts.summary),
        _errors(facts),
        _stand_out(facts.summary),
        _blocks(facts.summary),
        _coverage(facts.validation),
        _keys(facts.keys, facts.keys_note),
        _method(facts),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n<link rel="icon" href="data:,"/>\n'
        f"<title>{name}: glmquant report</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Any text as HTML text or attribute, on one line and of a sane length."""
    line = " ".join(printable(str(value)).replace("\ufffe", "?").replace("\uffff", "?").split())
    return escape(line if len(line) <= _MOST_TEXT else line[:_MOST_TEXT] + "...")


def size(nbytes: float) -> str:
    """Bytes for people, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 1000 else f"{nbytes:,.0f} TB"


def _subtitle(facts: Facts) -> str:
    words = f"{facts.summary.tensors:,} tensors in {facts.validation.nbytes:,} bytes"
    return words + (f"; source {text(facts.source.resolve().name)}" if facts.source else "")


# Sections


def _section(title: str, *parts: str, name: str) -> str:
    inner = "\n".join(filter(None, parts))
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}</h2>\n{inner}</section>'


def _note(words: str) -> str:
    return f'<p class="note">{words}</p>' if words else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str, texts: int = 1) -> str:
    """A table of ready HTML; the first `texts` columns are left-aligned, the others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kind = [' class="l"' if i < texts else "" for i in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        return "<tr>" + "".join(f"<{tag}{k}{scope}>{c}</{tag}>" for k, c in zip(kind, cells, strict=True)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    # tabindex: what scrolls must be reachable by keyboard
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><thead>{line(head, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _tiles(facts: Facts) -> str:
    s, report = facts.summary, facts.validation
    saved = 1 - s.nbytes / s.plain_bytes if s.plain_bytes else 0.0
    tiles = [
        ("Size", size(s.nbytes), f"{saved:.1%} less than with MXFP4 weights in bf16, {size(s.plain_bytes)}"),
        (
            "In MXFP4",
            f"{s.packed:,} weights",
            f"{8 * s.nbytes / s.parameters:.2f} bits an element over all {s.parameters:,}" if s.parameters else "",
        ),
    ]
    if s.overall:
        detail = f"worst {s.overall.low:.2f} dB; {s.compared:,} weights compared"
        tiles.append(("Median SQNR", f"{s.overall.middle:.2f} dB", detail))
    elif s.compared:
        tiles.append(("Median SQNR", "exact", f"{s.compared:,} weights compared, none with any noise"))
    else:
        tiles.append(("SQNR", "not measured", "give the bf16 or FP8 source with <code>--source</code>"))
    bad = sum(finding.severity == "error" for finding in report.findings)
    engines = len({target.engine for target in report.targets})
    value = f"{bad:,} error{'s' if bad != 1 else ''}" if bad else "no errors"
    detail = f"{len(report.targets)} releases of {engines} engine{'s' if engines != 1 else ''} asked"
    found = [*((title, value, detail, "") for title, value, detail in tiles)]
    found.append(("Loads", value, detail, " bad" if bad else " good"))
    cells = "".join(
        f'<div class="tile{kind}"><dt>{title}</dt><dd><b>{value}</b><span>{detail}</span></dd></div>'
        for title, value, detail, kind in found
    )
    return f'<dl class="tiles">{cells}</dl>'


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    items = []
    for finding in findings[:_MOST_FINDINGS]:
        names = ", ".join(map(text, finding.names))
        more = finding.count - len(finding.names)
        names += f" and {more:,} more" if names and more > 0 else ""
        effects = "".join(
            f"<li>{text(effect.targets)}: {text(effect.verdict)}: {text(effect.message)}</li>"
            for effect in finding.effects[:20]
        )
        items.append(
            f'<li class="finding {text(finding.severity)}"><p><b>{text(finding.severity)}</b> '
            f"<code>{text(finding.code)}</code> {text(finding.message)}</p>"
            + (f'<p class="names">{names}</p>' if names else "")
            + (f"<ul>{effects}</ul>" if effects else "")
            + (f"<p>Fix: {text(finding.fix)}</p>" if finding.fix else "")
            + "</li>"
        )
    left = len(findings) - len(items)
    more_line = _note(f"{left:,} more: <code>glmquant validate</code> shows them all." if left > 0 else "")
    return _section("Findings", f'<ul class="findings">{"".join(items)}</ul>', more_line, name="findings")


def _sizes(summary: Summary) -> str:
    rows = []
    for group in summary.groups:
        share = group.nbytes / summary.nbytes if summary.nbytes else 0.0
        rows.append(
            (
                f"{text(group.group)}",
                f'<span class="tag{" packed" if group.format == "MXFP4" else ""}">{text(group.format)}</span>',
                f'<span class="meter"><i style="width:{100 * share:.2f}%"></i></span>{share:.1%}',
                f"{group.nbytes:,}",
                f"{group.plain_bytes:,}",
                f"{group.tensors:,}",
                f"{group.parameters:,}",
            )
        )
    total = (
        "total",
        "",
        "",
        f"{summary.nbytes:,}",
        f"{summary.plain_bytes:,}",
        f"{summary.tensors:,}",
        f"{summary.parameters:,}",
    )
    head = ("group", "stored as", "share", "bytes", "MXFP4 as bf16", "tensors", "elements")
    table = _table(head, [*rows, tuple(f"<b>{cell}</b>" if cell else "" for cell in total)], "Size by group", 3)
    return _section(
        "Size by group",
        table,
        _note("A packed weight and its scales count as one tensor. The MTP layer is a group of its own."),
        name="sizes",
    )


def _errors(facts: Facts) -> str:
    s = facts.summary
    title = "Error by layer and projection"
    if not s.compared:
        words = "Not measured: it needs the weights this was made from. Run <code>glmquant report</code> with "
        return _section(title, _note(words + "<code>--source SRC</code>."), name="sqnr")
    if not s.overall:
        return _section(title, _note("Every weight compared is exact."), name="sqnr")
    if not s.sqnr:
        words = f"Layers and projections of this model type are not known. All weights together have {s.pooled:.2f} dB."
        return _section(title, _note(words), name="sqnr")
    shown = {name: dict(list(layers.items())[:_MOST_LAYERS]) for name, layers in s.sqnr.items()}
    spreads = [spread for layers in shown.values() for spread in layers.values()]
    low, high = min(x.low for x in spreads), max(x.high for x in spreads)
    margin = max(0.05, (high - low) * 0.05)
    figures = "".join(
        f"<figure><figcaption>{text(name)}</figcaption>"
        + charts.spreads(layers, low - margin, high + margin, s.mtp, f"SQNR by layer of {text(name)}")
        + "</figure>"
        for name, layers in shown.items()
    )
    numbers = sorted({layer for layers in shown.values() for layer in layers})
    head = ["layer", *map(text, shown)]
    rows = [
        [f"{n} MTP" if n in s.mtp else str(n), *(_median(layers.get(n)) for layers in shown.values())] for n in numbers
    ]
    most = max(map(len, s.sqnr.values()), default=0)
    return _section(
        title,
        _note(
            "Signal to quantization noise in dB against the source, decoded by a decoder that shares nothing with the "
            "kernels; higher is better, and 6 dB is a factor of two in the error. A line goes from the worst to the "
            "best weight of a layer, the dot is the median"
            + ("; orange is the MTP layer. " if any(n in s.mtp for n in numbers) else ". ")
            + f"All weights together have {s.pooled:.2f} dB."
        ),
        f'<div class="figures">{figures}</div>',
        f"<details><summary>Medians as a table</summary>{_table(head, rows, 'Median SQNR by layer, dB')}</details>",
        _note(f"The first {_MOST_LAYERS} layers; the JSONL has all." if most > _MOST_LAYERS else ""),
        name="sqnr",
    )


def _median(spread: Spread | None) -> str:
    return f"{spread.middle:.2f}" if spread else ""


def _stand_out(summary: Summary) -> str:
    if not summary.read:
        return ""
    rows = [_worst_row(row) for row in summary.worst]
    head = ("weight", "SQNR dB", "worst block") if summary.compared else ("weight",)
    beyond = (
        f'<b class="bad">{summary.beyond:,} have a block that is further off than MXFP4 rounding can be: they were not '
        "made from this source, or by a wrong kernel.</b>"
        if summary.beyond
        else "No block is further off than MXFP4 rounding can be (20% of its largest element)."
    )
    words = f"The {len(rows)} with the lowest SQNR. {beyond}"
    if not summary.compared:
        words = "Without a source: the most blocks of zeros first, then the most elements at the largest code."
    return _section(
        "Worst weights" if summary.compared else "Weights that stand out",
        _note(words),
        _table((*head, "zero blocks", "at +-6", "shard"), rows, "Worst weights"),
        name="worst",
    )


def _worst_row(row: Row) -> tuple[str, ...]:
    assert row.codes
    error: tuple[str, ...] = ()
    if row.error:
        exact = row.error.sqnr == float("inf")
        error = ("exact" if exact else f"{row.error.sqnr:.2f}", f"{row.error.worst_block:.1%}")
    return (
        f"<code>{text(row.name)}</code>",
        *error,
        f"{row.codes.zero_share:.2%}",
        f"{row.codes.saturated_share:.2%}",
        f"<code>{text(row.shard)}</code>",
    )


def _blocks(summary: Summary) -> str:
    codes = summary.codes
    used = codes.scale_range
    if not used:
        words = "No MXFP4 weight was read." if not summary.read else "Every block is of zeros."
        return _section("Scales and codes", _note(words), name="scales")
    filled = codes.blocks - codes.zero_blocks
    scales = [(f"{byte - 127}", codes.scales[byte] / filled) for byte in range(used[0], min(used[1], 254) + 1)]
    elements = sum(codes.codes)
    values = ("0", "0.5", "1", "1.5", "2", "3", "4", "6")
    magnitudes = [(value, (codes.codes[i] + codes.codes[i + 8]) / elements) for i, value in enumerate(values)]
    nan = codes.scales[255]
    return _section(
        "Scales and codes",
        _note(
            f"{codes.blocks:,} blocks of 32 elements: {codes.zero_share:.3%} are all zeros, "
            f"{codes.saturated_share:.2%} of the elements are at the largest code. "
            + (f'<b class="bad">{nan:,} blocks have a NaN scale.</b>' if nan else "No scale is NaN.")
        ),
        '<div class="figures">'
        "<figure><figcaption>E8M0 scales, share of blocks (logarithmic)</figcaption>"
        + charts.bars(scales, "Histogram of E8M0 scales", "scale, as a power of 2", logarithmic=True)
        + "</figure><figure><figcaption>E2M1 magnitudes, share of elements</figcaption>"
        + charts.bars(magnitudes, "Histogram of E2M1 magnitudes", "magnitude, in units of the scale")
        + "</figure></div>",
        name="scales",
    )


def _coverage(report: Report) -> str:
    title = "What the engines make of it"
    groups: dict[tuple[Any, ...], list[Target]] = {}
    for target in report.targets:
        name = str(target)
        rows = report.coverage.get(name)
        if rows:
            counts = tuple((group, tuple(row.items())) for group, row in sorted(rows.items()))
            legal, flags = tuple(report.tensor_parallel.get(name, ())), tuple(report.flags.get(name, ()))
            groups.setdefault((target.engine, counts, legal, flags), []).append(target)
    if not groups:
        words = "The exclude list cannot be read, so no engine could be asked; see the findings."
        return _section(title, _note(words), name="engines")
    verdicts = list(dict.fromkeys(v for (_, counts, _, _) in groups for _, row in counts for v, _ in row))
    lines, details = [], []
    for (_, counts, legal, flags), targets in groups.items():
        sums = {v: sum(dict(row).get(v, 0) for _, row in counts) for v in verdicts}
        lines.append(
            [
                text(span(targets)),
                *(_count(v, n) for v, n in sums.items()),
                ", ".join(map(str, legal)) or "-",
                " ".join(f"<code>{text(flag)}</code>" for flag in flags) or "-",
            ]
        )
        rows_of = [[text(group), *(_count(v, dict(row).get(v, 0)) for v in verdicts)] for group, row in counts]
        label = text(span(targets))
        details.append(
            f"<details><summary>Modules of {label}</summary>"
            + _table(["modules", *map(text, verdicts)], rows_of, f"Modules of {label}")
            + "</details>"
        )
    return _section(
        title,
        _note(
            "Modules that ask, and what becomes of each when the engine loads this checkpoint with its exclude list; "
            "target is the main model, draft the MTP layer. From models of the engines' code, not from a run of them."
        ),
        _table(["releases", *map(text, verdicts), "tensor-parallel sizes", "needs"], lines, "Coverage by engine"),
        *details,
        name="engines",
    )


def _count(verdict: str, count: int) -> str:
    kind = {"ok": "good", "slow": "warn"}.get(verdict, "bad")
    return f'<span class="{kind}">{count:,}</span>' if count else '<span class="none">0</span>'


def _keys(keys: Sequence[Mapping[str, Any]], note: str) -> str:
    if not keys:
        return ""
    columns = dict.fromkeys(column for row in keys for column in row)
    head = [column for column in columns if any(row.get(column, "") != "" for row in keys)]
    rows = [[text(row.get(column, "")) for column in head] for row in keys[:_MOST_KEYS]]
    left = len(keys) - len(rows)
    return _section(
        "MoE kernel keys",
        _note(text(note)),
        _table(list(map(text, head)), rows, "MoE kernel keys", len(head)),
        _note(f"{left:,} more." if left > 0 else ""),
        name="kernels",
    )


def _method(facts: Facts) -> str:
    s = facts.summary
    if s.read == s.packed:
        what = f"All {s.packed:,} MXFP4 weights were read"
    else:
        least = ", at least one" if facts.sample else ""
        what = (
            f"{s.read:,} of {s.packed:,} MXFP4 weights were read: {facts.sample:.2%} of each layer and projection"
            f"{least}; which ones depends on their names only (<code>--sample 1</code> reads all)"
        )
    compared = f", {s.compared:,} of them compared with the source" if facts.source else ""
    notes = "".join(f"<li><code>{text(row.name)}</code>: {text(row.note)}</li>" for row in s.notes)
    more = f"<li>and {s.noted - len(s.notes):,} more</li>" if s.noted > len(s.notes) else ""
    return _section(
        "How this was made",
        _note(
            f"{what}{compared}. Sizes and coverage are from the headers and config.json of all shards. "
            f"One line for each tensor is in <code>{text(facts.jsonl)}</code>. glmquant {text(facts.version)}."
        ),
        f'<p class="note">Not read or not compared:</p><ul class="names">{notes}{more}</ul>' if notes else "",
        name="method",
    )

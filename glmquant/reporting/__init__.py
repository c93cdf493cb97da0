"""`glmquant report`: a checkpoint as one HTML page to look at, and a JSONL with a line for each tensor to compute with.

The page is written by hand, with inline SVG and no script, rather than with plotly (which Quark brings along):
plotly.js 7.1 inlined is 4.8 MB, 1.2 MB in its basic bundle (which is not in the Python package): scripts of others in a
page about a stranger's files, which show nothing without JavaScript or to a screen reader. These charts take kilobytes
under a Content-Security-Policy that allows nothing to run, and the numbers are in tables and in the JSONL, which any
plotting tool reads.

    rows.py     headers -> rows; a sample of them read, counted and compared with the source
    summary.py  rows as they stream by -> what the page shows
    charts.py   numbers -> SVG
    keys.py     MoE kernel keys of each launch profile, from glmquant/serving
    page.py     Summary + the validator's Report -> HTML
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from glmquant.checkpoint.source import Checkpoint, open_source
from glmquant.checkpoint.writer import TEMPORARY, output_error, sync_folder
from glmquant.errors import OutputError
from glmquant.findings import Report
from glmquant.reporting.page import Facts, make_page
from glmquant.reporting.rows import Advance, Row, choose, default_sample, inventory, measured
from glmquant.reporting.summary import Summary, summarize


@dataclass(frozen=True)
class Written:
    """What `report` wrote: the page, the JSONL, and the figures in them."""

    html: Path
    jsonl: Path
    sample: float
    summary: Summary
    validation: Report

    @property
    def ok(self) -> bool:
        """The validator found no error, and no weight is further from its source than MXFP4 can be."""
        return self.validation.ok and not self.summary.beyond


def write_report(
    checkpoint: Checkpoint,
    source: Path | None,
    html: Path,
    jsonl: Path,
    sample: float | None,
    validation: Report,
    keys: tuple[Sequence[Mapping[str, Any]], str],
    threads: int,
    bar: Callable[[int], AbstractContextManager[Advance]],
) -> Written:
    """Read, sum up, write both files; neither is there before both are complete.

    Args:
        checkpoint: quantized, of any producer, with a tensor's weight and `_scale` named as Quark does.
        source: bf16, FP8 or fused checkpoint it was made from; without it no error is measured.
        sample: share (0 to 1) of each layer's weights of one projection to read; None: what takes minutes at most.
        validation: of it; its findings and coverage are shown.
        keys: MoE kernel keys to show, and a sentence about them; see keys.kernel_keys.
        bar: given the bytes that will be read, a context that is told the bytes of each chunk read.

    Raises:
        CheckpointError: a folder cannot be read at all, or the source is none.
        OutputError: a file to write exists, lies in one of the folders, or cannot be written.
    """
    from importlib.metadata import version  # costs start-up time

    folder = checkpoint.folder
    check_outputs((html, jsonl), [folder, *([source] if source else [])])
    original = open_source(source) if source else None
    shards = inventory(checkpoint)
    every = [row for rows in shards.values() for row in rows]
    share = default_sample(every, source is not None) if sample is None else sample
    chosen = choose(every, share)
    total = sum(row.nbytes + (2 * row.parameters if source else 0) for row in every if row.name in chosen)
    with _publishing((jsonl, html)) as (lines, page), bar(total) as advance:
        summary = summarize(_written(measured(checkpoint, original, shards, chosen, threads, advance), lines))
        page.write(make_page(Facts(folder, source, share, summary, validation, jsonl.name, version("glmquant"), *keys)))
    return Written(html, jsonl, share, summary, validation)


def default_page(folder: Path) -> Path:
    """`CKPT-report.html` beside the checkpoint; in the current folder for a hub-cache snapshot."""
    full = Path(os.path.abspath(folder))
    beside, name = full.parent, full.name
    if beside.name == "snapshots" and beside.parent.name.startswith("models--"):
        beside, name = Path.cwd(), beside.parent.name.removeprefix("models--").replace("--", "-")
    return beside / f"{name}-report.html"


def _written(rows: Iterable[Row], lines: TextIO) -> Iterator[Row]:
    for row in rows:
        lines.write(json.dumps(row.as_json(), allow_nan=False) + "\n")  # ASCII: no name can break a line
        yield row


def check_outputs(files: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse files that exist, lie in one of the folders that are read, or are one.

    Raises:
        OutputError: says which.
    """
    if files[0].resolve() == files[1].resolve():
        raise OutputError(f"{files[0]}: the page and the JSONL cannot be one file", "Name two with --html and --jsonl.")
    for file in files:
        if file.exists() or file.is_symlink():
            raise OutputError(f"{file} exists", "Remove it, or name another file with --html or --jsonl.")
        for folder in inputs:
            if folder.resolve() in file.resolve().parents:
                text = f"{file} lies in {folder}, which a report leaves alone"
                raise OutputError(text, "Name a file outside it with --html or --jsonl.")


@contextmanager
def _publishing(paths: Sequence[Path]) -> Iterator[Sequence[TextIO]]:
    """Temporary files that get their names, durable and in this order, when the block ends well; never over a file."""
    temporary = [path.parent / f".{path.name}{TEMPORARY}" for path in paths]
    at = paths[0]
    try:
        with ExitStack() as stack:
            files = []
            for at, path in zip(paths, temporary, strict=True):  # noqa: B007 (said in the error)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
                files.append(stack.enter_context(open(fd, "w", encoding="utf-8")))
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for at, path in zip(paths, temporary, strict=True):
            if at.exists():
                raise OutputError(f"{at} appeared during the run; it was left alone", "Name another file.")
            os.rename(path, at)
            sync_folder(at.parent)
    except OSError as err:
        raise output_error(str(at), err) from err
    finally:
        for path in temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)

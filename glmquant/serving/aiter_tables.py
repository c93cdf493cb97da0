"""The tuned fused-MoE tables of the installed AITER: which keys they have, and the input of its tuner.

Columns, buckets and exceptions are read from the installed release's own files, not from its number.
"""

from __future__ import annotations

import ast
import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmquant.errors import GlmquantError
from glmquant.serving.kernel_keys import COLUMNS, KernelShape, find_buckets, rules
from glmquant.serving.stack import Stack, read_text

ENVIRONMENT = "AITER_CONFIG_FMOE"
# Where the tuner is, below the folder that holds the package `aiter`, or below its aiter_meta: newest first.
_TUNERS = ("csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py", "hsa/gfx950/fmoe_2stages/tune.py")
# 256 compute units are MI350X and MI355X: how AITER itself fills in a missing gfx (gfx_from_cu_num).
_GFX_OF_CU = {"256": "gfx950", "304": "gfx942", "80": "gfx942"}

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A tuned row: both kernels' names, microseconds as measured by whoever tuned it ('' if not said), its file."""

    kernels: tuple[str, str]
    us: str
    file: str


@dataclass(frozen=True)
class Tables:
    """What an installed AITER looks kernels up in.

    Attributes:
        release: of the distribution, '' if it has none (a checkout).
        columns: of a key, in the order of the tuned tables.
        untuned_columns: header of the tuner's input.
        rule: how token counts are rounded (aiter.yaml); `known` says whether the release was recognised.
        strips: whether the lookup takes one off topk under expert parallelism.
        tiers: whether 131072 tokens fall back to the row of 32768.
    """

    root: Path
    release: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    untuned_columns: tuple[str, ...]
    rule: Mapping[str, Any]
    known: bool
    strips: bool
    tiers: bool
    tuner: Path | None
    rows: Mapping[Key, Row]

    def lookup(self, shape: KernelShape, token: int) -> Row | None:
        """The row for a shape and a bucket, None where the heuristic chooses."""
        found = self.rows.get(self._key(shape, token))
        if found is None and self.tiers and token == 131072:
            found = self.rows.get(self._key(shape, 32768))
        return found

    def _key(self, shape: KernelShape, token: int) -> Key:
        values = self.values(shape, token)
        return tuple(_normal(values[column]) for column in self.columns)

    def values(self, shape: KernelShape, token: int) -> dict[str, str]:
        """Column -> value, as this release asks."""
        values = shape.key(token)
        if self.strips and shape.masked:
            values["topk"] = str(shape.topk - 1)
        return values


def open_tables(stack: Stack, environ: Mapping[str, str] | None = None) -> Tables | None:
    """The tables of a stack's AITER, None if it is not installed.

    Args:
        environ: AITER_CONFIG_FMOE in it names the tables instead (by default that of this process).

    Raises:
        GlmquantError: there is no table, or its columns are not known.
    """
    package = stack.package("aiter")
    source = stack.find("aiter", ["fused_moe.py"])
    if package is None or source is None:
        return None
    configs = package / "configs"
    files = _files(configs, os.environ if environ is None else environ)
    tables = [(path, *_read(path)) for path in files]
    tables = [table for table in tables if table[1]]
    if not tables:
        raise GlmquantError(
            f"{configs}: no tuned fused-MoE table in it", f"Is {ENVIRONMENT} set to a file that exists?"
        )
    untuned = tuple(_read(configs / "untuned_fmoe.csv")[0]) or tuple(
        column for column in tables[0][1] if column in COLUMNS - {"gfx", "cu_num"}
    )
    columns = tuple(column for column in tables[0][1] if column in COLUMNS)
    if strange := [column for column in untuned if column not in COLUMNS]:
        raise GlmquantError(f"{configs / 'untuned_fmoe.csv'}: column {strange[0]!r} is not known", "A newer AITER?")
    text = read_text(source)
    rule = find_buckets(_bucket_integers(text))
    root = package.parent
    tuner = next((r / t for r in (root / "aiter_meta", root) for t in _TUNERS if (r / t).is_file()), None)
    rows: dict[Key, Row] = {}
    for path, _, records in tables:
        for record in records:
            key, row = _row(record, columns, path)
            rows.setdefault(key, row)
    return Tables(
        root,
        stack.release("amd-aiter", "aiter"),
        tuple(path for path, _, _ in tables),
        columns,
        untuned,
        rule or rules()["unknown"],
        rule is not None,
        "int(is_ep)" in text,
        "fallback_tier" in text,
        tuner,
        rows,
    )


def _files(configs: Path, environ: Mapping[str, str]) -> list[Path]:
    """As aiter/jit/core.py get_config_file: the variable's files, else the table and those of single models."""
    if named := environ.get(ENVIRONMENT):
        return [Path(part) for part in named.split(os.pathsep) if part]
    models = sorted((configs / "model_configs").glob("*tuned_fmoe*"))
    return [configs / "tuned_fmoe.csv", *(path for path in models if path.is_file() and "untuned" not in path.name)]


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows of a CSV; nothing if it cannot be read."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    try:
        return list(reader.fieldnames or []), [row for row in reader if None not in row]
    except csv.Error:
        return [], []


def _row(record: Mapping[str, str], columns: Sequence[str], path: Path) -> tuple[Key, Row]:
    values = {name: (value or "").strip() for name, value in record.items()}
    if values.get("_tag") == "flydsl_fallback":  # AITER leaves these out
        return (), Row(("", ""), "", "")
    if "gfx" in columns and values.get("gfx") in (None, "", "0", "nan", "None"):
        values["gfx"] = _GFX_OF_CU.get(_normal(values.get("cu_num", "")), "")
    kernels = (values.get("kernelName1", ""), values.get("kernelName2", ""))
    return tuple(_normal(values.get(column, "")) for column in columns), Row(kernels, values.get("us", ""), path.name)


def _normal(value: str) -> str:
    """One spelling of a value: 257 for 257.0, 1 for True."""
    if value in ("True", "False"):
        return str(int(value == "True"))
    try:
        return str(int(float(value)))
    except (ValueError, OverflowError):
        return value


def _bucket_integers(text: str) -> list[int]:
    """The integers in get_padded_M and in _PADDED_M_TIERS of fused_moe.py's source."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[int] = []
    for node in tree.body:
        tiers = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "_PADDED_M_TIERS" for target in node.targets
        )
        if tiers or (isinstance(node, ast.FunctionDef) and node.name == "get_padded_M"):
            constants = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
            found += [each.value for each in constants if type(each.value) is int]
    return found


def untuned_csv(tables: Tables, wanted: Iterable[tuple[KernelShape, int]]) -> str:
    """The tuner's input for these shapes and buckets, in the columns of the installed release."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(tables.untuned_columns)
    for line in _lines(tables, wanted):
        writer.writerow(line)
    return out.getvalue()


def _lines(tables: Tables, wanted: Iterable[tuple[KernelShape, int]]) -> Iterator[tuple[str, ...]]:
    seen = set()
    for shape, token in wanted:
        values = tables.values(shape, token)
        line = tuple(values[column] for column in tables.untuned_columns)
        if line not in seen:
            seen.add(line)
            yield line

"""The output's README.md: a model card that says what was done and how to serve it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from glmquant.checkpoint.header import open_regular
from glmquant.engines.targets import span
from glmquant.exclusions import ExclusionList
from glmquant.planner import Plan
from glmquant.text import printable

# Front matter is a few lines; the rest of a card is not read.
_MAX_CARD = 20_000
_MAX_VALUE = 200


def make_card(source_card: Path, plan: Plan, exclusions: ExclusionList, record: Mapping[str, Any]) -> str:
    """Markdown with Hub metadata; licence, languages and pipeline tag are taken over from the source's card.

    Names and texts that come from the checkpoint, its path or the command are data: neither HTML nor Markdown.
    """
    name = _plain(str(record["base_model"]).rpartition("/")[2])
    widened = any(not (job.copied or job.quantized) for job in plan.jobs)
    versions = _plain(", ".join(f"{tool} {number}" for tool, number in record["versions"].items()))
    lines = [
        "---",
        yaml.safe_dump(_metadata(source_card, record), sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {name} in MXFP4",
        "",
        f"Recipe {_code(plan.recipe.name)}: {_plain(plan.recipe.about)}. "
        "Weights are MXFP4 (OCP MX v1.0: E2M1 elements, one E8M0",
        "scale per 32) with AMD Quark's rounding; activations are quantized dynamically by the engine.",
        "Everything else is byte for byte the source's"
        + (", except FP8 weights that became bf16." if widened else "."),
        "",
        "```",
        _one_line(str(record["command"])),
        "```",
        "",
        f"Made with {versions}" + (", the fused kernel giving Quark's bits." if record["backend"] == "fused" else "."),
        "",
        "| group | tensors | bytes in | bytes out | dtype |",
        "|---|--:|--:|--:|---|",
    ]
    for row in plan.groups():
        dtype = row.dtype_out if row.dtype_in == row.dtype_out else f"{row.dtype_in} -> {row.dtype_out}"
        lines.append(f"| {_plain(row.group)} | {row.tensors:,} | {row.bytes_in:,} | {row.bytes_out:,} | {dtype} |")
    lines += [
        f"| total | {len(plan.weight_map):,} | {plan.bytes_in:,} | {plan.total_size:,} | |",
        "",
        "## Serve",
        "",
        "```",
        "SGLANG_USE_AITER=1 python -m sglang.launch_server --model-path THIS_FOLDER --tp 8 --trust-remote-code"
        + (_DRAFT if plan.layers.mtp else ""),
        "```",
        "",
        f"`quantization_config.exclude` ({len(exclusions.entries)} entries) was checked against models of these",
        f"releases: {span(exclusions.targets)}.",
    ]
    lines += ["", *(f"- {_plain(str(need))}" for need in exclusions.needs)] if exclusions.needs else []
    return "\n".join(lines) + "\n"


def with_graft(card: str, graft: Mapping[str, Any]) -> str:
    """A card with a section on the MTP layer that was added later, instead of an earlier one.

    Args:
        graft: `mtp_graft` of glmquant.json.
    """
    packed = f"{graft['quantized']:,} weights of them in MXFP4" if graft["quantized"] else "un-quantized"
    versions = _plain(", ".join(f"{tool} {number}" for tool, number in graft["versions"].items()))
    lines = [
        _GRAFT,
        "",
        f"Added afterwards from {_code(graft['source'])} by `glmquant mtp graft` ({versions}): {graft['tensors']:,}",
        f"tensors, {graft['bytes']:,} bytes, {packed}. What is said above may be without them. With it, serve with",
        "",
        "```",
        _DRAFT.replace("\\\n", "").strip().replace("  ", " "),
        "```",
    ]
    return card.partition(f"\n{_GRAFT}\n")[0].rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


_GRAFT = "## The MTP layer"
_DRAFT = (
    " \\\n  --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4"
)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def _plain(text: str) -> str:
    """Text that renders as itself wherever it stands in a line of Markdown."""
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", " ".join(printable(text).split())), quote=False)


def _code(text: str) -> str:
    return "`" + _one_line(text).replace("`", "'") + "`"


def _metadata(source_card: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"base_model": _one_line(record["base_model"]), "base_model_relation": "quantized"}
    source = _front_matter(source_card)
    for key in ("license", "license_name", "license_link", "language", "pipeline_tag"):
        if _harmless(source.get(key)):
            metadata[key] = source[key]
    library = source.get("library_name")
    metadata["library_name"] = library if isinstance(library, str) and _harmless(library) else "transformers"
    metadata["tags"] = ["mxfp4", "quark", "glmquant"]
    return metadata


def _harmless(value: Any) -> bool:
    """A short text of one line, or a few of them: all that these keys ever hold."""
    if isinstance(value, list):
        return 0 < len(value) <= _MAX_VALUE and all(isinstance(item, str) and _harmless(item) for item in value)
    return isinstance(value, str) and 0 < len(value) <= _MAX_VALUE and value.isprintable()


def _front_matter(card: Path) -> dict[str, Any]:
    """The YAML block between the first two `---` lines; nothing of it matters enough to fail over."""
    try:
        with open_regular(card) as file:
            text = file.read(_MAX_CARD).decode(errors="replace").replace("\r\n", "\n")
        head, found, _ = text.removeprefix("---\n").partition("\n---\n")
        data = yaml.load(head, Loader=yaml.BaseLoader) if found else None  # all scalars stay texts
    except (OSError, yaml.YAMLError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}

"""The output's README.md: a model card that says what was done and how to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from glmquant.engines.targets import span
from glmquant.exclusions import ExclusionList
from glmquant.planner import Plan


def make_card(source_card: Path, plan: Plan, exclusions: ExclusionList, record: Mapping[str, Any]) -> str:
    """Markdown with Hub metadata; licence, languages and pipeline tag are taken over from the source's card."""
    name = str(record["base_model"]).rpartition("/")[2]
    versions = ", ".join(f"{tool} {number}" for tool, number in record["versions"].items())
    lines = [
        "---",
        yaml.safe_dump(_metadata(source_card, record), sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {name} in MXFP4",
        "",
        f"Recipe `{plan.recipe.name}`: {plan.recipe.about}. Weights are MXFP4 (OCP MX v1.0: E2M1 elements, one E8M0",
        "scale per 32) with AMD Quark's rounding; activations are quantized dynamically by the engine.",
        "Everything else is byte for byte the source's.",
        "",
        "```",
        str(record["command"]),
        "```",
        "",
        f"Made with {versions}" + (", the fused kernel giving Quark's bits." if record["backend"] == "fused" else "."),
        "",
        "| group | tensors | bytes in | bytes out | dtype |",
        "|---|--:|--:|--:|---|",
    ]
    for row in plan.groups():
        dtype = row.dtype_out if row.dtype_in == row.dtype_out else f"{row.dtype_in} -> {row.dtype_out}"
        lines.append(f"| {row.group} | {row.tensors:,} | {row.bytes_in:,} | {row.bytes_out:,} | {dtype} |")
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
    lines += ["", *(f"- {need}" for need in exclusions.needs)] if exclusions.needs else []
    return "\n".join(lines) + "\n"


_DRAFT = (
    " \\\n  --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4"
)


def _metadata(source_card: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"base_model": record["base_model"], "base_model_relation": "quantized"}
    source = _front_matter(source_card)
    for key in ("license", "license_name", "license_link", "language", "pipeline_tag"):
        if key in source:
            metadata[key] = source[key]
    metadata["library_name"] = source.get("library_name", "transformers")
    metadata["tags"] = ["mxfp4", "quark", "glmquant"]
    return metadata


def _front_matter(card: Path) -> dict[str, Any]:
    """The YAML block between the first two `---` lines; nothing of it matters enough to fail over."""
    try:
        head, found, _ = card.read_text(encoding="utf-8").removeprefix("---\n").partition("\n---\n")
        data = yaml.safe_load(head) if found else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}

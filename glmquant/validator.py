"""Proves a checkpoint from disk: what is stored, what the list says, and what each target engine makes of both.

Reads headers only and shares no code with the writer, the planner or the kernels: it does not trust the maker.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, inspect
from glmquant.engines.model import DISABLE_FUSION, Evaluation, ModuleVerdict, Stored, Verdict
from glmquant.engines.targets import Target, evaluate, span
from glmquant.errors import GlmquantError
from glmquant.recipe import Architecture, load_architecture

BLOCK = 32
SEVERITIES = ("info", "warning", "error")
JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, or worth knowing.

    Attributes:
        code: stable, for scripts.
        severity: `error` (does not load, or loads wrong), `warning` (slow, or needs a launch flag) or `info`.
        message: what is wrong and what the engine does.
        names: the first few tensors, modules or files concerned; `count` is how many there are.
        targets: the engine releases concerned, '' where it is wrong for any.
        fix: what to do.
    """

    code: str
    severity: str
    message: str
    names: tuple[str, ...] = ()
    count: int = 0
    targets: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """What `validate` found.

    Attributes:
        coverage: target -> verdict -> number of modules (`ok`, `slow`, `silent misload`, `crash`).
    """

    folder: Path
    targets: tuple[Target, ...]
    findings: tuple[Finding, ...]
    tensors: int
    nbytes: int
    quantized_modules: int
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)

    def failed(self, fail_on: str = "error") -> bool:
        """Whether there is a finding at or above a severity."""
        limit = SEVERITIES.index(fail_on)
        return any(SEVERITIES.index(finding.severity) >= limit for finding in self.findings)

    @property
    def ok(self) -> bool:
        return not self.failed()


def validate_folder(folder: str | os.PathLike[str], targets: Sequence[Target]) -> Report:
    """Check a quantized checkpoint of any producer.

    Raises:
        CheckpointError: the folder or its config.json cannot be read at all.
    """
    checkpoint, problems = inspect(folder)
    findings = [
        Finding(p.code, "error", p.message, tuple(filter(None, (p.tensor or p.file,))), 1, fix=p.hint) for p in problems
    ]
    findings += _sizes(checkpoint)
    coverage: dict[str, dict[str, int]] = {}
    formats: dict[str, str] = {}
    try:
        architecture = load_architecture(checkpoint.model_type)
        layers = read_layers(checkpoint.config)
    except GlmquantError as err:
        findings.append(Finding("config", "error", err.message, (CONFIG,), 1, fix=err.hint))
    else:
        formats = stored_formats(checkpoint.tensors, architecture.lookups)
        findings += _mtp(checkpoint, architecture, layers)
        findings += _correction_bias(checkpoint)
        findings += _packed_tensors(checkpoint, formats)
        exclude = _exclude_list(checkpoint, findings)
        if exclude is not None:
            stored = Stored.of(formats, layers)
            evaluations = [evaluate(target, exclude, stored) for target in targets]
            findings += _engine_findings(evaluations, stored)
            coverage = {f"{e.engine} {e.release}": _count(e) for e in evaluations}
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Report(
        checkpoint.folder,
        tuple(targets),
        tuple(findings),
        len(checkpoint.tensors),
        checkpoint.nbytes,
        sum(kind == "mxfp4" for kind in formats.values()),
        coverage,
    )


def _sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.weight_map is None:
        return
    total, actual = checkpoint.total_size, checkpoint.nbytes
    if total != actual:
        yield Finding(
            "total-size",
            "warning",
            f"{INDEX}: total_size is {total}, the tensors have {actual} bytes",
            (INDEX,),
            1,
            fix="Write the sum of the tensors' bytes.",
        )


def _mtp(checkpoint: Checkpoint, architecture: Architecture, layers: Layers) -> Iterator[Finding]:
    modules = (architecture.module(name.rpartition(".")[0], layers) for name in checkpoint.tensors)
    present = {module.layer for module in modules if module.is_mtp}
    for layer in layers.mtp:
        if layer not in present:
            yield Finding(
                "mtp-absent",
                "error",
                f"config.json declares an MTP layer, but no tensor of layer {layer} is stored: sglang drafts with "
                "random weights and says nothing",
                (architecture.mtp_prefix.format(layer=layer),),
                1,
                fix="Add the MTP tensors, or set num_nextn_predict_layers to 0.",
            )
    for layer in sorted(found for found in present if found is not None and found not in layers.mtp):
        yield Finding(
            "mtp-undeclared",
            "error",
            f"layer {layer} is stored, but config.json declares {layers.count} layers and "
            f"num_nextn_predict_layers {len(layers.mtp)}",
            (architecture.mtp_prefix.format(layer=layer),),
            1,
            fix="Set num_nextn_predict_layers to the number of MTP layers.",
        )


def _correction_bias(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [
        name
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".e_score_correction_bias") and tensor.dtype != "F32"
    ]
    if names:
        yield _finding(
            "correction-bias-dtype",
            "error",
            "the router's e_score_correction_bias is not F32: rounding it picks other experts (sglang PR #37133)",
            names,
            fix="Copy it as F32 from the source.",
        )


def _packed_tensors(checkpoint: Checkpoint, formats: dict[str, str]) -> Iterator[Finding]:
    """Every packed weight has its scale, in the one shape and dtype that engines read right."""
    tensors = checkpoint.tensors
    missing, dtype, shape, odd = [], [], [], []
    for module, kind in formats.items():
        if kind == "plain":
            continue
        if kind != "mxfp4":
            odd.append(f"{module}.weight")
            continue
        weight, scale = tensors[f"{module}.weight"], tensors.get(f"{module}.weight_scale")
        if scale is None:
            missing.append(f"{module}.weight_scale")
        elif scale.dtype != "U8":
            dtype.append(f"{module}.weight_scale")
        elif scale.shape != (weight.shape[0], weight.shape[1] * 2 // BLOCK) or weight.shape[1] * 2 % BLOCK:
            shape.append(f"{module}.weight_scale")
    orphans = [
        name
        for name in tensors
        if name.endswith(("_scale", "_scale_inv")) and formats.get(name.rpartition(".")[0]) != "mxfp4"
    ]
    silent = "engines report nothing and the weight is wrong"
    if missing:
        yield _finding("scale-missing", "error", f"packed weights without a scale: {silent}", missing)
    if dtype:
        yield _finding(
            "scale-dtype",
            "error",
            f"scales that are not uint8 are cast by value, bytes up to 126 become 0: {silent}",
            dtype,
            fix="Store the same bytes as uint8.",
        )
    if shape:
        yield _finding(
            "scale-shape",
            "error",
            f"scales are not [out, in / 32] of their weight: broadcast or cut, {silent}",
            shape,
        )
    if orphans:
        yield _finding("scale-orphan", "error", "scales that belong to no packed weight of their name", orphans)
    if odd:
        yield _finding("weight-dtype", "error", "Linear weights that are neither packed (uint8) nor bf16/f16/f32", odd)


def _exclude_list(checkpoint: Checkpoint, findings: list[Finding]) -> list[str] | None:
    """The exclude list, if quantization_config is one that the engine models can be asked about."""

    def refuse(code: str, message: str) -> None:
        findings.append(Finding(code, "error", message, (CONFIG,), 1))

    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict):
        refuse(
            "config-not-quantized",
            "config.json has no quantization_config: engines load the packed weights as bf16",
        )
        return None
    if config.get("quant_method") != "quark":
        refuse(
            "config-method",
            f"quantization_config.quant_method is {config.get('quant_method')!r}, not 'quark'",
        )
        return None
    for key, kind in (
        ("global_quant_config", dict),
        ("layer_quant_config", dict),
        ("layer_type_quant_config", dict),
    ):
        if not isinstance(config.get(key), kind):
            refuse(
                "config-key",
                f"quantization_config.{key} must be a map; sglang and vLLM raise while reading it",
            )
    export = config.get("export")
    if not isinstance(export, dict) or not isinstance(export.get("kv_cache_group"), list):
        refuse(
            "config-key",
            "quantization_config.export.kv_cache_group must be a list; sglang and vLLM raise without it",
        )
    exclude = config.get("exclude", [])
    if not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
        refuse("config-key", "quantization_config.exclude must be a list of texts")
        return None
    return exclude


def _engine_findings(evaluations: Sequence[Evaluation], stored: Stored) -> Iterator[Finding]:
    """One finding per kind of fault, with all its modules and releases."""
    groups: dict[tuple[str, str, str, str], dict[str, list[Evaluation]]] = defaultdict(lambda: defaultdict(list))
    for evaluation in evaluations:
        for fault in evaluation.faults:
            code, fix = _classify(fault, stored)
            groups[code, fault.role, fault.message, fix][fault.prefix].append(evaluation)
        if evaluation.flags:
            flag = evaluation.flags[0]
            text = f"loads only with {flag}: the bf16 shared expert would be fused into the MXFP4 experts"
            groups["needs-flag", "target", text, f"Launch with {flag}."]["model.layers.*.mlp"].append(evaluation)
    for (code, role, message, fix), by_prefix in groups.items():
        releases = {(e.engine, e.release) for found in by_prefix.values() for e in found}
        yield _finding(
            code,
            "warning" if code in ("fusion-lost", "needs-flag") else "error",
            f"{role}: {message}",
            list(by_prefix),
            span([Target(*release) for release in releases]),
            fix,
        )


def _classify(fault: ModuleVerdict, stored: Stored) -> tuple[str, str]:
    kinds = {stored.formats.get(part) for part in fault.parts} | {
        kind for part in fault.parts for kind in stored.containers.get(part, ())
    }
    kinds.discard(None)
    if fault.verdict is Verdict.SLOW:
        return "fusion-lost", "Spell this entry so that it does not contain the text shared_expert."
    if fault.verdict is Verdict.SILENT:
        return "silent-misload", f"Add {fault.prefix!r} to the exclude list."
    if "different quantization schemes" in fault.message:
        return "half-a-fused-pair", f"Exclude all of {', '.join(fault.parts)}, or none."
    if "fused into" in fault.message:
        return "fusion-mismatch", f"Store both in one format, or launch with {DISABLE_FUSION}."
    if kinds == {"plain"}:
        return "not-covered", "Add these modules to the exclude list, under these names."
    if kinds == {"mxfp4"}:
        return "excluded-but-packed", "Remove the entries that match these modules from the exclude list."
    return "mixed-formats", "Store the whole module in one format."


def _count(evaluation: Evaluation) -> dict[str, int]:
    counts = {verdict.value: 0 for verdict in Verdict}
    for fault in evaluation.faults:
        counts[fault.verdict.value] += 1
    counts["ok"] = evaluation.asked - sum(counts.values())
    return counts


def _finding(code: str, severity: str, message: str, names: Sequence[str], targets: str = "", fix: str = "") -> Finding:
    return Finding(code, severity, message, tuple(names[:5]), len(names), targets, fix)

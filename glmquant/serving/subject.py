"""What a launch and its kernels depend on in a checkpoint, and what one engine release makes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.source import Checkpoint, Problem, inspect
from glmquant.engines.block_fp8 import on_disk
from glmquant.engines.model import Evaluation, Stored
from glmquant.engines.sglang import Sglang
from glmquant.engines.targets import ENGINES, Target, evaluate
from glmquant.errors import CheckpointError, GlmquantError
from glmquant.findings import Report
from glmquant.recipe import load_architecture
from glmquant.validator import validate_inspected

MODEL_TYPE = "glm_moe_dsa"


@dataclass(frozen=True)
class Subject:
    """A quantized checkpoint in the eyes of one engine release.

    Attributes:
        target: the modelled release that answers for the real one (`nearest`).
        routed, shared: formats (`mxfp4`, `plain`) of the main layers' routed and shared experts.
        draft_routed, draft_shared: the same of the MTP layer; empty where it is not stored.
        evaluation: the release's verdict, with the launch flags without which it does not load.
        report: what `validate` finds for this release.
    """

    folder: Path
    config: Mapping[str, Any]
    layers: Layers
    nbytes: int
    target: Target
    routed: frozenset[str]
    shared: frozenset[str]
    draft_routed: frozenset[str]
    draft_shared: frozenset[str]
    evaluation: Evaluation
    report: Report

    @property
    def fusable(self) -> bool:
        """Whether formats and numbers allow the shared expert among the routed ones of the main layers."""
        engine = ENGINES[self.target.engine]
        if isinstance(engine, Sglang) and not engine.fuses("target", self.target.release, (), self.layers):
            return False  # whatever the list says
        return self.layers.shared_experts == 1 and self.routed == self.shared == frozenset({"mxfp4"})

    @property
    def drafts(self) -> bool:
        """Whether there is an MTP layer to draft with, config and tensors."""
        return bool(self.layers.mtp) and bool(self.draft_routed)


def read_subject(folder: str | os.PathLike[str], target: Target) -> Subject:
    """Read a quantized checkpoint's headers and ask the model of one engine release about it.

    Raises:
        CheckpointError: it cannot be read, is not a GLM-5.2-like model (glm_moe_dsa), or is not quantized.
    """
    return subject_of(*inspect(folder), target)


def subject_of(checkpoint: Checkpoint, problems: Sequence[Problem], target: Target) -> Subject:
    """`read_subject` for what `inspect` has read already."""
    if checkpoint.model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{checkpoint.folder}: model_type is {checkpoint.model_type!r}",
            f"Launch profiles and kernel keys are for {MODEL_TYPE} only.",
        )
    block = checkpoint.config.get("quantization_config")
    exclude = block.get("exclude", []) if isinstance(block, dict) else None
    if not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json has no quantization_config with an exclude list",
            "Quantize the checkpoint first: glmquant quantize SRC OUT.",
        )
    architecture = load_architecture(checkpoint.model_type)
    layers = read_layers(checkpoint.config, architecture.keys)
    found = stored_formats(checkpoint.tensors, architecture.lookups)
    formats = {module: "mxfp4" if kind == "i8" else kind for module, kind in found.items()}
    fp8 = on_disk(checkpoint.config, checkpoint.tensors, formats)
    mtp = tuple(layers.at(layer) for layer in layers.mtp)

    def kinds(part: str, draft: bool) -> frozenset[str]:
        return frozenset(
            kind for module, kind in formats.items() if part in module and (mtp and module.startswith(mtp)) == draft
        )

    routed, shared = f".{layers.container}.", f".{layers.shared}."
    return Subject(
        checkpoint.folder,
        checkpoint.config,
        layers,
        checkpoint.nbytes,
        target,
        kinds(routed, False),
        kinds(shared, False),
        kinds(routed, True) if mtp else frozenset(),
        kinds(shared, True) if mtp else frozenset(),
        evaluate(target, exclude, Stored.of(formats, layers, fp8)),
        validate_inspected(checkpoint, problems, [target]),
    )


def nearest(engine: str, release: str) -> Target:
    """The newest modelled release that is not newer than `release` (0.5.16+rocm720 is 0.5.16).

    Raises:
        GlmquantError: an unknown engine, no release number, or older than every modelled release.
    """
    if engine not in ENGINES:
        raise GlmquantError(f"unknown engine {engine!r}", f"Known: {', '.join(ENGINES)}.")
    known = list(ENGINES[engine].releases())
    try:
        wanted = Version(Version(release).public)
    except InvalidVersion:
        raise GlmquantError(f"{release!r} is no release number", f"{engine}: {', '.join(known)}.") from None
    older = [each for each in known if Version(each) <= wanted]
    if not older:
        raise GlmquantError(
            f"{engine} {release} is older than {known[0]}, the oldest release that serves this model",
            f"Releases that glmquant knows: {', '.join(known)}.",
        )
    return Target(engine, max(older, key=Version))

"""Everything of an output that is not a shard: index, side files, record, card, manifest, and config.json last."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.metadata import version as installed_version

from glmquant.card import make_card
from glmquant.checkpoint.manifest import MANIFEST, Manifest, Run, digest, file_digest, lasting
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint
from glmquant.checkpoint.writer import copy_file, write_file
from glmquant.errors import OutputError
from glmquant.exclusions import ExclusionList
from glmquant.mxfp4.backend import Backend
from glmquant.mxfp4.config import quantization_config
from glmquant.planner import Plan

CARD = "README.md"
RECORD = "glmquant.json"


def finish(
    source: Checkpoint,
    plan: Plan,
    exclusions: ExclusionList,
    options: Sequence[str],
    run: Run,
    backend: Backend,
    base_model: str,
) -> None:
    """Everything that is not a shard: index, side files, record, card, manifest, and config.json last."""
    out, shards = run.output, run.records()
    files: dict[str, tuple[int, str]] = {}

    def write(name: str, content: bytes) -> None:
        write_file(out, name, content)
        files[name] = (len(content), digest(content))

    if source.weight_map is not None or len(plan.shards) > 1:
        index = {"metadata": {"total_size": plan.total_size}, "weight_map": plan.weight_map}
        write(INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode())
    for name in source.side_files:
        if name not in (CARD, RECORD, MANIFEST):
            copy_file(source.folder / name, out, name)
            files[name] = ((out / name).stat().st_size, file_digest(out / name))
    record = _record(plan, exclusions, options, backend, base_model)
    write(RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    write(CARD, make_card(source.folder / CARD, plan, exclusions, record).encode())
    config = {
        **source.config,
        "quantization_config": quantization_config(exclusions.texts, backend.version, plan.fp8_keys),
    }
    content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    files[CONFIG] = (len(content), digest(content))
    ordered = {shard.file: shards[shard.file] for shard in plan.shards}
    write_file(out, MANIFEST, Manifest(lasting(run.fingerprint), ordered, files).encode())
    try:
        write_file(out, CONFIG, content)
    except OutputError:
        (out / CONFIG).unlink(missing_ok=True)  # it may have its name already, and not be durable
        raise


def _record(
    plan: Plan, exclusions: ExclusionList, options: Sequence[str], backend: Backend, base_model: str
) -> dict[str, object]:
    """What was done, for people and tools: goes into the output as glmquant.json."""
    recipe = plan.recipe
    command = ["glmquant", "quantize", base_model, "OUT", *options]
    return {
        "base_model": base_model,
        "recipe": recipe.name,
        "rules": [{"group": r.group, "layers": r.layers, "reason": r.reason} for r in recipe.rules],
        "overrides": [str(override) for override in recipe.overrides],
        "command": shlex.join(command),
        "backend": backend.name,
        "versions": {"glmquant": installed_version("glmquant"), "amd-quark": backend.version},
        "targets": [str(target) for target in exclusions.targets],
        "needs": [str(need) for need in exclusions.needs],
        "exclude": [entry.record() for entry in exclusions.entries],
    }

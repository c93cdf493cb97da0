"""Mending and comparing the exclude lists of checkpoints that already exist, whoever made them."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from glmquant.checkpoint.formats import BLOCK_FP8, stored_formats
from glmquant.checkpoint.header import open_regular, parse_json
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.manifest import file_digest, replace_file
from glmquant.checkpoint.source import CONFIG, MAX_JSON_BYTES, Checkpoint, inspect, read_json, refuse_link_outside
from glmquant.checkpoint.writer import copy_file
from glmquant.engines import block_fp8
from glmquant.engines.sglang import Sglang
from glmquant.engines.targets import ENGINES, Target, span, split_modelled
from glmquant.errors import CheckpointError, GlmquantError
from glmquant.exclusions import ExclusionList, resolve
from glmquant.recipe import known_model_types, load_architecture
from glmquant.text import short


@dataclass(frozen=True, slots=True)
class Fix:
    """A checkpoint's list before and after; `backup` is where the old config.json went, None if nothing was written."""

    folder: Path
    before: tuple[str, ...]
    exclusions: ExclusionList
    backup: Path | None

    @property
    def removed(self) -> list[str]:
        """Entries of the old list that the new one does not have."""
        after = set(self.exclusions.texts)
        return [entry for entry in self.before if entry not in after]

    @property
    def added(self) -> list[str]:
        """Entries of the new list that the old one did not have."""
        before = set(self.before)
        return [entry for entry in self.exclusions.texts if entry not in before]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two lists differ in what they do: `a` and `b` are `un-quantized`, `mxfp4`, `fused`, ... or an error."""

    targets: str
    role: str
    prefix: str
    a: str
    b: str


# Problems after which it is not known what a checkpoint holds.
_UNTRUSTED = ("bad-header", "duplicate-tensor", "missing-shard", "bad-index", "index-path", "link-outside")


def on_disk(folder: Path, targets: Sequence[Target], form: str) -> ExclusionList:
    """The list for a folder as it is stored: the truth is in the shards, not in its config.

    Raises:
        CheckpointError: the headers cannot be trusted, or a weight is neither MXFP4 nor bf16/f16/f32.
        ExclusionError: no list serves all targets.
    """
    checkpoint, problems = inspect(folder)
    for problem in problems:
        if problem.code in _UNTRUSTED:
            raise problem.error()
    return list_for(checkpoint, targets, form)


def list_for(checkpoint: Checkpoint, targets: Sequence[Target], form: str) -> ExclusionList:
    """The list for what a checkpoint stores; raises as `on_disk`."""
    config = checkpoint.config.get("quantization_config")
    said = config.get("layer_quant_config") if isinstance(config, dict) else None
    if said and not (isinstance(said, dict) and all(map(block_fp8.is_block_fp8, said.values()))):
        raise CheckpointError(
            f"{CONFIG}: quantization_config.layer_quant_config has a format that is neither MXFP4 nor block-scaled FP8",
            "Lists are not resolved for such checkpoints.",
        )
    architecture = load_architecture(checkpoint.model_type)
    formats = stored_formats(checkpoint.tensors, architecture.lookups)
    for module, kind in formats.items():
        if kind not in ("mxfp4", "plain", BLOCK_FP8):
            tensor = checkpoint.tensors[f"{module}.weight"]
            raise CheckpointError(
                f"{tensor.shard}: tensor {tensor.name!r} is {tensor.dtype}: neither MXFP4 nor bf16, f16, f32"
            )
    fp8 = block_fp8.on_disk(checkpoint.config, checkpoint.tensors, formats)
    return resolve(formats, read_layers(checkpoint.config, architecture.keys), architecture, targets, form, fp8)


def fix(folder: Path, targets: Sequence[Target], form: str = "auto", dry_run: bool = False) -> Fix:
    """Rewrite only quantization_config.exclude in a checkpoint's config.json; no other file is touched.

    The old file is kept beside it as config.json.bak (.bak.1, ...); the new one replaces it atomically. A symlink
    into a hub cache is replaced by a file, the cache's blob stays as it is.

    Raises: as `on_disk`; OutputError if the folder cannot be written.
    """
    found = on_disk(folder, targets, form)
    config = read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{CONFIG}: no quantization_config: nothing to mend", "Is this a quantized checkpoint?")
    listed = quantization.get("exclude")
    before = [e if isinstance(e, str) else short(e) for e in listed] if isinstance(listed, list) else []
    if dry_run or before == found.texts:
        return Fix(folder, tuple(before), found, None)
    quantization["exclude"] = found.texts
    backup = back_up(folder, CONFIG)
    replace_file(folder, CONFIG, like(folder / CONFIG, config))
    return Fix(folder, tuple(before), found, backup)


def back_up(folder: Path, name: str) -> Path:
    """Copy a file of a checkpoint to NAME.bak (.bak.1, ...), or find the copy that is there already.

    Raises:
        CheckpointError, OutputError: it cannot be read or written.
    """
    names = (f"{name}.bak" + (f".{n}" if n else "") for n in count())
    content = file_digest(folder / name)
    backup = next(p for n in names if not (p := folder / n).exists() or file_digest(p) == content)
    if not backup.exists():
        copy_file(folder / name, folder, backup.name)
    return backup


def like(original: Path, config: dict[str, Any]) -> bytes:
    """JSON with the original's indentation and end of file, so that a textual diff shows the list only."""
    text = original.read_text(encoding="utf-8")
    indent = re.match(r"\{\n( {1,16}|\t{1,4})\"", text)
    body = json.dumps(config, indent=indent[1] if indent else 2, ensure_ascii=False)
    return (body + ("\n" if text.endswith("\n") else "")).encode()


def diff(a: Path, b: Path, targets: Sequence[Target]) -> list[Difference]:
    """What two lists answer differently, per engine and module.

    Args:
        a, b: checkpoint folders, config.json files, or files that hold a list (JSON, or one entry a line). The layer
            numbers come from the first of them that has a config.

    Raises:
        GlmquantError: a file cannot be read as any of these, or none of the two has a config.
    """
    (list_a, layers_a), (list_b, layers_b) = _read_list(a), _read_list(b)
    layers = layers_a or layers_b
    if layers is None:
        raise GlmquantError("neither list comes with a config.json, so the layers are unknown", "Give a folder.")
    asked, unknown = split_modelled(targets, layers.family)
    if not asked:
        raise GlmquantError(f"{', '.join(unknown)}: no target's answers are known", "Name others with --targets.")
    rows: dict[tuple[str, str, str, str], list[Target]] = defaultdict(list)
    for target in asked:
        engine = ENGINES[target.engine]
        answers = [engine.answers(target.release, exclude, layers) for exclude in (list_a, list_b)]
        for (module, one), (_, two) in zip(*answers, strict=True):
            if one != two:
                rows[module.role, module.prefix, _word(one), _word(two)].append(target)
        if isinstance(engine, Sglang):
            for role in ("target", "draft"):
                fused = [engine.fuses(role, target.release, exclude, layers) for exclude in (list_a, list_b)]
                if fused[0] != fused[1]:
                    words = ["fused" if f else "not fused" for f in fused]
                    rows[role, "shared experts", words[0], words[1]].append(target)
    return [Difference(span(found), *key) for key, found in rows.items()]


def _word(answer: bool | str) -> str:
    return answer if isinstance(answer, str) else "un-quantized" if answer else "mxfp4"


def _read_list(path: Path) -> tuple[list[str], Layers | None]:
    if path.is_dir():
        refuse_link_outside(path, CONFIG)
        path = path / CONFIG
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                raise GlmquantError(f"{path}: {size:,} bytes is too big for an exclude list or a config.json")
            content = file.read(MAX_JSON_BYTES)
        text = content.decode()
    except (OSError, ValueError) as err:
        raise GlmquantError(f"{path}: cannot be read: {err}") from err
    try:
        data = parse_json(content)
    except json.JSONDecodeError:
        return [line.strip() for line in text.splitlines() if line.strip()], None
    except (ValueError, RecursionError) as err:
        raise GlmquantError(f"{path}: not valid JSON: {err}") from err
    if isinstance(data, dict):
        config = data.get("quantization_config", data)
        entries = config.get("exclude") if isinstance(config, dict) else None
        layers = _layers(data)
    else:
        entries, layers = data, None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise GlmquantError(f"{path}: holds no exclude list", "Give a folder, a config.json, or a list of texts.")
    return entries, layers


def _layers(config: dict[str, Any]) -> Layers | None:
    """The layers of a config.json; None for a file that is none. One without a model type is read as GLM-5.2's."""
    model_type = config.get("model_type", "glm_moe_dsa")
    if not isinstance(model_type, str) or model_type not in known_model_types():
        return None
    keys = load_architecture(model_type).keys
    inner = keys.of(config) if not keys.inside or keys.inside in config else {}
    return read_layers(config, keys) if keys.layers in inner else None

"""What a graft would write, from headers and samples alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glmquant import planner
from glmquant.checkpoint.formats import PLAIN, module_name, stored_formats
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.manifest import MANIFEST
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, inspect, read_json
from glmquant.checkpoint.weights import FP8, SCALE_INV, shards_of
from glmquant.engines.targets import Target, evaluate
from glmquant.errors import CheckpointError, OutputError, RecipeError
from glmquant.exclusions import ExclusionList
from glmquant.findings import Report
from glmquant.graft.donor import Donor, promised
from glmquant.graft.same import HUB_SAMPLES, Pair, check_same, comparable, different, spread
from glmquant.mend import list_for
from glmquant.text import short

STEM = "model-mtp"
SHARD_SIZE = 5 * 1024**3
"""Bytes of tensors in a new shard: as in the published GLM-5.2."""
METADATA = {"format": "pt", "glmquant": "mtp graft"}
"""Of the new shards. Marks one that a killed run left, and that the index does not name, as ours to write again."""


@dataclass(frozen=True, slots=True)
class Graft:
    """What was grafted, or with a dry run would be.

    Attributes:
        there: tensors of the MTP layers that the checkpoint has already; `missing` those it had not, as SRC names them.
        shards: the new files.
        tensors, nbytes: in them, scales included.
        quantized: weights in them that are MXFP4.
        compared: tensors that both checkpoints hold, whose bytes were compared; `different` the names of those that
            are not the same (only with `force`).
        index: whether the index was, or is to be, replaced.
        config: keys of config.json that change, but for the exclude list -> (before, after).
        before, exclusions: the exclude list as it was, and the one for what is stored now; None where nothing is
            quantized.
        fetched: shards of SRC that come from the Hub, of `fetched_bytes`.
        keeps_list: the list as it was is kept, because it loads on every target.
        backups: copies of the files that were replaced.
        dry_run: nothing was written.
        report: what `validate` says of the result; None after a dry run, and for what is not quantized.
    """

    folder: Path
    there: int
    missing: tuple[str, ...]
    shards: tuple[str, ...]
    tensors: int
    nbytes: int
    quantized: int
    compared: int
    different: tuple[str, ...]
    index: bool
    config: Mapping[str, tuple[Any, Any]]
    before: tuple[str, ...]
    exclusions: ExclusionList | None
    keeps_list: bool
    fetched: tuple[str, ...] = ()
    fetched_bytes: int = 0
    backups: tuple[Path, ...] = ()
    dry_run: bool = False
    report: Report | None = None

    @property
    def list_changes(self) -> bool:
        return self.exclusions is not None and not self.keeps_list and list(self.before) != self.exclusions.texts

    @property
    def nothing_to_do(self) -> bool:
        """All of it was there before, and is named and declared."""
        return not (self.shards or self.index or self.config or self.list_changes)

    @property
    def ok(self) -> bool:
        return self.report is None or self.report.ok


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be written; `index` and `config` are None where the file stays as it is.

    `unread` are parts of the MTP layer that are to be compared once the donor's shards are fetched; `exclusions` is the
    new list, if there is one.
    """

    checkpoint: Checkpoint
    shards: tuple[planner.ShardPlan, ...]
    first_index: dict[str, Any] | None
    index: dict[str, Any] | None
    config: dict[str, Any] | None
    unread: tuple[Pair, ...]
    exclusions: ExclusionList | None

    @property
    def disk_needed(self) -> int:
        small = sum(len(json.dumps(value, indent=2)) for value in (self.first_index, self.index, self.config) if value)
        manifest = self.checkpoint.folder / MANIFEST
        known = manifest.stat().st_size if manifest.exists() else 0
        rows = sum(len(shard.jobs) for shard in self.shards)
        return sum(shard.file_size for shard in self.shards) + 2 * small + known + 200 * rows + 65536


def make_plan(
    donor: Donor, folder: Path, targets: Sequence[Target], form: str, quantized: bool, force: bool
) -> tuple[Plan, Graft]:
    """Arguments and errors as of `graft`; no byte of either checkpoint is changed."""
    checkpoint, problems = inspect(folder)
    for problem in problems:
        if problem.code in ("bad-header", "bad-index", "index-path", "link-outside"):
            raise problem.error()
    _check_config(donor, checkpoint)
    leftovers = _leftovers(checkpoint)
    tensors = _trusted_tensors(donor, checkpoint, leftovers)
    missing = _missing(donor, tensors)
    lacking = set(missing)
    there = [name for name in donor.mtp if name not in lacking]
    named = checkpoint.weight_map or {name: tensor.shard for name, tensor in tensors.items()}
    foreign = bool(missing) or any(named.get(name) != tensors[name].shard for name in there)
    pairs = list(comparable(donor, tensors, there if foreign else ()))
    unread: list[Pair] = []
    if donor.hub:  # a piece here and there shows another fine-tune before gigabytes are fetched
        own = [pair for pair in pairs if donor.is_mtp(pair[0].name)]
        others = [pair for pair in pairs if not donor.is_mtp(pair[0].name)]
        pairs, unread = spread(others, HUB_SAMPLES), [] if force else own
    differ = different(donor, checkpoint, pairs)
    if not force:
        check_same(donor, len(pairs) + len(unread), differ)

    packed = _packed_groups(donor, tensors) if quantized else frozenset()
    stem = _stem(checkpoint, leftovers)
    shards = _lay_out(donor, missing, packed, stem) if missing else ()
    if strays := sorted(leftovers - {shard.file for shard in shards}):
        raise OutputError(
            f"{strays[0]}: left by a graft with other options, and not named by {INDEX}", "Remove it, then try again."
        )
    new = [
        TensorInfo(out.name, out.dtype, out.shape, shard.file, out.start, out.end)
        for shard in shards
        for job in shard.jobs
        for out in job.outputs
    ]
    after = {**tensors, **{tensor.name: tensor for tensor in new}}
    index = _index(checkpoint, after, sum(donor.offers[name].numel for name in missing))
    first_index = _index(checkpoint, tensors, 0) if checkpoint.weight_map is None and shards else None
    config = deepcopy(checkpoint.config)
    changes = _declare(donor, config)
    same_index = index["weight_map"] == named
    found, before, keeps = _list(replace(checkpoint, config=config, tensors=after), targets, form)
    # A list that loads is left alone where all the rest was right already.
    keeps = keeps and not shards and same_index and not changes
    if found and not keeps:
        config["quantization_config"]["exclude"] = found.texts
    files = {file for shard in shards for file in shard.sources} | {f for a, _ in unread for f in shards_of(a)}
    fetch = sorted(files - donor.hub.cached.keys()) if donor.hub else []
    result = Graft(
        folder=folder,
        there=len(there),
        missing=tuple(missing),
        shards=tuple(shard.file for shard in shards),
        tensors=len(new),
        nbytes=sum(tensor.nbytes for tensor in new),
        quantized=sum(job.quantized for shard in shards for job in shard.jobs),
        compared=len(pairs),
        different=tuple(differ),
        index=not same_index,
        config=changes,
        before=before,
        exclusions=found,
        keeps_list=keeps,
        fetched=tuple(fetch),
        fetched_bytes=sum(donor.hub.files[file].size for file in fetch) if donor.hub else 0,
    )
    plan = Plan(
        checkpoint,
        tuple(shards),
        first_index,
        None if same_index else index,
        config if config != checkpoint.config else None,
        tuple(unread),
        None if keeps else found,
    )
    return plan, result


def _check_config(donor: Donor, checkpoint: Checkpoint) -> None:
    """Raise unless both config.json promise the same tensors (the MTP layer's aside, which CKPT's may not declare)."""
    if checkpoint.model_type != donor.checkpoint.model_type:
        raise CheckpointError(
            f"SRC is a {short(donor.checkpoint.model_type)}, CKPT a {short(checkpoint.model_type)} (model_type)",
            "Take the MTP layer from the model that CKPT was made from.",
        )
    ours, theirs = promised(checkpoint, donor), promised(donor.checkpoint, donor)
    for name in dict.fromkeys([*theirs, *ours]):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"not the same model: by SRC's {CONFIG} {name!r} is {_shape(theirs.get(name))}, "
                f"by CKPT's {_shape(ours.get(name))}",
                "Take the MTP layer from the model that CKPT was made from.",
            )


def _shape(shape: Sequence[int] | None) -> str:
    return "not in it" if shape is None else str(list(shape))


def _leftovers(checkpoint: Checkpoint) -> frozenset[str]:
    """Shards that a killed graft has written: complete, but not named by the index, so that nobody reads them."""
    if checkpoint.weight_map is None:
        return frozenset()
    named = set(checkpoint.weight_map.values())
    return frozenset(h.file for h in checkpoint.shards if h.file not in named and h.metadata == METADATA)


def _stem(checkpoint: Checkpoint, leftovers: frozenset[str]) -> str:
    """The beginning of the new shards' names, such that none is taken, not even by a shard that the index names."""
    used = {header.file for header in checkpoint.shards} - leftovers
    used |= set((checkpoint.weight_map or {}).values())
    number, stem = 1, STEM
    while any(re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", file) for file in used):
        number += 1
        stem = f"{STEM}{number}"
    return stem


def _trusted_tensors(donor: Donor, checkpoint: Checkpoint, leftovers: frozenset[str]) -> dict[str, TensorInfo]:
    """All tensors but those of leftovers.

    Raises:
        CheckpointError: one is there twice, or the index is wrong about one that is not of the MTP layer.
    """
    stored = [t for header in checkpoint.shards if header.file not in leftovers for t in header.tensors]
    tensors = {tensor.name: tensor for tensor in stored}
    if len(tensors) != len(stored):
        name, _ = Counter(tensor.name for tensor in stored).most_common(1)[0]
        files = ", ".join(tensor.shard for tensor in stored if tensor.name == name)
        raise CheckpointError(f"tensor {name!r} is in more than one shard: {files}", "Remove the stale shard.")
    if checkpoint.weight_map is None:
        return tensors
    for name, file in checkpoint.weight_map.items():
        if (name not in tensors or tensors[name].shard != file) and not donor.is_mtp(name):
            raise CheckpointError(
                f"{INDEX}: tensor {name!r} is said to be in {short(file)}, where it is not",
                "Only the MTP layer can be brought back: fetch the missing shard, or mend the index.",
            )
    for name, tensor in tensors.items():
        if name not in checkpoint.weight_map and not donor.is_mtp(name):
            raise CheckpointError(
                f"{tensor.shard}: tensor {name!r} is not named by {INDEX}",
                "Remove the stale shard, or mend the index.",
            )
    return tensors


def _missing(donor: Donor, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The donor's MTP tensors that are not there in any form.

    Raises:
        CheckpointError: one is there in a form that no engine reads.
    """
    missing = []
    for name in donor.mtp:
        shape = donor.offers[name].shape
        stored, scale = tensors.get(name), tensors.get(name + "_scale") or tensors.get(name + SCALE_INV)
        if stored is None and scale is None:
            missing.append(name)
        elif not _faithful(shape, stored, scale):
            tensor = stored or scale
            assert tensor
            raise CheckpointError(
                f"{tensor.shard}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, which is neither "
                f"SRC's {list(shape)} nor that in MXFP4 or FP8 with its scale",
                "glmquant adds shards and rewrites none: take this tensor out, or start from a checkpoint without it.",
            )
    return missing


def _faithful(shape: tuple[int, ...], stored: TensorInfo | None, scale: TensorInfo | None) -> bool:
    """Whether what is stored has the form of a tensor of this shape: as it is, FP8, or packed."""
    if stored is None or stored.dtype in PLAIN:
        return stored is not None and stored.shape == shape
    if scale is None or len(shape) != 2:
        return False
    if stored.dtype == FP8:
        return stored.shape == shape
    rows, columns = shape
    packed = (stored.dtype, stored.shape) in (("U8", (rows, columns // 2)), ("I8", (rows, columns // 2)))
    return packed and (scale.dtype, scale.shape) == ("U8", (rows, columns // planner.BLOCK))


def _packed_groups(donor: Donor, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Groups that a recipe may quantize in the MTP layer, and that are MXFP4 in all of the checkpoint's main layers."""
    architecture = donor.architecture
    allowed = {
        rule.group for recipe in architecture.recipes.values() for rule in recipe.rules if rule.layers in ("mtp", "all")
    }
    kinds: dict[str, set[str]] = {}
    for name, kind in stored_formats(tensors, architecture.lookups).items():
        module = architecture.module(name, donor.layers)
        if not module.is_mtp:
            kinds.setdefault(module.group, set()).add(kind)
    found = frozenset(group for group in allowed if kinds.get(group) == {"mxfp4"})
    if not found:
        raise RecipeError(
            f"--quantized: none of {', '.join(sorted(allowed)) or 'its groups'} is MXFP4 in all main layers of CKPT",
            "Leave --quantized out: the MTP layer is then stored as SRC has it.",
        )
    return found


def _lay_out(donor: Donor, names: Sequence[str], packed: frozenset[str], stem: str) -> tuple[planner.ShardPlan, ...]:
    fates: list[planner.Fate] = []
    for name in names:
        tensor, module = donor.offers[name], donor.architecture.module(module_name(name), donor.layers)
        quantize = name.endswith(".weight") and module.group in packed
        if quantize:
            planner.check_quantizable(tensor, donor.architecture)
        fates += planner.fates_of(tensor, module, quantize, {})
    packs = planner.pack(fates, SHARD_SIZE)
    files = [f"{stem}-{n:05}-of-{len(packs):05}.safetensors" for n in range(1, len(packs) + 1)]
    return tuple(planner.lay_out(file, METADATA, pack) for file, pack in zip(files, packs, strict=True))


def _index(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], parameters: int) -> dict[str, Any]:
    """The index for these tensors: its other metadata and its order are kept."""
    old: dict[str, Any] = read_json(checkpoint.folder / INDEX) if checkpoint.weight_map is not None else {}
    names = [name for name in checkpoint.weight_map or {} if name in tensors]
    in_order = names == sorted(names)
    names += sorted(tensors.keys() - set(names))
    given = old.get("metadata")
    metadata = {**(given if isinstance(given, dict) else {})}
    metadata["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    if type(count := metadata.get("total_parameters")) is int:  # transformers 5 writes it
        metadata["total_parameters"] = count + parameters
    weight_map = {name: tensors[name].shard for name in (sorted(names) if in_order else names)}
    return {**old, "metadata": metadata, "weight_map": weight_map}


def _declare(donor: Donor, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Declare the MTP layers in CKPT's config as the donor's does; returns key -> (before, after).

    Besides their number: keys that speak of them and are missing, and lists with an item a layer that were cut to the
    main layers.
    """
    keys = donor.architecture.keys
    theirs, ours = keys.of(donor.checkpoint.config), keys.of(config)
    assert isinstance(ours, dict)
    count, mtp = donor.layers.count, len(donor.layers.mtp)
    changes = {}
    for key, value in theirs.items():
        mine = ours.get(key)
        cut = isinstance(value, list) and len(value) == count + mtp and mine == value[:count]
        lost = key not in ours and re.search("nextn|mtp", key)
        if cut or lost or (key == keys.mtp and mine != value):
            changes[key] = (mine, value)
            ours[key] = value
    return changes


def _list(
    checkpoint: Checkpoint, targets: Sequence[Target], form: str
) -> tuple[ExclusionList | None, tuple[str, ...], bool]:
    """The list for what will be stored, the one that is there, and whether that one loads on every target."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None:
        return None, (), True
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "quark":
        raise CheckpointError(
            f"{CONFIG}: quantization_config.quant_method is {short(method)}, not 'quark'",
            "glmquant writes exclude lists of AMD Quark's format only.",
        )
    found = list_for(checkpoint, targets, form)
    listed = quantization.get("exclude")
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        return found, (), False
    loads = all(evaluate(target, listed, found.stored).loads for target in found.targets)
    return found, tuple(listed), loads

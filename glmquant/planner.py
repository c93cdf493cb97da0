"""Headers + recipe -> Plan: every output tensor's fate, dtype, shape and byte range, before any weight is read.

Pure and torch-free. `glmquant plan` prints it, `quantize` executes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from glmquant.checkpoint.formats import BLOCK_FP8, FP8_BLOCK, is_linear_weight, module_name
from glmquant.checkpoint.header import TensorInfo, encode_header, layout_order, tensor_nbytes
from glmquant.checkpoint.layers import LayerKeys, Layers
from glmquant.checkpoint.source import SINGLE, Checkpoint
from glmquant.checkpoint.weights import FP8, Fp8Weight, KeptScale, as_copies, offered, plain_dtype, shards_of
from glmquant.engines.block_fp8 import Dropped, keepable, layer_keys, names_read, unreadable
from glmquant.engines.model import Fp8Layers
from glmquant.engines.targets import ENGINES, Target, span
from glmquant.errors import CheckpointError, RecipeError
from glmquant.mxfp4.config import quantization_config
from glmquant.recipe import Architecture, Module, Recipe

BLOCK = 32
"""Elements along in_features that share one E8M0 scale (OCP MX v1.0, section 5.2)."""


Fate = tuple[TensorInfo, Module, bool]
"""A source tensor, its module, and whether it is quantized."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the output shard; `start` and `end` are absolute byte offsets in the output file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One source tensor and what becomes of it: itself (FP8 as bf16), or a packed weight and its scale.

    A weight that stays FP8, and its scale, are two tensors that are copied.
    """

    source: TensorInfo
    module: Module
    outputs: tuple[OutputTensor, ...]

    @property
    def quantized(self) -> bool:
        return len(self.outputs) == 2

    @property
    def copied(self) -> bool:
        """Whether its bytes are the source's."""
        return not self.quantized and not isinstance(self.source, Fp8Weight)

    @property
    def nbytes_out(self) -> int:
        return sum(out.end - out.start for out in self.outputs)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard: its file name, header bytes, jobs in source order, and exact size."""

    file: str
    header: bytes
    jobs: tuple[TensorJob, ...]
    file_size: int

    @property
    def sources(self) -> frozenset[str]:
        """The source shards that it is made from."""
        return frozenset(file for job in self.jobs for file in shards_of(job.source))


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A line of the plan's table: the tensors of one group that share input and output dtype."""

    group: str
    tensors: int
    parameters: int
    bytes_in: int
    bytes_out: int
    dtype_in: str
    dtype_out: str


@dataclass(frozen=True)
class Plan:
    """What quantizing a checkpoint with a recipe will write, to the byte.

    Attributes:
        bf16: FP8 modules that become bf16 although FP8 is to be kept, and why.
    """

    recipe: Recipe
    architecture: Architecture
    layers: Layers
    shards: tuple[ShardPlan, ...]
    bf16: Mapping[str, Dropped] = field(default_factory=dict)

    @cached_property
    def jobs(self) -> tuple[TensorJob, ...]:
        return tuple(job for shard in self.shards for job in shard.jobs)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Output tensor name -> shard file, sorted by name."""
        pairs = ((out.name, shard.file) for shard in self.shards for job in shard.jobs for out in job.outputs)
        return dict(sorted(pairs))

    @cached_property
    def total_size(self) -> int:
        """Sum of the output tensors' bytes: the index's metadata.total_size."""
        return sum(row.bytes_out for row in self._groups)

    @property
    def bytes_in(self) -> int:
        return sum(row.bytes_in for row in self._groups)

    @property
    def disk_needed(self) -> int:
        """Bytes of all output shards, headers included; side files and index are not in it."""
        return sum(shard.file_size for shard in self.shards)

    @cached_property
    def formats(self) -> dict[str, str]:
        """Linear modules -> how their weight will be stored: `mxfp4`, `plain`, or `fp8` (as the source has it)."""
        return {
            job.module.name: "mxfp4" if job.quantized else BLOCK_FP8 if job.outputs[0].dtype == FP8 else "plain"
            for job in self.jobs
            if is_linear_weight(job.source.name, len(job.source.shape), self.architecture.lookups)
        }

    @cached_property
    def fp8_keys(self) -> list[str]:
        """Keys of layer_quant_config that find the modules that stay FP8."""
        return layer_keys(self.formats, self.layers)

    @cached_property
    def fp8(self) -> Fp8Layers | None:
        """What the output will say and hold of modules that stay FP8, if any do."""
        if not self.fp8_keys:
            return None
        said = quantization_config([], "", self.fp8_keys)
        ends = (job.source.stored_as.rpartition(".") for job in self.jobs if isinstance(job.source, KeptScale))
        scales = {module: name for module, _, name in ends}
        return Fp8Layers(said["layer_quant_config"], said["global_quant_config"], scales)

    def groups(self) -> list[GroupRow]:
        """Totals per group; everything of the MTP layer is in group `mtp`."""
        return self._groups

    @cached_property
    def _groups(self) -> list[GroupRow]:
        members: dict[tuple[str, str, str], list[TensorJob]] = {}
        for job in self.jobs:
            group = "mtp" if job.module.is_mtp else job.module.group
            dtype_out = "MXFP4" if job.quantized else job.outputs[0].dtype
            members.setdefault((group, job.source.dtype, dtype_out), []).append(job)
        order = [*(group.name for group in self.architecture.groups), "mtp", "other"]
        rows = [
            GroupRow(
                group,
                sum(len(job.outputs) for job in jobs),
                sum(job.source.numel for job in jobs),
                sum(job.source.nbytes for job in jobs),
                sum(job.nbytes_out for job in jobs),
                dtype_in,
                dtype_out,
            )
            for (group, dtype_in, dtype_out), jobs in members.items()
        ]
        return sorted(rows, key=lambda r: (order.index(r.group), r.dtype_out != "MXFP4", r.dtype_out))


def make_plan(
    checkpoint: Checkpoint,
    architecture: Architecture,
    recipe: Recipe,
    layers: Layers,
    max_shard_size: int | None = None,
    keep_fp8: Sequence[Target] | None = None,
) -> Plan:
    """Lay out every output shard.

    Output shard k holds what source shard k held, in the order the reference safetensors writer uses (widest
    dtype first, then name), so that every tensor stays aligned. With `max_shard_size` shards are packed anew, layer by
    layer, to at most so many bytes of tensors (or one tensor that is larger). With `keep_fp8` un-quantized modules of a
    block-scaled FP8 source stay FP8 where all of these targets read that; else they become bf16.

    Raises:
        CheckpointError: a weight to be quantized has in_features that are no multiple of 32, or the MTP layer
            that config.json declares is absent, or a layer is there that it does not declare.
        RecipeError: an override matches nothing or a tensor that cannot be quantized, the combination is one
            that the architecture file refuses, or no module can stay FP8 for all targets.
    """
    parts = offered(checkpoint)
    tensors = {tensor.name: tensor for shard in parts.values() for tensor in shard}
    modules = {name: architecture.module(module_name(name), layers) for name in tensors}
    _check_mtp(tensors, layers, modules, architecture.keys)
    _check_overrides(recipe, modules)
    packed = {name for name, module in modules.items() if name.endswith(".weight") and recipe.quantizes(module)}
    kept, bf16 = _keep_fp8(tensors, packed, architecture, layers, keep_fp8) if keep_fp8 is not None else ({}, {})
    shards, all_fates = [], []
    for header in checkpoint.shards:
        fates = []
        for tensor in parts[header.file]:
            if tensor.name in packed:
                check_quantizable(tensor, architecture)
            fates += fates_of(tensor, modules[tensor.name], tensor.name in packed, kept)
        all_fates += fates
        if max_shard_size is None:
            shards.append(lay_out(header.file, header.metadata, fates))
    if max_shard_size is not None:
        metadata = checkpoint.shards[0].metadata if checkpoint.shards else {}
        packs = pack(all_fates, max_shard_size)
        names = [f"model-{n:05}-of-{len(packs):05}.safetensors" for n in range(1, len(packs) + 1)]
        names = names if len(packs) > 1 else [SINGLE]
        shards = [lay_out(name, metadata, fates) for name, fates in zip(names, packs, strict=True)]
    plan = Plan(recipe, architecture, layers, tuple(shards), bf16)
    if not any(job.quantized for job in plan.jobs):
        raise RecipeError(f"recipe {recipe.name!r} quantizes nothing in this checkpoint")
    _check_refusals(plan)
    return plan


def _keep_fp8(
    tensors: Mapping[str, TensorInfo],
    packed: Collection[str],
    architecture: Architecture,
    layers: Layers,
    targets: Sequence[Target],
) -> tuple[dict[str, str], dict[str, Dropped]]:
    """Weight that stays FP8 -> the name that its scale gets; and the modules that do not."""
    fp8 = [t for name, t in tensors.items() if isinstance(t, Fp8Weight) and name not in packed]
    if not fp8:
        raise RecipeError(
            "--keep-fp8: no un-quantized weight of this source is block-scaled FP8",
            "Leave the option out: what is not quantized is copied.",
        )
    if blocks := {t.block for t in fp8} - {FP8_BLOCK}:
        raise RecipeError(
            f"--keep-fp8: the source's blocks are {list(blocks.pop())}; engines read {list(FP8_BLOCK)} beside MXFP4",
            "Leave the option out: un-quantized modules become bf16.",
        )
    shapes = {module_name(t.name): (t.shape[0], t.shape[1]) for t in fp8}
    linears = [
        module_name(name) for name, t in tensors.items() if is_linear_weight(name, len(t.shape), architecture.lookups)
    ]
    kept, dropped = keepable(shapes, linears, layers, targets)
    if not kept:
        raise _cannot_keep(layers, targets)
    return {f"{module}.weight": f"{module}.{scale}" for module, scale in kept.items()}, dropped


def _cannot_keep(layers: Layers, targets: Sequence[Target]) -> RecipeError:
    """Who reads what, and which targets there are that read the same."""
    blind: dict[str, list[Target]] = {}
    named: dict[str, list[Target]] = {}
    for target in targets:
        where = (target.engine, target.release, layers)
        if names := names_read(*where):
            named.setdefault(" or ".join(names), []).append(target)
        else:
            blind.setdefault(unreadable(*where), []).append(target)
    what = [f"{span(found)} cannot read block-scaled FP8 beside MXFP4 ({why})" for why, found in blind.items()]
    what += [f"{span(found)} reads its scales as {name}" for name, found in named.items()] if len(named) > 1 else []
    loading = []
    for engine in ENGINES.values():
        if readers := [release for release in engine.releases() if names_read(engine.name, release, layers)]:
            old = readers[0] == engine.releases()[0]
            loading.append(f"--targets {engine.name}" if old else f"--targets '{engine.name}>={readers[0]}'")
    hint = f"Leave it out (un-quantized modules become bf16), or choose {', or '.join(loading)}."
    return RecipeError(f"--keep-fp8: no module can stay FP8 for all targets: {'; '.join(what)}", hint)


def fates_of(tensor: TensorInfo, module: Module, packed: bool, kept: Mapping[str, str]) -> list[Fate]:
    """What becomes of a source tensor; `kept` are FP8 weights that stay so -> the name that their scale gets."""
    if not (isinstance(tensor, Fp8Weight) and tensor.name in kept):
        return [(tensor, module, packed)]
    return [(part, module, False) for part in as_copies(tensor, kept[tensor.name])]


def pack(fates: list[Fate], limit: int) -> list[list[Fate]]:
    """Layer by layer (what is in none comes first), in the source's order; a weight and its scale stay together."""
    together: list[list[Fate]] = []
    for fate in sorted(fates, key=lambda fate: -1 if fate[1].layer is None else fate[1].layer):
        if isinstance(fate[0], KeptScale):
            together[-1].append(fate)
        else:
            together.append([fate])
    packs: list[list[Fate]] = []
    filled = 0
    for group in together:
        size = sum(tensor_nbytes(dtype, shape) for fate in group for _, dtype, shape in _outputs(fate))
        if not packs or filled + size > limit:
            packs.append([])
            filled = 0
        packs[-1] += group
        filled += size
    return packs


def _outputs(fate: Fate) -> list[tuple[str, str, tuple[int, ...]]]:
    tensor, _, packed = fate
    if not packed:
        name = tensor.stored_as if isinstance(tensor, KeptScale) else tensor.name
        return [(name, plain_dtype(tensor), tensor.shape)]
    out_features, in_features = tensor.shape
    return [
        (tensor.name, "U8", (out_features, in_features // 2)),
        (tensor.name + "_scale", "U8", (out_features, in_features // BLOCK)),
    ]


def lay_out(file: str, metadata: dict[str, str], fates: list[Fate]) -> ShardPlan:
    """A shard in the reference writer's order: its header, and every output byte's place."""
    rows = [row for fate in fates for row in _outputs(fate)]
    position, placed = 0, {}
    header_rows = []
    for name, dtype, shape in sorted(rows, key=lambda row: layout_order(row[1], row[0])):
        end = position + tensor_nbytes(dtype, shape)
        header_rows.append((name, dtype, shape, position, end))
        placed[name] = (dtype, shape, position, end)
        position = end
    header = encode_header(header_rows, metadata)

    def output(name: str) -> OutputTensor:
        dtype, shape, begin, end = placed[name]
        return OutputTensor(name, dtype, shape, len(header) + begin, len(header) + end)

    jobs = tuple(TensorJob(fate[0], fate[1], tuple(output(name) for name, _, _ in _outputs(fate))) for fate in fates)
    return ShardPlan(file, header, jobs, len(header) + position)


def check_quantizable(tensor: TensorInfo, architecture: Architecture) -> None:
    """Refuse what has no MXFP4 form.

    Raises:
        RecipeError: an embedding.
        CheckpointError: not 2-D, or rows that do not divide into blocks.
    """
    where = f"{tensor.shard}: tensor {tensor.name!r}"
    if module_name(tensor.name) in architecture.lookups:
        raise RecipeError(f"{where} is looked up by row, not multiplied: no engine reads it packed", "Leave it out.")
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{where} has shape {list(tensor.shape)}; MXFP4 here needs a 2-D weight")
    if tensor.shape[1] % BLOCK or not tensor.numel:
        raise CheckpointError(
            f"{where} has in_features {tensor.shape[1]}, not a multiple of {BLOCK} (the MXFP4 block)",
            "Leave it out with --keep.",
        )


def _check_mtp(
    tensors: Mapping[str, TensorInfo], layers: Layers, modules: Mapping[str, Module], keys: LayerKeys
) -> None:
    present = {module.layer for module in modules.values() if module.is_mtp}
    for layer in layers.mtp:
        if layer not in present:
            raise CheckpointError(
                f"config.json declares an MTP layer ({keys.mtp} {len(layers.mtp)}), but no tensor of "
                f"layer {layer} is in the checkpoint: speculative decoding would draft with random weights",
                "Fetch the shards with the MTP layer; loading and saving with transformers drops it.",
            )
    for name, module in modules.items():
        if module.is_mtp and module.layer not in layers.mtp:
            raise CheckpointError(
                f"{tensors[name].shard}: tensor {name!r} belongs to layer {module.layer}, but config.json "
                f"declares {layers.count} layers" + (f" and {keys.mtp} {len(layers.mtp)}" if keys.mtp else ""),
                f"Set {keys.mtp} to the number of MTP layers."
                if keys.mtp
                else f"Set {keys.layers} to the number of layers; this model type has no MTP layer.",
            )


def _check_overrides(recipe: Recipe, modules: Mapping[str, Module]) -> None:
    for override in recipe.overrides:
        if not any(override.matches(m.name) for name, m in modules.items() if name.endswith(".weight")):
            raise RecipeError(
                f"{override}: matches no module of this checkpoint",
                "Patterns are globs over module names such as 'model.layers.3.mlp.*', or 're:' and a regex.",
            )


def _check_refusals(plan: Plan) -> None:
    present: dict[str, set[str]] = {}
    for job in plan.jobs:
        key = f"{job.module.group}.{'mtp' if job.module.is_mtp else 'main'}"
        present.setdefault(key, set()).add("mxfp4" if job.quantized else "plain")
    for refusal in plan.architecture.refusals:
        if all(wanted in present.get(key, set()) for key, wanted in refusal.when.items()):
            what = ", ".join(f"{key} {wanted}" for key, wanted in refusal.when.items())
            raise RecipeError(
                f"recipe {plan.recipe.name!r} is refused ({what}): {refusal.reason}",
                f"Instead: {refusal.instead}.",
            )

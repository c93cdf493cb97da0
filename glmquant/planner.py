"""Headers + recipe -> Plan: every output tensor's fate, dtype, shape and byte range, before any weight is read.

Pure and torch-free. `glmquant plan` prints it, `quantize` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from glmquant.checkpoint.formats import is_linear_weight, module_name
from glmquant.checkpoint.header import TensorInfo, encode_header, layout_order, tensor_nbytes
from glmquant.checkpoint.layers import Layers
from glmquant.checkpoint.source import SINGLE, Checkpoint
from glmquant.checkpoint.weights import Fp8Weight, offered, plain_dtype, shards_of
from glmquant.errors import CheckpointError, RecipeError
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
    """One source tensor and what becomes of it: itself (FP8 as bf16), or a packed weight and its scale."""

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
    """What quantizing a checkpoint with a recipe will write, to the byte."""

    recipe: Recipe
    architecture: Architecture
    layers: Layers
    shards: tuple[ShardPlan, ...]

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
        return sum(job.nbytes_out for job in self.jobs)

    @property
    def bytes_in(self) -> int:
        return sum(job.source.nbytes for job in self.jobs)

    @property
    def disk_needed(self) -> int:
        """Bytes of all output shards, headers included; side files and index are not in it."""
        return sum(shard.file_size for shard in self.shards)

    @cached_property
    def formats(self) -> dict[str, str]:
        """Linear modules -> how their weight will be stored: `mxfp4` or `plain`."""
        return {
            job.module.name: "mxfp4" if job.quantized else "plain"
            for job in self.jobs
            if is_linear_weight(job.source.name, len(job.source.shape), self.architecture.lookups)
        }

    def groups(self) -> list[GroupRow]:
        """Totals per group; everything of the MTP layer is in group `mtp`."""
        sums: dict[tuple[str, str, str], list[int]] = {}
        for job in self.jobs:
            group = "mtp" if job.module.is_mtp else job.module.group
            dtype_out = "MXFP4" if job.quantized else job.outputs[0].dtype
            row = sums.setdefault((group, job.source.dtype, dtype_out), [0, 0, 0, 0])
            for i, add in enumerate((len(job.outputs), job.source.numel, job.source.nbytes, job.nbytes_out)):
                row[i] += add
        order = [*(group.name for group in self.architecture.groups), "mtp", "other"]
        rows = [
            GroupRow(g, count, numel, size_in, size_out, dtype_in, dtype_out)
            for (g, dtype_in, dtype_out), (count, numel, size_in, size_out) in sums.items()
        ]
        return sorted(rows, key=lambda r: (order.index(r.group), r.dtype_out != "MXFP4", r.dtype_out))


def make_plan(
    checkpoint: Checkpoint,
    architecture: Architecture,
    recipe: Recipe,
    layers: Layers,
    max_shard_size: int | None = None,
) -> Plan:
    """Lay out every output shard.

    Output shard k holds what source shard k held, in the order the reference safetensors writer uses (widest
    dtype first, then name), so that every tensor stays aligned. With `max_shard_size` shards are packed anew, layer by
    layer, to at most so many bytes of tensors (or one tensor that is larger).

    Raises:
        CheckpointError: a weight to be quantized has in_features that are no multiple of 32, or the MTP layer
            that config.json declares is absent (or the reverse).
        RecipeError: an override matches nothing or a tensor that cannot be quantized, or the combination is one
            that the architecture file refuses.
    """
    parts = offered(checkpoint)
    tensors = {tensor.name: tensor for shard in parts.values() for tensor in shard}
    modules = {name: architecture.module(module_name(name), layers) for name in tensors}
    _check_mtp(tensors, layers, modules)
    _check_overrides(recipe, modules)
    shards, all_fates = [], []
    for header in checkpoint.shards:
        fates = []
        for tensor in parts[header.file]:
            module = modules[tensor.name]
            packed = tensor.name.endswith(".weight") and recipe.quantizes(module)
            if packed:
                _check_quantizable(tensor, architecture)
            fates.append((tensor, module, packed))
        all_fates += fates
        if max_shard_size is None:
            shards.append(_lay_out(header.file, header.metadata, fates))
    if max_shard_size is not None:
        metadata = checkpoint.shards[0].metadata if checkpoint.shards else {}
        packs = _pack(all_fates, max_shard_size)
        names = [f"model-{n:05}-of-{len(packs):05}.safetensors" for n in range(1, len(packs) + 1)]
        names = names if len(packs) > 1 else [SINGLE]
        shards = [_lay_out(name, metadata, pack) for name, pack in zip(names, packs, strict=True)]
    plan = Plan(recipe, architecture, layers, tuple(shards))
    if not any(job.quantized for job in plan.jobs):
        raise RecipeError(f"recipe {recipe.name!r} quantizes nothing in this checkpoint")
    _check_refusals(plan)
    return plan


def _pack(fates: list[Fate], limit: int) -> list[list[Fate]]:
    """Layer by layer (what is in none comes first), in the source's order; a weight and its scale stay together."""
    packs: list[list[Fate]] = []
    filled = 0
    for fate in sorted(fates, key=lambda fate: -1 if fate[1].layer is None else fate[1].layer):
        size = sum(tensor_nbytes(dtype, shape) for _, dtype, shape in _outputs(fate))
        if not packs or filled + size > limit:
            packs.append([])
            filled = 0
        packs[-1].append(fate)
        filled += size
    return packs


def _outputs(fate: Fate) -> list[tuple[str, str, tuple[int, ...]]]:
    tensor, _, packed = fate
    if not packed:
        return [(tensor.name, plain_dtype(tensor), tensor.shape)]
    out_features, in_features = tensor.shape
    return [
        (tensor.name, "U8", (out_features, in_features // 2)),
        (tensor.name + "_scale", "U8", (out_features, in_features // BLOCK)),
    ]


def _lay_out(file: str, metadata: dict[str, str], fates: list[Fate]) -> ShardPlan:
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

    jobs = tuple(
        TensorJob(
            tensor,
            module,
            (output(tensor.name), output(tensor.name + "_scale")) if packed else (output(tensor.name),),
        )
        for tensor, module, packed in fates
    )
    return ShardPlan(file, header, jobs, len(header) + position)


def _check_quantizable(tensor: TensorInfo, architecture: Architecture) -> None:
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


def _check_mtp(tensors: Mapping[str, TensorInfo], layers: Layers, modules: Mapping[str, Module]) -> None:
    present = {module.layer for module in modules.values() if module.is_mtp}
    for layer in layers.mtp:
        if layer not in present:
            raise CheckpointError(
                f"config.json declares an MTP layer (num_nextn_predict_layers {len(layers.mtp)}), but no tensor of "
                f"layer {layer} is in the checkpoint: speculative decoding would draft with random weights",
                "Fetch the shards with the MTP layer; loading and saving with transformers drops it.",
            )
    for name, module in modules.items():
        if module.is_mtp and module.layer not in layers.mtp:
            raise CheckpointError(
                f"{tensors[name].shard}: tensor {name!r} belongs to layer {module.layer}, but config.json "
                f"declares {layers.count} layers and num_nextn_predict_layers {len(layers.mtp)}",
                "Set num_nextn_predict_layers to the number of MTP layers.",
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

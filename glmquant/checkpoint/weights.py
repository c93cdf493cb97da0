"""What a source offers to quantize: its tensors, with fused experts taken apart and FP8 weights with their scales.

Everything is a byte range of a shard, so nothing has to be read to plan with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.source import Checkpoint, ShardReader
from glmquant.errors import CheckpointError

FP8 = "F8_E4M3"
SCALE_INV = "_scale_inv"
# transformers 5 keeps a layer's experts in two 3-D parameters: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]
# (conversion_mapping.py, "qwen2_moe"; no ".weight" at the end of the name).
_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Fp8Weight(TensorInfo):
    """A block-scaled FP8 weight.

    Attributes:
        scale: its float32 scales, one a block; maybe in another shard.
        block: rows and columns of a block; the last ones may be ragged.
    """

    scale: TensorInfo
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class KeptScale(TensorInfo):
    """The scale of a weight that stays FP8: float32, one a block.

    Attributes:
        stored_as: its name in the output.
    """

    stored_as: str


def as_copies(weight: Fp8Weight, scale_name: str) -> tuple[TensorInfo, KeptScale]:
    """A weight that stays FP8 as two tensors to be copied, the scale under `scale_name`."""
    own = TensorInfo(weight.name, weight.dtype, weight.shape, weight.shard, weight.start, weight.end)
    scale = weight.scale
    where = (scale.name, scale.dtype, scale.shape, scale.shard, scale.start, scale.end)
    return own, KeptScale(*where, scale_name)


def shards_of(tensor: TensorInfo) -> tuple[str, ...]:
    """The shards that must be read for a tensor."""
    return (tensor.shard, tensor.scale.shard) if isinstance(tensor, Fp8Weight) else (tensor.shard,)


def plain_dtype(tensor: TensorInfo) -> str:
    """The dtype in which a tensor is quantized, or stored if it is not."""
    return "BF16" if isinstance(tensor, Fp8Weight) else tensor.dtype


def offered(checkpoint: Checkpoint) -> dict[str, tuple[TensorInfo, ...]]:
    """Shard -> what is in it, in the order of its bytes; scales of FP8 weights are with their weights.

    Raises:
        CheckpointError: an FP8 weight without scales of the right shape (or the reverse), fused experts whose layout
            does not follow from config.json, or a name that is there twice, fused and not.
    """
    block = _block(checkpoint.config)
    found: dict[str, tuple[TensorInfo, ...]] = {}
    names: set[str] = set()
    for header in checkpoint.shards:
        parts: list[TensorInfo] = []
        for tensor in header.tensors:
            if tensor.name.endswith(SCALE_INV):
                _check_owner(tensor, checkpoint.tensors)
            else:
                parts += _parts(tensor, checkpoint, block)
        for part in parts:
            if part.name in names:
                raise CheckpointError(
                    f"{part.shard}: tensor {part.name!r} is there twice, as itself and inside a fused one",
                    "Remove one of the two.",
                )
            names.add(part.name)
        found[header.file] = tuple(parts)
    return found


def _parts(tensor: TensorInfo, checkpoint: Checkpoint, block: tuple[int, int]) -> Iterator[TensorInfo]:
    fused = _FUSED.fullmatch(tensor.name)
    if fused and len(tensor.shape) == 3:
        yield from _unfused(tensor, fused["experts"], fused["kind"], checkpoint)
        return
    if tensor.dtype == FP8:
        scale = _scale_of(tensor, checkpoint.tensors, block)
        where = (tensor.name, tensor.dtype, tensor.shape, tensor.shard, tensor.start, tensor.end)
        yield Fp8Weight(*where, scale, block)
    else:
        yield tensor


def _unfused(tensor: TensorInfo, experts: str, kind: str, checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """Row-major [E, rows, columns]: each expert's projection is one byte range."""
    where = f"{tensor.shard}: tensor {tensor.name!r}"
    if tensor.dtype == FP8:
        raise CheckpointError(f"{where} is FP8 and fused, which is not supported", "Start from the bf16 checkpoint.")
    count, rows, columns = tensor.shape
    # Only transformers writes such tensors; its models with an image part keep the sizes in text_config.
    nested = checkpoint.config.get("text_config")
    sizes = {**(nested if isinstance(nested, dict) else {}), **checkpoint.config}
    inner, hidden = (sizes.get(key) for key in ("moe_intermediate_size", "hidden_size"))
    expected = {"gate_up_proj": (2 * (inner or 0), hidden), "down_proj": (hidden, inner)}
    if (rows, columns) != expected[kind]:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}; with hidden_size {hidden} and moe_intermediate_size {inner} it "
            f"should be [experts, {expected[kind][0]}, {expected[kind][1]}], as transformers 5 saves it",
            "Transposed layouts are not supported: save it again with transformers 5.",
        )
    if _square(expected, checkpoint.tensors, experts):
        raise CheckpointError(
            f"{where} is square, and nothing in its layer tells whether it is stored transposed",
            "Split the experts into one tensor each before quantizing.",
        )
    parts = _PARTS[kind]
    size = tensor.nbytes // count // len(parts)
    for expert in range(count):
        for i, part in enumerate(parts):
            start = tensor.start + (expert * len(parts) + i) * size
            name = f"{experts}.{expert}.{part}.weight"
            yield TensorInfo(name, tensor.dtype, (rows // len(parts), columns), tensor.shard, start, start + size)


def _square(expected: Mapping[str, tuple[Any, Any]], tensors: Mapping[str, TensorInfo], experts: str) -> bool:
    """Whether no fused tensor of these experts has a shape that only one orientation explains."""
    present = [kind for kind in expected if f"{experts}.{kind}" in tensors]
    return all(expected[kind][0] == expected[kind][1] for kind in present)


def _scale_of(tensor: TensorInfo, tensors: Mapping[str, TensorInfo], block: tuple[int, int]) -> TensorInfo:
    where = f"{tensor.shard}: tensor {tensor.name!r}"
    scale = tensors.get(tensor.name + SCALE_INV)
    if scale is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{where} is FP8 without {tensor.name + SCALE_INV!r}", "Fetch the missing shard.")
    wanted = tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=True))
    if scale.dtype != "F32" or scale.shape != wanted:
        raise CheckpointError(
            f"{scale.shard}: tensor {scale.name!r} is {scale.dtype} {list(scale.shape)}; "
            f"{list(tensor.shape)} in blocks of {list(block)} needs F32 {list(wanted)}"
        )
    return scale


def _check_owner(scale: TensorInfo, tensors: Mapping[str, TensorInfo]) -> None:
    owner = tensors.get(scale.name.removesuffix(SCALE_INV))
    if owner is None or owner.dtype != FP8:
        raise CheckpointError(
            f"{scale.shard}: tensor {scale.name!r} has no FP8 weight", "Fetch the missing shard, or remove it."
        )


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """weight_block_size of an FP8 source; (128, 128) where it is not said.

    Raises:
        CheckpointError: it is no pair of sizes.
    """
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if size is None:
        return 128, 128
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise CheckpointError(f"config.json: weight_block_size is {size!r}, two sizes are needed")
    return size[0], size[1]


Dequantize = Callable[[memoryview, int, Any, int, tuple[int, int], memoryview], int]
"""checkpoint.fp8.dequantize_into, or what gives the same."""


class WeightReader:
    """Reads rows of one 2-D weight as bf16, f16 or f32, whatever its format on disk.

    Args:
        readers: of the shards in `shards_of(tensor)`.
        dequantize: what turns FP8 into bf16: mxfp4.kernel.dequantize_into, or by default checkpoint/fp8.py, ten times
            slower, with the same bits.

    Attributes:
        dtype: of what `read_into` gives.
        row_bytes: of one row of that.

    Raises:
        CheckpointError: the scales of an FP8 weight cannot be read.
    """

    def __init__(
        self, readers: Mapping[str, ShardReader], tensor: TensorInfo, dequantize: Dequantize | None = None
    ) -> None:
        self._dequantize = dequantize
        self._reader, self._tensor = readers[tensor.shard], tensor
        self._columns, self._stored = tensor.shape[1], tensor.nbytes // tensor.shape[0]
        self.dtype, self.row_bytes = plain_dtype(tensor), self._stored
        self._fp8: Fp8Weight | None = None
        if isinstance(tensor, Fp8Weight):
            import numpy as np

            self._fp8, self.row_bytes = tensor, 2 * self._columns
            scale, content = tensor.scale, memoryview(bytearray(tensor.scale.nbytes))
            readers[scale.shard].read_into(content, scale.start)
            self._scales = np.frombuffer(content, "<f4").reshape(scale.shape)

    def read_into(self, out: memoryview, first_row: int) -> int:
        """Fill `out` with rows from `first_row` on; the flat index of a NaN or Inf if one was seen, else -1.

        Raises:
            CheckpointError: as of ShardReader.
        """
        offset = self._tensor.start + first_row * self._stored
        if self._fp8 is None:
            self._reader.read_into(out, offset)
            return -1
        content = memoryview(bytearray(len(out) // 2))
        self._reader.read_into(content, offset)
        if self._dequantize is None:
            from glmquant.checkpoint.fp8 import dequantize_into as plain

            self._dequantize = plain
        return self._dequantize(content, self._columns, self._scales, first_row, self._fp8.block, out)

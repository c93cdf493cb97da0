"""One row a tensor: what a checkpoint stores, how its MXFP4 codes lie, and how far they are from the source.

A packed weight and its `_scale` are one row. What is read is a sample: see `choose`.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from glmquant.checkpoint.formats import module_name
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.source import Checkpoint, ShardReader
from glmquant.checkpoint.weights import WeightReader, offered, shards_of
from glmquant.errors import CheckpointError, GlmquantError
from glmquant.mxfp4.error import WeightError, weight_error
from glmquant.recipe import Architecture, Module, load_architecture

MXFP4 = "MXFP4"
SCALE = "_scale"
BLOCK = 32  # elements that share a scale (OCP MX v1.0, section 5.2); format.py has it too, but imports numpy
# Weights that a default run looks at, in elements: decoding and comparing does 10 to 40 million a second and core,
# counting codes alone 50 times as many.
COMPARED, COUNTED = 5_000_000_000, 50_000_000_000
_CHUNK = 500_000  # elements at once: 20 MB a thread while they are compared
# A header can promise, over a hole, a weight that takes for ever; GLM-5.2's largest is lm_head with 0.95 G elements.
_MOST_COLUMNS, _MOST_ELEMENTS = 1_000_000, 4_000_000_000

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Codes:
    """How the blocks of one weight, or of several, are filled.

    Attributes:
        scales: blocks by E8M0 byte (256 counts), blocks of zeros left out: their byte says nothing.
        codes: elements by E2M1 code (16 counts); code 7 and 15 are +-6, the largest.
    """

    blocks: int = 0
    zero_blocks: int = 0
    scales: tuple[int, ...] = (0,) * 256
    codes: tuple[int, ...] = (0,) * 16

    def __add__(self, other: Codes) -> Codes:
        return Codes(
            self.blocks + other.blocks,
            self.zero_blocks + other.zero_blocks,
            tuple(map(add, self.scales, other.scales)),
            tuple(map(add, self.codes, other.codes)),
        )

    @property
    def zero_share(self) -> float:
        """Of the blocks."""
        return self.zero_blocks / self.blocks if self.blocks else 0.0

    @property
    def saturated_share(self) -> float:
        """Of the elements: those at the largest magnitude, 6 times the scale."""
        return (self.codes[7] + self.codes[15]) / (self.blocks * BLOCK) if self.blocks else 0.0

    @property
    def scale_range(self) -> tuple[int, int] | None:
        """Smallest and largest E8M0 byte."""
        used = [byte for byte, count in enumerate(self.scales) if count]
        return (used[0], used[-1]) if used else None


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the checkpoint.

    Attributes:
        module: with its group and layer.
        format: `MXFP4`, or the dtype in the header.
        shape: of the weight that a packed tensor stands for, [out_features, in_features].
        nbytes: its scale included.
        codes, error: of a sampled weight; `error` needs a source.
        note: why it could not be read or compared, or ''.
    """

    name: str
    module: Module
    format: str
    shape: tuple[int, ...]
    nbytes: int
    shard: str
    codes: Codes | None = None
    error: WeightError | None = None
    note: str = ""

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def projection(self) -> str:
        """`gate_proj` of `model.layers.3.mlp.experts.7.gate_proj`; '' outside the groups that are known."""
        return self.module.name.rpartition(".")[2] if self.module.group != "other" else ""

    def as_json(self) -> dict[str, Any]:
        """A line of the JSONL. `sqnr_db` is null without noise: JSON has no infinity."""
        found: dict[str, Any] = {
            "name": self.name,
            "group": self.module.group,
            "layer": self.module.layer,
            "mtp": self.module.is_mtp,
            "projection": self.projection,
            "format": self.format,
            "shape": list(self.shape),
            "bytes": self.nbytes,
            "shard": self.shard,
        }
        if self.codes:
            found["blocks"] = self.codes.blocks
            found["zero_block_share"] = self.codes.zero_share
            found["saturated_share"] = self.codes.saturated_share
            found["scale_range"] = self.codes.scale_range
        if self.error:
            finite = [float(x) if math.isfinite(x) else None for x in (self.error.signal, self.error.noise)]
            found["signal"], found["noise"] = finite
            found["sqnr_db"] = self.error.sqnr if math.isfinite(self.error.sqnr) else None
            found["worst_block"] = self.error.worst_block if math.isfinite(self.error.worst_block) else None
        if self.note:
            found["note"] = self.note
        return found


def inventory(checkpoint: Checkpoint) -> dict[str, list[Row]]:
    """Shard -> its rows, from headers alone; a scale belongs to its weight's row, wherever it is stored."""
    classify = _classifier(checkpoint.config)
    found: dict[str, list[Row]] = {}
    for header in checkpoint.shards:
        rows = found[header.file] = []
        for tensor in header.tensors:
            if checkpoint.tensors[tensor.name] is not tensor or _owner(tensor, checkpoint.tensors):
                continue
            module = classify(module_name(tensor.name))
            scale = _scale(tensor, checkpoint.tensors)
            if scale:
                shape = (tensor.shape[0], 2 * tensor.shape[1])
                size = tensor.nbytes + scale.nbytes
                rows.append(Row(tensor.name, module, MXFP4, shape, size, tensor.shard))
            else:
                rows.append(Row(tensor.name, module, tensor.dtype, tensor.shape, tensor.nbytes, tensor.shard))
    return found


def _classifier(config: Mapping[str, Any]) -> Callable[[str], Module]:
    try:
        architecture: Architecture = load_architecture(str(config.get("model_type", "")))
        layers: Layers = read_layers(config, architecture.keys)
    except GlmquantError:  # the validator says so; sizes can be shown all the same
        return lambda name: Module(name, "other", None, False)
    last = layers.count + len(layers.mtp)

    def classify(name: str) -> Module:
        module = architecture.module(name, layers)
        known = module.layer is None or module.layer < last
        return module if known else Module(name, "other", None, False)

    return classify


def _scale(tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The E8M0 scales of a packed weight; None if it is none, or they do not fit it."""
    scale = tensors.get(tensor.name + SCALE)
    if scale is None or tensor.dtype != "U8" or len(tensor.shape) != 2 or not tensor.numel:
        return None
    rows, packed = tensor.shape
    fits = packed % (BLOCK // 2) == 0 and scale.shape == (rows, packed * 2 // BLOCK)
    return scale if fits and scale.dtype in ("U8", "F8_E8M0") else None


def _owner(tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether this is the scale of a packed weight."""
    weight = tensors.get(tensor.name.removesuffix(SCALE)) if tensor.name.endswith(SCALE) else None
    return weight is not None and _scale(weight, tensors) is tensor


def choose(rows: Iterable[Row], sample: float) -> frozenset[str]:
    """Names of the packed weights to read: of each layer and projection this share, but at least one.

    Which ones depends on their names only, so two reports of one model look at the same weights.
    """
    places: dict[tuple[str, int | None, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.format == MXFP4:
            places[row.module.group, row.module.layer, row.projection].append(row.name)
    chosen = set()
    for names in places.values():
        names.sort(key=lambda name: (zlib.crc32(name.encode(errors="replace")), name))
        chosen.update(names[: math.ceil(sample * len(names))])
    return frozenset(chosen)


def default_sample(rows: Iterable[Row], compared: bool) -> float:
    """The share that a default run can afford: 1 for small checkpoints, under a hundredth for GLM-5.2 with a source."""
    elements = sum(row.parameters for row in rows if row.format == MXFP4)
    return min(1.0, (COMPARED if compared else COUNTED) / elements) if elements else 1.0


def measured(
    checkpoint: Checkpoint,
    source: Checkpoint | None,
    rows: Mapping[str, list[Row]],
    chosen: frozenset[str],
    threads: int,
    advance: Advance,
) -> Iterator[Row]:
    """The rows, shard by shard, those `chosen` with what their bytes say; a weight that cannot be read gets a note.

    Raises:
        CheckpointError: the source's fused or FP8 tensors do not fit together.
    """
    look = _Look(checkpoint, source, advance)
    with ThreadPoolExecutor(threads) as pool:
        for shard in rows.values():  # one shard's weights at a time: what waits is bounded
            found = pool.map(look.at, [row for row in shard if row.name in chosen])
            yield from (next(found) if row.name in chosen else row for row in shard)


class _Look:
    """Reads packed weights, and what they were made from; safe to call from several threads."""

    def __init__(self, checkpoint: Checkpoint, source: Checkpoint | None, advance: Advance) -> None:
        self._checkpoint, self._source, self._advance = checkpoint, source, advance
        self._offers: dict[str, TensorInfo] = {}
        if source:
            self._offers = {tensor.name: tensor for shard in offered(source).values() for tensor in shard}
        known = [checkpoint] + ([source] if source else [])
        self._headers = {id(c): {header.file: header for header in c.shards} for c in known}

    def at(self, row: Row) -> Row:
        if row.shape[1] > _MOST_COLUMNS or row.parameters > _MOST_ELEMENTS:
            return replace(row, note="too large to be a weight of a real model: not read")
        try:
            return self._read(row)
        except CheckpointError as err:
            return replace(row, note=err.message)

    def _read(self, row: Row) -> Row:
        columns, rows = row.shape[1], row.shape[0]
        packed = self._checkpoint.tensors[row.name]
        scale = self._checkpoint.tensors[row.name + SCALE]
        original, note = self._original(row)
        total, parts = Codes(), []
        step = max(1, _CHUNK // columns)
        with ExitStack() as stack:
            ours = stack.enter_context(self._open(self._checkpoint, packed.shard))
            same = scale.shard == packed.shard
            scales = ours if same else stack.enter_context(self._open(self._checkpoint, scale.shard))
            weight = None
            if original and self._source:
                readers = {f: stack.enter_context(self._open(self._source, f)) for f in set(shards_of(original))}
                weight = WeightReader(readers, original)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                content, exponents = (_take(r, t, first, count) for r, t in ((ours, packed), (scales, scale)))
                total += count_codes(content, exponents)
                self._advance(len(content) + len(exponents))
                if weight:
                    values = memoryview(bytearray(count * weight.row_bytes))
                    bad = weight.read_into(values, first)
                    if bad >= 0 or not _finite(values, weight.dtype):
                        weight, note = None, f"the source has a NaN or Inf in rows {first} to {first + count}"
                    else:
                        parts.append(weight_error(row.name, values, weight.dtype, columns, content, exponents))
                        self._advance(len(values))
        error = WeightError.of_parts(parts) if weight and parts else None
        if error and not math.isfinite(error.signal + error.noise):
            error, note = None, "a scale is NaN, or too large for float32: its error has no number"
        return replace(row, codes=total, error=error, note=note)

    def _original(self, row: Row) -> tuple[TensorInfo | None, str]:
        if not self._source:
            return None, ""
        found = self._offers.get(row.name)
        if found is None:
            return None, "not in the source"
        if found.shape != row.shape:
            return None, f"{list(row.shape)} here, {list(found.shape)} in the source"
        return found, ""

    def _open(self, checkpoint: Checkpoint, file: str) -> ShardReader:
        return ShardReader(checkpoint.folder / file, self._headers[id(checkpoint)][file])


def _take(reader: ShardReader, tensor: TensorInfo, first: int, count: int) -> memoryview:
    row = tensor.nbytes // tensor.shape[0]
    content = memoryview(bytearray(count * row))
    reader.read_into(content, tensor.start + first * row)
    return content


def _finite(values: memoryview, dtype: str) -> bool:
    """Whether no exponent is all ones. `weight_error` leaves blocks with NaN or Inf out, which here must be said."""
    import numpy as np

    kind, mask = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}[dtype]
    bits = np.frombuffer(values, kind)
    return not bool(np.any((bits & mask) == mask))


def count_codes(packed: memoryview, scale: memoryview) -> Codes:
    """Count what is in whole blocks.

    Args:
        packed: uint8, 16 bytes (32 E2M1 codes) a block.
        scale: uint8, one E8M0 byte a block.
    """
    import numpy as np

    magnitudes = np.frombuffer(packed, "<u8").reshape(-1, 2) & np.uint64(0x7777777777777777)
    zero = (magnitudes[:, 0] | magnitudes[:, 1]) == 0
    four = np.bincount(np.frombuffer(packed, "<u2"), minlength=65536).reshape((16,) * 4)
    codes = sum(four.sum(axis=tuple(a for a in range(4) if a != axis)) for axis in range(4))
    scales = np.bincount(np.frombuffer(scale, np.uint8)[~zero], minlength=256)
    return Codes(len(zero), int(zero.sum()), tuple(map(int, scales)), tuple(map(int, codes)))

"""Proves a finished output against its manifest, and against the source it was made from.

The manifest finds bit rot; the source finds everything else: copies are compared byte for byte, quantized weights are
quantized again, and their error is measured with the independent decoder, so that a wrong kernel cannot hide.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from glmquant.checkpoint.header import ShardHeader, TensorInfo
from glmquant.checkpoint.manifest import MANIFEST, Manifest, damage, file_digest
from glmquant.checkpoint.source import Checkpoint, Problem, ShardReader, inspect, open_source
from glmquant.checkpoint.weights import SCALE_INV, Fp8Weight, WeightReader, offered, shards_of
from glmquant.errors import CheckpointError
from glmquant.mxfp4.backend import Backend
from glmquant.mxfp4.error import WORST_BLOCK, WeightError, weight_error

_CHUNK = 1024 * 1024

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        copied, requantized: tensors compared with the source (0 without one).
        errors: of the weights quantized again, the largest first by noise.
    """

    folder: Path
    shards: int
    bytes_read: int
    copied: int
    requantized: int
    errors: tuple[WeightError, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_output(
    folder: Path, source: Path | None, sample: float, backend: Backend, threads: int, advance: Advance
) -> Verification:
    """Read an output again, all of it.

    Args:
        source: also compare with the bf16 checkpoint that it was made from.
        sample: share (0 to 1) of the tensors to compare with the source; which ones depends on their names only.
        backend: quantizes again.
        advance: told the bytes of each chunk read.

    Raises:
        CheckpointError: the output is unfinished, has no manifest, or one of the folders cannot be read at all.
    """
    output, problems = inspect(folder)
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder}: no {MANIFEST}: only outputs of glmquant can be verified",
            "`glmquant validate` checks a checkpoint of any producer.",
        )
    manifest = Manifest.read(folder)
    problems += _files(output, manifest)
    headers = {header.file: header for header in output.shards}
    with ThreadPoolExecutor(threads) as pool:
        known = [record for file, record in manifest.shards.items() if (folder / file).exists()]
        texts = pool.map(lambda r: damage(folder / r.file, r, advance, _names(headers.get(r.file))), known)
        problems += [Problem("damaged", text, r.file) for r, text in zip(known, texts, strict=True) if text]
        copied, errors = 0, []
        if source:
            original = open_source(source)
            offers = {tensor.name: tensor for shard in offered(original).values() for tensor in shard}
            problems += _unexplained(offers, output)
            chosen = [t for t in offers.values() if zlib.crc32(t.name.encode()) < sample * 2**32]
            work = _Comparison(original, output, backend, advance)
            for found in pool.map(work.compare, chosen):
                if isinstance(found, Problem):
                    problems.append(found)
                elif found is None:
                    copied += 1
                else:
                    errors.append(found)
                    if found.worst_block > WORST_BLOCK:
                        text = f"tensor {found.name!r}: a block is off by {found.worst_block:.0%} of its maximum"
                        problems.append(Problem("error-bound", text, tensor=found.name, hint="A wrong kernel?"))
    errors.sort(key=lambda error: error.sqnr)
    size = sum(record.size for record in manifest.shards.values())
    return Verification(folder, len(known), size, copied, len(errors), tuple(errors), tuple(problems))


def _files(output: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    present = {path for path in _relative(output.folder)}
    expected = {*manifest.files, *manifest.shards, MANIFEST}
    for name in sorted(expected - present):
        yield Problem("missing-file", f"{name}: missing", name)
    for name in sorted(present - expected):
        yield Problem("unknown-file", f"{name}: not written by the run that made this folder", name)
    for name, (size, value) in manifest.files.items():
        if name in present:
            path = output.folder / name
            if path.stat().st_size != size or file_digest(path) != value:
                yield Problem("changed-file", f"{name}: not what was written", name)


def _relative(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            yield (Path(root) / name).relative_to(folder).as_posix()


def _names(header: ShardHeader | None) -> Callable[[int], str]:
    """Byte offset -> the tensor that is there, in words."""
    starts = [tensor.start for tensor in header.tensors] if header else []

    def name(offset: int) -> str:
        at = bisect_right(starts, offset) - 1
        return f" (tensor {header.tensors[at].name!r})" if header and at >= 0 else " (header)" if header else ""

    return name


def _unexplained(offers: Mapping[str, TensorInfo], output: Checkpoint) -> Iterable[Problem]:
    scales = {name + "_scale" for name in offers}
    scales |= {t.name + SCALE_INV for t in offers.values() if isinstance(t, Fp8Weight)}
    for name, tensor in output.tensors.items():
        if name not in offers and name not in scales:
            yield Problem("extra-tensor", f"{tensor.shard}: tensor {name!r} is not in the source", tensor.shard, name)


class _Comparison:
    """One source tensor with what became of it; safe to call from several threads."""

    def __init__(self, source: Checkpoint, output: Checkpoint, backend: Backend, advance: Advance) -> None:
        self._source, self._output, self._backend, self._advance = source, output, backend, advance
        self._headers = {id(c): {header.file: header for header in c.shards} for c in (source, output)}

    def compare(self, tensor: TensorInfo) -> Problem | WeightError | None:
        """None for a faithful copy, the error of a weight quantized as the backend does, or what is wrong."""
        name = tensor.name
        stored, scale = self._output.tensors.get(name), self._output.tensors.get(name + "_scale")
        if stored is None:
            return Problem("missing-tensor", f"tensor {name!r} of the source is not in the output", tensor=name)
        try:
            with ExitStack() as stack, self._open(self._output, stored.shard) as ours:
                readers = {f: stack.enter_context(self._open(self._source, f)) for f in set(shards_of(tensor))}
                if (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape):
                    problem = self._copied(tensor, stored, readers[tensor.shard], ours)
                    if problem or not isinstance(tensor, Fp8Weight):
                        return problem
                    return self._scale(tensor.scale, [name + SCALE_INV, name + "_scale"], readers[tensor.scale.shard])
                if isinstance(tensor, Fp8Weight) and (stored.dtype, stored.shape) == ("BF16", tensor.shape):
                    return self._quantized(tensor, stored, None, readers, ours, ours)
                rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
                shapes = ((rows, columns // 2), (rows, columns // 32))
                if scale and (stored.dtype, scale.dtype) == ("U8", "U8") and (stored.shape, scale.shape) == shapes:
                    with self._open(self._output, scale.shard) as scales:
                        return self._quantized(tensor, stored, scale, readers, ours, scales)
        except CheckpointError as err:
            return Problem("unreadable", err.message, tensor=name, hint=err.hint)
        text = f"{stored.shard}: tensor {name!r} became {stored.dtype} {list(stored.shape)}"
        return Problem("unknown-format", text, stored.shard, name)

    def _scale(self, scale: TensorInfo, names: list[str], original: ShardReader) -> Problem | None:
        """The scale of a weight that stayed FP8, under one of these names."""
        found = [self._output.tensors[name] for name in names if name in self._output.tensors]
        if [(t.dtype, t.shape) for t in found] != [(scale.dtype, scale.shape)]:
            text = f"tensor {scale.name!r} of the source is not in the output as it was"
            return Problem("missing-tensor", text, tensor=scale.name)
        with self._open(self._output, found[0].shard) as ours:
            return self._copied(scale, found[0], original, ours)

    def _open(self, checkpoint: Checkpoint, file: str) -> ShardReader:
        return ShardReader(checkpoint.folder / file, self._headers[id(checkpoint)][file])

    def _copied(
        self, tensor: TensorInfo, stored: TensorInfo, original: ShardReader, ours: ShardReader
    ) -> Problem | None:
        for start in range(0, tensor.nbytes, _CHUNK):
            count = min(_CHUNK, tensor.nbytes - start)
            a, b = memoryview(bytearray(count)), memoryview(bytearray(count))
            original.read_into(a, tensor.start + start)
            ours.read_into(b, stored.start + start)
            self._advance(2 * count)
            if a != b:
                text = f"{stored.shard}: tensor {stored.name!r} differs from the source in bytes {start:,} to "
                return Problem("differs", f"{text}{start + count:,}", stored.shard, stored.name)
        return None

    def _quantized(
        self,
        tensor: TensorInfo,
        stored: TensorInfo,
        scale: TensorInfo | None,
        readers: Mapping[str, ShardReader],
        ours: ShardReader,
        scales: ShardReader,
    ) -> Problem | WeightError | None:
        """Without `scale`: an FP8 weight that was stored as bf16."""
        rows, columns = tensor.shape
        weight = WeightReader(readers, tensor)  # numpy's FP8, not the kernel that wrote
        step = max(1, self._backend.chunk_elements // columns)
        outputs = [(stored, ours)] + ([(scale, scales)] if scale else [])
        parts = []
        for row in range(0, rows, step):
            count = min(step, rows - row)
            source = memoryview(bytearray(count * weight.row_bytes))
            bad = weight.read_into(source, row)
            found, again = [], [source]
            for out, reader in outputs:
                size = out.nbytes // rows
                found.append(memoryview(bytearray(count * size)))
                reader.read_into(found[-1], out.start + row * size)
            if scale and bad < 0:
                again = [memoryview(bytearray(len(part))) for part in found]
                bad = self._backend.quantize_into(source, weight.dtype, columns, *again)
            if bad >= 0 or found != again:
                text = f"tensor {stored.name!r} is not what the source gives, rows {row} to {row + count}"
                return Problem("differs", f"{stored.shard}: {text}", stored.shard, stored.name)
            if scale:
                parts.append(weight_error(tensor.name, source, weight.dtype, columns, *found))
            self._advance(len(source) + sum(map(len, found)))
        return WeightError.of_parts(parts) if parts else None

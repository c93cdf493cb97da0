"""Executes a plan's shards: bytes from the source, through the backend, into their place in the output.

Work is cut into pieces of one tensor (big copies into several); threads take pieces of a few shards at once, so one
shard's fsync does not stall the others. Each thread holds one chunk in memory, whatever the sizes of tensor and shard.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from glmquant.checkpoint.header import ShardHeader
from glmquant.checkpoint.manifest import ShardRecord, digest, record_of
from glmquant.checkpoint.source import ShardReader
from glmquant.checkpoint.weights import WeightReader
from glmquant.checkpoint.writer import ShardWriter
from glmquant.errors import BackendError, CheckpointError
from glmquant.mxfp4.backend import Backend
from glmquant.planner import BLOCK, ShardPlan, TensorJob

logger = logging.getLogger(__name__)

COPY_CHUNK = 1024 * 1024
"""Stays in the second-level cache: faster than 4 MB, and than copy_file_range, which moves pages one by one (ext4)."""
COPY_PIECE = 256 * COPY_CHUNK
AHEAD = 24 * 1024 * 1024
"""Bytes after a piece that are asked for when it begins: about one expert weight of GLM-5.2."""

Advance = Callable[[int], object]
Progress = Callable[[int, str], AbstractContextManager[Advance]]
"""(bytes to come, what is done with them) -> a bar that counts them."""
Published = Callable[[ShardRecord], object]


@dataclass
class _Shard:
    """A shard being written; the thread that ends its last piece publishes it.

    `digests` are (start, end, digest) of what was written; `zeros` the weights of which no byte but 0 was seen yet.
    """

    plan: ShardPlan
    readers: Mapping[str, ShardReader]
    writer: ShardWriter
    pieces_left: int
    digests: list[tuple[int, int, str]]
    zeros: set[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def piece_done(self, digests: list[tuple[int, int, str]]) -> bool:
        with self.lock:
            self.digests += digests
            self.pieces_left -= 1
            return not self.pieces_left

    def seen(self, name: str, written: memoryview) -> None:
        """Only a tensor's first bytes are looked at, as long as those are not all 0."""
        if name in self.zeros and (bytes(written[:4096]).strip(b"\0") or bytes(written).strip(b"\0")):
            with self.lock:
                self.zeros.discard(name)


class SourceShards:
    """The source's shards, opened when a shard of the output needs them and closed after the last one that does.

    Args:
        plans: the output shards that will be written, each once.
        path: where a source shard is; may wait until it is there.
        done: told each source shard that no output shard needs any more.
        stop: ends a wait in `path`, from any thread.
    """

    def __init__(
        self,
        headers: Mapping[str, ShardHeader],
        plans: Sequence[ShardPlan],
        path: Callable[[str], Path],
        done: Callable[[str], object] | None = None,
        stop: Callable[[], object] = lambda: None,
    ) -> None:
        self._headers, self._path, self._done, self.stop = headers, path, done, stop
        self._left = Counter(file for plan in plans for file in plan.sources)
        self._open: dict[str, ShardReader] = {}
        self._lock = threading.Lock()

    def open(self, plan: ShardPlan) -> dict[str, ShardReader]:
        """Readers of all it is made from, for the main thread.

        Raises:
            CheckpointError: one cannot be read, or changed since its header was.
        """
        for file in sorted(plan.sources - self._open.keys()):
            reader = ShardReader(self._path(file), self._headers[file])
            with self._lock:
                self._open[file] = reader
        return {file: self._open[file] for file in plan.sources}

    def close(self, plan: ShardPlan, drop_pages: bool) -> None:
        """This output shard is durable."""
        for file in sorted(plan.sources):
            with self._lock:
                self._left[file] -= 1
                reader = None if self._left[file] else self._open.pop(file)
            if reader:
                if drop_pages:
                    reader.drop_pages()
                reader.close()
                if self._done:
                    self._done(file)

    def close_all(self) -> None:
        for reader in self._open.values():
            reader.close()


class _Stopped(Exception):
    """Another thread failed, or the user stopped the run."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor to quantize, or `length` bytes of one to copy, from `start` on."""

    job: TensorJob
    start: int
    length: int


class _Local(threading.local):
    """A thread's backend and its buffers, made once."""

    backend: Backend
    source = memoryview(b"")
    packed = memoryview(b"")
    scale = memoryview(b"")


class Streamer:
    """Runs shards through one or more backends (one per device) on `workers` threads.

    Args:
        published: called with the record of each shard once it is durable, by the thread that finished it.
        drop_behind: tell the system to forget pages once they are used, so that a job larger than memory does not
            push everything else out of it.
        allow_zeros: take a weight that is all zeros for what it is, not for a damaged download.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        workers: int,
        advance: Advance,
        published: Published,
        *,
        drop_behind: bool = False,
        allow_zeros: bool = False,
    ) -> None:
        self._backends, self._workers, self._advance, self._published = backends, workers, advance, published
        self._drop_behind, self._allow_zeros = drop_behind, allow_zeros
        self._stop = threading.Event()
        self._local = _Local()
        self._started = 0
        self._lock = threading.Lock()

    def run(self, shards: Sequence[ShardPlan], source: SourceShards, output: Path) -> None:
        """Write all shards; on the first error nothing more is begun and unfinished shards are removed.

        Raises:
            CheckpointError, OutputError, BackendError: the first that happened.
        """
        slots = threading.Semaphore(self._workers + 1)
        futures: list[Future[None]] = []
        opened: list[_Shard] = []
        pool = ThreadPoolExecutor(self._workers, "glmquant", self._start_thread)
        try:
            for plan in shards:
                slots.acquire()
                if self._stop.is_set():
                    break
                logger.info("writing %s", plan.file)
                pieces = list(_cut(plan))
                shard = self._open(plan, source, output, len(pieces))
                opened.append(shard)
                if not pieces:
                    self._publish(shard, source)
                    slots.release()
                futures += [pool.submit(self._work, shard, piece, source, slots) for piece in pieces]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                if not future.cancelled():
                    future.result()
        except BaseException as err:
            self._stop.set()
            source.stop()
            pool.shutdown(cancel_futures=True)
            if isinstance(err, Exception):  # not Ctrl-C, which no thread's error may hide
                self._raise_first(futures)
            raise
        finally:
            pool.shutdown()
            source.close_all()
            for shard in opened:
                shard.writer.discard()

    def _raise_first(self, futures: list[Future[None]]) -> None:
        """The earliest piece's error is shown, not one that another error caused."""
        for future in futures:
            if future.done() and not future.cancelled() and (error := future.exception()):
                raise error

    def _start_thread(self) -> None:
        with self._lock:
            self._local.backend = self._backends[self._started % len(self._backends)]
            self._started += 1

    def _open(self, plan: ShardPlan, source: SourceShards, output: Path, pieces: int) -> _Shard:
        readers = source.open(plan)
        writer = ShardWriter(output, plan.file, plan.header, plan.file_size)
        writer.open()
        zeros = {job.source.name for job in plan.jobs if _is_weight(job)} if not self._allow_zeros else set()
        return _Shard(plan, readers, writer, pieces, [(0, len(plan.header), digest(plan.header))], zeros)

    def _work(self, shard: _Shard, piece: _Piece, source: SourceShards, slots: threading.Semaphore) -> None:
        if self._stop.is_set():
            return
        try:
            tensor = piece.job.source
            shard.readers[tensor.shard].will_need(tensor.start + piece.start + piece.length, AHEAD)
            digests = self._copy(shard, piece) if piece.job.copied else self._convert(shard, piece.job)
            if shard.piece_done(digests):
                self._publish(shard, source)
                slots.release()
        except _Stopped:
            slots.release()
        except BaseException:
            self._stop.set()
            source.stop()
            slots.release()  # the main thread may be waiting to open the next shard
            raise

    def _progress(self, count: int) -> None:
        with self._lock:  # a progress bar counts with +=
            self._advance(count)

    def _publish(self, shard: _Shard, source: SourceShards) -> None:
        for reader in shard.readers.values():
            reader.check_unchanged()
        if shard.zeros:
            raise CheckpointError(
                f"{shard.plan.file}: tensor {min(shard.zeros)!r} is all zeros",
                "The download is incomplete or damaged: fetch this file again. If it is meant so: --allow-zeros.",
            )
        record = record_of(shard.plan.file, shard.digests)
        shard.writer.publish(drop_pages=self._drop_behind)
        self._published(record)
        source.close(shard.plan, self._drop_behind)

    def _convert(self, shard: _Shard, job: TensorJob) -> list[tuple[int, int, str]]:
        """Quantize a weight, or write an FP8 one as bf16, some rows at a time."""
        from glmquant.mxfp4.kernel import dequantize_into  # numpy, not needed to plan

        tensor, local = job.source, self._local
        rows, columns = tensor.shape
        weight = WeightReader(shard.readers, tensor, dequantize_into)
        step = min(rows, max(1, local.backend.chunk_elements // columns))
        digests = [xxhash.xxh3_128() for _ in job.outputs]
        for row in range(0, rows, step):
            self._check_stop()
            count = min(step, rows - row)
            local.source = _at_least(local.source, count * weight.row_bytes)
            source = local.source[: count * weight.row_bytes]
            bad = weight.read_into(source, row)
            written = [source]
            if bad < 0 and job.quantized:
                local.packed = _at_least(local.packed, count * columns // 2)
                local.scale = _at_least(local.scale, count * columns // BLOCK)
                written = [local.packed[: count * columns // 2], local.scale[: count * columns // BLOCK]]
                bad = local.backend.quantize_into(source, weight.dtype, columns, *written)
            if bad >= 0:
                raise _non_finite(source, weight.dtype, columns, bad, tensor.name, row)
            for out, content, state in zip(job.outputs, written, digests, strict=True):
                shard.writer.write(content, out.start + row * ((out.end - out.start) // rows))
                state.update(content)
            shard.seen(tensor.name, written[0])
            self._progress(count * (tensor.nbytes // rows))
        for out in job.outputs:
            shard.writer.start_writeback(out.start, out.end)
        return [(out.start, out.end, d.hexdigest()) for out, d in zip(job.outputs, digests, strict=True)]

    def _copy(self, shard: _Shard, piece: _Piece) -> list[tuple[int, int, str]]:
        tensor, to = piece.job.source, piece.job.outputs[0].start
        reader, copied = shard.readers[tensor.shard], xxhash.xxh3_128()
        for start in range(piece.start, piece.start + piece.length, COPY_CHUNK):
            self._check_stop()
            count = min(COPY_CHUNK, piece.start + piece.length - start)
            self._local.source = _at_least(self._local.source, count)
            chunk = self._local.source[:count]
            reader.read_into(chunk, tensor.start + start)
            shard.writer.write(chunk, to + start)
            copied.update(chunk)
            shard.seen(tensor.name, chunk)
            shard.writer.start_writeback(to + start, to + start + count)
            self._progress(count)
        return [(to + piece.start, to + piece.start + piece.length, copied.hexdigest())]

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _is_weight(job: TensorJob) -> bool:
    """A matrix is never all zeros in a trained model; a bias may be."""
    return len(job.source.shape) >= 2 and job.source.numel > 0 and job.source.name.endswith(".weight")


def _cut(plan: ShardPlan) -> Iterator[_Piece]:
    for job in plan.jobs:
        size = job.source.nbytes
        if not job.copied:
            yield _Piece(job, 0, size)
        else:
            for start in range(0, size, COPY_PIECE):
                yield _Piece(job, start, min(COPY_PIECE, size - start))


def _non_finite(source: memoryview, dtype: str, columns: int, index: int, name: str, first_row: int) -> BackendError:
    width, code = {"BF16": (2, "<H"), "F16": (2, "<e"), "F32": (4, "<f")}[dtype]
    (value,) = struct.unpack_from(code, source, index * width)
    if dtype == "BF16":
        (value,) = struct.unpack("<f", struct.pack("<I", value << 16))
    row, column = divmod(index, columns)
    return BackendError(
        f"tensor {name!r} holds {value} at row {first_row + row}, column {column}: "
        "a weight to be quantized must be finite",
        "The source is damaged there; --keep leaves this module un-quantized.",
    )


def _at_least(buffer: memoryview, size: int) -> memoryview:
    return buffer if len(buffer) >= size else memoryview(bytearray(size))


def default_workers() -> int:
    """CPUs this process may use: its affinity, and a cgroup v2 quota if there is one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cpus, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cpus


def available_memory() -> int | None:
    """Bytes the system could give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None

"""Pieces, threads and several backends: whatever the cut, the bytes are the same, and the first error is shown."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import support
import torch
from support import FakeBackend

import glmquant
from glmquant import pipeline, streaming
from glmquant.checkpoint import writer
from glmquant.errors import BackendError, OutputError
from glmquant.mxfp4.backend import CheckedBackend
from glmquant.mxfp4.kernel import FusedBackend


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[str, bytes]:
    return shards(support.output(tiny, "moe").output)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize(("chunk", "piece"), [(1, 1000), (5000, 1), (10**9, 10**9)])
def test_any_cut_on_any_number_of_threads_writes_the_same_bytes(
    workers: int, chunk: int, piece: int, tiny: Path, tmp_path: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedBackend, "chunk_elements", chunk)
    monkeypatch.setattr(streaming, "COPY_CHUNK", max(piece, 64))
    monkeypatch.setattr(streaming, "COPY_PIECE", 3 * max(piece, 64))
    out = glmquant.quantize(tiny, tmp_path / "out", workers=workers).output
    assert shards(out) == expected


def test_quark_on_two_devices_writes_the_same_bytes(tiny: Path, tmp_path: Path, expected) -> None:
    result = glmquant.quantize(tiny, tmp_path / "out", backend="quark", device="cpu,cpu")
    assert shards(result.output) == expected


def test_a_sample_is_checked_against_quark_and_a_differing_bit_is_an_error(
    tiny: Path, tmp_path: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shards(glmquant.quantize(tiny, tmp_path / "good", check_backend=0.3).output) == expected

    class OneBitOff(FusedBackend):
        def quantize_into(self, source, dtype, columns, packed, scale) -> int:
            bad = super().quantize_into(source, dtype, columns, packed, scale)
            packed[7] ^= 1
            return bad

    with pytest.raises(BackendError, match="packed byte 7 of a chunk with 32 columns"):
        checked = CheckedBackend(OneBitOff(), FusedBackend(), 1.0)
        checked.quantize_into(memoryview(bytes(2048)), "BF16", 32, bytearray(512), bytearray(32))
    with pytest.raises(BackendError, match="not a share"):
        CheckedBackend(FusedBackend(), FusedBackend(), 2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("chunk", [1, 10**6])
def test_a_damaged_weight_is_named_with_value_row_and_column(
    dtype: torch.dtype, value: float, chunk: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.4.mlp.experts.3.down_proj.weight"

    def damage(found: str, tensor: torch.Tensor) -> torch.Tensor:
        if found != name:
            return tensor
        tensor = tensor.to(dtype)
        tensor[100, 63] = tensor[101, 2] = value
        return tensor

    monkeypatch.setattr(FusedBackend, "chunk_elements", chunk)
    source = support.copy(tiny, tmp_path / "source", damage)
    with pytest.raises(BackendError, match=rf"tensor '{name}' holds {value} at row 100, column 63.*\n.*--keep"):
        glmquant.quantize(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.partial"))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_stops_the_run_and_is_the_one_shown(
    workers: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))

    class Fails(FakeBackend):
        def quantize_into(self, source, dtype, columns, packed, scale) -> int:
            if next(calls) == 5:
                raise BackendError("the fifth call")
            return super().quantize_into(source, dtype, columns, packed, scale)

    monkeypatch.setattr(pipeline, "make_backends", lambda *_: [Fails()])
    with pytest.raises(BackendError, match="the fifth call"):
        glmquant.quantize(tiny, tmp_path / "out", workers=workers)
    assert next(calls) < 30
    assert not (tmp_path / "out/config.json").exists()
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_a_full_disk_under_several_threads_leaves_no_temporary_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.pwrite, iter(range(10**6))

    def full(*args: object) -> int:
        if next(calls) > 40:
            raise OSError(writer.errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"model-0000\d-of-.*cannot be written: No space left"):
        glmquant.quantize(tiny, tmp_path / "out", workers=4)
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_shards_are_open_only_a_few_at_a_time(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, lock = [0], [0], threading.Lock()
    opened, published = writer.ShardWriter.open, writer.ShardWriter.publish

    def count(change: int) -> None:
        with lock:
            now[0] += change
            most[0] = max(most[0], now[0])

    def open_(self) -> None:
        count(1)
        opened(self)

    def publish(self, drop_pages: bool = False) -> None:
        time.sleep(0.02)
        published(self, drop_pages)
        count(-1)

    monkeypatch.setattr(writer.ShardWriter, "open", open_)
    monkeypatch.setattr(writer.ShardWriter, "publish", publish)
    glmquant.quantize(tiny, tmp_path / "out", workers=1)
    assert now == [0] and most[0] <= 2


def test_the_fused_path_imports_neither_torch_nor_quark(tiny: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, glmquant; glmquant.quantize(sys.argv[1], sys.argv[2]); "
        "assert not {'torch', 'quark', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny), str(tmp_path / "out")], check=True)


def test_default_workers_and_memory_are_sane() -> None:
    assert 1 <= streaming.default_workers() <= (os.cpu_count() or 1)
    memory = streaming.available_memory()
    assert memory is None or memory > 2**20


def test_wrong_backends_are_refused(tiny: Path, tmp_path: Path) -> None:
    for wrong in ({"backend": "tpu"}, {"backend": "fused", "device": "cuda"}):
        with pytest.raises(BackendError):
            glmquant.quantize(tiny, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()

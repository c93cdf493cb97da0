"""glmquant verify, --verify-source: bit rot, wrong copies, wrong numbers and wrong downloads are found and named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from support import FakeBackend

import glmquant
from glmquant import pipeline
from glmquant.checkpoint.header import read_header
from glmquant.checkpoint.manifest import MANIFEST
from glmquant.cli import main
from glmquant.errors import CheckpointError
from glmquant.mxfp4.error import WORST_BLOCK, weight_error
from glmquant.mxfp4.kernel import FusedBackend

CopyOf = Callable[[Path], Path]
QUANTIZED = "model.layers.4.mlp.experts.3.down_proj.weight"
COPIED = "model.layers.2.self_attn.o_proj.weight"


@pytest.fixture
def out(tiny: Path, copy_of: CopyOf) -> Path:
    return copy_of(support.output(tiny, "moe").output)


def flip(folder: Path, tensor: str, at: int = 5) -> str:
    """One bit of a tensor; returns the shard."""
    for path in folder.glob("*.safetensors"):
        for info in read_header(path).tensors:
            if info.name == tensor:
                content = bytearray(path.read_bytes())
                content[info.start + at] ^= 1
                path.write_bytes(content)
                return path.name
    raise AssertionError(tensor)


def test_a_good_output_is_proven_in_every_tensor(tiny: Path, out: Path) -> None:
    done = glmquant.verify(out, tiny)
    plan = glmquant.plan(tiny).plan
    quantized = {job.source.name for job in plan.jobs if job.quantized}
    assert done.ok and done.shards == 3
    assert {error.name for error in done.errors} == quantized
    assert done.copied == len(plan.jobs) - len(quantized)
    assert all(17 < error.sqnr < 22 and 0.1 < error.worst_block <= WORST_BLOCK for error in done.errors)
    assert done.errors == tuple(sorted(done.errors, key=lambda e: e.sqnr))
    part = glmquant.verify(out, tiny, sample=0.2)
    assert part.ok and 0 < part.copied < done.copied and 0 < part.requantized < done.requantized


@pytest.mark.parametrize("tensor", [QUANTIZED, QUANTIZED + "_scale", COPIED])
def test_one_rotten_bit_is_found_and_named_without_the_source(out: Path, tensor: str) -> None:
    file = flip(out, tensor)
    (problem,) = glmquant.verify(out).problems
    assert (problem.code, problem.file) == ("damaged", file)
    assert f"(tensor {tensor!r}) are not those that were written" in problem.message


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(QUANTIZED, "is not what the source gives, rows"), (COPIED, "differs from the source in bytes")],
)
def test_what_the_manifest_cannot_know_the_source_shows(tiny: Path, copy_of: CopyOf, tensor: str, message: str) -> None:
    """As if the output had been written wrong, and its digests taken of the wrong bytes."""
    source = copy_of(tiny)
    out = glmquant.quantize(source, source.parent / "out").output
    flip(source, tensor, at=1)
    (problem,) = glmquant.verify(out, source).problems
    assert problem.code == "differs" and problem.tensor == tensor and message in problem.message


def test_a_wrong_kernel_cannot_hide_behind_itself(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make_backends", lambda *_: [FakeBackend()])
    out = glmquant.quantize(tiny, tmp_path / "out").output
    problems = glmquant.verify(out, tiny).problems
    assert {problem.code for problem in problems} == {"error-bound"}
    assert len(problems) == sum(job.quantized for job in glmquant.plan(tiny).plan.jobs)
    assert "of its maximum" in problems[0].message


def test_files_that_are_missing_changed_or_strange_are_found(out: Path) -> None:
    (out / "tokenizer.json").unlink()
    (out / "generation_config.json").write_text("{}")
    (out / "extra.txt").write_text("")
    (out / "model-00002-of-00003.safetensors").unlink()
    codes = {(problem.code, problem.file) for problem in glmquant.verify(out).problems}
    assert {
        ("missing-file", "tokenizer.json"),
        ("changed-file", "generation_config.json"),
        ("unknown-file", "extra.txt"),
        ("missing-file", "model-00002-of-00003.safetensors"),
    } <= codes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), "format 2 with digest 'xxh3_128' is not known"),
        (lambda m: m.update(shards=[]), "shards, files and fingerprint must be objects"),
        (lambda m: m["files"].update({"../up": [1, ""]}), r"'\.\./up' must be a path inside the folder"),
        (lambda m: m["shards"].update({"a/b.safetensors": {"size": 0, "ranges": []}}), "record of 'a/b.safetensors'"),
        (lambda m: next(iter(m["shards"].values()))["ranges"].pop(), "the record of .* is damaged"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(out: Path, change: Callable[[dict], object], message: str) -> None:
    manifest = support.read_json(out / MANIFEST)
    change(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        glmquant.verify(out)


def test_an_output_of_another_tool_is_refused(out: Path) -> None:
    (out / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="only outputs of glmquant can be verified"):
        glmquant.verify(out)


def test_the_command_says_what_it_found(tiny: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(out), "--source", str(tiny)]) == 0
    text = capsys.readouterr().out
    assert f"{out}: 3 shards, " in text and "0 problems" in text
    assert "weights come out the same again" in text and " dB, worst block " in text
    flip(out, COPIED)
    assert main(["verify", str(out), "--source", str(tiny), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and {p["code"] for p in found["problems"]} == {"damaged", "differs"}
    assert found["errors"][0]["sqnr"] > 15


# the error bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_further_off_than_the_bound(dtype: torch.dtype, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 12, (512, 8, 1), generator=rng) if dtype == torch.float16 else None
    exponents = spread if spread is not None else torch.randint(-120, 120, (512, 8, 1), generator=rng)
    values = (torch.rand(512, 8, 32, generator=rng) * 2 - 1) * 2.0**exponents
    weight = values.reshape(512, 256).to(dtype)
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    source = memoryview(weight.view(torch.uint8).numpy().tobytes())
    packed, scale = bytearray(512 * 128), bytearray(512 * 8)
    assert FusedBackend().quantize_into(source, name, 256, packed, scale) == -1
    error = weight_error("w", source, name, 256, memoryview(packed), memoryview(scale))
    assert 0.15 < error.worst_block <= WORST_BLOCK


def test_the_worst_case_of_the_bound_exists() -> None:
    row = np.zeros(32, np.float32)
    row[0] = 5  # between 4 and 6
    packed, scale = bytearray(16), bytearray(1)
    FusedBackend().quantize_into(row.data.cast("B"), "F32", 32, packed, scale)
    assert weight_error("w", row.data.cast("B"), "F32", 32, memoryview(packed), memoryview(scale)).worst_block == (
        pytest.approx(0.2)
    )


# the source's checksums


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def hub_cache(source: Path, root: Path) -> Path:
    """Large files named by sha256, small ones by git's sha1, as huggingface_hub does."""
    snapshot, blobs = root / "models--org--name/snapshots/abc", root / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        blob = blobs / (hashlib.sha256(content).hexdigest() if large else git_sha1(content))
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def local_dir(source: Path, root: Path) -> Path:
    folder = support.copy(source, root / "local")
    notes = folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    for path in source.iterdir():
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        (notes / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{etag}\n1700000000.0\n")
    return folder


def sums_file(source: Path, root: Path) -> Path:
    folder = support.copy(source, root / "sums")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in source.iterdir()]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("make", [hub_cache, local_dir, sums_file])
@pytest.mark.parametrize("damaged", ["", "model-00002-of-00003.safetensors", "tokenizer.json"])
def test_a_source_is_compared_with_the_checksums_that_came_with_it(
    make: Callable[[Path, Path], Path], damaged: str, tiny: Path, tmp_path: Path
) -> None:
    source = make(tiny, tmp_path)
    if not damaged:
        assert glmquant.quantize(source, tmp_path / "out", verify_source=True).report.ok
        return
    path = (source / damaged).resolve()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{damaged}: its checksum is [0-9a-f]+, not [0-9a-f]+\n.*fetch it again"
    ):
        glmquant.quantize(source, tmp_path / "out", verify_source=True)
    assert not (tmp_path / "out").exists()


def test_without_checksums_it_says_what_it_needs(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checksum of model-00001.* \(3 shards without one\)\n.*SHA256SUMS"):
        glmquant.quantize(tiny, tmp_path / "out", verify_source=True)
    assert not (tmp_path / "out").exists()

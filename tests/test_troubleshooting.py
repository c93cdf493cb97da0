"""TROUBLESHOOTING.md: every line is provoked, and says what the page says."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
import torch

from glmquant.checkpoint import writer
from glmquant.checkpoint.header import read_header
from glmquant.cli import main
from glmquant.mxfp4.kernel import FusedBackend
from glmquant.streaming import Streamer

PAGE = Path(__file__).resolve().parent.parent / "TROUBLESHOOTING.md"
ROWS = dict(re.findall(r"^\| ([^|`]+) \| `(.+?)` \|", PAGE.read_text(), re.M))
PLACES = {"N": r"[\d,]+", "X": "[0-9a-f]+", "WHY": ".+", "TENSOR": r"model\.\S+", "HOST": r"\S+"}
PLACES |= dict.fromkeys(("OUT", "SRC", "SHARD", "FILE"), r"\S+")


class Place:
    """A source to spoil, an output, and what is printed meanwhile."""

    def __init__(self, tiny: Path, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.source = Path(shutil.copytree(tiny, root / "source"))
        self.out, self.patch, self.root = root / "out", patch, root

    def quantize(self, *options: str) -> int:
        return main(["quantize", str(self.source), str(self.out), "--quiet", "--workers", "1", *options])

    def stopped(self) -> None:
        """An output with one finished shard."""
        publish = Streamer._publish

        def one(streamer: Streamer, *args: object) -> None:
            publish(streamer, *args)  # type: ignore[arg-type]
            raise OSError(errno.EIO, "stop")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Streamer, "_publish", one)
            assert self.quantize() == 1

    def shard(self) -> Path:
        return self.source / "model-00002-of-00003.safetensors"

    def failing(self, where: object, name: str, code: int, after: int = 0) -> None:
        real, calls = getattr(where, name), iter(range(10**6))

        def fail(*args: object) -> object:
            if next(calls) >= after:
                raise OSError(code, os.strerror(code))
            return real(*args)

        self.patch.setattr(where, name, fail)


def spoil(place: Place, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    shutil.move(place.source, place.root / "good")
    support.copy(place.root / "good", place.source, change)


def interrupted(place: Place) -> None:
    def slow(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        return -1

    place.patch.setattr(FusedBackend, "quantize_into", slow)
    assert place.quantize() == 130


def killed(place: Place) -> None:
    place.stopped()
    place.quantize()


def other_settings(place: Place) -> None:
    place.stopped()
    place.quantize("--resume", "--recipe", "routed")


def rotten_shard(place: Place) -> None:
    place.stopped()
    (path,) = place.out.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert place.quantize("--resume") == 0


def two_runs(place: Place) -> None:
    def second(*_: object) -> None:
        command = [sys.executable, "-m", "glmquant", "quantize", place.source, place.out, "--resume"]
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stderr.write(done.stderr)
        raise OSError(errno.EIO, "enough")

    place.patch.setattr(Streamer, "_publish", second)
    place.quantize()


def validate_unfinished(place: Place) -> None:
    place.stopped()
    main(["validate", str(place.out)])


def other_files(place: Place) -> None:
    place.out.mkdir()
    (place.out / "thesis.tex").touch()
    place.quantize()


def finished(place: Place) -> None:
    assert place.quantize() == 0
    assert place.quantize("--resume") == 0
    place.quantize()


def small_disk(place: Place) -> None:
    usage = shutil.disk_usage(place.root)
    place.patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    place.quantize()


def small_quota(place: Place) -> None:
    place.failing(writer, "allocate", errno.EDQUOT)
    place.quantize()
    assert not place.out.exists()


def full_disk(place: Place) -> None:
    place.failing(os, "pwrite", errno.ENOSPC, after=40)
    place.quantize()


def no_folder(place: Place) -> None:
    place.out = place.source.parent / "file/out"
    place.out.parent.touch()
    place.quantize()


def rotten_output(place: Place) -> None:
    assert place.quantize() == 0
    path = place.out / place.shard().name
    content = bytearray(path.read_bytes())
    content[read_header(path).tensors[3].start] ^= 1
    path.write_bytes(content)
    assert main(["verify", str(place.out)]) == 1


def bad_sector(place: Place) -> None:
    place.failing(os, "preadv", errno.EIO, after=20)
    place.quantize()


def links(place: Place) -> None:
    moved = shutil.move(place.shard(), place.source / "elsewhere")
    place.shard().symlink_to(moved)
    place.quantize("--delete-source-shards")
    assert Path(moved).exists()


def truncated(place: Place) -> None:
    os.truncate(place.shard(), place.shard().stat().st_size - 1000)
    place.quantize()


def missing(place: Place) -> None:
    place.shard().unlink()
    place.quantize()


def zeros(place: Place) -> None:
    spoil(place, lambda name, tensor: tensor.zero_() if name.endswith("3.self_attn.o_proj.weight") else tensor)
    place.quantize()


def nan(place: Place) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("4.mlp.experts.3.down_proj.weight"):
            tensor[5, 7] = float("nan")
        return tensor

    spoil(place, change)
    place.quantize()


def checksum(place: Place) -> None:
    sums = (f"{'0' * 64}  {path.name}" for path in place.source.iterdir())
    (place.source / "SHA256SUMS").write_text("\n".join(sums))
    place.quantize("--verify-source")


def no_checksums(place: Place) -> None:
    place.quantize("--verify-source")


def changed(place: Place) -> None:
    real = FusedBackend.quantize_into

    def touch(*args: object) -> int:
        for path in place.source.glob("*.safetensors"):
            os.utime(path)
        return real(*args)  # type: ignore[arg-type]

    place.patch.setattr(FusedBackend, "quantize_into", touch)
    place.quantize()


def dropped(place: Place) -> None:
    place.quantize("--drop-pushed")


def kept_fp8(place: Place) -> None:
    place.quantize("--keep-fp8")


def other_weights(place: Place) -> None:
    assert place.quantize() == 0
    spoil(place, lambda name, tensor: tensor * 2)
    main(["mtp", "graft", str(place.source), str(place.out)])
    place.out.rename(place.root / "done")


def too_many_gpus(place: Place) -> None:
    assert place.quantize() == 0
    main(["serve", str(place.out), "--release", "0.5.23"])
    place.out.rename(place.root / "done")


PROVOKED: dict[str, Callable[[Place], None]] = {
    "Ctrl-C or SIGTERM": interrupted,
    "kill -9, power loss, a crash": killed,
    "resumed with other settings": other_settings,
    "a finished shard rotted since": rotten_shard,
    "two runs on one output": two_runs,
    "validating an unfinished output": validate_unfinished,
    "the output folder holds other files": other_files,
    "the output is finished already": finished,
    "the disk is too small": small_disk,
    "a quota is too small": small_quota,
    "the disk fills up in mid-run": full_disk,
    "the output folder cannot be made": no_folder,
    "the output rotted after the run": rotten_output,
    "the source cannot be read": bad_sector,
    "deleting through links": links,
    "a truncated shard": truncated,
    "a missing shard": missing,
    "a hole in a download": zeros,
    "NaN or Inf in a weight": nan,
    "a wrong checksum": checksum,
    "no checksums to compare with": no_checksums,
    "the source changed under way": changed,
    "dropping what is nowhere else": dropped,
    "FP8 that a target cannot read": kept_fp8,
    "a graft from other weights": other_weights,
    "a model too small for the node": too_many_gpus,
}


def test_every_line_of_the_page_is_provoked_below() -> None:
    assert ROWS.keys() - {"what happened"} == PROVOKED.keys()


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Place(tiny, tmp_path, monkeypatch)


@pytest.mark.parametrize("what", PROVOKED)
def test_what_goes_wrong_says_what_the_page_says(
    what: str, place: Place, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    PROVOKED[what](place)
    printed = capsys.readouterr()
    pattern = re.sub(r"\b[A-Z]+\b", lambda m: PLACES.get(m[0], m[0]), re.escape(ROWS[what]))
    assert re.search(pattern, printed.err + printed.out + caplog.text), printed.err + printed.out + caplog.text
    assert "Traceback" not in printed.err
    if place.out.exists() and what not in ("the output is finished already", "the output rotted after the run"):
        assert what == "a finished shard rotted since" or not (place.out / "config.json").exists()

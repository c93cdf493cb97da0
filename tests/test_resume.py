"""Stopped runs: what they leave, how they are continued, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import support
import torture

import glmquant
from glmquant import shards
from glmquant.checkpoint import writer
from glmquant.checkpoint.manifest import MANIFEST, Manifest, record_of
from glmquant.cli import main
from glmquant.errors import BackendError, CheckpointError, OutputError
from glmquant.mxfp4.kernel import FusedBackend
from glmquant.streaming import Streamer

CopyOf = Callable[[Path], Path]
MTP_SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[str, str]:
    return torture.digests(support.output(tiny, "moe").output)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """Raise an error when the n-th shard has been published."""

    def arm(count: int, error: BaseException) -> None:
        publish = Streamer._publish
        done = []

        def failing(self: Streamer, *args: object) -> None:
            publish(self, *args)  # type: ignore[arg-type]
            done.append(args)
            if len(done) == count:
                monkeypatch.setattr(Streamer, "_publish", publish)
                raise error

        monkeypatch.setattr(Streamer, "_publish", failing)

    return arm


Stop = Callable[[int, BaseException], None]


def test_an_interrupted_run_keeps_its_shards_and_says_how_to_continue(
    tiny: Path, tmp_path: Path, expected: dict[str, str], stop_after: Stop
) -> None:
    out = tmp_path / "out"
    stop_after(1, BackendError("the GPU caught fire", "Put it out."))
    with pytest.raises(BackendError) as failed:
        glmquant.quantize(tiny, out, workers=1, recipe="moe")
    command = f"glmquant quantize {tiny} {out} --recipe moe --resume"
    assert str(failed.value).splitlines() == [
        "the GPU caught fire",
        "  Put it out.",
        f"  Finished shards are kept. Continue with: {command}",
    ]
    kept = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert len(kept) == 1
    assert sorted(path.name for path in out.iterdir()) == [".glmquant", *kept]

    with pytest.raises(OutputError, match="is unfinished; nothing was touched") as refused:
        glmquant.quantize(tiny, out)
    assert command in str(refused.value)
    with pytest.raises(CheckpointError, match=r"is an unfinished output: no config\.json yet") as refused_too:
        glmquant.validate(out)
    assert command in str(refused_too.value)

    glmquant.quantize(tiny, out, resume=True)
    assert torture.digests(out) == expected
    assert {name: (out / name).stat().st_ino for name in kept} == kept


def test_the_command_it_names_works_as_it_stands(tiny: Path, tmp_path: Path, stop_after: Stop) -> None:
    options = {
        "recipe": "routed",
        "keep": ["model.layers.3.mlp.experts.*"],
        "targets": "sglang>=0.5.18",
        "base_model": "a/b c",
    }
    stop_after(1, BackendError("stop"))
    with pytest.raises(BackendError) as failed:
        glmquant.quantize(tiny, tmp_path / "o u t", workers=1, **options)
    import shlex

    words = shlex.split(str(failed.value).partition("Continue with: ")[2])
    assert words[0] == "glmquant" and main(words[1:]) == 0
    glmquant.quantize(tiny, tmp_path / "whole", **options)
    assert torture.digests(tmp_path / "o u t") == torture.digests(tmp_path / "whole")


def test_an_error_before_the_first_shard_leaves_no_trace(tiny: Path, tmp_path: Path, stop_after: Stop) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "allocate", full)
        with pytest.raises(OutputError, match=r"cannot be written: Disk quota exceeded\n.*Free space"):
            glmquant.quantize(tiny, tmp_path / "new/out")
        assert not (tmp_path / "new/out").exists()
        (tmp_path / "empty").mkdir()
        with pytest.raises(OutputError, match="Disk quota exceeded"):
            glmquant.quantize(tiny, tmp_path / "empty")
        assert os.listdir(tmp_path / "empty") == []
    assert glmquant.quantize(tiny, tmp_path / "empty").report.ok


def test_all_space_is_taken_before_the_first_byte_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, int]] = []

    def run(self: Streamer, shards: list, *_: object) -> None:
        begun.append({path.name: path.stat().st_blocks * 512 for path in (tmp_path / "out").glob(".*.partial")})
        raise BackendError("enough seen")

    monkeypatch.setattr(Streamer, "run", run)
    with pytest.raises(BackendError):
        glmquant.quantize(tiny, tmp_path / "out")
    planned = {f".{shard.file}.partial": shard.file_size for shard in glmquant.plan(tiny).plan.shards}
    assert begun[0].keys() == planned.keys()
    assert all(begun[0][file] >= size for file, size in planned.items())


def test_a_file_system_that_cannot_reserve_is_used_all_the_same(
    tiny: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        writer.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(writer, "_fallocate", unsupported)
    assert torture.digests(glmquant.quantize(tiny, tmp_path / "out", recipe="moe").output) == expected


def test_a_damaged_finished_shard_is_written_again(
    tiny: Path, tmp_path: Path, expected: dict[str, str], stop_after: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    stop_after(2, BackendError("stop"))
    with pytest.raises(BackendError):
        glmquant.quantize(tiny, out, workers=1)
    first, second = sorted(out.glob("*.safetensors"))
    with open(first, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    with open(second, "r+b") as file:
        file.truncate(1000)
    glmquant.quantize(tiny, out, resume=True)
    assert torture.digests(out) == expected
    assert "are not those that were written; written again" in caplog.text
    assert "1,000 bytes instead of" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"size": 5, "ranges": []}', b'{"size": -1, "ranges": 1}'])
def test_a_damaged_record_counts_as_none(
    content: bytes, tiny: Path, tmp_path: Path, expected: dict[str, str], stop_after: Stop
) -> None:
    out = tmp_path / "out"
    stop_after(1, BackendError("stop"))
    with pytest.raises(BackendError):
        glmquant.quantize(tiny, out, workers=1)
    (record,) = (out / ".glmquant").glob("*.safetensors.json")
    record.write_bytes(content)
    glmquant.quantize(tiny, out, resume=True)
    assert torture.digests(out) == expected


def test_a_finished_output_is_not_written_again(tiny: Path, copy_of: CopyOf, expected: dict[str, str]) -> None:
    out = copy_of(support.output(tiny, "moe").output)
    before = support.fingerprint(out)
    assert glmquant.quantize(tiny, out, resume=True).report.ok
    assert support.fingerprint(out) == before
    with pytest.raises(OutputError, match="holds a finished checkpoint; nothing was touched"):
        glmquant.quantize(tiny, out)
    with pytest.raises(OutputError, match="recipe was 'moe', now 'routed'"):
        glmquant.quantize(tiny, out, resume=True, recipe="routed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "moe-mtp"}, "recipe was 'moe', now 'moe-mtp'"),
        ({"keep": ["model.layers.3.mlp.experts.*"]}, r"overrides was \[\], now \['--keep"),
        ({"targets": "sglang==0.5.15", "form": "literal"}, "exclude list was"),
        ({"base_model": "other/name"}, "base model was 'tiny', now 'other/name'"),
        ({"backend": "quark"}, "backend was 'fused', now 'quark'"),
    ],
)
def test_another_setting_is_refused_and_named(
    change: dict, message: str, tiny: Path, tmp_path: Path, stop_after: Stop
) -> None:
    stop_after(1, BackendError("stop"))
    with pytest.raises(BackendError):
        glmquant.quantize(tiny, tmp_path / "out", workers=1)
    before = support.fingerprint(tmp_path / "out")
    with pytest.raises(OutputError, match=f"begun with something else, so it cannot be continued: .*{message}"):
        glmquant.quantize(tiny, tmp_path / "out", resume=True, **change)
    after = support.fingerprint(tmp_path / "out")
    assert {k: v for k, v in after.items() if "lock" not in k} == {k: v for k, v in before.items() if "lock" not in k}


@pytest.mark.parametrize("what", ["shard", "config", "format"])
def test_another_source_or_format_is_refused_and_named(
    what: str, tiny: Path, copy_of: CopyOf, tmp_path: Path, stop_after: Stop
) -> None:
    source, out = copy_of(tiny), tmp_path / "out"
    stop_after(1, BackendError("stop"))
    with pytest.raises(BackendError):
        glmquant.quantize(source, out, workers=1)
    if what == "shard":
        os.utime(source / MTP_SHARD, ns=(1, 1))
    elif what == "config":
        config = support.read_json(source / "config.json") | {"initializer_range": 0.5}
        (source / "config.json").write_text(json.dumps(config))
    else:
        run = support.read_json(out / ".glmquant/run.json")
        run["fingerprint"]["format"] = 0
        (out / ".glmquant/run.json").write_text(json.dumps(run))
    message = {"shard": f"source file '{MTP_SHARD}' changed", "config": "config.json was", "format": "format was 0"}
    with pytest.raises(OutputError, match=message[what]):
        glmquant.quantize(source, out, resume=True)


def test_a_second_run_on_the_same_output_is_refused_while_the_first_works(
    tiny: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    refused: list[str] = []
    publish = Streamer._publish

    def meanwhile(self: Streamer, *args: object) -> None:
        if not refused:
            for option in ([], ["--resume"]):
                command = [sys.executable, "-m", "glmquant", "quantize", tiny, out, *option]
                done = subprocess.run(command, capture_output=True, text=True)
                refused.append(f"{done.returncode} {done.stderr}")
        publish(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Streamer, "_publish", meanwhile)
    glmquant.quantize(tiny, out, recipe="moe", workers=1)
    assert all(f"is being written by another process (process {os.getpid()} on " in text for text in refused)
    assert all(text.startswith("1 glmquant: error:") for text in refused)
    assert torture.digests(out) == expected


def test_a_file_system_without_locks_works(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert glmquant.quantize(tiny, tmp_path / "out").report.ok
    assert "cannot be locked (No locks available): start no second run on it" in caplog.text


# the source


def test_a_source_that_changes_while_it_is_read_is_an_error(
    tiny: Path, copy_of: CopyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_of(tiny)
    quantize = FusedBackend.quantize_into

    def touching(self: FusedBackend, *args: object) -> int:
        for path in source.glob("*.safetensors"):
            os.utime(path)
        return quantize(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedBackend, "quantize_into", touching)
    with pytest.raises(CheckpointError, match=r"model-0000\d.*: changed since its header was read \(it was written to"):
        glmquant.quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_zeros_is_an_error_unless_it_is_meant_so(tiny: Path, tmp_path: Path) -> None:
    zeros = {"model.layers.4.mlp.experts.3.down_proj.weight", "model.layers.2.self_attn.o_proj.weight"}
    source = support.copy(tiny, tmp_path / "source", lambda name, t: t.zero_() if name in zeros else t)
    with pytest.raises(CheckpointError, match=r"tensor 'model.*' is all zeros\n.*fetch this file again.*--allow-zeros"):
        glmquant.quantize(source, tmp_path / "out")
    assert glmquant.quantize(source, tmp_path / "allowed", allow_zeros=True).report.ok


def test_a_read_only_source_and_any_umask_do(tiny: Path, copy_of: CopyOf, tmp_path: Path) -> None:
    source = copy_of(tiny)
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    old = os.umask(0o027)
    try:
        out = glmquant.quantize(source, tmp_path / "out").output
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o640}


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
def test_a_read_only_place_says_so_first(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    tmp_path.chmod(0o755)
    place.chmod(0o555)
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    drop = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    for folder in list(tmp_path.parents)[:-2]:
        if os.geteuid() == 0 and folder.stat().st_uid == 0 and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        [*drop, sys.executable, "-m", "glmquant", "quantize", source, place / "out"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"glmquant: error: output {place / 'out'} cannot be created: Permission denied" in done.stderr
    assert list(place.iterdir()) == []


def test_a_clock_that_goes_backwards_changes_nothing(
    tiny: Path, tmp_path: Path, expected: dict[str, str], stop_after: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stop_after(1, BackendError("stop"))
    with pytest.raises(BackendError):
        glmquant.quantize(tiny, out, workers=1)
    for path in out.rglob("*"):  # written in what is now the future
        os.utime(path, (4e9, 4e9))
    for clock in ("time", "monotonic"):
        ticks = iter(range(10**9, 0, -1))
        monkeypatch.setattr(time, clock, lambda ticks=ticks: float(next(ticks)))
    assert main(["quantize", str(tiny), str(out), "--resume", "--recipe", "moe"]) == 0
    assert torture.digests(out) == expected


# deleting the source


def test_source_shards_go_once_their_output_is_verified_and_the_run_can_be_continued(
    tiny: Path, copy_of: CopyOf, tmp_path: Path, expected: dict[str, str], stop_after: Stop
) -> None:
    source, out = copy_of(tiny), tmp_path / "out"
    stop_after(2, BackendError("stop"))
    with pytest.raises(BackendError) as failed:
        glmquant.quantize(source, out, workers=1, delete_source_shards=True, base_model="tiny")
    assert "--delete-source-shards --resume" in str(failed.value)
    assert len(list(source.glob("*.safetensors"))) == 1
    with pytest.raises(CheckpointError, match="missing"):
        glmquant.plan(source)
    glmquant.quantize(source, out, resume=True, delete_source_shards=True, base_model="tiny")
    assert torture.digests(out) == expected
    assert not list(source.glob("*.safetensors"))
    assert (source / "config.json").exists()


def test_a_source_shard_stays_if_its_output_cannot_be_read_back(
    tiny: Path, copy_of: CopyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, before = copy_of(tiny), support.fingerprint(tiny)
    publish = writer.ShardWriter.publish

    def rotting(self: writer.ShardWriter, drop_pages: bool = False) -> None:
        publish(self, drop_pages)
        with open(self.path, "r+b") as file:
            file.seek(5000)
            file.write(b"\xff\x00\xff")

    monkeypatch.setattr(writer.ShardWriter, "publish", rotting)
    with pytest.raises(OutputError, match="are not those that were written; its source shard was not deleted"):
        glmquant.quantize(source, tmp_path / "out", delete_source_shards=True)
    left = support.fingerprint(source)
    assert {n: v[0] for n, v in left.items() if "safetensors" in n} == {
        n: v[0] for n, v in before.items() if "safetensors" in n
    }


def test_links_are_never_deleted_through(tiny: Path, copy_of: CopyOf, tmp_path: Path) -> None:
    real = copy_of(tiny)
    source = tmp_path / "models--org--name/snapshots/abc"
    blobs = tmp_path / "models--org--name/blobs"
    source.mkdir(parents=True)
    blobs.mkdir()
    for path in real.iterdir():
        shutil.move(path, blobs / path.name)
        (source / path.name).symlink_to(blobs / path.name)
    with pytest.raises(CheckpointError, match=r"is a link: --delete-source-shards would delete a file outside"):
        glmquant.quantize(source, tmp_path / "out", delete_source_shards=True)
    assert len(list(blobs.glob("*.safetensors"))) == 3 and not (tmp_path / "out").exists()


# signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_in_seconds_and_it_can_be_continued(
    number: int, code: int, tiny: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    out = tmp_path / "out"
    script = (
        "import sys, time\n"
        "from glmquant.mxfp4.kernel import FusedBackend\n"
        "from glmquant.cli import main\n"
        "real = FusedBackend.quantize_into\n"
        "FusedBackend.quantize_into = lambda *a: (time.sleep(0.02), real(*a))[1]\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "quantize", tiny, out, "--workers", "1", "--recipe", "moe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
        sent = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - sent < 5
    assert stderr.splitlines() == [
        "glmquant: interrupted",
        f"  Continue with: glmquant quantize {tiny} {out} --recipe moe --resume",
    ]
    assert not (out / "config.json").exists() and not list(out.glob(".*.partial"))
    glmquant.quantize(tiny, out, resume=True)
    assert torture.digests(out) == expected


def test_a_second_signal_stops_at_once(tiny: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    out = tmp_path / "out"
    script = (
        "import sys, time\n"
        "from glmquant.mxfp4.kernel import FusedBackend\n"
        "from glmquant.cli import main\n"
        "FusedBackend.quantize_into = lambda *a: time.sleep(600)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "quantize", tiny, out, "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob(".*.partial")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 130
    glmquant.quantize(tiny, out, resume=True)
    assert torture.digests(out) == expected


# kills and faults: a sample; scripts/torture.py does all of them


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> torture.Torture:
    from make_tiny_glm import make_tiny_glm

    source = tmp_path_factory.mktemp("torture") / "source"
    make_tiny_glm(source, layers=2, experts=2, hidden=64, moe_intermediate=32, intermediate=64, shards=3)
    return torture.Torture(source, tmp_path_factory.mktemp("torn"))


def test_killed_at_a_sample_of_steps_nothing_is_lost(torn: torture.Torture) -> None:
    assert torture.kill(torn, every=len(torn.calls) // 12, instants=6, seed=1).endswith("0 lost")


def test_with_a_sample_of_failing_system_calls_nothing_is_lost(torn: torture.Torture) -> None:
    assert torture.fault(torn, every=len(torn.calls) // 3).endswith("0 lost")


@pytest.mark.parametrize("size_mb", [1, 2])
def test_on_a_small_disk_nothing_is_begun_that_cannot_end(
    size_mb: int, tiny: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        with pytest.raises(OutputError, match=r"bytes free, the output needs"):
            glmquant.quantize(tiny, disk / "out")
        assert list(disk.iterdir()) == []
        with pytest.MonkeyPatch.context() as patch:  # as if another process took the space after the check
            patch.setattr(shards, "check_space", lambda *_: None)
            with pytest.raises(OutputError, match=r"cannot be written: No space left on device\n.*Free space"):
                glmquant.quantize(tiny, disk / "out")
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        assert torture.digests(glmquant.quantize(tiny, disk / "out", recipe="moe").output) == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_another_process_fills_stops_nothing_that_was_reserved(tiny: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        quantize = FusedBackend.quantize_into

        def greedy(self: FusedBackend, *args: object) -> int:
            with open(disk / "other", "ab") as other:
                try:
                    while True:
                        other.write(bytes(65536))
                        other.flush()
                except OSError:
                    pass
            return quantize(self, *args)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FusedBackend, "quantize_into", greedy)
            with pytest.raises(OutputError, match="No space left on device") as failed:
                glmquant.quantize(tiny, disk / "out", workers=1)
        assert not (disk / "out/config.json").exists()
        (disk / "other").unlink()
        if (disk / "out").exists():
            assert "--resume" in str(failed.value)
        assert glmquant.quantize(tiny, disk / "out", resume=True).report.ok
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# the manifest


def test_the_manifest_names_every_file_and_every_byte(tiny: Path) -> None:
    out = support.output(tiny, "moe").output
    manifest = Manifest.read(out)
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {*manifest.files, *manifest.shards, MANIFEST} == files
    for file, record in manifest.shards.items():
        assert record.size == record.ranges[-1][0] == (out / file).stat().st_size
    assert Manifest.read(out).encode() == (out / MANIFEST).read_bytes()


def test_pieces_with_a_gap_or_an_overlap_are_no_record() -> None:
    assert record_of("a", [(3, 5, "y"), (0, 3, "x"), (5, 5, "empty")]).ranges == ((3, "x"), (5, "y"))
    for pieces in ([(0, 3, "x"), (4, 5, "y")], [(0, 3, "x"), (2, 5, "y")], [(1, 2, "x")]):
        with pytest.raises(OutputError, match="not written, or twice"):
            record_of("a", pieces)


def test_mending_the_list_keeps_the_manifest_true(tiny: Path, copy_of: CopyOf) -> None:
    out = copy_of(support.output(tiny, "moe").output)
    config = support.read_json(out / "config.json")
    config["quantization_config"]["exclude"] = ["lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    assert {p.code for p in glmquant.verify(out).problems} == {"changed-file"}
    glmquant.fix_exclusions(out)
    assert [p.code for p in glmquant.verify(out).problems] == ["unknown-file"]  # config.json.bak

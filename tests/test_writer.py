"""checkpoint/writer.py: nothing of the user's is touched, nothing half-done looks done."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import contents

import glmquant
from glmquant.checkpoint.manifest import open_run
from glmquant.checkpoint.writer import ShardWriter, check_place, check_space, copy_file, create_folder, write_file
from glmquant.errors import OutputError

NAME = "model-00001-of-00003.safetensors"
HEADER = b"\x02\0\0\0\0\0\0\0{}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "source"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def everything(folder: Path) -> tuple[list[str], dict[str, bytes]]:
    """All paths, empty folders and links too, and all contents."""
    return sorted(str(path) for path in folder.rglob("*")), contents(folder)


def refusal(output: Path, source: Path, needed: int = 0) -> str:
    """The message; nothing in sight of source and output may have changed."""
    root = source.parent.parent
    before = everything(root)
    with pytest.raises(OutputError) as caught:
        check_place(output, source)
        check_space(output, needed)
        with open_run(output, {}, "glmquant ...", resume=False):
            pass
    assert everything(root) == before
    return str(caught.value)


# where to write


def test_a_new_or_empty_folder_is_accepted_and_not_yet_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "new/deep"):
        check_place(tmp_path / folder, source)
        check_space(tmp_path / folder, 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["weights.bin", ".hidden", ".model.safetensors.partial"])
def test_a_folder_with_anything_in_it_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"precious")
    message = refusal(tmp_path / "out", source)
    assert message.startswith(f"output {tmp_path}/out is not empty (it holds {name!r}); nothing was touched\n")


def test_the_source_itself_is_refused(source: Path) -> None:
    assert refusal(source, source).startswith(f"output {source} is the source folder\n")


def test_the_source_under_another_name_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    assert "is the source folder" in refusal(tmp_path / "link", source)
    assert "is the source folder" in refusal(source / ".." / "source", source)


def test_a_folder_inside_the_source_is_refused(source: Path, tmp_path: Path) -> None:
    assert f"lies inside the source {source}" in refusal(source / "a" / "b", source)
    (tmp_path / "link").symlink_to(source)
    assert f"lies inside the source {source}" in refusal(tmp_path / "link" / "a", source)


def test_a_folder_that_contains_the_source_is_refused(source: Path) -> None:
    assert f"contains the source {source}" in refusal(source.parent, source)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_something_that_is_no_folder_is_refused(source: Path, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "out").write_bytes(b"precious")
    else:
        (tmp_path / "out").symlink_to("gone")
    assert refusal(tmp_path / "out", source) == f"output {tmp_path}/out exists and is not a folder"


def test_a_disk_that_is_too_small_is_refused_with_the_missing_bytes(source: Path, tmp_path: Path) -> None:
    message = refusal(tmp_path / "new" / "out", source, needed=2**62)
    assert f"the disk of {tmp_path}/new/out has " in message
    assert " bytes free, the output needs 4,611,686,018,427,387,904\n" in message


def test_the_last_free_byte_may_be_used(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    check_space(tmp_path / "out", 1000)
    message = refusal(tmp_path / "out", source, 1001)
    assert message.endswith("has 1,000 bytes free, the output needs 1,001\n  Free 1 bytes or choose another disk.")


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(size, 0, size))


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"output .*/file/out cannot be created: Not a directory"):
        create_folder(tmp_path / "file" / "out")


# one shard


def test_a_shard_may_be_filled_in_any_order_and_appears_when_complete(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, NAME, HEADER, 16) as writer:
        writer.write(b"456", 13)
        writer.write(memoryview(b"123"), 10)
        assert os.listdir(tmp_path) == [f".{NAME}.partial"]
        assert (tmp_path / f".{NAME}.partial").stat().st_size == 16
    assert contents(tmp_path) == {NAME: HEADER + b"123456"}


def test_a_buffer_of_any_type_is_written_as_its_bytes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, NAME, HEADER, 14) as writer:
        writer.write(memoryview(b"\x01\x02\x03\x04").cast("H"), 10)
    assert (tmp_path / NAME).read_bytes() == HEADER + b"\x01\x02\x03\x04"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_file_behind(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), ShardWriter(tmp_path, NAME, HEADER, 16) as writer:
        writer.write(b"123456", 10)
        raise error
    assert os.listdir(tmp_path) == []


def test_no_file_stays_open_whether_the_shard_was_written_or_not(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with ShardWriter(tmp_path, NAME, HEADER, 10):
        pass
    with pytest.raises(OutputError), ShardWriter(tmp_path, NAME, HEADER, 16):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_missing_bytes_are_an_error_and_leave_no_file_behind(tmp_path: Path) -> None:
    message = f"{NAME}: 13 bytes written, 16 planned"
    with pytest.raises(OutputError, match=message), ShardWriter(tmp_path, NAME, HEADER, 16) as writer:
        writer.write(b"123", 10)
    assert os.listdir(tmp_path) == []


def test_a_reserved_shard_takes_its_space_and_can_be_filled_later(tmp_path: Path) -> None:
    ShardWriter(tmp_path, NAME, HEADER, 100_010).reserve()
    reserved = (tmp_path / f".{NAME}.partial").stat()
    assert reserved.st_size == 100_010 and reserved.st_blocks * 512 >= 100_010
    with ShardWriter(tmp_path, NAME, HEADER, 100_010) as writer:
        writer.write(b"x" * 100_000, 10)
    assert contents(tmp_path) == {NAME: HEADER + b"x" * 100_000}


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    for name in (NAME, "config.json"):
        (tmp_path / f".{name}.partial").symlink_to("precious")
    with pytest.raises(OutputError, match=f"{NAME}: cannot be written: Too many levels"):
        ShardWriter(tmp_path, NAME, HEADER, 16).open()
    with pytest.raises(OutputError, match=r"config\.json: cannot be written: Too many levels"):
        write_file(tmp_path, "config.json", b"{}")
    assert (tmp_path / "precious").read_bytes() == b"precious"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_size_that_the_system_refuses_is_an_error_before_any_byte(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=f"{NAME}: cannot be written: File too large"), file_size_limit(15):
        ShardWriter(tmp_path, NAME, HEADER, 16).__enter__()
    assert os.listdir(tmp_path) == []


def test_a_write_that_the_system_refuses_is_an_error_with_the_shard(tmp_path: Path) -> None:
    message = f"{NAME}: cannot be written: File too large"
    with (
        pytest.raises(OutputError, match=message),
        ShardWriter(tmp_path, NAME, HEADER, 16) as writer,
        file_size_limit(12),
    ):
        writer.write(b"123456", 10)  # the first two bytes fit
    assert os.listdir(tmp_path) == []


# small files


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_file(tmp_path, "config.json", b"old")
    write_file(tmp_path, "config.json", b"new")
    assert contents(tmp_path) == {"config.json": b"new"}


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    write_file(tmp_path, "config.json", b"old")
    with pytest.raises(OutputError, match=r"config\.json: cannot be written: File too large"), file_size_limit(10):
        write_file(tmp_path, "config.json", b"x" * 100)
    assert contents(tmp_path) == {"config.json": b"old"}


def test_a_side_file_is_copied_byte_for_byte_and_its_link_resolved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "blob").write_bytes(b"\x00\r\n\xff")
    (tmp_path / "tokenizer.json").symlink_to("blob")
    copy_file(tmp_path / "tokenizer.json", out, "sub/tokenizer.json")
    assert not (out / "sub/tokenizer.json").is_symlink()
    assert contents(out) == {"sub/tokenizer.json": b"\x00\r\n\xff"}


def test_a_side_file_whose_folder_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sub").write_bytes(b"")
    with pytest.raises(OutputError, match=r"sub cannot be created: File exists"):
        copy_file(tmp_path / "sub", tmp_path, "sub/tokenizer.json")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_every_file_has_the_mode_that_the_umask_says(tmp_path: Path, mask: int) -> None:
    (tmp_path / "private").write_bytes(b"")
    (tmp_path / "private").chmod(0o600)
    before = os.umask(mask)
    try:
        write_file(tmp_path, "a", b"")
        copy_file(tmp_path / "private", tmp_path, "b")
        with ShardWriter(tmp_path, "c", HEADER, 10):
            pass
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"} == {0o666 & ~mask}


# a whole run


def test_too_little_disk_is_found_before_the_output_folder_is_made(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 1000)
    with pytest.raises(OutputError, match="has 1,000 bytes free, the output needs "):
        glmquant.quantize(tiny, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_used_output_folder_is_refused_and_stays_as_it_is(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    before, source_before = everything(tmp_path), everything(tiny)
    with pytest.raises(OutputError, match="is not empty"):
        glmquant.quantize(tiny, tmp_path / "out")
    assert (everything(tmp_path), everything(tiny)) == (before, source_before)


def test_a_full_disk_in_the_second_shard_names_it_and_leaves_no_config(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = "model-00002-of-00003.safetensors"
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if second in os.readlink(f"/proc/self/fd/{fd}") and offset > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError) as caught:
        glmquant.quantize(tiny, tmp_path / "out", workers=1)
    first, *hints = str(caught.value).splitlines()
    assert first == f"{second}: cannot be written: No space left on device"
    assert hints[0] == "  Free space on the disk of the output." and "--resume" in hints[1]
    assert sorted(os.listdir(tmp_path / "out")) == [".glmquant", NAME]


def test_config_json_is_written_last(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), written.append(Path(new).name)))
    glmquant.quantize(tiny, tmp_path / "out")
    assert written[-1] == "config.json"
    records = [name for name in written if name.endswith(".safetensors.json")]
    assert sorted(written) == sorted([*os.listdir(tmp_path / "out"), *records, "run.json"])


def test_the_disk_needed_is_enough_and_not_far_off(tiny: Path, tmp_path: Path) -> None:
    glmquant.quantize(tiny, tmp_path / "out")
    taken = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert taken <= glmquant.plan(tiny).disk_needed <= taken + 100_000

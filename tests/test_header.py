"""checkpoint/header.py: what the bytes say, the reference writer's layout, and every damage refused by name."""

from __future__ import annotations

import contextlib
from math import prod
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from checkpoints import edit_header, raw_shard, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from glmquant.checkpoint.header import (
    DTYPE_BITS,
    ShardHeader,
    TensorInfo,
    encode_header,
    layout_order,
    read_header,
    tensor_nbytes,
)
from glmquant.errors import CheckpointError

LITERAL = (
    b"\xa0\0\0\0\0\0\0\0"
    b'{"__metadata__":{"format":"pt"},'
    b'"w.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"w.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]}}'
    b"      "
)
DATA = bytes(range(20))


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value)


# literal bytes


def test_a_header_is_read_from_its_bytes(tmp_path: Path) -> None:
    header = read_header(save(tmp_path / "a.safetensors", LITERAL + DATA))
    assert header == ShardHeader(
        "a.safetensors",
        (
            TensorInfo("w.bias", "F32", (2,), "a.safetensors", 168, 176),
            TensorInfo("w.weight", "BF16", (2, 3), "a.safetensors", 176, 188),
        ),
        {"format": "pt"},
        188,
        (tmp_path / "a.safetensors").stat().st_mtime_ns,
        xxhash.xxh3_128_hexdigest(LITERAL),
    )
    assert [(tensor.nbytes, tensor.numel) for tensor in header.tensors] == [(8, 2), (12, 6)]


def test_a_header_is_written_as_its_bytes() -> None:
    rows = [("w.bias", "F32", (2,), 0, 8), ("w.weight", "BF16", (2, 3), 8, 20)]
    assert encode_header(rows, {"format": "pt"}) == LITERAL


def test_without_metadata_no_key_for_it_is_written() -> None:
    expected = b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   '
    assert encode_header([("a", "U8", (1,), 0, 1)], {}) == expected


def test_tensors_come_in_file_order_whatever_the_order_of_names(tmp_path: Path) -> None:
    text = (
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        '"empty":{"dtype":"F32","shape":[0,4],"data_offsets":[1,1]}}'
    )
    header = read_header(save(tmp_path / "a.safetensors", raw_shard(text, b"xy")))
    assert [(tensor.name, tensor.nbytes) for tensor in header.tensors] == [("b", 1), ("empty", 0), ("a", 1)]


def test_safetensors_reads_a_header_of_ours(tmp_path: Path) -> None:
    rows = [("a.weight_scale", "F8_E8M0", (2, 1), 0, 2), ("é\n", "F4", (2, 32), 2, 34)]
    path = save(tmp_path / "a.safetensors", encode_header(rows, {"format": "pt"}) + bytes(34))
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["a.weight_scale", "é\n"]
        assert file.get_slice("é\n").get_shape() == [2, 32]
        assert file.get_slice("é\n").get_dtype() == "F4"


# the reference writer

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(TORCH)), shapes), max_size=8), st.randoms())
@settings(deadline=None, max_examples=100)
def test_a_file_is_laid_out_as_safetensors_lays_it_out(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict, random
) -> None:
    content = {name: random.randbytes(tensor_nbytes(dtype, shape)) for name, (dtype, shape) in tensors.items()}
    rows, data = [], b""
    for name in sorted(tensors, key=lambda name: layout_order(tensors[name][0], name)):
        rows.append((name, *tensors[name], len(data), len(data) + len(content[name])))
        data += content[name]
    ours = encode_header(rows, {"format": "pt"}) + data

    theirs = {
        name: torch.frombuffer(bytearray(content[name]), dtype=torch.uint8).view(TORCH[dtype]).reshape(shape)
        if prod(shape)
        else torch.empty(shape, dtype=TORCH[dtype])
        for name, (dtype, shape) in tensors.items()
    }
    assert safetensors.torch.save(theirs, metadata={"format": "pt"}) == ours

    path = save(tmp_path_factory.getbasetemp() / "property.safetensors", ours)
    read = read_header(path)
    assert {t.name: (t.dtype, t.shape) for t in read.tensors} == tensors
    assert all(ours[t.start : t.end] == content[t.name] for t in read.tensors)


def test_every_dtype_of_the_format_has_its_size() -> None:
    assert set(TORCH) | {"F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"} == set(DTYPE_BITS)
    assert [tensor_nbytes(dtype, (8,)) for dtype in ("F4", "F6_E2M3", "U8", "BF16", "F32", "I64")] == [
        4,
        6,
        8,
        16,
        32,
        64,
    ]


# damage


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_the_length_word_is_refused(tmp_path: Path, size: int) -> None:
    message = refusal(save(tmp_path / "cut.safetensors", LITERAL[:size]))
    assert message.startswith(f"cut.safetensors: header cut short: the file has {size} bytes\n")
    assert "fetch this file again" in message


def test_a_header_cut_inside_its_json_is_refused(tmp_path: Path) -> None:
    message = refusal(save(tmp_path / "cut.safetensors", LITERAL[:100]))
    assert "cut.safetensors: header cut short: 160 bytes announced, 92 present" in message


def test_a_length_over_the_formats_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = save(tmp_path / "page.safetensors", b"<!DOCTYPE html><html>")
    assert "page.safetensors: header length" in refusal(path) and "not a safetensors file" in refusal(path)
    longest = save(tmp_path / "longest.safetensors", (100_000_000).to_bytes(8, "little"))
    assert "header cut short: 100000000 bytes announced" in refusal(longest)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.safetensors") == "gone.safetensors: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "not valid JSON"),
        (b'{"\xff":1}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (r'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "not valid JSON"),
        (r'{"__metadata__":{"format":"\ud800"}}', "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"__metadata__":["format"]}', "__metadata__ is not a map of strings"),
        ('{"__metadata__":{"format":1}}', "__metadata__ is not a map of strings"),
        ('{"a":{},"a":{}}', "key 'a' appears twice"),
        ('{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "key 'dtype' appears twice"),
    ],
)
def test_a_header_that_is_no_clean_json_is_refused(tmp_path: Path, header: str | bytes, message: str) -> None:
    found = refusal(save(tmp_path / "bad.safetensors", raw_shard(header)))
    assert found.startswith("bad.safetensors: ") and message in found


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["dtype", "shape", "data_offsets"], "exactly dtype, shape and data_offsets"),
        ({"dtype": "BF16", "shape": [2]}, "exactly dtype, shape and data_offsets"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 4], "x": 1}, "exactly dtype, shape and data_offsets"),
        ({"dtype": "F12", "shape": [2], "data_offsets": [0, 4]}, "unknown dtype 'F12'"),
        ({"dtype": ["BF16"], "shape": [2], "data_offsets": [0, 4]}, "unknown dtype ['BF16']"),
        ({"dtype": "BF16", "shape": [True, 2], "data_offsets": [0, 4]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": [-1, -2], "data_offsets": [0, 4]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": [2.0], "data_offsets": [0, 4]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": 2, "data_offsets": [0, 4]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 2, 4]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, "4"]}, "not natural numbers"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [4, 0]}, "data_offsets [4, 0] hold -4 bytes"),
        ({"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}, "[0, 4] hold 4 bytes, BF16 [3] needs 6"),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}, "F4 [3] does not fill whole bytes"),
    ],
)
def test_a_wrong_entry_is_refused_with_file_and_tensor(tmp_path: Path, entry: object, message: str) -> None:
    found = refusal(save(tmp_path / "bad.safetensors", raw_shard({"a.weight": entry}, bytes(4))))
    assert found.startswith("bad.safetensors: tensor 'a.weight': ") and message in found


@pytest.mark.parametrize(
    ("begin", "message"),
    [(0, "tensor 'b' overlaps 'a'"), (2, "tensor 'b' overlaps 'a'"), (5, "tensor 'b' leaves a gap after 'a'")],
)
def test_ranges_that_do_not_meet_are_refused_with_file_and_tensors(tmp_path: Path, begin: int, message: str) -> None:
    path = save(tmp_path / "a.safetensors", shard({"a": ("BF16", [2]), "b": ("BF16", [2])}))
    with edit_header(path) as header:
        header["b"]["data_offsets"] = [begin, begin + 4]
    assert refusal(path) == f"a.safetensors: {message}"


def test_a_first_tensor_that_starts_late_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", shard({"a": ("BF16", [2])}) + bytes(4))
    with edit_header(path) as header:
        header["a"]["data_offsets"] = [4, 8]
    assert refusal(path) == "a.safetensors: tensor 'a' leaves a gap after the header"


def test_a_tensor_past_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", (LITERAL + DATA)[:-1])
    assert "a.safetensors: tensor 'w.weight' ends at byte 188, past the end of the file (187)" in refusal(path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", LITERAL + DATA + b"?")
    assert refusal(path) == "a.safetensors: 1 bytes after 'w.weight' belong to no tensor"


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_file_is_refused_or_one_that_safetensors_reads_alike(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(LITERAL + DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.sampled_from(b'\0\x20"{}[],:-.0129eauBF\xff')
        )
    path = save(tmp_path_factory.getbasetemp() / "damaged.safetensors", bytes(content))
    with contextlib.suppress(CheckpointError):
        ours = {t.name: [t.dtype, list(t.shape), bytes(content[t.start : t.end])] for t in read_header(path).tensors}
        theirs = dict(safetensors.deserialize(bytes(content)))
        assert ours == {name: [t["dtype"], t["shape"], bytes(t["data"])] for name, t in theirs.items()}

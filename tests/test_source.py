"""checkpoint/source.py: a folder is read from its headers, and whatever does not fit together is refused by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from checkpoints import FIRST, INDEX, SECOND, edit_header, edit_json, raw_shard, shard, write_checkpoint

from glmquant.checkpoint import source
from glmquant.checkpoint.source import ShardReader, inspect, open_source
from glmquant.errors import CheckpointError

A, B, C = "model.a.weight", "model.b.weight", "model.c.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: A and B in the first, C in the second."""
    tensors = {FIRST: {A: ("BF16", [2, 32]), B: ("F32", [4])}, SECOND: {C: ("BF16", [2])}}
    return write_checkpoint(tmp_path / "source", tensors, num_hidden_layers=1)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    return str(caught.value)


# what is accepted


def test_a_folder_is_read_without_its_weights(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / ".gitattributes").write_text("")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    found = open_source(folder)
    assert [header.file for header in found.shards] == [FIRST, SECOND]
    assert {name: (t.dtype, t.shape, t.shard) for name, t in found.tensors.items()} == {
        A: ("BF16", (2, 32), FIRST),
        B: ("F32", (4,), FIRST),
        C: ("BF16", (2,), SECOND),
    }
    assert found.nbytes == 128 + 16 + 4
    assert found.model_type == "glm_moe_dsa"
    assert found.side_files == (".gitattributes", "tokenizer/vocab.json")


def test_a_single_shard_needs_no_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", {"model.safetensors": {A: ("F16", [2])}})
    (folder / INDEX).unlink()
    found = open_source(folder)
    assert (found.weight_map, found.total_size, list(found.tensors)) == (None, None, [A])


def test_a_hub_cache_snapshot_is_read_like_a_plain_folder(tiny: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--zai-org--GLM-5.2"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for path in tiny.iterdir():
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
        (repo / "blobs" / sha).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{sha}")
    plain, cached = open_source(tiny), open_source(snapshot)
    assert cached.tensors == plain.tensors
    assert [(shard.file, shard.digest) for shard in cached.shards] == [(s.file, s.digest) for s in plain.shards]
    assert (cached.config, cached.weight_map) == (plain.config, plain.weight_map)
    assert cached.side_files == plain.side_files


def test_the_published_checkpoint_is_read_whole(full: Path) -> None:
    found = open_source(full)
    assert (len(found.shards), len(found.tensors)) == (282, 59_585)
    assert found.nbytes == found.total_size == 1_506_659_919_872


# the folder


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone").startswith(f"{tmp_path}/gone does not exist\n")


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    assert refusal(folder / FIRST).startswith(f"{folder / FIRST} is not a folder\n")


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder).startswith(f"{folder}: no config.json\n")


def test_a_config_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert refusal(folder) == "config.json: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not valid JSON: "),
        ("[]", "config.json: not a JSON object"),
        ('{"num_hidden_layers":1,"num_hidden_layers":2}', "key 'num_hidden_layers' appears twice"),
        ('{"a":{"b":1,"b":2}}', "key 'b' appears twice"),
        ('{"a":"\\ud800"}', "config.json: not valid JSON: "),
        ("[" * 100_000, "config.json: not valid JSON: "),
    ],
)
def test_a_config_that_is_no_clean_json_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    assert message in refusal(folder)


def test_a_json_file_of_absurd_size_is_refused_unread(folder: Path) -> None:
    os.truncate(folder / "config.json", source.MAX_JSON_BYTES + 1)
    assert "config.json: 100000001 bytes is too big" in refusal(folder)


def test_a_symlinked_subfolder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "extra").symlink_to(tmp_path)
    assert refusal(folder).startswith("extra: a symlinked folder inside a checkpoint\n")


def test_a_side_file_whose_link_leads_nowhere_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("gone")
    assert refusal(folder).startswith("tokenizer.json: not a regular file, or a link that leads nowhere\n")


def test_a_shard_whose_link_leads_nowhere_is_refused(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("gone")
    assert f"{SECOND}: cannot be read: No such file" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "old/weights.pth", "a.ckpt", "b.pkl"])
def test_a_pickle_is_refused(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04.")
    assert refusal(folder).startswith(f"{name}: a pickle file; glmquant neither reads nor copies pickles")


# index and shards


def test_several_shards_without_an_index_are_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"no {INDEX}, and 2 shards instead of one model.safetensors" in refusal(folder)


def test_a_folder_without_shards_is_refused(folder: Path) -> None:
    for file in (INDEX, FIRST, SECOND):
        (folder / file).unlink()
    assert "and no shard instead of one model.safetensors" in refusal(folder)


def test_an_index_that_names_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert f"{INDEX} names shard {SECOND} (for tensor {C!r} and others), which is not there" in refusal(folder)


def test_an_index_that_names_a_missing_tensor_is_refused(folder: Path) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"]["model.d.weight"] = FIRST
    assert f"{INDEX}: tensor 'model.d.weight' is not in shard {FIRST}" in refusal(folder)


def test_an_index_that_lacks_a_tensor_is_refused(folder: Path) -> None:
    with edit_json(folder / INDEX) as index:
        del index["weight_map"][B]
    assert f"tensor {B!r} of shard {FIRST} is not named by {INDEX}" in refusal(folder)


def test_an_index_that_gives_a_tensor_to_another_shard_is_refused(folder: Path) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"][B] = SECOND
    assert f"{INDEX}: tensor {B!r} is said to be in {SECOND} but is in {FIRST}" in refusal(folder)


def test_a_shard_that_the_index_does_not_name_is_refused(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(shard({"model.d.weight": ("BF16", [2])}))
    assert f"shard consolidated.safetensors (with tensor 'model.d.weight') is not named by {INDEX}" in refusal(folder)


def test_a_shard_in_a_subfolder_is_refused(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "x.safetensors").write_bytes(shard({"model.d.weight": ("BF16", [2])}))
    assert "original/x.safetensors: a shard in a subfolder" in refusal(folder)


def test_a_name_in_two_shards_is_refused(folder: Path) -> None:
    (folder / SECOND).write_bytes(shard({C: ("BF16", [2]), A: ("BF16", [2])}))
    assert f"tensor {A!r} is in two shards: {FIRST} and {SECOND}" in refusal(folder)


@pytest.mark.parametrize(
    "path", ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "a/x.safetensors", "x", ""]
)
def test_an_index_path_that_leaves_the_folder_is_refused(folder: Path, path: str) -> None:
    (folder.parent / "x.safetensors").write_bytes(shard({A: ("BF16", [2, 32])}))
    with edit_json(folder / INDEX) as index:
        index["weight_map"][C] = path
    assert f"{INDEX}: tensor {C!r} is said to be in {path!r}, which is not a shard name in this folder" in refusal(
        folder
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"metadata":{}}', "weight_map is not a map of tensor to file"),
        ('{"weight_map":{"a":1}}', "weight_map is not a map of tensor to file"),
        ('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "key 'a' appears twice"),
    ],
)
def test_a_broken_index_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    found = refusal(folder)
    assert found.startswith(f"{INDEX}: ") and message in found


def test_a_broken_header_is_refused_with_file_and_tensor(folder: Path) -> None:
    with edit_header(folder / FIRST) as header:
        header[B]["data_offsets"] = [127, 143]
    assert refusal(folder).startswith(f"{FIRST}: tensor {B!r} overlaps {A!r}")


def test_a_header_with_a_duplicate_name_is_refused(folder: Path) -> None:
    entry = '"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    (folder / SECOND).write_bytes(raw_shard("{" + entry + "," + entry + "}"))
    assert refusal(folder).startswith(f"{SECOND}: header is not valid JSON: key 'x' appears twice")


def test_the_first_problem_is_shown_and_the_others_are_counted(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    assert f"{INDEX} names shard {FIRST}" in refusal(folder) and "(and 1 more problems)" in refusal(folder)


def test_inspect_lists_every_problem_with_its_place(folder: Path) -> None:
    (folder / FIRST).unlink()
    with edit_json(folder / INDEX) as index:
        index["weight_map"] |= {"model.d.weight": SECOND, "model.e.weight": "../e.safetensors"}
    (folder / "new").mkdir()
    for file in ("extra.safetensors", "new/model.safetensors"):
        (folder / file).write_bytes(shard({f"{file}.weight": ("BF16", [2])}))
    found = [(problem.code, problem.file, problem.tensor) for problem in inspect(folder)[1]]
    assert sorted(found) == [
        ("index-path", INDEX, "model.e.weight"),
        ("missing-shard", FIRST, A),
        ("missing-tensor", SECOND, "model.d.weight"),
        ("shard-in-subfolder", "new/model.safetensors", ""),
        ("unindexed-shard", "extra.safetensors", "extra.safetensors.weight"),
    ]


# sources that cannot be quantized


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3"])
def test_a_dtype_that_no_source_holds_is_refused(folder: Path, dtype: str) -> None:
    (folder / SECOND).write_bytes(shard({C: (dtype, [2])}))
    assert f"{SECOND}: tensor {C!r} has dtype {dtype}; a source may hold BF16, F16, F32" in refusal(folder)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with edit_header(folder / SECOND) as header:
        header[C]["dtype"] = "F12"
    assert refusal(folder).startswith(f"{SECOND}: tensor {C!r}: unknown dtype 'F12'")


@pytest.mark.parametrize(
    ("config", "method"), [({"quant_method": "awq"}, "awq"), ({"bits": 4}, "unknown"), (["x"], "unknown")]
)
def test_a_quantized_source_is_refused_with_its_method(folder: Path, config: object, method: str) -> None:
    with edit_json(folder / "config.json") as changed:
        changed["quantization_config"] = config
    message = f"config.json: the source is already quantized (quantization_config.quant_method {method!r})"
    assert refusal(folder).startswith(message)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(C, "U8"), (C, "I8"), (f"{C}_scale", "BF16"), (f"{C}_scale_inv", "F32"), (f"{C}_packed", "BF16")],
)
def test_a_quantized_tensor_in_a_source_is_refused_though_the_config_is_silent(
    folder: Path, name: str, dtype: str
) -> None:
    (folder / SECOND).write_bytes(shard({name: (dtype, [2])}))
    with edit_json(folder / INDEX) as index:
        del index["weight_map"][C]
        index["weight_map"][name] = SECOND
    message = f"{SECOND}: tensor {name!r} ({dtype}) shows that the source is already quantized"
    assert refusal(folder).startswith(message)


# reading


def test_a_shard_is_read_exactly_and_never_past_its_end(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    with ShardReader(folder / FIRST, open_source(folder).shards[0]) as reader:
        buffer = bytearray(50)
        reader.read_into(memoryview(buffer), 100)
        assert bytes(buffer) == content[100:150]
        with pytest.raises(CheckpointError, match=rf"{FIRST}: ends at byte {len(content)}, 40 more expected"):
            reader.read_into(memoryview(buffer), len(content) - 10)


def test_a_shard_that_changed_since_is_refused(folder: Path) -> None:
    header = open_source(folder).shards[0]
    with open(folder / FIRST, "ab") as file:
        file.write(b"?")
    with pytest.raises(CheckpointError, match=f"{FIRST}: changed since its header was read"):
        ShardReader(folder / FIRST, header)

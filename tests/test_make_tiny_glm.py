"""scripts/make_tiny_glm.py, make_full_layout.py and the layout they share: true to the published GLM-5.2."""

import gzip
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import glm_layout as layout
import make_full_layout
import make_tiny_glm
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

PUBLISHED = json.loads(layout.CONFIG.read_text())
MTP = "model.layers.5."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    make_tiny_glm.make_tiny_glm(out)
    return out


@pytest.fixture(scope="module")
def tensors(tiny: Path) -> dict[str, torch.Tensor]:
    return read(tiny)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, from the file that the index names."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                assert weight_map.pop(name) == file.name
                found[name] = f.get_tensor(name)
    assert not weight_map
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# the layout


def test_names_sizes_and_shards_are_the_published_index_byte_for_byte() -> None:
    found = layout.tensors(PUBLISHED)
    packed = layout.pack(found, layout.SHARD_LIMIT)
    assert len(found) == 59_585
    assert sum(t.dtype == "F32" for t in found) == 76
    assert layout.index(packed).encode() == gzip.decompress(layout.INDEX.read_bytes())


def test_without_a_schedule_every_layer_has_an_indexer() -> None:  # GLM-5 and GLM-5.1
    config = {k: v for k, v in PUBLISHED.items() if not k.startswith("index")} | {
        k: PUBLISHED[k] for k in ("index_n_heads", "index_head_dim")
    }
    assert sum(t.name.endswith("indexer.wk.weight") for t in layout.tensors(config)) == 79


def test_pack_is_greedy_and_gives_a_too_big_tensor_its_own_shard() -> None:
    sizes = [3, 3, 2, 9, 1, 1]
    shards = layout.pack([layout.Tensor(str(i), (n,)) for i, n in enumerate(sizes)], limit=12)
    assert [[t.shape[0] for t in shard] for shard in shards.values()] == [[3, 3], [2], [9], [1, 1]]
    assert next(iter(shards)) == "model-00001-of-00004.safetensors"


# the tiny checkpoint


def test_tensors_are_those_of_its_config(tiny: Path, tensors: dict[str, torch.Tensor]) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config.keys() == PUBLISHED.keys()
    assert {"full", "shared"} == set(config["indexer_types"])
    assert {"dense", "sparse"} == set(config["mlp_layer_types"])
    assert {k: tuple(t.shape) for k, t in tensors.items()} == {t.name: t.shape for t in layout.tensors(config)}


def test_config_is_written_in_the_published_form(tiny: Path) -> None:
    for path in (tiny / "config.json", layout.CONFIG):
        text = path.read_text()
        assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_only_the_correction_bias_is_f32(tensors: dict[str, torch.Tensor]) -> None:
    f32 = {name: t for name, t in tensors.items() if t.dtype == torch.float32}
    assert set(f32) == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, 6)}
    assert all(t.ne(0).any() for t in f32.values())
    assert {t.dtype for name, t in tensors.items() if name not in f32} == {torch.bfloat16}


def test_mtp_layer_is_a_full_sparse_layer_with_its_glue(tensors: dict[str, torch.Tensor]) -> None:
    mtp = {name.removeprefix(MTP) for name in tensors if name.startswith(MTP)}
    full_sparse = {n.removeprefix("model.layers.1.") for n in tensors if n.startswith("model.layers.1.")}
    assert mtp - full_sparse == {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    assert full_sparse <= mtp


def test_transformers_loads_it_and_saves_the_same_names(
    tiny: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model, info = GlmMoeDsaForCausalLM.from_pretrained(tiny, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith(MTP) for name in info["unexpected_keys"])
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as f:
        saved = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    assert saved.keys() == {name for name in tensors if not name.startswith(MTP)}
    assert all(torch.equal(saved[name].float(), tensors[name].float()) for name in saved)


def test_shards_are_greedy_and_cut_layers_and_experts(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    assert list(weight_map) == sorted(weight_map)
    assert set(weight_map.values()) == {f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)}

    found = layout.tensors(json.loads((tiny / "config.json").read_text()))
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in found)}
    packed = layout.pack(found, make_tiny_glm.shard_limit(found, 3))
    assert weight_map == {t.name: file for file, shard in packed.items() for t in shard}

    files = defaultdict(set)
    for name, file in weight_map.items():
        for part in (r"model\.layers\.\d+\.", r".*\.experts\.\d+\."):
            if match := re.match(part, name):
                files[match[0]].add(file)
    cut = [part for part, where in files.items() if len(where) > 1]
    assert any("experts" in part for part in cut) and any("experts" not in part for part in cut)


def test_same_options_same_bytes(tiny: Path, tmp_path: Path) -> None:
    make_tiny_glm.make_tiny_glm(tmp_path / "again")
    make_tiny_glm.make_tiny_glm(tmp_path / "other", seed=1)
    assert contents(tmp_path / "again") == contents(tiny)
    changed = {name for name, data in contents(tmp_path / "other").items() if data != contents(tiny)[name]}
    assert changed == {f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)}


def test_options_change_the_layout(tmp_path: Path) -> None:
    make_tiny_glm.make_tiny_glm(
        tmp_path, layers=3, dense_layers=2, experts=4, shards=1, mtp=False, overrides={"n_shared_experts": 2}
    )
    found = read(tmp_path)
    assert not any(name.startswith("model.layers.3.") for name in found)
    assert found["model.layers.2.mlp.shared_experts.up_proj.weight"].shape == (128, 128)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 100}, "100 in_features: MXFP4 needs a multiple of 32"),
        ({"vocab": 265}, "at least 266"),
        ({"experts": 1}, "at least 2 experts"),
        ({"dense_layers": 6}, "no more dense layers than layers"),
        ({"shards": 0}, "at least 1"),
        ({"overrides": {"hidden_sise": 64}}, "not a key of GLM-5.2's config.json: hidden_sise"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_tiny_glm.make_tiny_glm(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_used_folder_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = contents(tiny)
    for script in (make_tiny_glm, make_full_layout):
        monkeypatch.setattr(sys, "argv", ["script", str(tiny)])
        with pytest.raises(SystemExit) as stop:
            script.main()
        assert stop.value.code == 2
        assert "is not an empty folder" in capsys.readouterr().err
    assert contents(tiny) == before


def test_tokenizer_loads_and_agrees_with_the_config(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = json.loads((tiny / "config.json").read_text())
    text = "def f(x):\n    return x  # ünï→"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == config["vocab_size"]
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert tokenizer.convert_tokens_to_ids(names) == config["eos_token_id"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "[gMASK]<sop><|user|>hi<|assistant|>"


# the full layout


def test_full_layout_is_the_published_one_without_its_data(tmp_path: Path) -> None:
    out = tmp_path / "glm-5.2"
    script = Path(make_full_layout.__file__)
    # -S hides every installed package: the script must need none.
    subprocess.run([sys.executable, "-I", "-S", script, out], check=True, timeout=60)

    assert (out / "config.json").read_bytes() == layout.CONFIG.read_bytes()
    assert (out / "model.safetensors.index.json").read_bytes() == gzip.decompress(layout.INDEX.read_bytes())
    shards = sorted(out.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in shards]
    assert len(shards) == 282
    # The published file sizes. They tell that the published headers have no __metadata__.
    assert sizes[:3] == [5_342_821_416, 5_351_970_840, 5_360_347_320]
    assert sizes[199] == max(sizes) == 5_368_361_544
    assert sizes[281] == 293_618_224
    assert sum(sizes) == 1_506_667_387_408
    assert sum(path.stat().st_blocks * 512 for path in shards) < 64 * 1024**2

    with safe_open(out / "model-00282-of-00282.safetensors", framework="pt") as f:
        assert f.metadata() is None
        q_b_proj = f.get_slice("model.layers.9.self_attn.q_b_proj.weight")
        assert q_b_proj.get_shape() == [16384, 2048] and q_b_proj.get_dtype() == "BF16"
        assert len(f.keys()) == 5


def test_full_layout_refuses_a_config_that_is_not_the_indexs(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for change, message in (({"num_hidden_layers": 77}, "tensor names"), ({"hidden_size": 4096}, "bytes")):
        config.write_text(json.dumps(PUBLISHED | change))
        with pytest.raises(ValueError, match=message):
            make_full_layout.make_full_layout(tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()

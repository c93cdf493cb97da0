"""A checkpoint that lost its MTP layer drafts with random weights; grafted, every release loads all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ckpt
import harness
import pytest

import glmquant

pytestmark = pytest.mark.conformance

MTP = "model.layers.4."  # of the tiny checkpoint
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("grafted")
    source = ckpt.write(root / "source", None, ())
    lost = lose_mtp(glmquant.quantize(source, root / "whole", recipe="moe").output, root / "lost")
    made = {"lost": lost}
    for name, quantized in (("bf16", False), ("mxfp4", True)):
        made[name] = Path(shutil.copytree(lost, root / name))
        assert glmquant.graft_mtp(source, made[name], quantized=quantized).ok
    # as if killed before config.json was replaced
    made["between"] = Path(shutil.copytree(made["bf16"], root / "between"))
    shutil.copy(lost / "config.json", made["between"] / "config.json")
    return made


def lose_mtp(folder: Path, to: Path) -> Path:
    """Shards written anew without the layer, and no word of it in the exclude list."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("glmquant.manifest.json"))
    index = json.loads((to / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith(MTP)}
    for path in to.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            kept = {name: shard.get_tensor(name) for name in index["weight_map"]}
        save_file(kept, path, {"format": "pt"})
    (to / INDEX).write_text(json.dumps(index))
    config = json.loads((to / "config.json").read_text())
    block = config["quantization_config"]
    words = ("model.layers.4", "decoder", "model.eh_proj")
    block["exclude"] = [e for e in block["exclude"] if not any(word in e.replace("\\", "") for word in words)]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(("engine", "release"), [(e, r) for e in ("sglang", "vllm") for r in harness.releases(e)])
def test_a_grafted_mtp_layer_loads(engine: str, release: str, folders: dict[str, Path]) -> None:
    found = dict(zip(folders, harness.load(engine, release, list(folders.values())), strict=True))
    assert found["lost"]["target"]["loaded"] and not found["lost"]["ok"]  # what the graft is for
    for name in ("bf16", "mxfp4"):
        assert found[name]["ok"], found[name]
    assert found["between"]["target"]["loaded"], found["between"]["target"]
    assert not found["between"]["draft"]["loaded"]  # it stops, and does not draft with the wrong weights

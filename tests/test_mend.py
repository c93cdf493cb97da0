"""`exclusions fix` and `diff`: only the list changes, nothing is lost, and lists are compared by what they do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from make_full_output import make_full_output

import glmquant
from glmquant.cli import main


@pytest.fixture
def published(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint as AMD publishes them: checkpoint names only, indented by 4 spaces, no end of line."""
    out = tmp_path / "published"
    plan = make_full_output(tiny, out, "moe").plan
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["exclude"] = sorted(m for m, kind in plan.formats.items() if kind == "plain")
    (out / "config.json").write_text(json.dumps(config, indent=4))
    return out


def test_a_published_list_is_mended_and_only_the_list(published: Path) -> None:
    before = {p.name: p.read_bytes() for p in published.iterdir()}
    assert not glmquant.validate(published, targets="sglang==0.5.14").ok
    done = glmquant.fix_exclusions(published)
    after = {p.name: p.read_bytes() for p in published.iterdir()}
    assert done.backup == published / "config.json.bak"
    assert after.pop("config.json.bak") == before["config.json"]
    old, new = (json.loads(files.pop("config.json")) for files in (before, after))
    assert before == after
    assert new["quantization_config"].pop("exclude") == done.exclusions.texts
    del old["quantization_config"]["exclude"]
    assert list(old.items()) == list(new.items())
    assert (published / "config.json").read_text().startswith('{\n    "')
    assert glmquant.validate(published).ok


def test_mending_twice_does_nothing_and_a_second_backup_never_overwrites_the_first(published: Path) -> None:
    glmquant.fix_exclusions(published)
    config = (published / "config.json").read_bytes()
    again = glmquant.fix_exclusions(published)
    assert again.backup is None and again.added == again.removed == []
    assert (published / "config.json").read_bytes() == config
    other = glmquant.fix_exclusions(published, form="literal")
    assert other.backup == published / "config.json.bak.1"


def test_a_dry_run_writes_nothing_and_shows_the_difference(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p.name: p.read_bytes() for p in published.iterdir()}
    assert main(["exclusions", "fix", str(published), "--dry-run"]) == 0
    assert {p.name: p.read_bytes() for p in published.iterdir()} == before
    out = capsys.readouterr()
    assert "+ re:model\\.decoder\\..*\n" in out.out and "- model.layers.5.eh_proj\n" in out.out
    assert "nothing was written" in out.err


def test_a_hub_cache_blob_is_never_written_through_its_symlink(published: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--amd--GLM-5.2-MXFP4"
    snapshot, blob = repo / "snapshots/0123abc", repo / "blobs/4567def"
    shutil.move(published, snapshot)
    blob.parent.mkdir()
    shutil.move(snapshot / "config.json", blob)
    (snapshot / "config.json").symlink_to("../../blobs/4567def")
    before = blob.read_bytes()
    glmquant.fix_exclusions(snapshot)
    assert blob.read_bytes() == before
    assert not (snapshot / "config.json").is_symlink()


def test_a_folder_whose_headers_lie_is_not_mended(published: Path) -> None:
    shard = next(iter(sorted(published.glob("*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(glmquant.CheckpointError, match=shard.name):
        glmquant.fix_exclusions(published)


def test_layer_quant_config_is_refused_and_a_recipe_for_a_quantized_folder_too(published: Path) -> None:
    with pytest.raises(glmquant.CheckpointError, match="already quantized"):
        glmquant.resolve_exclusions(published, recipe="moe")
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"]["layer_quant_config"] = {"*self_attn*": {}}
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(glmquant.CheckpointError, match="layer_quant_config"):
        glmquant.fix_exclusions(published)


def test_lists_are_compared_by_what_engines_do(published: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer.txt"
    old = json.loads((published / "config.json").read_text())["quantization_config"]["exclude"]
    longer.write_text("\n".join([*old, "*self_attn*", "model.no.such.module"]))
    assert glmquant.diff_exclusions(published, longer) == []
    mended = tmp_path / "mended.json"
    mended.write_text(json.dumps(glmquant.resolve_exclusions(published).texts))
    rows = glmquant.diff_exclusions(published, mended)
    assert {row.role for row in rows} == {"draft"}
    assert {row.targets for row in rows} == {"sglang 0.5.13.post1-0.5.15.post1"}
    eh_proj = next(row for row in rows if row.prefix == "model.eh_proj")
    assert (eh_proj.a, eh_proj.b) == ("mxfp4", "un-quantized")


def test_diff_exits_1_on_a_difference_and_prints_json(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    assert main(["exclusions", "diff", str(published), str(empty), "--json", "--targets", "vllm"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {"targets", "role", "prefix", "a", "b"} == set(rows[0])
    assert main(["exclusions", "diff", str(published), str(published)]) == 0
    assert main(["exclusions", "diff", str(empty), str(empty)]) == 1
    assert "Give a folder" in capsys.readouterr().err
    assert main(["exclusions", "one", "two"]) == 2


def test_an_entry_that_no_engine_can_compile_is_named(published: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("lm_head\nre:model.(layers\n")
    with pytest.raises(glmquant.ExclusionError, match=r"entry 're:model\.\(layers' is not a valid regular expression"):
        glmquant.diff_exclusions(published, broken)

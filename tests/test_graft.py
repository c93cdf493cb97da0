"""`mtp graft`: what was lost comes back bit for bit, nothing else changes, and a kill leaves nothing half-done."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
import torture
from checkpoints import edit_json
from hub_server import HubServer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from test_sources import fp8  # noqa: F401 (a fixture)

import glmquant
from glmquant.checkpoint import writer
from glmquant.cli import main
from glmquant.errors import BackendError, CheckpointError, ExclusionError, OutputError, RecipeError

REPO = "org/model"
MTP = "model.layers.5."
MTP_SHARD = "model-00003-of-00003.safetensors"
NEW = "model-mtp-00001-of-00001.safetensors"
Keep = Callable[[str], bool]


@pytest.fixture(scope="module")
def apart(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with its MTP layer in a shard of its own, so that the shard can be lost."""
    to = tmp_path_factory.mktemp("apart") / "tiny"
    return reshard(tiny, to, lambda name: f"model-0000{3 if name.startswith(MTP) else 1}-of-00003.safetensors")


def reshard(folder: Path, to: Path, shard: Callable[[str], str]) -> Path:
    """The same tensors in other shards; those of shard '' are lost, from the index too."""
    ignore = shutil.ignore_patterns("*.safetensors", "glmquant.manifest.json")
    shutil.copytree(folder, to, ignore=ignore)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, (_, tensor) in support.tensors(folder).items():
        files.setdefault(shard(name), {})[name] = tensor
    files.pop("", None)
    for file, tensors in files.items():
        save_file(tensors, to / file, {"format": "pt"})
    with edit_json(to / support.INDEX) as index:
        index["weight_map"] = {name: file for file, tensors in files.items() for name in sorted(tensors)}
        index["metadata"]["total_size"] = sum(t.nbytes for tensors in files.values() for t in tensors.values())
    return to


def without_mtp(folder: Path, to: Path, keep: Keep = lambda _: False) -> Path:
    """As transformers saves it: shards written anew without the MTP layer (but for what is to be kept)."""
    where = {name: file for name, (file, _) in support.tensors(folder).items()}
    return reshard(folder, to, lambda name: "" if name.startswith(MTP) and not keep(name) else where[name])


def without_shard(folder: Path, to: Path, *, trimmed: bool) -> Path:
    """The shard with the MTP layer was not copied; the index may still name it."""
    shutil.copytree(folder, to)
    (to / MTP_SHARD).unlink()
    if trimmed:
        with edit_json(to / support.INDEX) as index:
            index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != MTP_SHARD}
            index["metadata"]["total_size"] = -1
    return to


def undeclare(folder: Path, count: int | None = 0) -> Path:
    """config.json without MTP layer: neither declared nor excluded."""
    with edit_json(folder / "config.json") as config:
        config.pop("num_nextn_predict_layers")
        if count is not None:
            config["num_nextn_predict_layers"] = count
        block = config["quantization_config"]
        words = ("model.layers.5", "decoder", "model.eh_proj")
        block["exclude"] = [e for e in block["exclude"] if not any(word in e.replace("\\", "") for word in words)]
    return folder


LOSSES: dict[str, Callable[[Path, Path], Path]] = {
    "rewritten": without_mtp,
    "rewritten, undeclared": lambda folder, to: undeclare(without_mtp(folder, to)),
    "shard lost": lambda folder, to: without_shard(folder, to, trimmed=True),
    "shard lost, undeclared": lambda folder, to: undeclare(without_shard(folder, to, trimmed=True), None),
    "shard lost, still in the index": lambda folder, to: without_shard(folder, to, trimmed=False),
}


def values(folder: Path) -> dict[str, object]:
    return {name: support.bits(tensor) for name, (_, tensor) in support.tensors(folder).items()}


def shard_prints(folder: Path) -> dict[str, object]:
    return {name: print_ for name, print_ in support.fingerprint(folder).items() if name.endswith(".safetensors")}


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def check_whole(folder: Path, whole: Path) -> None:
    """It has what the output that lost nothing has, and its index and config.json say so."""
    assert values(folder) == values(whole)
    found = support.tensors(folder)
    index = support.read_json(folder / support.INDEX)
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in found.values())
    assert support.read_json(folder / "config.json") == support.read_json(whole / "config.json")
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    report = glmquant.validate(folder)
    assert report.ok and report.findings == glmquant.validate(whole).findings


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("recipe", ["moe", "moe-mtp"])
def test_what_was_lost_comes_back_bit_for_bit(recipe: str, loss: str, apart: Path, tmp_path: Path) -> None:
    whole = support.output(apart, recipe).output
    lost = LOSSES[loss](whole, tmp_path / "lost")
    old, source, files = shard_prints(lost), support.fingerprint(apart), support.read_json(lost / "config.json")
    assert glmquant.validate(lost).ok == ("undeclared" in loss)  # a whole model without MTP layer
    done = glmquant.graft_mtp(apart, lost, quantized=recipe == "moe-mtp", workers=2)
    assert done.ok and done.report is not None and not done.nothing_to_do
    assert done.shards == (NEW,) and done.there == 0
    assert len(done.missing) == sum(name.startswith(MTP) for name in support.tensors(apart))
    assert done.tensors == sum(name.startswith(MTP) for name in support.tensors(whole))
    assert done.compared > 50 and not done.different
    check_whole(lost, whole)
    assert {name: value for name, value in shard_prints(lost).items() if name != NEW} == old
    assert support.fingerprint(apart) == source
    if "undeclared" in loss:
        before = None if loss.startswith("shard") else 0
        assert done.config == {"num_nextn_predict_layers": (before, 1)}
        assert support.read_json(lost / "config.json.bak") == files
    else:
        assert not done.config and not done.list_changes and not (lost / "config.json.bak").exists()


def test_of_routed_only_the_routed_experts_are_quantized(tiny: Path, tmp_path: Path) -> None:
    whole = support.output(tiny, "routed-mtp").output
    lost = without_mtp(whole, tmp_path / "lost")
    assert glmquant.graft_mtp(tiny, lost, quantized=True).quantized == 24
    check_whole(lost, whole)


def test_the_shard_size_is_bounded_and_names_never_clash(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glmquant.graft.planning.SHARD_SIZE", 300_000)
    whole = support.output(tiny, "moe").output
    where = {name: file for name, (file, _) in support.tensors(whole).items()}
    taken = {MTP_SHARD: "model-mtp-00001-of-00001.safetensors", "model-00001-of-00003.safetensors": ""}
    lost = reshard(
        whole, tmp_path / "lost", lambda name: "" if name.startswith(MTP) else taken.get(where[name]) or where[name]
    )
    done = glmquant.graft_mtp(tiny, lost)
    count = len(done.shards)
    assert count > 2 and done.shards == tuple(
        f"model-mtp2-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)
    )
    check_whole(lost, whole)
    with safe_open(lost / done.shards[0], framework="pt") as file:
        assert file.metadata()["format"] == "pt"  # transformers refuses others


def test_an_fp8_source_becomes_bf16_or_is_quantized(
    fp8: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    for recipe in ("moe", "moe-mtp"):
        whole = support.output(fp8[0], recipe).output
        lost = without_mtp(whole, tmp_path / recipe)
        glmquant.graft_mtp(fp8[0], lost, quantized=recipe == "moe-mtp")
        check_whole(lost, whole)


def test_fused_experts_of_the_source_are_taken_apart(tiny: Path, tmp_path: Path) -> None:
    fused: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in support.shards(tiny).items():
        fused[file] = {n: t for n, t in tensors.items() if not n.startswith(f"{MTP}mlp.experts.")}
    mtp = {n: t for n, (_, t) in support.tensors(tiny).items() if n.startswith(f"{MTP}mlp.experts.")}

    def part(expert: int, name: str) -> torch.Tensor:
        return mtp[f"{MTP}mlp.experts.{expert}.{name}.weight"]

    gate_up = [torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(8)]
    fused[MTP_SHARD][f"{MTP}mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    fused[MTP_SHARD][f"{MTP}mlp.experts.down_proj"] = torch.stack([part(e, "down_proj") for e in range(8)])
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    for file, tensors in fused.items():
        save_file(tensors, source / file, {"format": "pt"})
    (source / support.INDEX).unlink()  # the shards are all there, so nothing is missed
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    glmquant.graft_mtp(source, lost)
    check_whole(lost, whole)


def test_the_shards_with_the_mtp_layer_are_enough(tiny: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for name in ("config.json", support.INDEX, MTP_SHARD):
        shutil.copy2(tiny / name, few / name)
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    assert 5 < glmquant.graft_mtp(few, lost).compared < 50
    check_whole(lost, whole)


def test_a_checkpoint_that_lost_nothing_is_left_alone(
    tiny: Path, copy_of: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe in ("moe", "moe-mtp"):
        out = copy_of(support.output(tiny, recipe).output)
        before = support.fingerprint(out)
        assert main(["mtp", "graft", str(tiny), str(out)]) == 0
        said = capsys.readouterr().out
        assert "nothing to do: all 47 tensors of the MTP layer are there" in said
        assert support.fingerprint(out) == before
        # its own list loads, so another spelling does not replace it
        assert glmquant.graft_mtp(tiny, out, form="regex", quantized=True).nothing_to_do
        assert support.fingerprint(out) == before


def test_what_is_there_but_not_in_the_index_is_compared_and_named(apart: Path, tmp_path: Path) -> None:
    whole = support.output(apart, "moe").output
    lost = Path(shutil.copytree(whole, tmp_path / "lost"))
    with edit_json(lost / support.INDEX) as index:
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != MTP_SHARD}
    wrong = Path(shutil.copytree(lost, tmp_path / "wrong"))
    before = shard_prints(lost)
    done = glmquant.graft_mtp(apart, lost)
    assert done.shards == () and done.index and done.there == len(set(support.shards(apart)[MTP_SHARD]))
    assert shard_prints(lost) == before
    check_whole(lost, whole)
    flip_last_bit(wrong / MTP_SHARD)
    with pytest.raises(CheckpointError, match=r"has a part of the MTP layer, and 1 tensors of it are not SRC's"):
        glmquant.graft_mtp(apart, wrong)


def test_a_part_that_is_the_same_is_completed_and_one_that_is_not_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost", lambda name: "norm" in name or "eh_proj" in name)
    other = support.copy(lost, tmp_path / "other", lambda name, t: t + 1 if name == f"{MTP}enorm.weight" else t)
    done = glmquant.graft_mtp(tiny, lost)
    assert done.there == 10 and len(done.missing) == 37
    check_whole(lost, whole)
    before = support.fingerprint(other)
    with pytest.raises(CheckpointError, match=rf"1 tensors of it are not SRC's, '{MTP}enorm\.weight' first"):
        glmquant.graft_mtp(tiny, other)
    assert support.fingerprint(other) == before
    assert glmquant.graft_mtp(tiny, other, force=True).different == (f"{MTP}enorm.weight",)
    assert values(other).keys() == values(whole).keys()


def test_a_part_in_another_format_is_refused_before_anything_is_written(tiny: Path, tmp_path: Path) -> None:
    packed = support.output(tiny, "moe-mtp").output
    gate = f"{MTP}mlp.experts.0.gate_proj.weight"
    half = without_mtp(packed, tmp_path / "half", lambda name: name.startswith(gate))
    before = support.fingerprint(half)
    # one expert in MXFP4 and seven in bf16 are no container that an engine can build
    with pytest.raises(ExclusionError, match=r"mlp\.experts"):
        glmquant.graft_mtp(tiny, half)
    assert support.fingerprint(half) == before
    glmquant.graft_mtp(tiny, half, quantized=True)
    check_whole(half, packed)
    for kept in (gate, gate + "_scale"):
        bad = without_mtp(packed, tmp_path / kept, lambda name, kept=kept: name == kept)
        with pytest.raises(
            CheckpointError, match=rf"tensor '{kept}' is U8 .*neither SRC's \[64, 128\] nor that in MXFP4 or FP8"
        ):
            glmquant.graft_mtp(tiny, bad, quantized=True)


# who may give to whom


def test_another_fine_tune_is_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that trained nothing but an attention weight of one layer."""
    name = "model.layers.2.self_attn.o_proj.weight"
    tuned = support.copy(tiny, tmp_path / "tuned", lambda n, t: t * 1.01 if n == name else t)
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    before = support.fingerprint(lost)
    assert main(["mtp", "graft", str(tuned), str(lost)]) == 1
    said = capsys.readouterr().err
    assert "not the same weights: 1 of " in said and f"'{name}' first" in said and "use --force" in said
    assert support.fingerprint(lost) == before
    assert main(["mtp", "graft", str(tuned), str(lost), "--force"]) == 0
    assert "1 differ, model.layers.2.self_attn.o_proj.weight first" in capsys.readouterr().out
    check_whole(lost, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "other_type"}, r"SRC is a 'glm_moe_dsa', CKPT a 'other_type'"),
        (
            {"hidden_size": 256},
            r"by SRC's config\.json 'model\.embed_tokens\.weight' is \[512, 128\].*CKPT's \[512, 256\]",
        ),
        ({"num_hidden_layers": 4, "indexer_types": None, "mlp_layer_types": None}, "not the same model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8', not 'quark'"),
        ({"quantization_config": {"quant_method": "quark", "layer_quant_config": {"a": {}}}}, "layer_quant_config"),
    ],
)
def test_another_model_or_format_is_refused(change: dict, message: str, tiny: Path, tmp_path: Path) -> None:
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    (lost / "config.json").write_text(json.dumps({**support.read_json(lost / "config.json"), **change}))
    before = support.fingerprint(lost)
    with pytest.raises(CheckpointError, match=message):
        glmquant.graft_mtp(tiny, lost)
    assert support.fingerprint(lost) == before


def test_a_source_that_cannot_give_is_refused(apart: Path, tiny: Path, tmp_path: Path) -> None:
    whole = support.output(apart, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    before = support.fingerprint(lost)

    def refused(source: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as error:
            glmquant.graft_mtp(source, lost)
        assert error.value.hint

    refused(whole, "already quantized")
    part = without_mtp(apart, tmp_path / "part", lambda name: "norm" in name)
    refused(part, r"no tensor 'model\.layers\.5\..*' of the MTP layer \(38 of 47 are missing\)")
    gone = without_shard(apart, tmp_path / "gone", trimmed=False)
    with pytest.raises(CheckpointError, match=rf"47 of 47 are missing\)\n  Fetch '{MTP_SHARD}'\."):
        glmquant.graft_mtp(gone, lost)
    only = Path(shutil.copytree(apart, tmp_path / "only"))
    (only / "model-00001-of-00003.safetensors").unlink()
    refused(only, "share no un-quantized tensor")
    plain = Path(shutil.copytree(apart, tmp_path / "plain"))
    with edit_json(plain / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
    refused(plain, r"declares no MTP layer \(num_nextn_predict_layers is 0 or missing\)")
    assert support.fingerprint(lost) == before
    glmquant.graft_mtp(only, lost, force=True)
    check_whole(lost, whole)


def test_only_the_mtp_layer_is_brought_back(tiny: Path, tmp_path: Path) -> None:
    """Another shard that is missing, or stale, is said and left to the user."""
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    stale = Path(shutil.copytree(lost, tmp_path / "stale"))
    twice = Path(shutil.copytree(lost, tmp_path / "twice"))
    (lost / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is said to be in 'model-00001-of-00003\.safetensors', where it is not"):
        glmquant.graft_mtp(tiny, lost)
    save_file({"model.layers.9.weight": torch.ones(2)}, stale / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"old\.safetensors: tensor 'model\.layers\.9\.weight' is not named by"):
        glmquant.graft_mtp(tiny, stale)
    save_file({"model.norm.weight": torch.ones(2)}, twice / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is in more than one shard"):
        glmquant.graft_mtp(tiny, twice)


def test_quantized_needs_quantized_main_layers(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="none of routed, shared is MXFP4 in all main layers"):
        glmquant.graft_mtp(tiny, without_mtp(tiny, tmp_path / "lost"), quantized=True)


def test_a_bf16_checkpoint_that_transformers_saved_can_be_quantized_again(tiny: Path, tmp_path: Path) -> None:
    lost = without_mtp(tiny, tmp_path / "lost")
    with edit_json(lost / support.INDEX) as index:
        index["metadata"]["total_parameters"] = sum(t.numel() for _, t in support.tensors(lost).values())
    with pytest.raises(CheckpointError, match="declares an MTP layer"):
        glmquant.quantize(lost, tmp_path / "out")
    done = glmquant.graft_mtp(tiny, lost)
    assert done.report is None and done.ok
    index = support.read_json(lost / support.INDEX)
    assert index["metadata"]["total_parameters"] == sum(t.numel() for _, t in support.tensors(tiny).values())
    out = glmquant.quantize(lost, tmp_path / "out", recipe="moe").output
    assert values(out) == values(support.output(tiny, "moe").output)


def test_lists_with_an_item_a_layer_that_were_cut_are_whole_again(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    with edit_json(source / "config.json") as config:
        config |= {"layer_types": list("abcdef"), "other": list("abcdef"), "mtp_key": 7}
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    with edit_json(lost / "config.json") as config:
        config |= {"layer_types": list("abcde"), "other": list("xbcde")}
    done = glmquant.graft_mtp(source, lost)
    assert done.config == {"layer_types": (list("abcde"), list("abcdef")), "mtp_key": (None, 7)}
    found = support.read_json(lost / "config.json")
    assert (found["layer_types"], found["mtp_key"], found["other"]) == (list("abcdef"), 7, list("xbcde"))


# files


def test_one_file_without_index_gets_one(tiny: Path, tmp_path: Path) -> None:
    whole = support.output(tiny, "moe").output
    lost = reshard(whole, tmp_path / "lost", lambda name: "" if name.startswith(MTP) else "model.safetensors")
    (lost / support.INDEX).unlink()
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    glmquant.graft_mtp(tiny, lost)
    check_whole(lost, whole)
    assert not glmquant.graft_mtp(tiny, again).index


def test_verify_knows_the_new_files(apart: Path, tmp_path: Path) -> None:
    for recipe in ("moe", "moe-mtp"):
        lost = undeclare(without_shard(support.output(apart, recipe).output, tmp_path / recipe, trimmed=True))
        assert not glmquant.verify(lost).ok
        done = glmquant.graft_mtp(apart, lost, quantized=recipe == "moe-mtp")
        assert [path.name for path in done.backups] == [f"{support.INDEX}.bak", "config.json.bak"]
        proof = glmquant.verify(lost, apart)
        assert proof.ok, proof.problems
        assert proof.copied + proof.requantized == len(support.tensors(apart))
        flip_last_bit(lost / NEW)
        assert {problem.code for problem in glmquant.verify(lost).problems} == {"damaged"}


def test_record_and_card_of_an_output_say_where_its_mtp_layer_is_from(
    server: HubServer, tiny: Path, tmp_path: Path
) -> None:
    commit = server.add(REPO, tiny)
    without = without_mtp(tiny, tmp_path / "without")
    with edit_json(without / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
    out = glmquant.quantize(without, tmp_path / "out", base_model="org/model").output
    before, card = support.read_json(out / "glmquant.json"), (out / "README.md").read_text()
    assert "--speculative" not in card
    done = glmquant.graft_mtp(REPO, out, quantized=True)
    record, said = support.read_json(out / "glmquant.json"), (out / "README.md").read_text()
    found = record.pop("mtp_graft")
    assert (found["source"], found["shards"]) == (f"{REPO}@{commit}", [NEW])
    assert (found["tensors"], found["bytes"], found["quantized"]) == (done.tensors, done.nbytes, 27)
    assert {**record, "exclude": 0} == {**before, "exclude": 0}
    listed = [entry["entry"] for entry in record["exclude"]]
    assert listed == support.read_json(out / "config.json")["quantization_config"]["exclude"]
    assert said.startswith(card) and f"`{REPO}@{commit}`" in said and "27 weights of them in MXFP4" in said
    assert said.count("--speculative-algorithm EAGLE") == 1
    assert glmquant.verify(out, tiny).ok
    again = without_mtp(out, tmp_path / "again")
    glmquant.graft_mtp(tiny, again)  # the earlier section goes
    said = (again / "README.md").read_text()
    assert (
        said.startswith(card)
        and said.count("## The MTP layer") == 1
        and "`tiny`" in said
        and REPO not in said[len(card) :]
    )


def test_a_card_that_is_no_text_is_left_as_it_is(tiny: Path, tmp_path: Path) -> None:
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    (lost / "README.md").write_bytes(b"\xff\xfe")
    assert glmquant.graft_mtp(tiny, lost).ok
    assert (lost / "README.md").read_bytes() == b"\xff\xfe"
    other = without_mtp(support.output(tiny, "moe").output, tmp_path / "other")
    (other / "glmquant.json").unlink()  # not glmquant's: nothing of it is ours to write
    card = (other / "README.md").read_bytes()
    assert glmquant.graft_mtp(tiny, other).ok
    assert (other / "README.md").read_bytes() == card and not (other / "glmquant.json").exists()
    torn = without_mtp(support.output(tiny, "moe").output, tmp_path / "torn")
    (torn / "glmquant.json").write_text('{"recipe": ')
    assert glmquant.graft_mtp(tiny, torn).ok
    assert (torn / "README.md").read_bytes() == card and (torn / "glmquant.json").read_text() == '{"recipe": '


def test_a_dry_run_writes_nothing_and_says_all(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = undeclare(without_mtp(support.output(tiny, "moe").output, tmp_path / "lost"))
    before = support.fingerprint(lost)
    assert main(["mtp", "graft", str(tiny), str(lost), "--dry-run", "--quantized", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert support.fingerprint(lost) == before
    assert main(["mtp", "graft", str(tiny), str(lost), "--quantized"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"new shards    {NEW}: 74 tensors, ") and "27 weights in MXFP4" in line for line in said)
    assert "config.json   num_nextn_predict_layers: 0 -> 1" in said and said[-1].endswith("other findings")
    assert found["shards"] == [NEW] and found["tensors"] == 74 and len(found["missing"]) == 47
    assert found["exclude"] == support.read_json(lost / "config.json")["quantization_config"]["exclude"]
    assert found["config"] == {"num_nextn_predict_layers": {"before": 0, "after": 1}}
    new = support.shards(lost)[NEW]
    assert found["bytes"] == sum(tensor.nbytes for tensor in new.values())


def test_of_a_repository_only_the_shards_with_the_mtp_layer_are_fetched(
    server: HubServer, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    before = support.fingerprint(lost)
    server.add(REPO, tiny)
    size = (tiny / MTP_SHARD).stat().st_size
    assert main(["mtp", "graft", REPO, str(lost), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"from the Hub  1 shards to be fetched: {size:,} bytes" in said and "all equal" in said
    assert support.fingerprint(lost) == before and not (lost / ".glmquant").exists()
    asked = server.of(f"GET /cdn/.*{MTP_SHARD}")
    assert f"bytes=0-{size - 1}" not in [request.range for request in asked]
    server.requests.clear()
    done = glmquant.graft_mtp(REPO, lost)
    assert done.ok and done.fetched == (MTP_SHARD,) and done.fetched_bytes == size and done.compared > 50
    check_whole(lost, whole)
    assert not (lost / ".glmquant").exists()
    full = [request.path for request in server.of("GET /cdn/") if request.sent > size // 2]
    assert len(full) == 1 and full[0].endswith(MTP_SHARD)
    server.requests.clear()
    assert glmquant.graft_mtp(REPO, lost).nothing_to_do
    assert server.sent(f"GET /cdn/.*{MTP_SHARD}") < size // 2


def test_another_fine_tune_on_the_hub_is_refused_before_it_is_fetched(
    server: HubServer, tiny: Path, tmp_path: Path
) -> None:
    norm = "model.layers.2.input_layernorm.weight"
    server.add(REPO, support.copy(tiny, tmp_path / "tuned", lambda name, t: t + 1 if name == norm else t))
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    before = support.fingerprint(lost)
    with pytest.raises(CheckpointError, match=rf"not the same weights: 1 of \d+ .*'{norm}' first"):
        glmquant.graft_mtp(REPO, lost)
    assert support.fingerprint(lost) == before and not (lost / ".glmquant").exists()
    assert server.sent(f"GET /cdn/.*{MTP_SHARD}") < (tiny / MTP_SHARD).stat().st_size // 2


def test_a_part_of_two_origins_is_found_once_the_donor_is_fetched(
    server: HubServer, tiny: Path, tmp_path: Path
) -> None:
    server.add(REPO, tiny)
    whole = support.output(tiny, "moe").output
    same = without_mtp(whole, tmp_path / "same", lambda name: "norm" in name)
    other = support.copy(same, tmp_path / "other", lambda name, t: t + 1 if name == f"{MTP}enorm.weight" else t)
    names = set(os.listdir(other))
    assert glmquant.graft_mtp(REPO, same).there == 9
    check_whole(same, whole)
    with pytest.raises(CheckpointError, match=r"1 tensors of it are not SRC's.*\n.*\n.*are kept in .*mtp-source for"):
        glmquant.graft_mtp(REPO, other)
    assert set(os.listdir(other)) == names | {".glmquant"}
    assert os.listdir(other / ".glmquant/mtp-source") == [MTP_SHARD]
    server.requests.clear()
    assert glmquant.graft_mtp(REPO, other, force=True).ok
    assert set(os.listdir(other)) == {*names, NEW, f"{support.INDEX}.bak"}
    assert server.sent(f"GET /cdn/.*{MTP_SHARD}") < (tiny / MTP_SHARD).stat().st_size // 2


def test_a_fetch_that_breaks_off_is_continued(server: HubServer, tiny: Path, tmp_path: Path) -> None:
    server.add(REPO, tiny)
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    before = support.fingerprint(lost)
    size = (tiny / MTP_SHARD).stat().st_size
    broken = server.fault(f"GET /cdn/.*{MTP_SHARD}", cut=size // 3, least=size // 2)
    refused = server.fault(f"GET /cdn/.*{MTP_SHARD}", times=100, status=503, least=size // 2)
    with pytest.raises(CheckpointError, match=r"the server answers 503.*\n.*\n.*kept in"):
        glmquant.graft_mtp(REPO, lost)
    assert broken.times == 0 and refused.times < 99
    now = support.fingerprint(lost)
    assert {name: now[name] for name in before if name != "."} == {n: v for n, v in before.items() if n != "."}
    refused.times = 0
    server.requests.clear()
    assert glmquant.graft_mtp(REPO, lost).ok
    check_whole(lost, whole)
    assert f"bytes={size // 3}-{size - 1}" in [request.range for request in server.of(f"GET /cdn/.*{MTP_SHARD}")]
    assert not (lost / ".glmquant").exists()


def test_offline_the_shards_in_the_cache_are_enough(
    server: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    server.add(REPO, tiny)
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    snapshot_download(REPO, allow_patterns=["*.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=rf"47 of 47 are missing\)\n  Fetch .*{MTP_SHARD}"):
        glmquant.graft_mtp(REPO, lost)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(REPO, allow_patterns=[MTP_SHARD])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    done = glmquant.graft_mtp(REPO, lost)
    assert done.fetched == () and server.requests == []
    check_whole(lost, whole)


def test_room_for_what_is_fetched_is_asked_for_first(
    server: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(REPO, tiny)
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    size = (tiny / MTP_SHARD).stat().st_size
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=size + 100_000))
    with pytest.raises(OutputError, match="bytes free, the output needs"):
        glmquant.graft_mtp(REPO, lost)
    assert not (lost / ".glmquant").exists()


def test_a_small_disk_is_said_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    before = support.fingerprint(lost)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(OutputError, match="100,000 bytes free"):
        glmquant.graft_mtp(tiny, lost)
    assert support.fingerprint(lost) == before


def test_an_error_in_the_middle_leaves_the_checkpoint_as_it_was(tiny: Path, tmp_path: Path) -> None:
    bad = f"{MTP}mlp.experts.3.up_proj.weight"
    source = support.copy(tiny, tmp_path / "source", lambda n, t: torch.full_like(t, float("nan")) if n == bad else t)
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    before = torture.digests(lost)
    with pytest.raises(BackendError, match="nan at row 0"):
        glmquant.graft_mtp(source, lost, quantized=True)
    assert torture.digests(lost) == before
    zeros = support.copy(tiny, tmp_path / "zeros", lambda n, t: torch.zeros_like(t) if n == bad else t)
    with pytest.raises(CheckpointError, match="all zeros"):
        glmquant.graft_mtp(zeros, lost)
    assert torture.digests(lost) == before
    assert glmquant.graft_mtp(zeros, lost, allow_zeros=True).ok


def test_two_at_once_are_kept_apart(tiny: Path, tmp_path: Path) -> None:
    lost = without_mtp(support.output(tiny, "moe").output, tmp_path / "lost")
    fd = os.open(lost, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(OutputError, match="being grafted by another process"):
            glmquant.graft_mtp(tiny, lost)
        assert not glmquant.graft_mtp(tiny, lost, dry_run=True).nothing_to_do
    finally:
        os.close(fd)
    assert glmquant.graft_mtp(tiny, lost).ok


def test_what_a_killed_graft_left_is_written_again_or_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = support.output(tiny, "moe").output
    lost = without_mtp(whole, tmp_path / "lost")
    with monkeypatch.context() as patch:
        patch.setattr("glmquant.graft.writing.back_up", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            glmquant.graft_mtp(tiny, lost)
    assert (lost / NEW).exists() and NEW not in (lost / support.INDEX).read_text()
    with monkeypatch.context() as patch:
        patch.setattr("glmquant.graft.planning.SHARD_SIZE", 300_000)
        with pytest.raises(OutputError, match=rf"{NEW}: left by a graft with other options.*\n  Remove it"):
            glmquant.graft_mtp(tiny, lost)
    flip_last_bit(lost / NEW)
    glmquant.graft_mtp(tiny, lost)
    check_whole(lost, whole)


# kills


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source, and its output without MTP layer and without a word of it in config.json."""
    from make_tiny_glm import make_tiny_glm

    root = tmp_path_factory.mktemp("small")
    sizes = {"layers": 2, "experts": 2, "hidden": 64, "moe_intermediate": 32, "intermediate": 64, "shards": 2}
    make_tiny_glm(root / "plain", **sizes)
    name = "model.layers.2."
    source = reshard(
        root / "plain", root / "source", lambda n: f"model-0000{3 if n.startswith(name) else 1}-of-00003.safetensors"
    )
    whole = glmquant.quantize(source, root / "whole", recipe="moe-mtp").output
    lost = without_shard(whole, root / "lost", trimmed=True)
    with edit_json(lost / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
        config["quantization_config"]["exclude"] = ["lm_head"]
    return source, lost


def as_engines_see(folder: Path) -> tuple[dict[str, object], dict]:
    """The tensors of the files that the index names, and config.json; FileNotFoundError as engines raise."""
    named = set(support.read_json(folder / support.INDEX)["weight_map"].values())
    seen: dict[str, object] = {}
    for file in sorted(named):
        with safe_open(folder / file, framework="pt") as shard:
            seen |= {name: support.bits(shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
    return seen, support.read_json(folder / "config.json")


def test_killed_at_any_step_it_is_as_it_was_or_complete(
    small: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, lost = small
    monkeypatch.setattr("glmquant.graft.planning.SHARD_SIZE", 40_000)  # several new shards
    out, whole = tmp_path / "out", Path(shutil.copytree(lost, tmp_path / "whole"))

    def graft(folder: Path, act: Callable[[str, int], object]) -> list[str]:
        with torture.hooked(act) as made:
            glmquant.graft_mtp(source, folder, quantized=True, workers=2)
            return list(made)

    monkeypatch.setattr("glmquant.pipeline.validate_folder", lambda *_: None)  # reads only
    calls = graft(whole, lambda *_: None)
    untouched, old, expected = torture.digests(source), torture.digests(lost), torture.digests(whole)
    assert len([file for file in expected if file.startswith("model-mtp-")]) > 1
    before, after = as_engines_see(lost), as_engines_see(whole)
    states = {"before": before, "between": (after[0], before[1]), "after": after}
    renames = [step for step, name in enumerate(calls, 1) if name == "rename"]
    met = set()
    for step in sorted({1, *renames, renames[-1] + 1, *range(1, len(calls), len(calls) // 5)}):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(lost, out)

        def act(_: str, number: int, step: int = step) -> None:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)

        code = torture.forked(lambda act=act: bool(graft(out, act)) - 1)
        assert code == -signal.SIGKILL, torture.TRACE.read_text()
        seen = as_engines_see(out)
        met.add(next(name for name, state in states.items() if state == seen))
        left = torture.digests(out)
        assert {file: left[file] for file in old if file.endswith(".safetensors")}.items() <= old.items()
        assert torture.forked(lambda: bool(graft(out, lambda *_: None)) - 1) == 0, torture.TRACE.read_text()
        assert torture.digests(out) == expected, f"killed before call {step} ({calls[step - 1]})"
    assert met == {"before", "between", "after"}
    assert torture.digests(source) == untouched
    torture.TRACE.unlink(missing_ok=True)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_whatever_part_is_left_the_rest_is_added(small: tuple[Path, Path], data: st.DataObject) -> None:
    """Any set of modules of the MTP layer may have survived, in MXFP4 or not."""
    source, lost = small
    whole = lost.parent / "whole"
    modules = sorted({n.rpartition(".")[0] for n in support.tensors(whole) if n.startswith("model.layers.2.")})
    kept = data.draw(st.sets(st.sampled_from(modules)))
    with tempfile.TemporaryDirectory() as folder:
        where = {name: file for name, (file, _) in support.tensors(whole).items()}
        part = reshard(
            whole,
            Path(folder) / "part",
            lambda n: where[n] if not n.startswith("model.layers.2.") or n.rpartition(".")[0] in kept else "",
        )
        done = glmquant.graft_mtp(source, part, quantized=True)
        assert done.nothing_to_do == (len(kept) == len(modules))
        check_whole(part, whole)

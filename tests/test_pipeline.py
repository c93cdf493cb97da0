"""glmquant.quantize as a whole: what lands on disk, what stays untouched, and what a failure leaves behind."""

import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import support
import torch
from make_tiny_glm import make_tiny_glm
from safetensors import safe_open
from safetensors.torch import save, save_file
from support import INDEX, RECIPES, FakeBackend, bits, read_json

import glmquant
from glmquant import pipeline, streaming
from glmquant.checkpoint import writer
from glmquant.cli import main
from glmquant.errors import BackendError, CheckpointError, OutputError

NOT_COPIED = {"README.md", "config.json", INDEX}


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make_backends", lambda *_: [FakeBackend()])


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    """The smallest checkpoint there is: one dense, one MoE and one MTP layer in 2 shards."""
    ranks = {"num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
    sizes = {"layers": 2, "experts": 2, "hidden": 32, "moe_intermediate": 32, "intermediate": 32, "vocab": 266}
    make_tiny_glm(tmp_path / "source", shards=2, overrides=ranks, **sizes)
    return tmp_path / "source"


# the output


@pytest.mark.parametrize("recipe", RECIPES)
def test_side_files_are_copied_byte_for_byte(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    expected = {p.name for p in tiny.iterdir() if p.suffix != ".safetensors"} - NOT_COPIED
    assert {"tokenizer.json", "chat_template.jinja", "LICENSE", ".gitattributes"} <= expected
    for name in expected:
        assert (result.output / name).read_bytes() == (tiny / name).read_bytes()
    shards = {p.name for p in tiny.glob("*.safetensors")}
    assert {p.name for p in result.output.iterdir()} == expected | shards | NOT_COPIED | {
        "glmquant.json",
        "glmquant.manifest.json",
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_validator_finds_no_error(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    assert result.report.ok
    assert result.report.folder == result.output
    assert result.report.quantized_modules == sum(job.quantized for job in result.plan.jobs) > 0


@pytest.mark.usefixtures("fake_backend")
def test_config_is_the_sources_in_its_order_with_quantization_config_at_the_end(mini: Path, tmp_path: Path) -> None:
    keys = ["vocab_size", "model_type"]  # not sorted
    before = read_json(mini / "config.json")
    before = {key: before.pop(key) for key in keys} | before | {"note": "größer als 2"}
    (mini / "config.json").write_text(json.dumps(before, ensure_ascii=False), encoding="utf-8")
    result = glmquant.quantize(mini, tmp_path / "out")
    after = read_json(result.output / "config.json")
    assert list(after) == [*before, "quantization_config"]
    assert after.pop("quantization_config")["exclude"] == result.exclusions.texts
    assert after == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_index_names_every_tensor_and_the_exact_size(tiny: Path, recipe: str) -> None:
    folder = support.output(tiny, recipe).output
    index, tensors = read_json(folder / INDEX), support.tensors(folder)
    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for _, tensor in tensors.values())}


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_are_the_bytes_that_safetensors_itself_writes(tiny: Path, recipe: str) -> None:
    folder = support.output(tiny, recipe).output
    for file, shard in support.shards(folder).items():
        assert (folder / file).read_bytes() == save(shard, {"format": "pt"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_foretells_the_size_of_every_shard(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    sizes = {shard.file: shard.file_size for shard in glmquant.plan(tiny, recipe=recipe).plan.shards}
    assert sizes == {path.name: path.stat().st_size for path in result.output.glob("*.safetensors")}


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "note": "ünï"}])
def test_metadata_of_the_shards_is_kept(mini: Path, tmp_path: Path, metadata: dict[str, str] | None) -> None:
    for file, shard in support.shards(mini).items():
        save_file(shard, mini / file, metadata)
    glmquant.quantize(mini, tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="pt") as f:
            assert f.metadata() == metadata


@pytest.mark.usefixtures("fake_backend")
def test_subfolders_come_along_and_tool_leftovers_do_not(mini: Path, tmp_path: Path) -> None:
    for name in ("assets/deep/a.bin.txt", ".cache/huggingface/x.lock", ".git/config", "__pycache__/m.pyc"):
        (mini / name).parent.mkdir(parents=True, exist_ok=True)
        (mini / name).write_bytes(b"\0\xff\r\n")
    out = glmquant.quantize(mini, tmp_path / "out").output
    assert (out / "assets/deep/a.bin.txt").read_bytes() == b"\0\xff\r\n"
    assert {p.name for p in out.iterdir() if p.is_dir()} == {"assets"}


def hub_cache(folder: Path, cache: Path) -> Path:
    """The same checkpoint as huggingface_hub caches it: a snapshot of symlinks into blobs."""
    repo = cache / "models--zai-org--GLM-5.2"
    snapshot = repo / "snapshots/0123456789abcdef"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(path, repo / f"blobs/{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.mark.usefixtures("fake_backend")
def test_a_hub_cache_snapshot_gives_the_same_files_and_no_links(mini: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(mini, tmp_path / "hub")
    before = support.fingerprint(tmp_path / "hub")
    plain = glmquant.quantize(mini, tmp_path / "plain", base_model="zai-org/GLM-5.2").output
    cached = glmquant.quantize(snapshot, tmp_path / "cached").output
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (plain, cached)]
    assert contents[0] == contents[1]
    assert not any(path.is_symlink() for path in cached.iterdir())
    assert read_json(cached / "glmquant.json")["base_model"] == "zai-org/GLM-5.2"
    assert support.fingerprint(tmp_path / "hub") == before


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_permissions_follow_the_umask_not_the_source(mini: Path, tmp_path: Path, umask: int, mode: int) -> None:
    for path in mini.iterdir():
        path.chmod(0o444)
    previous = os.umask(umask)
    try:
        out = glmquant.quantize(mini, tmp_path / "out").output
    finally:
        os.umask(previous)
    assert {
        path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir() if path.stat().st_mode & 0o777 != mode
    } == {}


@pytest.mark.parametrize("recipe", ["moe", "routed-mtp"])
def test_the_source_is_not_touched(tiny: Path, tmp_path: Path, recipe: str) -> None:
    source = support.copy(tiny, tmp_path / "source")
    before = support.fingerprint(source)
    glmquant.quantize(source, tmp_path / "out", recipe=recipe)
    assert support.fingerprint(source) == before


def test_a_checkpoint_without_an_mtp_layer_works(tmp_path: Path) -> None:
    make_tiny_glm(tmp_path / "source", layers=3, experts=4, shards=2, mtp=False)
    result = glmquant.quantize(tmp_path / "source", tmp_path / "out", recipe="routed")
    assert result.report.ok
    assert not any(".layers.3." in name for name in support.tensors(result.output))
    assert "speculative" not in (result.output / "README.md").read_text()


@pytest.mark.usefixtures("fake_backend")
def test_a_single_shard_without_an_index_works(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tiny_glm(source, layers=2, experts=2, shards=1)
    next(source.glob("*.safetensors")).rename(source / "model.safetensors")
    (source / INDEX).unlink()
    result = glmquant.quantize(source, tmp_path / "out")
    assert result.report.ok
    assert not (result.output / INDEX).exists()
    assert [p.name for p in result.output.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.usefixtures("fake_backend")
def test_overrides_decide_module_by_module_and_are_recorded(mini: Path, tmp_path: Path) -> None:
    dense, shared = "model.layers.0.mlp.*", "model.layers.1.mlp.shared_experts.*"
    result = glmquant.quantize(mini, tmp_path / "out", quantize=[dense], keep=[shared], targets="sglang==0.5.23")
    packed = {name.removesuffix("_scale") for name in support.tensors(result.output) if name.endswith("_scale")}
    assert {name for name in packed if ".layers.0." in name} == {
        f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    assert not any("shared_experts" in name for name in packed)
    record = read_json(result.output / "glmquant.json")
    assert record["overrides"] == [f"--quantize {dense}", f"--keep {shared}"]
    assert f"--quantize '{dense}' --keep '{shared}'" in record["command"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_record_tells_the_origin_of_every_exclude_entry(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    record = read_json(result.output / "glmquant.json")
    entries = record["exclude"]
    assert [entry["entry"] for entry in entries] == result.exclusions.texts
    assert all(entry["origin"] and entry["module"] for entry in entries)
    assert (record["recipe"], record["backend"], record["versions"]["amd-quark"]) == (recipe, "fused", "0.13")
    assert record["command"] == f"glmquant quantize {record['base_model']} OUT --recipe {recipe}"
    assert record["needs"] == [str(need) for need in result.exclusions.needs]
    assert record["targets"] == [str(target) for target in result.exclusions.targets]


@pytest.mark.usefixtures("fake_backend")
def test_tensors_copied_in_pieces_are_whole(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = glmquant.quantize(mini, tmp_path / "whole").output
    monkeypatch.setattr(streaming, "COPY_CHUNK", 1000)
    pieces = glmquant.quantize(mini, tmp_path / "pieces").output
    for path in whole.glob("*.safetensors"):
        assert (pieces / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("fake_backend")
def test_progress_adds_up_to_the_bytes_read(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    announced: list[int] = []

    @contextmanager
    def progress(total: int, wanted: bool, doing: str) -> Iterator[Callable[[int], object]]:
        announced.append(total)
        yield seen.append

    monkeypatch.setattr(pipeline, "progress_bar", progress)
    monkeypatch.setattr(streaming, "COPY_CHUNK", 1000)
    glmquant.quantize(mini, tmp_path / "out")
    assert announced == [sum(tensor.nbytes for _, tensor in support.tensors(mini).values())] == [sum(seen)]
    assert max(seen[:-1]) <= 2048 < announced[0]


# damaged weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_weight_stops_the_run_and_is_named(tiny: Path, tmp_path: Path, value: float) -> None:
    damaged = "model.layers.4.mlp.experts.3.down_proj.weight"

    def damage(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == damaged:
            tensor[100, 63] = value
        return tensor

    source = support.copy(tiny, tmp_path / "source", damage)
    shard = support.tensors(source)[damaged][0]
    message = f"tensor {damaged!r} holds {value} at row 100, column 63"
    with pytest.raises(BackendError, match=re.escape(message)):
        glmquant.quantize(source, tmp_path / "out")
    written = os.listdir(tmp_path / "out")
    assert shard not in written and all(name.endswith((".safetensors", ".glmquant")) for name in written)


def test_nan_in_a_copied_weight_is_copied(tiny: Path, tmp_path: Path) -> None:
    router = "model.layers.2.mlp.gate.weight"

    def damage(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == router:  # NaNs of three payloads, and -Inf
            tensor.view(torch.int16)[0, :4] = torch.tensor([0x7F81, -0x7F, 0x7FC0, -0x80], dtype=torch.int16)
        return tensor

    source = support.copy(tiny, tmp_path / "source", damage)
    out = glmquant.quantize(source, tmp_path / "out").output
    assert torch.isnan(support.tensors(source)[router][1]).sum() == 3
    assert bits(support.tensors(out)[router][1]) == bits(support.tensors(source)[router][1])


@pytest.mark.usefixtures("fake_backend")
def test_a_source_that_shrinks_under_way_stops_the_run(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = sorted(mini.glob("*.safetensors"))[-1]

    def truncate(*_: object) -> list[FakeBackend]:
        os.truncate(last, last.stat().st_size - 1)
        return [FakeBackend()]

    monkeypatch.setattr(pipeline, "make_backends", truncate)
    with pytest.raises(CheckpointError, match=f"{last.name}: changed since its header was read"):
        glmquant.quantize(mini, tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()


# failures of the system

STEPS = {
    "allocate": (writer, "allocate"),
    "pwrite": (os, "pwrite"),
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
}


class Failing:
    """A system call that works until the n-th time; counts the calls."""

    def __init__(self, call: Callable, fail_at: int, error: BaseException) -> None:
        self.call, self.fail_at, self.error, self.calls = call, fail_at, error, 0

    def __get__(self, instance: object, owner: type | None = None) -> Callable:
        return self if instance is None else lambda *args: self(instance, *args)

    def __call__(self, *args: object) -> object:
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.error
        return self.call(*args)


def run(source: Path, out: Path, step: str, fail_at: int, error: BaseException) -> int:
    """Quantize with the n-th call of a step failing; returns the number of calls seen."""
    where, name = STEPS[step]
    failing = Failing(getattr(where, name), fail_at, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, failing)
        glmquant.quantize(source, out)
    return failing.calls


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_at_any_step_never_leaves_a_config(mini: Path, tmp_path: Path, step: str) -> None:
    calls = run(mini, tmp_path / "whole", step, 0, OSError())
    assert (tmp_path / "whole/config.json").exists()
    assert calls >= 2
    stride = 7 if step == "pwrite" else 1  # one or two a tensor
    for n in range(1, calls + (step != "fsync"), stride):  # the last sync comes when all is done
        out = tmp_path / f"out-{n}"
        with pytest.raises(OutputError, match="No space left on device") as caught:
            run(mini, out, step, n, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert "Free space on the disk of the output." in str(caught.value)
        assert not (out / "config.json").exists()
        assert not list(out.rglob("*.partial"))


@pytest.mark.usefixtures("fake_backend")
def test_ctrl_c_at_any_rename_leaves_whole_files_and_no_config(mini: Path, tmp_path: Path) -> None:
    calls = run(mini, tmp_path / "whole", "rename", 0, OSError())
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for n in range(1, calls + 1):
        out = tmp_path / f"out-{n}"
        with pytest.raises(KeyboardInterrupt):
            run(mini, out, "rename", n, KeyboardInterrupt())
        left = {path.name: path.read_bytes() for path in out.glob("[!.]*")}
        assert left.items() < whole.items() and "config.json" not in left
        assert not list(out.rglob("*.partial"))


def test_a_backend_that_cannot_start_leaves_no_output(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="device 'cuda:99' cannot be used"):
        glmquant.quantize(tiny, tmp_path / "out", device="cuda:99")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fake_backend")
def test_an_output_is_refused_as_a_source(mini: Path, tmp_path: Path) -> None:
    out = glmquant.quantize(mini, tmp_path / "out").output
    with pytest.raises(CheckpointError, match="already quantized"):
        glmquant.quantize(out, tmp_path / "again")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "quark"


@pytest.mark.usefixtures("fake_backend")
def test_the_recorded_command_asks_for_the_same_again(mini: Path, tmp_path: Path) -> None:
    asked = {"recipe": "moe-mtp", "targets": "sglang>=0.5.22", "form": "regex"}
    keep = ["model.layers.2.mlp.experts.*", "model.layers.2.mlp.shared_experts.*"]
    done = glmquant.quantize(mini, tmp_path / "out", keep=keep, **asked)
    command = shlex.split(read_json(done.output / "glmquant.json")["command"])
    assert command[:2] == ["glmquant", "quantize"]
    with redirect_stdout(StringIO()) as printed:
        assert main(["plan", str(mini), *command[4:], "--json"]) == 0
    again = json.loads(printed.getvalue())
    assert again["exclude_entries"] == len(done.exclusions.entries)
    assert again["bytes_out"] == done.plan.total_size
    assert again["targets"] == ["sglang 0.5.22", "sglang 0.5.23"]

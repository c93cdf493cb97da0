"""planner.py: the plan is exact to the byte, and what no engine could load is refused before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoints import FIRST, edit_header, edit_json, write_checkpoint

from glmquant.checkpoint.header import read_header
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.source import Checkpoint, open_source
from glmquant.errors import CheckpointError, GlmquantError, RecipeError
from glmquant.planner import Plan, make_plan
from glmquant.recipe import load_architecture, select_recipe

GLM = load_architecture("glm_moe_dsa")
SHARED_MTP = "model.layers.5.mlp.shared_experts.*"
COUNTS = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}


def planned(
    source: Checkpoint | Path, recipe: str | None = None, quantize: Sequence[str] = (), keep: Sequence[str] = ()
) -> Plan:
    checkpoint = source if isinstance(source, Checkpoint) else open_source(source)
    architecture, chosen = select_recipe(GLM, recipe)
    return make_plan(checkpoint, architecture, chosen.with_overrides(quantize, keep), read_layers(checkpoint.config))


def refusal(source: Path, kind: type[GlmquantError], **options: Sequence[str] | str) -> str:
    with pytest.raises(kind) as caught:
        planned(source, **options)
    return str(caught.value)


# the published model


@pytest.fixture(scope="module")
def published(full: Path) -> Checkpoint:
    return open_source(full)


@pytest.mark.parametrize(
    ("recipe", "tensors", "size"),
    [("moe-mtp", 118_181, 423_738_337_280), ("routed-mtp", 117_953, 427_952_039_936)],  # routed: see test_cli.py
)
def test_the_published_model_takes_exactly_this_much(
    published: Checkpoint, recipe: str, tensors: int, size: int
) -> None:
    plan = planned(published, recipe)
    assert (len(plan.weight_map), plan.total_size) == (tensors, size)


def test_moe_leaves_1319_modules_of_the_published_model_plain(published: Checkpoint) -> None:
    plan = planned(published, "moe")
    assert (len(plan.weight_map), plan.total_size) == (117_410, 437_987_305_472)
    assert plan.bytes_in == 1_506_659_919_872
    layers = read_layers(published.config)
    plain = [GLM.module(name, layers) for name, stored in plan.formats.items() if stored == "plain"]
    assert Counter("mtp" if module.is_mtp else module.group for module in plain) == {
        "attention": 390,
        "indexer": 63,
        "router": 75,
        "dense": 9,
        "embeddings": 1,
        "mtp": 781,
    }
    assert [module.name for module in plain if module.group == "embeddings"] == ["lm_head"]
    assert len(plan.formats) - len(plain) == 75 * (256 + 1) * 3

    # As published, no shard has __metadata__, so no output shard gets any.
    assert not any(b"__metadata__" in shard.header for shard in plan.shards)
    assert [shard.file for shard in plan.shards] == [header.file for header in published.shards]
    rows = {row.group: row for row in plan.groups() if row.dtype_out == "MXFP4"}
    assert (rows["routed"].tensors, rows["routed"].parameters) == (115_200, 75 * 256 * 3 * 2048 * 6144)
    assert sum(row.bytes_out for row in plan.groups()) == plan.total_size


# the layout of each shard


@pytest.mark.parametrize("recipe", ["moe", "moe-mtp", "routed", "routed-mtp"])
def test_output_ranges_cover_each_shard_without_gap_or_overlap(tiny: Path, recipe: str) -> None:
    plan = planned(tiny, recipe)
    for planned_shard in plan.shards:
        position = len(planned_shard.header)
        for out in sorted((out for job in planned_shard.jobs for out in job.outputs), key=lambda out: out.start):
            assert (out.name, out.start) == (out.name, position)
            position = out.end
        assert position == planned_shard.file_size
    assert (
        plan.disk_needed
        == sum(s.file_size for s in plan.shards)
        == plan.total_size + sum(len(s.header) for s in plan.shards)
    )


def test_a_planned_shard_is_laid_out_as_safetensors_lays_it_out(tiny: Path) -> None:
    dtypes = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}
    for planned_shard in planned(tiny, "moe-mtp").shards:
        outputs = [out for job in planned_shard.jobs for out in job.outputs]
        zeros = {out.name: torch.zeros(out.shape, dtype=dtypes[out.dtype]) for out in outputs}
        saved = safetensors.torch.save(zeros, metadata={"format": "pt"})
        assert saved.startswith(planned_shard.header) and len(saved) == planned_shard.file_size


def test_a_planned_shard_reads_back_as_planned(tiny: Path, tmp_path: Path) -> None:
    for planned_shard in planned(tiny).shards:
        (tmp_path / planned_shard.file).write_bytes(
            planned_shard.header + bytes(planned_shard.file_size - len(planned_shard.header))
        )
        read = read_header(tmp_path / planned_shard.file)
        found = {(t.name, t.dtype, t.shape, t.start, t.end) for t in read.tensors}
        assert found == {(o.name, o.dtype, o.shape, o.start, o.end) for job in planned_shard.jobs for o in job.outputs}


def test_a_weight_becomes_packed_bytes_and_a_scale_per_32_and_all_else_stays(tiny: Path) -> None:
    plan = planned(tiny)
    jobs = {job.source.name: [(out.name, out.dtype, out.shape) for out in job.outputs] for job in plan.jobs}
    expert, router = "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.gate"
    assert jobs[expert] == [(expert, "U8", (64, 64)), (expert + "_scale", "U8", (64, 4))]
    assert jobs[router + ".weight"] == [(router + ".weight", "BF16", (8, 128))]
    assert jobs[router + ".e_score_correction_bias"] == [(router + ".e_score_correction_bias", "F32", (8,))]
    assert len(jobs) == len(open_source(tiny).tensors)


def test_output_shard_k_holds_what_source_shard_k_held(tiny: Path) -> None:
    source = open_source(tiny)
    for header, planned_shard in zip(source.shards, planned(source, "moe-mtp").shards, strict=True):
        assert planned_shard.file == header.file
        assert [job.source for job in planned_shard.jobs] == list(header.tensors)


def test_the_weight_map_is_sorted_and_sends_a_scale_to_its_weights_shard(tiny: Path) -> None:
    weight_map = planned(tiny).weight_map
    assert list(weight_map) == sorted(weight_map)
    scales = [name for name in weight_map if name.endswith("_scale")]
    assert len(scales) == 4 * (8 + 1) * 3
    assert all(weight_map[name] == weight_map[name.removesuffix("_scale")] for name in scales)


def test_metadata_of_a_source_shard_is_kept(tiny: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny)
    with edit_header(folder / "model-00001-of-00003.safetensors") as header:
        header["__metadata__"] = {"format": "pt", "who": "é"}
    with edit_header(folder / "model-00002-of-00003.safetensors") as header:
        del header["__metadata__"]
    first, second, third = planned(folder).shards
    assert first.header[8:].startswith('{"__metadata__":{"format":"pt","who":"é"},"'.encode())
    assert b"__metadata__" not in second.header
    assert third.header[8:].startswith(b'{"__metadata__":{"format":"pt"},"')


def test_groups_add_up_and_the_mtp_layer_is_one_of_them(tiny: Path) -> None:
    plan = planned(tiny, "moe-mtp")
    rows = plan.groups()
    assert sum(row.tensors for row in rows) == len(plan.weight_map)
    assert sum(row.bytes_in for row in rows) == plan.bytes_in == open_source(tiny).nbytes
    assert sum(row.bytes_out for row in rows) == plan.total_size
    mtp = [(row.dtype_in, row.dtype_out, row.tensors) for row in rows if row.group == "mtp"]
    assert mtp[0] == ("BF16", "MXFP4", (8 + 1) * 3 * 2)
    assert ("F32", "F32", 1) in mtp


# overrides


def test_overrides_change_single_modules(tiny: Path) -> None:
    plan = planned(tiny, quantize=["model.layers.0.mlp.*"], keep=["model.layers.2.mlp.experts.*"])
    assert plan.formats["model.layers.0.mlp.up_proj"] == "mxfp4"
    assert plan.formats["model.layers.2.mlp.experts.7.up_proj"] == "plain"
    assert plan.formats["model.layers.3.mlp.experts.7.up_proj"] == "mxfp4"


@pytest.mark.parametrize("option", ["quantize", "keep"])
@pytest.mark.parametrize("pattern", ["model.layers.9.*", "re:model", "model.layers.1.mlp.experts.0.up_proj.weight"])
def test_a_pattern_that_matches_nothing_is_refused(tiny: Path, option: str, pattern: str) -> None:
    message = refusal(tiny, RecipeError, **{option: [pattern]})
    assert message.startswith(f"--{option} {pattern}: matches no module of this checkpoint\n")


def test_a_recipe_that_quantizes_nothing_here_is_refused(tiny: Path) -> None:
    assert "recipe 'moe' quantizes nothing in this checkpoint" in refusal(tiny, RecipeError, keep=["*"])


def test_a_vector_is_refused_with_file_and_tensor(tiny: Path) -> None:
    message = refusal(tiny, CheckpointError, quantize=["model.norm"])
    assert "safetensors: tensor 'model.norm.weight' has shape [128]; MXFP4 here needs a 2-D weight" in message


def test_an_embedding_is_refused_with_file_and_tensor(tiny: Path) -> None:
    message = refusal(tiny, RecipeError, quantize=["model.embed_tokens"])
    assert "model-00001-of-00003.safetensors: tensor 'model.embed_tokens.weight' is looked up by row" in message


@pytest.mark.parametrize("columns", [48, 33, 0])
def test_in_features_that_are_no_multiple_of_32_are_refused_with_tensor_and_number(
    tmp_path: Path, columns: int
) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    folder = write_checkpoint(tmp_path / "source", {FIRST: {name: ("BF16", [4, columns])}}, **COUNTS)
    message = refusal(folder, CheckpointError)
    assert message.startswith(f"{FIRST}: tensor {name!r} has in_features {columns}, not a multiple of 32")


def test_odd_in_features_are_fine_in_a_weight_that_stays(tmp_path: Path) -> None:
    odd, even = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"
    shards = {FIRST: {odd: ("BF16", [4, 33]), even: ("BF16", [4, 32])}}
    plan = planned(write_checkpoint(tmp_path / "source", shards, **COUNTS))
    assert {job.source.name: job.quantized for job in plan.jobs} == {odd: False, even: True}


# the MTP layer


def test_a_declared_but_absent_mtp_layer_is_refused(tiny: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny)
    with edit_json(folder / "config.json") as config:
        config["num_nextn_predict_layers"] = 2
    message = refusal(folder, CheckpointError)
    assert message.startswith(
        "config.json declares an MTP layer (num_nextn_predict_layers 2), but no tensor of layer 6 "
    )
    assert "transformers drops it" in message


def test_an_undeclared_mtp_layer_is_refused_with_file_and_tensor(tiny: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny)
    with edit_json(folder / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
    message = refusal(folder, CheckpointError)
    assert "safetensors: tensor 'model.layers.5." in message
    assert "belongs to layer 5, but config.json declares 5 layers and num_nextn_predict_layers 0" in message


def test_a_checkpoint_without_any_mtp_layer_is_planned(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    folder = write_checkpoint(tmp_path / "source", {FIRST: {name: ("BF16", [4, 32])}}, **COUNTS)
    assert list(planned(folder).weight_map) == [name, name + "_scale"]


def test_a_bias_and_a_tensor_that_no_pattern_knows_are_copied(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.0."
    names = [expert + "up_proj.weight", expert + "up_proj.bias", expert + "new_proj.weight"]
    plan = planned(write_checkpoint(tmp_path / "source", {FIRST: dict.fromkeys(names, ("BF16", [4, 32]))}, **COUNTS))
    assert [job.quantized for job in plan.jobs] == [True, False, False]
    assert plan.formats == {expert + "up_proj": "mxfp4", expert + "new_proj": "plain"}
    assert [row.group for row in plan.groups()] == ["routed", "routed", "other"]


# combinations that no engine loads


def test_mtp_experts_in_two_formats_are_refused_with_reason_and_way_out(tiny: Path) -> None:
    message = refusal(tiny, RecipeError, recipe="moe-mtp", keep=[SHARED_MTP])
    assert message.startswith("recipe 'moe-mtp' is refused (routed.mtp mxfp4, shared.mtp plain, shared.main mxfp4): ")
    assert "sglang 0.5.22 and 0.5.23" in message and "crash" in message
    assert (
        "Instead: quantize the MTP layer's shared experts too (recipe moe-mtp), or keep all shared experts" in message
    )


@pytest.mark.parametrize("options", [{"recipe": "moe-mtp"}, {"recipe": "moe-mtp", "keep": ["*.shared_experts.*"]}])
def test_both_ways_out_are_planned(tiny: Path, options: dict) -> None:
    assert planned(tiny, **options).formats["model.layers.5.mlp.experts.0.up_proj"] == "mxfp4"


def test_a_refusal_of_the_users_own_file_counts_too(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "schema: 1\nextends: glm_moe_dsa\n"
        "recipes:\n  mine: {about: dense, quantize: [{group: dense, layers: main, reason: to try}]}\n"
        "refuse:\n  - {when: {dense.main: mxfp4}, reason: too slow, instead: use moe, source: measured}\n"
    )
    message = refusal(tiny, RecipeError, recipe=str(tmp_path / "my.yaml"))
    assert message == "recipe 'mine' is refused (dense.main mxfp4): too slow\n  Instead: use moe."


def test_a_plan_depends_on_no_byte_of_the_weights(tiny: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny)
    path = folder / "model-00001-of-00003.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:start] + bytes(len(raw) - start))
    assert planned(folder).shards == planned(tiny).shards

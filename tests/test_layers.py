"""checkpoint/layers.py: which layer is what, from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glmquant.checkpoint.layers import indexer_formula, read_layers
from glmquant.errors import CheckpointError

PUBLISHED = json.loads((Path(__file__).parent / "data/glm-5.2/config.json").read_text())
FULL = [0, 1, 2, *range(6, 78, 4)]
"""The published `indexer_types`: three, then every fourth."""


def test_the_published_layers() -> None:
    layers = read_layers(PUBLISHED)
    assert (layers.count, layers.mtp, layers.dense) == (78, (78,), {0, 1, 2})
    assert layers.moe == tuple(range(3, 78))
    assert sorted(layers.indexer) == FULL
    assert (layers.routed_experts, layers.shared_experts) == (256, 1)


def test_the_published_schedule_keys_give_the_published_indexer_list() -> None:
    assert sorted(indexer_formula(PUBLISHED, 78)) == FULL
    assert sorted(read_layers(PUBLISHED | {"indexer_types": None}).indexer) == FULL


def test_a_list_in_the_config_wins_over_the_formula() -> None:
    config = {"num_hidden_layers": 3, "first_k_dense_replace": 3, "index_topk_freq": 2}
    config |= {"mlp_layer_types": ["sparse", "dense", "sparse"], "indexer_types": ["shared", "shared", "full"]}
    layers = read_layers(config)
    assert (layers.dense, layers.indexer, layers.moe) == ({1}, {2}, (0, 2))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"index_topk_freq": 0}, {0, 1, 2, 3, 4}),
        ({"index_topk_freq": 2}, {1, 3}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, {0, 1, 3}),
        ({"index_topk_pattern": "FSSFS"}, {0, 3}),
        ({"index_topk_pattern": ["full", "shared"], "index_topk_freq": 2}, {0}),
    ],
)
def test_without_a_list_the_schedule_says_who_has_an_indexer(keys: dict, expected: set[int]) -> None:
    assert read_layers({"num_hidden_layers": 5, **keys}).indexer == expected


@pytest.mark.parametrize("value", [None, 0])
def test_no_mtp_layer_is_declared_by_null_or_zero(value: int | None) -> None:
    assert read_layers({"num_hidden_layers": 5, "num_nextn_predict_layers": value}).mtp == ()


def test_several_mtp_layers_follow_the_main_ones() -> None:
    assert read_layers({"num_hidden_layers": 5, "num_nextn_predict_layers": 2}).mtp == (5, 6)


def test_a_config_without_num_hidden_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers is None, a natural number is needed"):
        read_layers({"model_type": "glm_moe_dsa"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "78"),
        ("num_hidden_layers", True),
        ("num_nextn_predict_layers", -1),
        ("first_k_dense_replace", 1.0),
        ("n_routed_experts", [256]),
        ("index_topk_freq", "4"),
    ],
)
def test_a_key_that_is_no_natural_number_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_layers({"num_hidden_layers": 5, key: value})
    assert str(caught.value) == f"config.json: {key} is {value!r}, a natural number is needed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2001}, "num_hidden_layers is 2001; the limit is 2,000"),
        ({"n_routed_experts": 10_001}, "n_routed_experts is 10001; the limit is 10,000"),
        ({"num_hidden_layers": 2000, "n_routed_experts": 200}, "2000 layers of n_routed_experts 200 are no real model"),
        ({"index_topk_pattern": "F" * 2001}, "index_topk_pattern is for 2,001 layers"),
    ],
)
def test_sizes_that_no_model_has_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_layers({"num_hidden_layers": 5, **changes})
    assert str(caught.value) == f"config.json: {message}"


@pytest.mark.parametrize("key", ["mlp_layer_types", "indexer_types"])
@pytest.mark.parametrize("value", [["full"], "full!", {}])
def test_a_layer_list_of_another_length_or_type_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_layers({"num_hidden_layers": 5, key: value})
    assert str(caught.value) == f"config.json: {key} must be a list with one item per layer (5)"

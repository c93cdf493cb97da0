"""recipe.py: what a recipe allows, how module names are classified, and that no wrong line passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.errors import RecipeError
from glmquant.recipe import (
    Architecture,
    Recipe,
    known_model_types,
    load_architecture,
    parse_architecture,
    recipe_folder,
    select_recipe,
)

LAYERS = read_layers(json.loads((Path(__file__).parent / "data/glm-5.2/config.json").read_text()))
GLM = load_architecture("glm_moe_dsa")

MINE = """\
schema: 1
extends: glm_moe_dsa
recipes:
  first:
    about: all routed experts
    quantize:
      - {group: routed, layers: all, reason: small}
  second:
    about: dense only
    quantize:
      - {group: dense, layers: main, reason: to try it}
"""


def own(tmp_path: Path, text: str, name: str = "") -> tuple[Architecture, Recipe]:
    (tmp_path / "my.yaml").write_text(text)
    return select_recipe(GLM, f"{tmp_path}/my.yaml{name}")


def refusal(tmp_path: Path, text: str, name: str = "") -> str:
    with pytest.raises(RecipeError) as caught:
        own(tmp_path, text, name)
    return str(caught.value)


def chosen(recipe: Recipe, *modules: str, layers: Layers = LAYERS) -> list[bool]:
    return [recipe.quantizes(GLM.module(module, layers)) for module in modules]


# classification


@pytest.mark.parametrize(
    ("name", "group", "layer", "is_mtp"),
    [
        ("model.layers.3.mlp.experts.255.down_proj", "routed", 3, False),
        ("model.layers.78.mlp.experts.0.gate_proj", "routed", 78, True),
        ("model.layers.3.mlp.shared_experts.up_proj", "shared", 3, False),
        ("model.layers.3.mlp.gate", "router", 3, False),
        ("model.layers.0.mlp.gate_proj", "dense", 0, False),
        ("model.layers.77.self_attn.kv_a_proj_with_mqa", "attention", 77, False),
        ("model.layers.6.self_attn.indexer.weights_proj", "indexer", 6, False),
        ("model.layers.78.eh_proj", "mtp_glue", 78, True),
        ("model.layers.78.shared_head.norm", "norms", 78, True),
        ("lm_head", "embeddings", None, False),
        ("model.norm", "norms", None, False),
        ("model.layers.78.surprise", "other", 78, True),
        ("model.layers.7.mlp.experts.0.gate_proj.extra", "other", 7, False),
        ("vision.layers.3.mlp.gate", "other", None, False),
    ],
)
def test_a_module_is_classified_by_its_whole_name(name: str, group: str, layer: int | None, is_mtp: bool) -> None:
    module = GLM.module(name, LAYERS)
    assert (module.group, module.layer, module.is_mtp) == (group, layer, is_mtp)


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("model.layers.78.eh_proj", "model.eh_proj"),
        ("model.layers.78.shared_head.norm", "model.shared_head.norm"),
        ("model.layers.78.self_attn.o_proj", "model.decoder.self_attn.o_proj"),
    ],
)
def test_an_mtp_module_has_the_name_that_sglangs_draft_gives_it(name: str, alias: str) -> None:
    assert ("sglang", alias) in [(rule.engine, found) for found, rule in GLM.mtp_aliases(name, LAYERS)]


def test_a_module_outside_the_mtp_layer_has_no_alias() -> None:
    assert GLM.mtp_aliases("model.layers.7.self_attn.o_proj", LAYERS) == []


# the recipes


@pytest.mark.parametrize(
    ("name", "routed", "shared", "mtp_routed", "mtp_shared"),
    [
        ("moe", True, True, False, False),
        ("moe-mtp", True, True, True, True),
        ("routed", True, False, False, False),
        ("routed-mtp", True, False, True, False),
    ],
)
def test_a_recipe_quantizes_experts_only(
    name: str, routed: bool, shared: bool, mtp_routed: bool, mtp_shared: bool
) -> None:
    recipe = GLM.recipe(name)
    experts = ["3.mlp.experts.0.up_proj", "3.mlp.shared_experts.up_proj"]
    experts += ["78.mlp.experts.0.up_proj", "78.mlp.shared_experts.up_proj"]
    assert chosen(recipe, *(f"model.layers.{e}" for e in experts)) == [routed, shared, mtp_routed, mtp_shared]
    others = ["3.mlp.gate", "0.mlp.up_proj", "3.self_attn.o_proj", "3.self_attn.indexer.wk", "78.eh_proj", "78.new"]
    assert not any(chosen(recipe, "lm_head", "model.embed_tokens", *(f"model.layers.{o}" for o in others)))


def test_moe_is_the_default_recipe() -> None:
    assert select_recipe(GLM, None)[1] == GLM.recipe(None) == GLM.recipe("moe")


def test_an_unknown_recipe_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(RecipeError) as caught:
        select_recipe(GLM, "tiny")
    assert str(caught.value).startswith("unknown recipe 'tiny'\n")
    assert "moe, moe-mtp, routed, routed-mtp" in str(caught.value)


def test_an_unknown_model_type_is_refused_and_the_known_ones_listed() -> None:
    assert "glm_moe_dsa" in known_model_types()
    with pytest.raises(RecipeError) as caught:
        load_architecture("llama")
    assert str(caught.value).startswith("config.json: model_type 'llama' is unknown\n")
    assert f"Known: {', '.join(known_model_types())}." in str(caught.value)


# overrides


def test_overrides_are_globs_or_whole_name_regexes_and_keep_wins() -> None:
    recipe = GLM.recipe("moe").with_overrides(
        quantize=["model.layers.0.mlp.*", r"re:model\.layers\.1\.mlp\.(gate|up)_proj"],
        keep=["model.layers.0.mlp.gate_proj", r"re:.*\.3\.mlp\.experts\..*"],
    )
    names = ["0.mlp.up_proj", "0.mlp.gate_proj", "1.mlp.gate_proj", "1.mlp.down_proj"]
    names += ["3.mlp.experts.0.up_proj", "33.mlp.experts.0.up_proj"]
    expected = [True, False, True, False, False, True]
    assert chosen(recipe, *(f"model.layers.{name}" for name in names)) == expected


def test_a_glob_is_no_regex() -> None:
    recipe = GLM.recipe("moe").with_overrides(quantize=["model.layers.0.mlp.(up_proj"], keep=[])
    assert chosen(recipe, "model.layers.0.mlp.up_proj") == [False]


@pytest.mark.parametrize("option", ["quantize", "keep"])
def test_a_bad_regex_is_refused_with_the_option_it_came_from(option: str) -> None:
    patterns = {"quantize": [], "keep": [], option: ["re:mlp.(up"]}
    with pytest.raises(RecipeError) as caught:
        GLM.recipe("moe").with_overrides(**patterns)
    assert str(caught.value).startswith(f"--{option} re:mlp.(up: not a valid regular expression: ")


# a user's own file


def test_the_first_recipe_of_a_file_is_its_default(tmp_path: Path) -> None:
    architecture, recipe = own(tmp_path, MINE)
    assert (recipe.name, list(architecture.recipes), architecture.file) == ("first", ["first", "second"], "my.yaml")
    assert chosen(recipe, "model.layers.78.mlp.experts.0.up_proj", "model.layers.0.mlp.up_proj") == [True, False]


def test_another_recipe_of_a_file_is_named_behind_a_colon(tmp_path: Path) -> None:
    _, recipe = own(tmp_path, MINE, ":second")
    assert chosen(recipe, "model.layers.78.mlp.experts.0.up_proj", "model.layers.0.mlp.up_proj") == [False, True]


def test_a_file_in_a_folder_named_like_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").mkdir()
    assert own(tmp_path / "set.yaml", MINE, ":second")[1].name == "second"


def test_a_file_keeps_the_architectures_groups_and_refusals_and_may_add_its_own(tmp_path: Path) -> None:
    added = "refuse:\n  - {when: {dense.main: mxfp4}, reason: slow, instead: keep them, source: measured}\n"
    architecture, _ = own(tmp_path, MINE + added)
    assert architecture.groups == GLM.groups and architecture.refusals[:-1] == GLM.refusals
    assert architecture.refusals[-1].when == {"dense.main": "mxfp4"}


def test_an_unknown_name_behind_the_colon_is_refused(tmp_path: Path) -> None:
    assert "unknown recipe 'third'\n  my.yaml has: first, second." in refusal(tmp_path, MINE, ":third")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yaml: cannot be read: No such file"):
        select_recipe(GLM, f"{tmp_path}/gone.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1\n", "", "must begin with 'schema: 1'"),
        ("schema: 1", "schema: 2", "must begin with 'schema: 1'"),
        ("schema: 1", "schema: 1\nschema: 1", "key 'schema' appears twice"),
        ("extends: glm_moe_dsa\n", "", "no key 'extends'\n  Write 'extends: glm_moe_dsa'."),
        ("extends: glm_moe_dsa", "extends: llama", "extends 'llama', but the checkpoint is 'glm_moe_dsa'"),
        ("schema: 1", "schema: 1\nrecipe: x", "unknown key 'recipe'\n  Allowed: extends, recipes, refuse, schema."),
        ("    about: dense only", "    abuot: dense only", "unknown key 'abuot' in recipes.second"),
        ("    about: dense only\n", "", "about must be a text"),
        ("    about: dense only", "    about: 5", "about must be a text"),
        ("second:", "first:", "key 'first' appears twice"),
        ("group: dense", "group: experts", "recipes.second: unknown group 'experts'\n  Known: attention, "),
        ("group: dense", "group: [dense]", "group must be a text"),
        ("layers: main", "layers: both", "recipes.second: layers 'both' must be one of main, mtp, all"),
        (", reason: to try it", "", "reason must be a text"),
        ("reason: to try it", 'reason: " "', "reason must be a text"),
        ("reason: to try it", "reason: to try it, why: x", "unknown key 'why' in recipes.second.quantize"),
        ("reason: to try it", "reason: a, reason: b", "key 'reason' appears twice"),
        ("{group: dense, layers: main, reason: to try it}", "dense", "recipes.second.quantize must be a map"),
        (
            "    quantize:\n      - {group: dense, layers: main, reason: to try it}\n",
            "    quantize: []\n",
            "recipes.second: quantizes nothing",
        ),
        (
            "    quantize:\n      - {group: dense, layers: main, reason: to try it}\n",
            "    quantize: 5\n",
            "must be a list",
        ),
        (MINE[MINE.index("recipes") :], "recipes: {}", "no recipe in it"),
        (MINE[MINE.index("recipes") :], "", "recipes must be a map"),
        (MINE, "", "must begin with 'schema: 1'"),
        (MINE, "schema: 1\nextends: glm_moe_dsa\nrecipes: {1: [2]}", "recipes.1 must be a map"),
        (MINE, "schema: [", "not valid YAML"),
        (MINE, "!!python/object/apply:os.system [ls]", "not valid YAML"),
        (MINE, "schema: 1\n? [a]\n: b", "not valid YAML"),
    ],
)
def test_a_wrong_line_in_a_file_is_refused_with_the_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert MINE.count(old) == 1
    found = refusal(tmp_path, MINE.replace(old, new))
    assert found.startswith(f"{tmp_path}/my.yaml: ") and message in found


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        ("", "refuse must be a list"),
        ("[x]", "refuse must be a map"),
        (
            "[{when: {dense.all: mxfp4}, reason: a, instead: b, source: c}]",
            "dense.all: mxfp4 is not <group>.<main|mtp>",
        ),
        (
            "[{when: {dens.main: mxfp4}, reason: a, instead: b, source: c}]",
            "dens.main: mxfp4 is not <group>.<main|mtp>",
        ),
        ("[{when: {dense.main: fp8}, reason: a, instead: b, source: c}]", "dense.main: fp8 is not <group>.<main|mtp>"),
        ("[{when: {}, reason: a, instead: b, source: c}]", "refuse: when is empty"),
        ("[{when: {dense.main: mxfp4}, reason: a, instead: b}]", "source must be a text"),
        ("[{when: {dense.main: mxfp4}, reason: a, instead: b, source: c, x: 1}]", "unknown key 'x' in refuse"),
    ],
)
def test_a_wrong_refusal_in_a_file_is_refused(tmp_path: Path, refuse: str, message: str) -> None:
    assert message in refusal(tmp_path, f"{MINE}refuse: {refuse}\n")


odd = st.sampled_from([None, True, 0, 1.5, "", "x", [], ["x"], {}, {"x": 1}, {1: "x"}, [[]], [None]])


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_odd_value_in_a_file_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    refuse = "refuse: [{when: {dense.main: mxfp4}, reason: slow, instead: keep them, source: measured}]\n"
    content: Any = yaml.safe_load(MINE + refuse)
    place, inside = content, True
    while inside:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inside = isinstance(place[key], (dict, list)) and data.draw(st.booleans())
        place = place[key] if inside else place
    place[key] = data.draw(odd)
    try:
        _, recipe = own(tmp_path_factory.getbasetemp(), yaml.safe_dump(content, sort_keys=False))
    except RecipeError as err:
        assert "my.yaml: " in str(err)
    else:
        assert recipe.name == next(iter(content["recipes"])) and recipe.rules


# the architecture file


def test_every_architecture_file_follows_the_schema() -> None:
    for name in known_model_types():
        assert load_architecture(name).model_type == name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("default: moe\n", "default: best\n", "default 'best' is not one of its recipes"),
        ("model_type: glm_moe_dsa\n", "", "model_type must be a text"),
        ("lookups: [model.embed_tokens]", "lookups: model.embed_tokens", "lookups must be a list of texts"),
        ("lookups: [model.embed_tokens]", "lookups: [1]", "lookups must be a list of texts"),
        ("lookups: [model.embed_tokens]", 'lookups: [""]', "lookups must be a list of texts"),
        ("  router:\n    modules:", "  router:\n    module:", "unknown key 'module' in groups.router"),
        ('  prefix: "model.layers.{layer}."', "", "prefix must be a text"),
        ('      to: "model.{rest}"\n', "", "to must be a text"),
        ("  aliases:\n", "  aliases: 1\n  x:\n", "unknown key 'x' in mtp"),
    ],
)
def test_a_wrong_line_in_an_architecture_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (recipe_folder() / "glm_moe_dsa.yaml").read_text()
    assert old in text
    (tmp_path / "glm.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        parse_architecture(tmp_path / "glm.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/glm.yaml: ") and message in str(caught.value)


def test_an_architecture_file_without_aliases_is_refused(tmp_path: Path) -> None:
    text = yaml.safe_load((recipe_folder() / "glm_moe_dsa.yaml").read_text())
    del text["mtp"]["aliases"]
    (tmp_path / "glm.yaml").write_text(yaml.safe_dump(text))
    with pytest.raises(RecipeError, match="aliases must be a list"):
        parse_architecture(tmp_path / "glm.yaml")

"""The output's README.md: a model card that the Hub understands and whose numbers are true."""

import re
import shutil
from pathlib import Path

import pytest
import support
from huggingface_hub import ModelCard
from make_tiny_glm import make_tiny_glm
from support import RECIPES, TRAINED, FakeBackend

import glmquant
from glmquant import pipeline


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make_backends", lambda *_: [FakeBackend()])


def load(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_hub_reads_base_model_licence_and_tags(tiny: Path, recipe: str) -> None:
    data = load(support.output(tiny, recipe).output).data.to_dict()
    assert data == {
        "base_model": "tiny",
        "base_model_relation": "quantized",
        "license": "cc0-1.0",
        "library_name": "transformers",
        "tags": ["mxfp4", "quark", "glmquant"],
    }


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize(
    ("given", "expected"), [(None, "zai-org/GLM-5.2"), ("someone/else", "someone/else")], ids=["guessed", "given"]
)
def test_base_model_comes_from_the_hub_cache_path(tiny: Path, tmp_path: Path, given: str | None, expected: str) -> None:
    snapshot = tmp_path / "hub/models--zai-org--GLM-5.2/snapshots/0123456789abcdef"
    shutil.copytree(tiny, snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    for source in (snapshot, tmp_path / "link"):
        card = load(glmquant.quantize(source, tmp_path / f"out-{source.name}", base_model=given).output)
        assert card.data.base_model == expected
        assert f"# {expected.partition('/')[2]} in MXFP4" in card.text
        assert f"glmquant quantize {expected} OUT --recipe moe\n" in card.text


@pytest.mark.usefixtures("fake_backend")
def test_what_the_source_card_says_of_licence_and_language_is_taken_over(tiny: Path, tmp_path: Path) -> None:
    source = support.copy(tiny, tmp_path / "source")
    said = (
        "license: other\nlicense_name: größe\nlicense_link: LICENSE\nlanguage: [en, zh]\npipeline_tag: text-generation"
    )
    (source / "README.md").write_text(f"---\n{said}\nlibrary_name: sglang\ntags: [theirs]\n---\n# Theirs\n")
    card = load(glmquant.quantize(source, tmp_path / "out").output)
    found = card.data.to_dict()
    assert (found["license"], found["license_name"], found["license_link"]) == ("other", "größe", "LICENSE")
    assert (found["language"], found["pipeline_tag"]) == (["en", "zh"], "text-generation")
    assert (found["library_name"], found["tags"]) == ("sglang", ["mxfp4", "quark", "glmquant"])
    assert "Theirs" not in card.text


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize(
    "card", [None, b"", b"# no front matter\n", b"---\nlicense: [\n---\n", b"---\n- a list\n---\n", b"\xff\xfe"]
)
def test_a_source_card_of_no_use_costs_the_licence_only(tiny: Path, tmp_path: Path, card: bytes | None) -> None:
    source = support.copy(tiny, tmp_path / "source")
    (source / "README.md").unlink()
    if card is not None:
        (source / "README.md").write_bytes(card)
    data = load(glmquant.quantize(source, tmp_path / "out").output).data.to_dict()
    assert data["base_model"] == "source" and "license" not in data


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_adds_up_to_what_is_on_disk(recipe: str) -> None:
    folder = support.output(TRAINED, recipe).output
    rows = [line.strip("| ").split(" | ") for line in load(folder).text.splitlines() if line.startswith("| ")]
    assert rows[0][:4] == ["group", "tensors", "bytes in", "bytes out"]
    *groups, total = [[int(cell.replace(",", "")) for cell in row[1:4]] for row in rows[1:]]
    assert rows[-1][0] == "total" and [sum(column) for column in zip(*groups, strict=True)] == total

    before, after = support.tensors(TRAINED), support.tensors(folder)
    sizes = [sum(tensor.nbytes for _, tensor in tensors.values()) for tensors in (before, after)]
    assert total == [len(after), *sizes]
    packed = sum(int(row[1].replace(",", "")) for row in rows if row[-1] == "BF16 -> MXFP4")
    assert packed == 2 * sum(name.endswith("_scale") for name in after)


@pytest.mark.parametrize("recipe", RECIPES)
def test_list_tools_and_launch_command_are_said(tiny: Path, recipe: str) -> None:
    result = support.output(tiny, recipe)
    text = load(result.output).text
    assert f"`quantization_config.exclude` ({len(result.exclusions.entries)} entries)" in text
    assert "--speculative-algorithm EAGLE" in text
    assert re.search(r"Made with glmquant \S+, amd-quark 0\.13, the fused kernel giving Quark's bits\.\n", text)


@pytest.mark.usefixtures("fake_backend")
def test_with_256_experts_recipe_routed_needs_a_flag_and_says_so(tmp_path: Path) -> None:
    # Engines fuse a shared expert into 256 routed ones only.
    make_tiny_glm(tmp_path / "source", layers=2, experts=256, hidden=32, moe_intermediate=32, intermediate=32)
    flag = "--disable-shared-experts-fusion"
    for recipe, flags in (("moe", 0), ("routed", 1)):
        result = glmquant.quantize(tmp_path / "source", tmp_path / recipe, recipe=recipe, targets="sglang>=0.5.13")
        needs = [str(need) for need in result.exclusions.needs]
        text = load(result.output).text
        assert all(f"\n- {need}\n" in text for need in needs)
        assert sum(f"needs {flag}" in need for need in needs) == text.count(f"needs {flag}") == flags

"""What the README shows is true: every command and every example runs, and its tables agree with the data."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
import yaml
from make_full_output import make_full_output

import glmquant
from glmquant.cli import main
from glmquant.recipe import load_architecture

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RECIPES_README = (ROOT / "exclusions/README.md").read_text()
SOURCE, OUTPUT = "/models/GLM-5.2", "/models/GLM-5.2-MXFP4"


def blocks(text: str, language: str) -> list[str]:
    return [textwrap.dedent(block) for block in re.findall(rf"^ *```{language}\n(.*?)```", text, re.S | re.M)]


def commands() -> Iterator[str]:
    for block in blocks(README, "bash"):
        yield from block.strip().splitlines()


GLMQUANT = [c for c in commands() if c.startswith("glmquant ")]
SCRIPTS = [c for c in commands() if c.startswith("scripts/")]


@pytest.fixture(scope="session")
def output(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("readme") / "out"
    make_full_output(tiny, out, "moe")
    return out


@pytest.fixture(scope="session")
def full_output(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the real size; the small one cannot be cut for 8 GPUs."""
    out = tmp_path_factory.mktemp("readme-full") / "out"
    make_full_output(full, out, "moe")
    return out


def on_tiny(text: str, tiny: Path, output: Path) -> str:
    """The README's paths of the real model, as the small one's."""
    return text.replace(OUTPUT, str(output)).replace(SOURCE, str(tiny))


def test_the_readme_has_no_command_that_is_not_run_here() -> None:
    assert set(commands()) == {*GLMQUANT, *SCRIPTS}
    assert SCRIPTS == ["scripts/quickstart.sh", "scripts/test.sh"]


SERVING = [c for c in GLMQUANT if c.split()[1] in ("serve", "tune-input", "doctor")]


@pytest.mark.parametrize("command", SERVING)
def test_commands_about_serving_run(command: str, full_output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(command.replace(OUTPUT, str(full_output)))[1:])
    out, err = capsys.readouterr()
    assert not err
    if command.startswith("glmquant doctor"):
        assert code == 1 and "fix   sglang is not installed here" in out
    elif command.startswith("glmquant serve"):
        assert code == 0 and "--speculative-num-steps" in out
    else:
        assert "257" in out


def test_the_published_table_is_undecided(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (c for c in GLMQUANT if c.startswith("glmquant evals compare"))
    assert main(shlex.split(command)[1:]) == 1
    out = capsys.readouterr().out
    assert "undecided at 2 points" in out and "-0.048 to +0.028" in out and "1,600 questions an arm" in out


ELSEWHERE = ("quantize", "evals", "serve", "tune-input", "doctor")


@pytest.mark.parametrize("command", [c for c in GLMQUANT if c.split()[1] not in ELSEWHERE])
def test_commands_of_the_readme_run(command: str, tiny: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command.startswith(("glmquant verify", "glmquant report", "glmquant mtp")):  # the weights are read
        output = support.output(tiny, "moe").output
    words = shlex.split(on_tiny(command, tiny, output))[1:]
    assert main(words) == 0, capsys.readouterr().err


def test_quickstart_and_the_quantize_command_do_the_whole_job(tiny: Path, tmp_path: Path) -> None:
    """Both import Quark, so they run in processes of their own, as a user would start them."""
    quickstart = subprocess.run(["scripts/quickstart.sh"], cwd=ROOT, capture_output=True, text=True)
    assert quickstart.returncode == 0, quickstart.stderr
    assert "no findings" in quickstart.stdout or "0 errors" in quickstart.stdout
    assert (ROOT / "quickstart-out/tiny-glm-mxfp4/config.json").exists()
    for command in (c for c in GLMQUANT if c.startswith("glmquant quantize")):  # the second one has --resume
        words = shlex.split(on_tiny(command, tiny, tmp_path / "out"))[1:]
        done = subprocess.run([sys.executable, "-m", "glmquant", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 errors" in done.stdout or "no findings" in done.stdout


def test_the_test_command_is_what_ci_runs() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()
    for script in ("scripts/test.sh", "scripts/quickstart.sh", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("example", blocks(README, "python"))
def test_library_examples_of_the_readme_run(
    example: str, tiny: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" if "glmquant.quantize" in example else output
    if "glmquant.verify" in example:
        target = support.output(tiny, "moe").output
    exec(compile(on_tiny(example, tiny, target), "README.md", "exec"), {})


def test_the_recipe_table_agrees_with_the_plan_of_the_real_model(full: Path) -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)`[^|]*\|[^|]*\| ([\d,]+) \|", README, re.M))
    assert rows == {
        name: f"{glmquant.plan(full, recipe=name, targets='vllm').plan.total_size:,}"
        for name in load_architecture("glm_moe_dsa").recipes
    }


def test_every_schema_key_and_the_example_recipe_of_the_recipes_readme_are_real(tiny: Path, tmp_path: Path) -> None:
    data = yaml.safe_load((ROOT / "exclusions/glm_moe_dsa.yaml").read_text())
    documented = set(
        re.findall(r"`([a-z_]+)(?:\.[a-z]+)?`", "".join(re.findall(r"^\| (`[^|]*) \|", RECIPES_README, re.M)))
    )
    assert set(data) == documented
    own = tmp_path / "my.yaml"
    own.write_text(blocks(RECIPES_README, "yaml")[0])
    plan = glmquant.plan(tiny, recipe=str(own)).plan
    assert plan.formats["model.layers.0.mlp.up_proj"] == "mxfp4"


def test_the_architecture_section_names_every_module() -> None:
    section = README.partition("## Architecture")[2]
    for path in (ROOT / "glmquant").glob("*.py"):
        if not path.name.startswith("__"):
            assert path.name in section, path.name


def test_every_option_of_every_verb_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (
        "plan",
        "quantize",
        "exclusions",
        "validate",
        "verify",
        "mtp graft",
        "report",
        "serve",
        "tune-input",
        "doctor",
        "evals run",
        "evals compare",
    ):
        with pytest.raises(SystemExit, match="0"):
            main([*verb.split(), "--help"])
        text = capsys.readouterr().out
        assert re.search(rf"usage: glmquant {verb}", text)
        assert f"glmquant {verb}" in README

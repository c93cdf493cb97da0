"""cli/: the verbs, their output for people and for programs, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from checkpoints import edit_json

import glmquant
from glmquant.checkpoint.writer import write_file
from glmquant.cli import main

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def stopped(capsys: Capture, *argv: object) -> tuple[object, str, str]:
    """As `run`, for what argparse ends itself."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def error_line(capsys: Capture, *argv: object) -> str:
    """The one error line of a run that fails; its indented hint belongs to it."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("glmquant: error: ") and "Traceback" not in err
    assert all(line.startswith("  ") for line in err.splitlines()[1:])
    return err


# help and usage

VERBS = [
    "plan",
    "quantize",
    "exclusions",
    "validate",
    "verify",
    "mtp",
    "report",
    "evals",
    "serve",
    "tune-input",
    "doctor",
]


def test_help_names_every_verb(capsys: Capture) -> None:
    code, out, _ = stopped(capsys, "--help")
    assert code == 0
    assert re.findall(r"^    ([a-z]\S*)", out, re.MULTILINE) == VERBS
    assert "exit codes: 0 done, 1 a finding or an error, 2 wrong usage" in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(capsys: Capture, verb: str) -> None:
    code, out, _ = stopped(capsys, verb, "--help")
    assert code == 0 and out.startswith(f"usage: glmquant {verb} ")


def test_the_version_is_the_installed_one(capsys: Capture) -> None:
    assert stopped(capsys, "--version") == (0, f"glmquant {version('glmquant')}\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["pack", "x"],
        ["plan"],
        ["plan", "x", "y"],
        ["plan", "x", "--format", "json"],
        ["quantize", "x"],
        ["exclusions", "x", "--format", "xml"],
        ["validate", "x", "--fail-on", "never"],
        ["validate", "x", "--recipe", "moe"],
    ],
)
def test_wrong_usage_exits_with_2(capsys: Capture, argv: list[str]) -> None:
    code, out, err = stopped(capsys, *argv)
    assert (code, out) == (2, "") and err.startswith("usage: glmquant")


def test_exclusions_takes_one_checkpoint(capsys: Capture) -> None:
    code, out, err = run(capsys, "exclusions", "a", "b")
    assert (code, out) == (2, "") and err.startswith("glmquant exclusions: error: give one CKPT")


# plan


def test_plan_prints_a_table_and_a_summary(tiny: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "plan", tiny)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == f"{tiny}: glm_moe_dsa, 5 layers + MTP layer 5"
    assert lines[1].startswith("recipe moe: ")
    assert "routed          192  1,572,864    417,792  BF16 -> MXFP4" in lines
    assert "total           337  4,010,144  2,710,688" in lines
    assert "compression   1.48x" in lines
    assert "quantized     44.13% of parameters" in lines


def test_plan_says_the_overrides(tiny: Path, capsys: Capture) -> None:
    _, out, _ = run(capsys, "plan", tiny, "--quantize", "model.layers.0.mlp.*", "--keep", r"re:.*\.layers\.1\..*")
    assert "  --quantize model.layers.0.mlp.*\n  --keep re:.*\\.layers\\.1\\..*\n" in out


def test_plan_json_has_the_numbers(tiny: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "plan", tiny, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    numbers = ("recipe", "shards", "tensors_in", "tensors_out", "bytes_in", "bytes_out")
    assert [found[key] for key in numbers] == ["moe", 3, 229, 337, 4_010_144, 2_710_688]
    assert found["groups"][0] == {
        "group": "routed",
        "tensors": 192,
        "parameters": 786_432,
        "bytes_in": 1_572_864,
        "bytes_out": 417_792,
        "dtype_in": "BF16",
        "dtype_out": "MXFP4",
    }
    assert sum(group["bytes_out"] for group in found["groups"]) == found["bytes_out"]
    assert found["quantized_share"] == (786_432 + 98_304) / 2_005_032
    assert found["bytes_out"] < found["disk_needed"] < found["bytes_out"] + 300_000
    assert found["exclude_entries"] == len(glmquant.plan(tiny).exclusions.entries)
    assert found["targets"][0] == "sglang 0.5.13.post1"


def test_plan_takes_a_recipe_and_targets(tiny: Path, capsys: Capture) -> None:
    _, out, _ = run(capsys, "plan", tiny, "--json", "--recipe", "moe-mtp", "--targets", "sglang==0.5.23")
    found = json.loads(out)
    assert (found["recipe"], found["targets"]) == ("moe-mtp", ["sglang 0.5.23"])
    assert found["tensors_out"] == 337 + (8 + 1) * 3


def test_plan_of_the_published_model_is_exact(full: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "plan", full, "--json", "--recipe", "routed", "--targets", "sglang==0.5.23")
    found = json.loads(out)
    assert (code, found["tensors_out"], found["bytes_out"]) == (0, 117_185, 442_145_564_672)


# exclusions


def test_exclusions_prints_one_entry_a_line(tiny: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "exclusions", tiny)
    assert code == 0
    assert out.splitlines() == glmquant.resolve_exclusions(tiny).texts
    assert out.startswith("lm_head\nmodel.layers.0.mlp.down_proj\n")


def test_exclusions_json_is_the_list_as_in_config_json(tiny: Path, capsys: Capture) -> None:
    _, out, _ = run(capsys, "exclusions", tiny, "--format", "json", "--recipe", "routed")
    assert json.loads(out) == glmquant.resolve_exclusions(tiny, recipe="routed").texts


def test_exclusions_table_says_where_each_entry_comes_from(tiny: Path, capsys: Capture) -> None:
    _, out, _ = run(capsys, "exclusions", tiny, "--format", "table")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["lm_head", "checkpoint", "lm_head"]
    entries = glmquant.resolve_exclusions(tiny).entries
    assert [(row[0], row[1]) for row in rows] == [(entry.text, entry.origin) for entry in entries]


# validate


def test_validate_json_and_exit_code_tell_of_findings(tiny: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "validate", tiny, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["tensors"], found["bytes"]) == (1, False, 229, 4_010_144)
    assert "config-not-quantized" in [finding["code"] for finding in found["findings"]]


def test_validate_prints_findings_for_people(tiny: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "validate", tiny)
    assert code == 1 and out.startswith(f"{tiny}: 229 tensors, 4,010,144 bytes, 0 modules in MXFP4\n")
    assert "\nerror: config-not-quantized" in out


# quantize


def test_quantize_says_what_was_written_and_that_it_loads(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    out_folder = tmp_path / "out"
    code, out, _ = run(capsys, "quantize", tiny, out_folder)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith(f"wrote {out_folder} in ")
    assert "total           337  4,010,144  2,710,688" in lines
    assert f"{out_folder}: 337 tensors, 2,710,688 bytes, 108 modules in MXFP4" in lines


def test_quantize_is_silent_when_told_so(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "quantize", tiny, tmp_path / "out", "--quiet", "--recipe", "moe-mtp") == (0, "", "")
    assert (tmp_path / "out" / "config.json").exists()


def test_quantize_exits_with_1_and_speaks_when_its_output_has_findings(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def write_less(folder: Path, name: str, content: bytes) -> None:
        if name != "model.safetensors.index.json":
            write_file(folder, name, content)

    monkeypatch.setattr("glmquant.finishing.write_file", write_less)
    code, out, _ = run(capsys, "quantize", tiny, tmp_path / "out", "--quiet")
    assert code == 1 and "\nerror: no-index" in out


# errors


@pytest.mark.parametrize("verb", ["plan", "exclusions", "validate"])
def test_a_missing_folder_is_one_line_and_exit_code_1(tmp_path: Path, capsys: Capture, verb: str) -> None:
    assert error_line(capsys, verb, tmp_path / "gone").startswith(f"glmquant: error: {tmp_path}/gone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "tiny"], "unknown recipe 'tiny'"),
        (["--keep", "model.layers.9.*"], "--keep model.layers.9.*: matches no module"),
        (["--quantize", "re:("], "--quantize re:(: not a valid regular expression"),
        (["--targets", "llama.cpp"], "unknown target 'llama.cpp'"),
        (["--targets", "sglang>=9"], "target 'sglang>=9': no known release"),
        (["--recipe", "moe-mtp", "--keep", "model.layers.5.mlp.shared_experts.*"], "recipe 'moe-mtp' is refused"),
    ],
)
def test_a_wrong_option_value_is_one_line_and_exit_code_1(
    tiny: Path, capsys: Capture, options: list[str], message: str
) -> None:
    assert error_line(capsys, "plan", tiny, *options).startswith(f"glmquant: error: {message}")


def test_an_unknown_model_type_is_named_with_the_known_ones(
    tiny: Path, copy_of: Callable[[Path], Path], capsys: Capture
) -> None:
    folder = copy_of(tiny)
    with edit_json(folder / "config.json") as config:
        config["model_type"] = "llama"
    error = error_line(capsys, "plan", folder)
    assert "model_type 'llama' is unknown" in error and "Known: " in error and "glm_moe_dsa" in error


def test_quantize_into_a_used_folder_touches_nothing(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "precious").write_bytes(b"")
    assert "is not empty (it holds 'precious')" in error_line(capsys, "quantize", tiny, tmp_path)
    assert os.listdir(tmp_path) == ["precious"]


# the real thing


def test_the_command_runs_as_a_process(tiny: Path) -> None:
    command = [sys.executable, "-m", "glmquant"]
    done = subprocess.run([*command, "plan", tiny, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes_out"] == 2_710_688

    done = subprocess.run([*command, "plan", "/gone"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "glmquant: error: /gone does not exist"
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_traceback(tiny: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        command = [sys.executable, "-m", "glmquant", "exclusions", tiny]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_verbose_shows_the_traceback_of_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "glmquant", "plan", "-v", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr and "no config.json" in done.stderr

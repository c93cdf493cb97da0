"""Launch commands go to the engines' own argument parsers; doctor looks at real wheels."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import envs
import harness
import pytest
from make_full_layout import make_full_layout
from make_full_output import make_full_output
from packaging.version import Version

from glmquant import operate
from glmquant.engines.model import rules_for
from glmquant.serving.aiter_tables import open_tables
from glmquant.serving.doctor import examine_stack, observed
from glmquant.serving.guard import find_guard, patch
from glmquant.serving.launch import Launch, Wish, make_launch
from glmquant.serving.settings import PROFILES, engine_settings, hardware, profiles
from glmquant.serving.stack import open_stack
from glmquant.serving.subject import nearest, read_subject

pytestmark = pytest.mark.conformance

SGLANG, VLLM = harness.releases("sglang"), harness.releases("vllm")
RECIPES = ("moe", "routed")
AITER = "0.1.7.post2.dev18"  # the newest that the registry has; sglang's images install a checkout


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GLM-5.2 at full size, headers only, bf16 and quantized."""
    root = tmp_path_factory.mktemp("full")
    make_full_layout(root / "source")
    for recipe in RECIPES:
        make_full_output(root / "source", root / recipe, recipe)
    return {recipe: root / recipe for recipe in RECIPES}


def launches(folders: dict[str, Path], engine: str, release: str) -> list[Launch]:
    """Every profile of every recipe, and the rest of the flags."""
    subjects = {recipe: read_subject(folder, nearest(engine, release)) for recipe, folder in folders.items()}

    def launch(recipe: str, profile: str, wish: Wish) -> Launch:
        return make_launch(subjects[recipe], engine_settings(engine), profiles()[profile], hardware(), release, wish)

    found = [launch(recipe, name, Wish(host="::1", port=30001)) for recipe in RECIPES for name in PROFILES]
    return [*found, launch("moe", "latency", Wish(ep=8, draft_depth=0))]


def parse(engine: str, release: str, lines: list[list[str]]) -> list[dict[str, Any]]:
    """What the release's own parser makes of these words (sglang_parse.py, vllm_parse.py)."""
    env = harness.ensure(engine, release)
    script = Path(__file__).with_name(f"{engine}_parse.py")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([str(env.python), str(script)], input=text, capture_output=True, text=True, env=env.environ())
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(lines)
    return answers


@pytest.mark.parametrize("release", SGLANG)
def test_sglang_accepts_every_flag(release: str, folders: dict[str, Path]) -> None:
    harness.ensure("sglang", release)
    found = launches(folders, "sglang", release)
    wrong = [*found[0].argv[3:], "--no-such-flag"], ["--model-path", "x", "--kv-cache-dtype", "fp9"]
    *good, unknown, value = parse("sglang", release, [*(each.argv[3:] for each in found), *wrong])
    assert not unknown["ok"] and "--no-such-flag" in unknown["error"]
    assert not value["ok"] and "fp9" in value["error"]
    for launch, answer in zip(found, good, strict=True):
        assert answer["ok"], answer
        args, depth = answer["args"], launch.draft_depth
        assert (args["tp_size"], args["dp_size"], args["ep_size"]) == (launch.tp, launch.dp, launch.ep)
        assert (args["kv_cache_dtype"], args["enable_aiter_allreduce_fusion"]) == ("fp8_e4m3", True)
        assert args["disable_shared_experts_fusion"] is ("--disable-shared-experts-fusion" in launch.argv)
        drafts = (args["speculative_num_steps"], args["speculative_eagle_topk"], args["speculative_num_draft_tokens"])
        assert drafts == ((depth, 1, depth + 1) if depth else (None, None, None))
        assert args["speculative_algorithm"] == ("EAGLE" if depth else None)
        assert (args["reasoning_parser"], args["tool_call_parser"]) == ("glm45", "glm47")
        assert args["mem_fraction_static"] == 0.8 and args["watchdog_timeout"] == 1200
        assert (args["host"], args["port"]) == (("::1", 30001) if launch.ep == 1 else ("127.0.0.1", 30000))


@pytest.mark.parametrize("release", VLLM)
def test_vllm_accepts_every_flag(release: str, folders: dict[str, Path]) -> None:
    harness.ensure("vllm", release)
    found = launches(folders, "vllm", release)
    *good, unknown = parse("vllm", release, [*(each.argv[2:] for each in found), ["x", "--no-such-flag"]])
    assert not unknown["ok"]
    for launch, answer in zip(found, good, strict=True):
        assert answer["ok"], answer
        args = answer["args"]
        assert (args["tensor_parallel_size"], args["data_parallel_size"]) == (launch.tp, launch.dp)
        assert args["enable_expert_parallel"] is (launch.ep > 1)
        depth = launch.draft_depth
        expected = {"method": "mtp", "num_speculative_tokens": depth} if depth else None
        assert args["speculative_config"] == expected
        assert (args["moe_backend"], args["linear_backend"]) == ("aiter", "aiter")


@pytest.mark.parametrize("release", SGLANG)
def test_doctor_reads_the_wheel_as_the_model_says(release: str, tmp_path: Path) -> None:
    stack = open_stack([harness.ensure("sglang", release).folder])
    rules, wheel = rules_for("sglang", release), observed(stack)
    assert wheel == {name: rules[name] for name in wheel}
    lines = {line.code: line for line in examine_stack(stack)}
    assert lines["sglang"].status == "ok" and lines["sglang"].text == f"sglang {release}"
    assert {lines[code].status for code in ("draft-list", "veto", "container-leaf")} == {"ok"}
    kernels = "triton" if Version(release) >= Version("0.5.20") else "tilelang"
    assert lines["sparse-attention"].text == f"sparse attention uses {kernels} on ROCm, and it is not installed"
    guard = find_guard(stack)
    assert guard and guard.present is (Version(release) >= Version("0.5.15"))
    assert lines["rocm-guard"].status == ("ok" if guard.present else "fix")


@pytest.mark.skipif("0.5.14" not in SGLANG, reason="needs two releases that --quick leaves out")
def test_the_patch_makes_the_file_of_the_next_release(tmp_path: Path) -> None:
    guards = {r: find_guard(open_stack([harness.ensure("sglang", r).folder])) for r in ("0.5.14", "0.5.15.post1")}
    old, new = guards["0.5.14"], guards["0.5.15.post1"]
    assert old and new
    path = tmp_path / old.path.relative_to(harness.ensure("sglang", "0.5.14").folder)
    path.parent.mkdir(parents=True)
    path.write_text(old.text)
    subprocess.run(["patch", "-p1", "-s"], input=patch(old), text=True, cwd=tmp_path, check=True)
    assert path.read_text() == new.text


def aiter() -> Path:
    """The unpacked wheel of amd-aiter."""
    folder = envs.root() / f"amd-aiter-{AITER}"
    if not (folder / ".complete").is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"amd-aiter=={AITER}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise harness.EnvironmentUnavailable(done.stderr[-500:])
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
        (folder / ".complete").touch()
    return folder


def test_a_real_aiter_has_no_kernel_for_this_model(folders: dict[str, Path]) -> None:
    tables = open_tables(open_stack([aiter()]), {})
    assert tables and tables.known and tables.release == AITER
    assert tables.columns[:2] == ("cu_num", "token") and len(tables.rows) > 700
    assert tables.tuner and tables.tuner.name == "tune.py"
    report = operate.kernel_keys(folders["moe"], release="0.5.23", site_packages=[aiter()])
    assert [(len(line.hits), len(line.misses)) for line in report.lines if line.served] == [(0, 7), (0, 7)]


def test_a_real_aiter_is_looked_up_as_it_does_itself() -> None:
    """Every row of its table is found under its own columns, as pandas reads them."""
    import csv

    tables = open_tables(open_stack([aiter()]), {})
    assert tables
    with open(tables.files[0], newline="") as file:
        rows = list(csv.DictReader(file))
    distinct = {tuple(row[column] for column in tables.columns) for row in rows}
    assert len(tables.rows) == len(distinct) and set(tables.rows) == distinct

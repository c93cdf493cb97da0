"""scripts/bench.py runs, on an input so small that its times say nothing."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import glmquant

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/bench.py"


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    work = tmp_path_factory.mktemp("bench")
    done = run("--source", tiny, "--work", work, "--tools", "glmquant:2,limit:1")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((work / "bench.json").read_text()), work


def test_each_tool_is_run_as_often_as_asked_and_writes_what_was_planned(
    measured: tuple[str, dict, Path], tiny: Path
) -> None:
    _, result, work = measured
    assert {tool: len(runs) for tool, runs in result["runs"].items()} == {"glmquant": 2, "limit": 1}
    assert result["not_measured"] == {}
    planned = sum(shard.file_size for shard in glmquant.plan(tiny).plan.shards)
    for one in (one for runs in result["runs"].values() for one in runs):
        assert one["bytes_out"] == planned
        assert min(one[key] for key in ("seconds", "cpu_seconds", "peak_rss", "anonymous")) > 0
    assert not (work / "out").exists()


def test_the_table_is_markdown_with_a_row_a_tool(measured: tuple[str, dict, Path]) -> None:
    rows = [line for line in measured[0].splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {11}
    assert [row.split("|")[1].strip() for row in rows] == ["tool", "---", "glmquant", "limit"]


def test_a_tool_that_fails_or_takes_too_long_is_in_the_table_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    done = run("--source", tiny, "--work", tmp_path, "--tools", "limit", "--timeout", "0")
    assert done.returncode == 0, done.stderr
    assert "| limit | 0 | not measured: stopped after 0 s |" in done.stdout


def test_an_unknown_tool_is_refused() -> None:
    done = run("--tools", "glmquant,nonsense")
    assert done.returncode == 2 and "unknown tool 'nonsense'" in done.stderr


def test_growth_scaling_and_whole_run_the_job_at_each_size_and_number_of_threads(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("bench", SCRIPT)
    assert spec and spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    small = {"hidden": 256, "moe_intermediate": 64, "intermediate": 64, "vocab": 512, "experts": 8, "layers": 2}
    monkeypatch.setattr(bench, "SIZES", small)
    monkeypatch.setattr(bench, "GROWTH", {1: 4, 2: 8, 3: 16})
    shutil.copytree(tiny, tmp_path / "full")
    for verb in (["growth", "--most", "2"], ["scaling"], ["whole", "--shards", "1"]):
        monkeypatch.setattr(sys, "argv", ["bench.py", "--work", str(tmp_path), "--runs", "1", *verb])
        bench.main()
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split("|") for line in printed if line.startswith("| ")]
    assert any(line.startswith("seconds = ") and line.endswith(" x GB") for line in printed)
    assert rows[0][1].strip() == "GB in" and 0 < float(rows[1][1]) < float(rows[2][1]) + 0.01
    assert {row[1].strip() for row in rows[4:8]} == {"glmquant", "limit"}
    assert rows[8][1].strip() == "disk, GB/s" and all(row[2].endswith(" min ") for row in rows[9:]) and rows[9:]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"source", "source-1", "source-2", "full"}

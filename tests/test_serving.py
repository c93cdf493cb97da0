"""Launch commands, kernel keys and the tuner's input. What real engines accept is asked in tests/conformance."""

from __future__ import annotations

import csv
import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import FIRST, write_checkpoint
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from make_full_output import make_full_output
from serving_support import (
    FP4,
    ROUNDING,
    UNTUNED,
    install,
    install_aiter,
    published_rows,
    short_checkpoint,
    table,
    tuned,
    with_exclude,
)

from glmquant import operate
from glmquant.cli import main
from glmquant.errors import CheckpointError, GlmquantError, OutputError
from glmquant.serving import settings
from glmquant.serving.aiter_tables import ENVIRONMENT, Tables, open_tables, untuned_csv
from glmquant.serving.guard import find_guard, patch
from glmquant.serving.kernel_keys import buckets, find_buckets, kernel_shapes, rules
from glmquant.serving.launch import Launch, Wish, make_launch
from glmquant.serving.output import write_new
from glmquant.serving.settings import engine_settings, hardware, profiles
from glmquant.serving.stack import open_stack
from glmquant.serving.subject import Subject, nearest, read_subject

LATENCY = [
    *("--kv-cache-dtype", "fp8_e4m3", "--enable-aiter-allreduce-fusion"),
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "6", "--chunked-prefill-size", "131072", "--mem-fraction-static", "0.80"),
    *("--watchdog-timeout", "1200", "--reasoning-parser", "glm45", "--tool-call-parser", "glm47"),
]


def launch(recipe: str = "moe", profile: str = "latency", release: str = "0.5.23", **wish: Any) -> Launch:
    return operate.launch(short_checkpoint(recipe), profile=profile, release=release, wish=Wish(**wish))


@cache
def subject(recipe: str = "moe", release: str = "0.5.23", engine: str = "sglang") -> Subject:
    return read_subject(short_checkpoint(recipe), nearest(engine, release))


def started(
    about: Subject, profile: str = "latency", release: str = "", guard: bool | None = None, **wish: Any
) -> Launch:
    engine = about.target.engine
    release = release or about.target.release
    return make_launch(about, engine_settings(engine), profiles()[profile], hardware(), release, Wish(**wish), guard)


def value(found: Launch, flag: str) -> str | None:
    return next((each.value for each in found.flags if each.name == flag), None)


# Profiles


def test_every_row_of_the_profiles_has_a_reason_and_a_condition_that_exists() -> None:
    path = Path(settings.__file__).with_name("profiles.yaml")
    data = yaml.safe_load(path.read_text())
    assert tuple(data["engines"]) == settings.ENGINES
    assert tuple(data["profiles"]) == settings.PROFILES
    known = {"", "draft", "dp", "ep", "fusable", "unfuse", "host", "port"}
    for engine in settings.ENGINES:
        found = engine_settings(engine)
        rows = [*found.env, *found.flags, *found.notes]
        assert rows and all(row.reason and row.when in known for row in rows)
        assert all(set(row.profiles) <= set(settings.PROFILES) for row in rows)


def test_latency_is_one_replica_of_8_that_drafts_5_ahead() -> None:
    found = launch()
    folder = str(short_checkpoint("moe"))
    program = ["python3", "-m", "sglang.launch_server", "--model-path", folder, "--tp-size", "8"]
    assert found.argv == [*program, *LATENCY]
    assert found.environ == {"SGLANG_USE_AITER": "1"}
    assert found.fused and found.notes == ()


def test_throughput_is_two_replicas_of_4() -> None:
    found = launch(profile="throughput")
    assert (value(found, "--tp-size"), value(found, "--dp-size")) == ("4", "2")
    assert (value(found, "--speculative-num-steps"), value(found, "--speculative-num-draft-tokens")) == ("3", "4")
    assert value(found, "--chunked-prefill-size") == "32768"
    assert "--enable-dp-attention" not in found.argv


def test_the_real_size_is_served_likewise(full: Path, tmp_path: Path) -> None:
    make_full_output(full, tmp_path / "out")
    about = read_subject(tmp_path / "out", nearest("sglang", "0.5.23"))
    assert started(about).argv[7:] == LATENCY
    with pytest.raises(GlmquantError, match=r"438 GB of weights a GPU do not fit") as caught:
        started(about, tp=1)
    assert caught.value.hint == "Legal here: 2, 4, 8, 16."


@pytest.mark.parametrize(("release", "depth"), [("0.5.13.post1", 3), ("0.5.14", 3), ("0.5.15", 5), ("0.5.23", 5)])
def test_before_the_guard_drafts_are_3_deep(release: str, depth: int) -> None:
    found = launch(release=release)
    assert found.draft_depth == depth
    assert value(found, "--speculative-num-draft-tokens") == str(depth + 1)
    assert any("USE_ROCM" in note for note in found.notes) == (depth == 3)


def test_the_guard_of_the_installed_file_counts_not_the_release() -> None:
    old, new = subject(release="0.5.14"), subject()
    assert started(old, guard=True).draft_depth == 5
    assert started(old, guard=False).draft_depth == 3
    assert started(new, guard=False).draft_depth == 3
    assert started(new, guard=False, draft_depth=2).draft_depth == 2


@pytest.mark.parametrize(
    ("release", "flag"), [("0.5.13.post1", True), ("0.5.17", True), ("0.5.18", False), ("0.5.23", False)]
)
def test_bf16_shared_experts_need_a_flag_before_0_5_18(release: str, flag: bool) -> None:
    found = launch("routed", release=release)
    assert ("--disable-shared-experts-fusion" in found.argv) is flag
    assert not found.fused
    reasons = [each.reason for each in found.flags if each.name == "--disable-shared-experts-fusion"]
    assert all(release in reason for reason in reasons)


def test_no_mtp_layer_no_draft() -> None:
    found = started(replace(subject(), draft_routed=frozenset()))
    assert found.draft_depth == 0
    assert not any("speculative" in word for word in found.argv)
    assert "no MTP layer" in found.notes[0]


def test_illegal_sizes_are_refused_with_the_legal_ones() -> None:
    for wish, hint in (
        ({"tp": 3}, "Legal here: 1, 2, 4, 8, 16."),
        ({"tp": 8, "ep": 3}, "Legal with tensor-parallel size 8: 1, 2, 4, 8."),
        ({"tp": 8, "dp": 2}, "Legal with tensor-parallel size 8: at most 1. --gpus says how many GPUs there are."),
    ):
        with pytest.raises(GlmquantError) as caught:
            launch(**wish)
        assert caught.value.hint == hint
    for nonsense in ({"tp": 0}, {"tp": -8}, {"dp": 0}, {"ep": 0}, {"gpus": 0}, {"draft_depth": -1}):
        with pytest.raises(GlmquantError):
            launch(**nonsense)
    assert launch(tp=8, dp=2, gpus=16).dp == 2
    with pytest.raises(GlmquantError) as caught:
        launch(tp=16, gpus=16, release="0.5.21")  # a share of 128 rows is read from the wrong place
    assert caught.value.hint == "Legal here: 1, 2, 4, 8."
    assert launch(tp=16, gpus=16, release="0.5.22").tp == 16


def test_a_list_that_only_the_draft_trips_over_can_be_served_without_it() -> None:
    entries = json.loads((short_checkpoint("moe") / "config.json").read_text())["quantization_config"]["exclude"]
    folder = with_exclude("moe", [entry for entry in entries if "layers" in entry and "layers\\.5" not in entry])
    with pytest.raises(GlmquantError, match="does not load this checkpoint right") as caught:
        operate.launch(folder, release="0.5.23")
    assert "--draft-depth 0" in caught.value.hint and "exclusions fix" in caught.value.hint
    assert operate.launch(folder, release="0.5.23", wish=Wish(draft_depth=0)).draft_depth == 0


def test_a_list_that_the_target_trips_over_is_refused() -> None:
    folder = with_exclude("moe", [])
    with pytest.raises(GlmquantError, match="does not load this checkpoint right") as caught:
        operate.launch(folder, release="0.5.23", wish=Wish(draft_depth=0))
    assert "--draft-depth 0" not in caught.value.hint


@pytest.mark.parametrize(
    ("release", "modelled"),
    [("0.5.16", "0.5.16"), ("0.5.16+rocm720", "0.5.16"), ("0.5.15.post1", "0.5.15.post1"), ("0.9", "0.5.23")],
)
def test_the_nearest_modelled_release_answers(release: str, modelled: str) -> None:
    assert nearest("sglang", release).release == modelled


def test_a_release_that_nothing_is_known_about_is_refused() -> None:
    with pytest.raises(GlmquantError, match="older than"):
        nearest("sglang", "0.5.12")
    with pytest.raises(GlmquantError, match="no release number"):
        nearest("sglang", "main")
    with pytest.raises(GlmquantError, match=r"flags are known for >=0\.33 only"):
        operate.launch(short_checkpoint("moe"), engine="vllm", release="0.30.0")
    assert "holds for 0.5.23" in launch(release="0.9").notes[0]


def test_a_source_and_another_model_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {FIRST: {"lm_head.weight": ("BF16", [4, 4])}})
    with pytest.raises(CheckpointError, match="no quantization_config"):
        operate.launch(source)
    other = write_checkpoint(tmp_path / "other", {FIRST: {"lm_head.weight": ("BF16", [4, 4])}}, model_type="llama")
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        operate.launch(other)


def test_vllm_and_atom() -> None:
    found = operate.launch(short_checkpoint("moe"), engine="vllm", profile="throughput")
    assert found.environ["VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"] == "1" and found.fused
    assert json.loads(value(found, "--speculative-config") or "") == {"method": "mtp", "num_speculative_tokens": 3}
    assert any("vllm#52833" in note for note in found.notes)
    unfused = operate.launch(short_checkpoint("routed"), engine="vllm")
    assert "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS" not in unfused.environ and not unfused.fused
    with pytest.raises(GlmquantError) as caught:
        operate.launch(short_checkpoint("moe"), engine="vllm", wish=Wish(ep=2))
    assert caught.value.hint == "Legal with tensor-parallel size 8: 1, 8."
    atom = operate.launch(short_checkpoint("moe"), engine="atom")
    assert atom.draft_depth == 3 and any("never executed" in note for note in atom.notes)


@settings_of(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1), max_size=3), st.text(min_size=1))
def test_a_shell_reads_the_script_as_the_command(extra: list[str], folder: str) -> None:
    found = replace(started(subject()), program=("python3", "-m", folder), extra=tuple(extra))
    lines = found.script().split("\n")
    exports = [line for line in lines[: len(found.env)] if line.startswith("export ")]
    command = "\n".join(lines[len(exports) :])
    assert shlex.split(command.replace(" \\\n", " "), comments=False) == found.argv


def test_the_command_line_prints_and_runs(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    folder = str(short_checkpoint("moe"))
    words = [sys.executable, "-m", "glmquant", "serve", folder, "--engine", "vllm", "--release", "0.33.0", "--run"]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*words, "--port", "7", "--flags=--x 'a b'"], capture_output=True, text=True, env=env)
    argv, environ = json.loads(done.stdout.splitlines()[-1])
    assert argv[:2] == ["serve", folder] and argv[-4:] == ["--port", "7", "--x", "a b"]
    assert environ["VLLM_ROCM_USE_AITER"] == "1"
    assert "# --port 7: as asked" in done.stdout


def test_the_command_line_refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(short_checkpoint("moe"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["serve", folder, "--run", "--release", "0.5.23"]) == 1
    assert "'python3' is not on the PATH" in capsys.readouterr().err
    assert main(["serve", folder, "--flags='"]) == 1
    assert "Quotes must be closed" in capsys.readouterr().err
    assert main(["serve", folder, "--release", "0.5.14", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_depth"] == 3


def test_the_installed_release_is_taken(tmp_path: Path) -> None:
    install(tmp_path, "sglang", "0.5.17+rocm", {"kernels/jit/csrc/elementwise/fused_metadata_copy.cuh": "\n"})
    absent = operate.launch(short_checkpoint("routed"), site_packages=[tmp_path.parent])
    assert absent.notes[0].startswith("sglang is not installed here: this is for 0.5.23")
    found = operate.launch(short_checkpoint("routed"), site_packages=[tmp_path])
    assert found.notes == ()
    assert (found.release, found.modelled) == ("0.5.17+rocm", "0.5.17")
    assert "--disable-shared-experts-fusion" in found.argv


# Kernel keys


KEY = {
    "gfx": "gfx950",
    "cu_num": "256",
    "token": "64",
    "model_dim": "6144",
    "act_type": "ActivationType.Silu",
    "dtype": "torch.bfloat16",
    "q_dtype_a": FP4,
    "q_dtype_w": FP4,
    "q_type": "QuantType.per_1x32",
    "use_g1u1": "1",
    "doweight_stage1": "0",
}


@pytest.mark.parametrize(
    ("recipe", "wish", "expected"),
    [
        ("moe", {"tp": 8}, ("256", "257", "9")),
        ("moe", {"tp": 4, "dp": 2}, ("512", "257", "9")),
        ("moe", {"tp": 1}, ("2048", "257", "9")),
        ("routed", {"tp": 8}, ("256", "256", "8")),
        ("moe", {"tp": 8, "ep": 8}, ("2048", "33", "9")),
        ("moe", {"tp": 8, "ep": 2}, ("512", "129", "9")),
        ("routed", {"tp": 8, "ep": 8}, ("2048", "32", "8")),
        ("moe", {"tp": 16, "gpus": 16}, ("256", "257", "9")),  # 128 rows, padded to 256
    ],
)
def test_the_key_of_the_target(recipe: str, wish: dict[str, int], expected: tuple[str, ...]) -> None:
    about = subject(recipe)
    shape = kernel_shapes(about, started(about, **wish), hardware())[0]
    sizes = dict(zip(("inter_dim", "expert", "topk"), expected, strict=True))
    assert shape.role == "target" and shape.key(64) == KEY | sizes


def test_the_key_of_the_draft_is_of_what_the_mtp_layer_stores() -> None:
    plain, packed = subject("moe"), subject("moe-mtp")
    bf16 = kernel_shapes(plain, started(plain), hardware())[1].key(1)
    assert (bf16["q_type"], bf16["q_dtype_w"], bf16["expert"]) == ("QuantType.No", "torch.bfloat16", "257")
    assert kernel_shapes(packed, started(packed), hardware())[1].key(1)["q_type"] == "QuantType.per_1x32"
    assert len(kernel_shapes(plain, started(plain, draft_depth=0), hardware())) == 1
    old = subject("moe", "0.5.20")  # the draft's shared expert is never fused
    assert [shape.expert for shape in kernel_shapes(old, started(old), hardware())] == [257, 256]


def test_vllm_cuts_experts_over_replicas_too() -> None:
    about = subject(engine="vllm", release="0.33.0")
    shape = kernel_shapes(about, started(about, "throughput"), hardware())[0]
    assert (shape.inter_dim, shape.expert, shape.topk) == (256, 257, 9)
    with pytest.raises(GlmquantError, match="not modelled"):
        kernel_shapes(about, started(about, ep=8), hardware())


@pytest.mark.parametrize("generation", ROUNDING)
@pytest.mark.parametrize("most", [1, 100, 1024, 3000, 20_000, 32768, 40_000, 200_000])
def test_buckets_are_what_the_release_rounds_to(generation: str, most: int, tmp_path: Path) -> None:
    tables = open_tables(open_stack([install_aiter(tmp_path, rounding=generation)]), {})
    assert tables and tables.known
    space: dict[str, Any] = {"nextPow2": lambda n: 1 << (n - 1).bit_length() if n > 1 else 1}
    exec(ROUNDING[generation], space)
    rounded = {space["get_padded_M"](tokens) for tokens in range(1, most + 1)}
    assert set(buckets(tables.rule, most)) == rounded - {20480}  # this one number is rounded to itself


def test_an_unknown_rounding_is_said_to_be_unknown(tmp_path: Path) -> None:
    install_aiter(tmp_path)
    (tmp_path / "aiter/fused_moe.py").write_text("def get_padded_M(M):\n    return M // 7 * 7\n")
    tables = open_tables(open_stack([tmp_path]), {})
    assert tables and not tables.known and tables.rule == rules()["unknown"]
    assert find_buckets([7]) is None
    (tmp_path / "aiter/fused_moe.py").write_text("def broken(:")
    assert not (open_tables(open_stack([tmp_path]), {}) or tables).known


def keys(folder: Path, recipe: str, profile: str = "throughput", **more: Any) -> dict[tuple[str, bool], list[int]]:
    """(role, as served?) -> [tuned, not tuned]."""
    found = operate.kernel_keys(
        short_checkpoint(recipe), profile=profile, release="0.5.23", site_packages=[folder], wish=Wish(**more)
    )
    return {(line.shape.role, line.served): [len(line.hits), len(line.misses)] for line in found.lines}


def test_what_the_published_table_has_and_what_fusion_off_costs(tmp_path: Path) -> None:
    folder = install_aiter(tmp_path, published_rows())
    found = keys(folder, "moe")
    assert found["target", True] == [16, 0] and found["target", False] == [5, 11]
    assert keys(folder, "routed")["target", True] == [5, 11]
    assert keys(folder, "moe-mtp")["draft", True] == [16, 0]
    # 131072 tokens at once are looked up under 32768 too
    assert keys(folder, "moe", "latency") == {
        ("target", True): [17, 0],
        ("target", False): [0, 17],
        ("draft", True): [0, 17],
        ("draft", False): [0, 17],
    }


def test_sglang_fuses_no_other_number_of_experts() -> None:
    few = replace(subject(), layers=replace(subject().layers, routed_experts=64))
    assert subject().fusable and not few.fusable and not subject("routed").fusable
    assert replace(few, target=nearest("vllm", "0.33.0")).fusable


def test_an_entry_that_switches_fusion_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_aiter(tmp_path, published_rows())
    entry = "model.decoder.mlp.shared_experts.down_proj"
    folder = with_exclude("moe", add=[entry])
    words = ["--release", "0.5.23", "--profile", "throughput", "--site-packages", str(tmp_path)]
    assert main(["tune-input", str(folder), *words, "--draft-depth", "0"]) == 0
    said = capsys.readouterr().out
    assert "256 experts, top 8: 5 of 16 token counts tuned\n" in said
    assert "257 experts, top 9: 16 of 16 token counts tuned (if shared experts were fused)" in said
    assert entry in said and "glmquant exclusions fix" in said


def test_expert_parallel_topk_is_as_the_release_asks(tmp_path: Path) -> None:
    rows = [tuned(64, 2048, 33, 8), tuned(64, 2048, 33, 9)]
    about = subject()
    shape = kernel_shapes(about, started(about, ep=8), hardware())[0]
    new = open_tables(open_stack([install_aiter(tmp_path / "new", rows)]), {})
    old = open_tables(open_stack([install_aiter(tmp_path / "old", rows, "spring 2026")]), {})
    assert new and old
    assert new.values(shape, 64)["topk"] == "8" and old.values(shape, 64)["topk"] == "9"


def lookup(folder: Path) -> Any:
    about = subject()
    tables = open_tables(open_stack([folder]), {})
    assert tables
    return tables.lookup(kernel_shapes(about, started(about), hardware())[0], 64)


@pytest.mark.parametrize(
    ("row", "hit"),
    [
        (tuned(64, 256, 257, 9), True),
        (tuned(64, 256, 257, 9, use_g1u1="True", doweight_stage1="False") | {"expert": "257.0"}, True),
        (tuned(64, 256, 257, 9, gfx=""), True),  # filled in from the number of compute units
        (tuned(64, 256, 257, 9, gfx="0"), True),
        (tuned(64, 256, 257, 9, gfx="gfx1250"), False),
        (tuned(64, 256, 257, 9, cu_num=304), False),
        (tuned(128, 256, 257, 9), False),
        (tuned(64, 256, 257, 9, _tag="flydsl_fallback"), False),
        (tuned(64, 256, 257, 9, _tag="other"), True),
        (tuned(64, 256, 257, 9, q_type="QuantType.per_1x128"), False),
    ],
)
def test_a_row_hits_as_aiter_reads_it(row: dict[str, object], hit: bool, tmp_path: Path) -> None:
    assert bool(lookup(install_aiter(tmp_path, [row], more=["_tag"]))) is hit


def test_a_table_without_gfx_is_keyed_without_it(tmp_path: Path) -> None:
    found = lookup(install_aiter(tmp_path, [tuned(64, 256, 257, 9)], gfx=False))
    assert found.kernels == ("one", "two") and found.us == "2.5"


def test_the_variable_replaces_the_tables(tmp_path: Path) -> None:
    install_aiter(tmp_path, published_rows())
    own = tmp_path / "own.csv"
    own.write_text(table(["cu_num", *UNTUNED], [{k: tuned(1, 2, 3, 4)[k] for k in ("cu_num", *UNTUNED)}]))
    stack = open_stack([tmp_path])
    found = open_tables(stack, {ENVIRONMENT: f"{own}{os.pathsep}{tmp_path}/missing.csv"})
    assert found and found.files == (own,) and len(found.rows) == 1 and "gfx" not in found.columns
    with pytest.raises(GlmquantError, match="no tuned fused-MoE table"):
        open_tables(stack, {ENVIRONMENT: str(tmp_path / "missing.csv")})


def read_back(tables: Tables, wanted: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(untuned_csv(tables, wanted).splitlines()))


def test_the_tuners_input_has_the_releases_columns_and_only_what_misses(tmp_path: Path) -> None:
    columns = [*UNTUNED[3:], *UNTUNED[:3]]  # as a release may have them
    folder = install_aiter(tmp_path, published_rows(), untuned=columns)
    report = operate.kernel_keys(
        short_checkpoint("routed"), profile="throughput", release="0.5.23", site_packages=[folder]
    )
    assert report.tables
    found = read_back(report.tables, report.wanted())
    assert list(found[0]) == columns
    target = [row for row in found if row["q_type"] == "QuantType.per_1x32"]
    tokens = [int(row["token"]) for row in target]
    assert tokens == [1, 8, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert {row["inter_dim"] for row in target} == {"512"} and {row["expert"] for row in target} == {"256"}
    assert len(read_back(report.tables, report.wanted(everything=True))) == 32
    # what is tuned from this input is found afterwards
    rows = [{**tuned(0, 0, 0, 0), **row} for row in found]
    again = operate.kernel_keys(
        short_checkpoint("routed"),
        profile="throughput",
        release="0.5.23",
        site_packages=[install_aiter(tmp_path / "tuned", [*published_rows(), *rows])],
    )
    assert again.complete and not report.complete


def test_a_column_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = install_aiter(tmp_path, untuned=[*UNTUNED, "phase_of_moon"])
    with pytest.raises(GlmquantError, match="'phase_of_moon' is not known"):
        open_tables(open_stack([folder]), {})


def test_tune_input_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_aiter(tmp_path, published_rows())
    out = tmp_path / "untuned.csv"
    words = ["tune-input", str(short_checkpoint("routed")), "--release", "0.5.23", "--site-packages", str(tmp_path)]
    assert main([*words, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{out}: 34 rows" in said and "left to the heuristic: 1, 2, 4" in said
    assert len(out.read_text().splitlines()) == 35
    assert main([*words, "-o", str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--max-tokens", "0"]) == 1
    assert "0 tokens at once are none" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shapes"][0]["key"]["expert"] == "256" and found["aiter"]["known"]


def test_without_aiter_the_keys_are_shown_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune-input", str(short_checkpoint("moe")), "--release", "0.5.23", "--site-packages", str(tmp_path)]
    assert main(words) == 0
    assert "257 experts, top 9: 0 of 17" in capsys.readouterr().out
    assert main([*words, "-o", str(tmp_path / "out.csv")]) == 1
    assert not (tmp_path / "out.csv").exists()


def test_a_file_that_exists_or_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    write_new(tmp_path / "a", "x")
    with pytest.raises(OutputError, match="exists"):
        write_new(tmp_path / "a", "y")
    with pytest.raises(OutputError, match="cannot be written"):
        write_new(tmp_path / "none/a", "y")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "x"


# The guard


BARE = "// before\n#include <algorithm>\n#include <cuda_runtime.h>\n\nint after;\n"
GUARDED = (
    "// before\n#include <algorithm>\n#ifndef USE_ROCM\n#include <cuda_runtime.h>\n#else\n"
    "#include <hip/hip_runtime.h>\n#endif\n\nint after;\n"
)
OLD, NEW = ("jit_kernel", "kernels/jit")


@pytest.mark.parametrize("place", [OLD, NEW])
def test_the_patch_makes_what_upstream_made(place: str, tmp_path: Path) -> None:
    path = f"{place}/csrc/elementwise/fused_metadata_copy.cuh"
    install(tmp_path, "sglang", "0.5.14", {path: BARE})
    guard = find_guard(open_stack([tmp_path]))
    assert guard and not guard.present
    (tmp_path / "guard.patch").write_text(patch(guard))
    subprocess.run(["patch", "-p1", "-s", "-i", "guard.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "sglang" / path).read_text() == GUARDED
    mended = find_guard(open_stack([tmp_path]))
    assert mended and mended.present and patch(mended) == ""


@pytest.mark.parametrize("text", [GUARDED, "int nothing;\n", "#if defined(A)\n# include <cuda_runtime.h>\n#endif\n"])
def test_an_include_that_is_conditional_or_gone_is_no_fault(text: str, tmp_path: Path) -> None:
    install(tmp_path, "sglang", "0.5.14", {f"{OLD}/csrc/elementwise/fused_metadata_copy.cuh": text})
    guard = find_guard(open_stack([tmp_path]))
    assert guard and guard.present

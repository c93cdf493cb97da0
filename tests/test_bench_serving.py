"""bench_serving over real HTTP against a server of known latencies, overload and failures; knee, plot and cost.

sglang's client is played by bench_client.py here; tests/conformance/test_bench_serving.py runs the real one.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import bench_client
import bench_serving
import numpy as np
import pytest
from bench_serving import BenchError, Load, Step, command, cost_of_ratios, knee, main, percentile, plot, table
from hypothesis import given
from hypothesis import strategies as st
from streaming_server import Behaviour, streaming


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., int]:
    """Runs a verb against a URL into tmp_path/out."""
    client = bench_client.install(tmp_path)

    def run(verb: str, url: str, *words: str) -> int:
        where = ["--base-url", url, "--model", "tiny", "--tokenizer", "none", "--python", client]
        return main([verb, str(tmp_path / "out"), *where, *words])

    return run


SMALL = ("--input", "100", "--output", "10", "--group", "2", "--seconds", "1")


def results(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out/results.json").read_text())


# --- measured over HTTP


def test_known_latencies_come_out(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(first=0.1, each=0.01, slots=100)
    with streaming(behaviour) as url:
        assert bench("ladder", f"{url}/v1/", *SMALL, "--rates", "8,16") == 0
    eight, sixteen = results(tmp_path)["steps"]
    for step, asked in ((eight, 8), (sixteen, 16)):
        assert (step["asked"], step["answered"], step["success"]) == (asked, asked, 1.0)
        assert 0.1 <= step["ttft_p50"] <= step["ttft_p95"] < 0.5
        assert 0.01 <= step["tpot_p50"] < 0.05
        assert step["tok_s"] == pytest.approx(10 * step["request_s"])
        assert step["total_tok_s"] == pytest.approx(110 * step["request_s"])
        assert step["request_s"] == pytest.approx(asked / step["duration"])
    printed = capsys.readouterr().out
    assert "| 8 |" in printed and "No knee up to 16 requests/s" in printed and "the ladder ends too early" in printed
    assert (tmp_path / "out/table.md").read_text() in printed
    assert {body["max_tokens"] for body in behaviour.requests} == {10}


def test_the_knee_is_where_a_server_of_known_capacity_saturates(bench: Callable[..., int], tmp_path: Path) -> None:
    """Two slots of 0.1 s each serve 20 requests/s; at 80 the queue grows by 60 a second."""
    with streaming(Behaviour(first=0.08, each=0.002, slots=2)) as url:
        assert bench("ladder", url, *SMALL, "--seconds", "0.5", "--rates", "4,80,160", "--ttft-limit", "0.6") == 0
    found = results(tmp_path)
    low, high, higher = found["steps"]
    assert low["ttft_p95"] < 0.6 < high["ttft_p95"] < higher["ttft_p95"]
    assert high["request_s"] < 21 and high["success"] == 1.0
    assert (found["knee"]["rate"], found["knee"]["reached"]) == (4.0, True)
    assert found["knee"]["tok_s"] == low["tok_s"]


def test_a_server_that_turns_requests_away_looks_fast_and_is_not_taken_for_it(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour(first=0.1, each=0.001, slots=2, queue=1)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "2,100", "--ttft-limit", "5") == 0
    found = results(tmp_path)
    assert found["steps"][0]["success"] == 1.0
    assert found["steps"][1]["success"] < 0.6 and found["steps"][1]["ttft_p95"] < 0.5
    assert (found["knee"]["rate"], found["knee"]["reached"]) == (2.0, True)
    assert "rate-100: HTTPError: HTTP Error 503" in capsys.readouterr().out
    assert "\u00d7" in (tmp_path / "out/plot.svg").read_text()


def test_streams_that_break_off_are_failures(bench: Callable[..., int], tmp_path: Path) -> None:
    with streaming(Behaviour(first=0.01, each=0.001, slots=50, cut=4)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "40", "--min-success", "0.5") == 0
    (step,) = results(tmp_path)["steps"]
    assert 0.65 <= step["success"] <= 0.85 and step["error"]
    assert results(tmp_path)["knee"]["reached"] is False  # half was enough for the user


def test_a_step_in_which_nothing_is_answered_is_a_result_and_the_ladder_goes_on(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour(refuse=True)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "4,8") == 0
    found = results(tmp_path)
    assert [step["answered"] for step in found["steps"]] == [0, 0]
    assert found["knee"]["rate"] is None and found["knee"]["reached"]
    out = capsys.readouterr().out
    assert "| 4 | 0.00 | 0 | 0 | - | - | 0.0% |" in out and "Warmup failed" in out and "No load keeps" in out
    ElementTree.parse(tmp_path / "out/plot.svg")


def test_a_step_that_hangs_is_ended(bench: Callable[..., int], tmp_path: Path) -> None:
    with streaming(Behaviour(first=30)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "4", "--step-timeout", "1") == 0
    assert "not done in 1.0 s" in results(tmp_path)["steps"][0]["error"]


def test_answers_that_end_early_are_told_and_not_counted_as_long(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour(first=0.01, each=0.001, slots=50, short=3)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "20") == 0
    assert "answers are shorter than asked: 3 tokens of 10" in capsys.readouterr().out
    (step,) = results(tmp_path)["steps"]
    assert step["tok_s"] == pytest.approx(3 * step["request_s"])


def test_tokens_that_only_the_client_believes_in_are_told(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour(first=0.01, each=0.001, slots=50, short=3, usage=False)) as url:
        assert bench("ladder", url, *SMALL, "--rates", "20") == 0
    assert "tokens counted 200, in the text 60: no usage from the server" in capsys.readouterr().out


def test_a_single_stream_sends_one_after_another(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(first=0.05, each=0.01, slots=1, queue=0)  # a second one at a time would be turned away
    with streaming(behaviour) as url:
        assert bench("single", url, "--input", "100", "--output", "11", "--prompts", "4") == 0
    (step,) = results(tmp_path)["steps"]
    assert step["answered"] == 4 and 0.05 <= step["ttft_p50"] < 0.5
    decode, whole = map(float, re.search(r"\| 100 / 11 \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out).groups())
    assert 10 < decode <= 100 and whole < decode
    assert "knee" not in results(tmp_path) and not (tmp_path / "out/plot.svg").exists()


def test_no_step_finds_its_prompts_in_the_cache_of_another(bench: Callable[..., int]) -> None:
    behaviour = Behaviour(first=0.001, each=0.0, slots=50)
    with streaming(behaviour) as url:
        assert bench("ladder", url, *SMALL, "--rates", "20,40") == 0
    first = [body["prompt"] for body in behaviour.requests[1:21]]  # the first one is the warm-up
    second = [body["prompt"] for body in behaviour.requests[22:]]
    assert (len(first), len(second)) == (20, 40)
    shared = [{prompt[: len(" a") * 60] for prompt in prompts} for prompts in (first, second)]
    assert not shared[0] & shared[1] and [len(s) for s in shared] == [10, 20]


def test_measured_again_is_continued_and_other_settings_are_refused(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(first=0.001, each=0.0, slots=50)
    with streaming(behaviour) as url:
        assert bench("ladder", url, *SMALL, "--rates", "10,20") == 0
        before = (tmp_path / "out/results.json").read_text()
        (tmp_path / "out/raw/rate-20.jsonl").unlink()
        seen = len(behaviour.requests)
        assert bench("ladder", url, *SMALL, "--rates", "10,20") == 0
        assert len(behaviour.requests) - seen == 21
        assert "rate-10: measured already" in capsys.readouterr().err
        assert json.loads(before)["steps"][0] == results(tmp_path)["steps"][0]
        assert bench("ladder", url, *SMALL, "--rates", "10,30") == 1
        assert "other settings" in capsys.readouterr().err
    assert main(["table", str(tmp_path / "out"), "--ttft-limit", "0.000001"]) == 0
    assert "No load keeps TTFT p95 <= 1e-06 s" in capsys.readouterr().out


def test_a_dead_server_is_no_result(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour()) as url:
        pass
    assert bench("ladder", url, *SMALL, "--rates", "1") == 1
    assert "Is the server up?" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_another_model_and_a_folder_in_use_are_refused(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(Behaviour(), "huge") as url:
        assert bench("ladder", url, *SMALL, "--rates", "1") == 1
        assert "serves huge, not tiny" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("")
    with streaming(Behaviour()) as url:
        assert bench("ladder", url, *SMALL, "--rates", "1") == 1
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_without_sglang_the_error_says_what_is_needed(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--base-url", "http://127.0.0.1:1", "--model", "m", "--tokenizer", "t", "--python", python]
    assert main(["single", str(tmp_path / "out"), *words]) == 1
    assert re.search("--python|No such file", capsys.readouterr().err)


def test_a_client_that_fails_by_itself_is_no_result_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    find = "[ $1 = -c ] && echo sglang.bench_serving 0.5.13 && exit"
    python.write_text(f"#!/bin/sh\n{find}\necho ImportError: >&2; echo no numpy\nexit 1")
    python.chmod(0o755)
    with streaming(Behaviour()) as url:
        words = ["--base-url", url, "--model", "tiny", "--tokenizer", "t", "--python", str(python)]
        assert main(["single", str(tmp_path / "out"), *words]) == 1
    assert "sglang's client failed, not the server: ImportError: no numpy" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out/raw").iterdir()] == ["single.log"]


def test_where_sglang_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing it; the new place before the deprecated one."""
    (tmp_path / "sglang/benchmark").mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("raise ImportError('a GPU is needed')")
    (tmp_path / "sglang/bench_serving.py").write_text("")
    (tmp_path / "sglang-0.5.13.dist-info").mkdir()
    (tmp_path / "sglang-0.5.13.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.13\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert bench_serving.find_client(sys.executable) == ("sglang.bench_serving", "0.5.13")
    (tmp_path / "sglang/benchmark/serving.py").write_text("")
    assert bench_serving.find_client(sys.executable) == ("sglang.benchmark.serving", "0.5.13")


# --- pure parts


def step(rate: float, p95: float = 1.0, answered: int = 100, tok_s: float = 100.0) -> Step:
    load = Load(20_000, 1_000, 0.6, 16, 100, rate)
    return Step(
        load, 112, min(answered, 112) if answered < 100 else 112, 60.0, tok_s, 21 * tok_s, rate, p95 / 2, p95, 0.01
    )


def test_the_load_is_that_of_the_write_up() -> None:
    args = bench_serving.argparse.Namespace(
        seed=1, tokenizer="t", backend="sglang-oai", base_url="http://h", model="m", extra_request_body=""
    )
    load = Load(20_000, 1_000, 0.6, 16, 576, 2.4)
    words = command("python", "sglang.benchmark.serving", args, load, Path("o"))
    flag = dict(zip(words[3::2], words[4::2], strict=False))
    prefix, question = int(flag["--gsp-system-prompt-len"]), int(flag["--gsp-question-len"])
    assert prefix + question == 20_000 and flag["--gsp-output-len"] == "1000" and flag["--request-rate"] == "2.4"
    # of 16 requests the first misses: 15 hits of the prefix are 60% of all tokens
    assert 15 * prefix / (16 * 20_000) == pytest.approx(0.6)
    assert int(flag["--num-prompts"]) == int(flag["--gsp-num-groups"]) * 16 == 576


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([50, 95]))
def test_percentiles_are_those_of_numpy(values: list[float], p: int) -> None:
    assert percentile(sorted(values), p) == pytest.approx(np.percentile(values, p))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.floats(0.1, 10))
def test_everything_up_to_the_knee_is_within_the_limit(p95: list[float], limit: float) -> None:
    steps = [step(rate, t) for rate, t in enumerate(p95, 1)]
    found = knee(steps, limit, 95, 0.99)
    good = [s for s in steps if found.step and s.load.rate <= found.step.load.rate]
    assert all(s.ttft_p95 <= limit for s in good)
    assert found.reached == (len(good) < len(steps))
    assert not found.reached or steps[len(good)].ttft_p95 > limit


def test_the_table_holds_no_markup_of_the_server() -> None:
    bad = Step(**{**vars(step(1.0)), "error": "<script>|x|\x1b[2J`"})
    assert not re.search(r"[<>`\x1b]|\|x", table([bad]).split("\n\n")[1])


def test_the_plot_is_whole_and_needs_nothing_from_elsewhere() -> None:
    svg = plot([step(0.5, 0.4), step(1.0, 0.9), step(2.4, 12.0, answered=50)], 5.0)
    root = ElementTree.fromstring(svg)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 3 and names.count("circle") == 9
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"0.5", "1", "2.4", "limit 5", "\u00d7"} <= texts
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.get("cx")) < width and 0 < float(circle.get("cy")) < height


# --- cost


def test_cost_of_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--system", "MI355X,20,2626", "--system", "B200,50,3192"]) == 0
    out = capsys.readouterr().out
    assert "| MI355X | 20 | 2,626 | 2.116 | 1.00 | 1.00 | 1.00 |" in out  # 20 / (2626 * 3600) * 1e6
    assert "| B200 | 50 | 3,192 | 4.351 | 2.50 | 1.22 | 2.06 |" in out
    assert "Given, not measured here: MI355X, B200" in out


def test_a_price_against_one_part_and_a_throughput_against_another_are_refused() -> None:
    """The write-up's: 2.75 times cheaper than a B300, 80% of a B200."""
    with pytest.raises(BenchError, match="price ratio is against B300, the throughput ratio against B200"):
        cost_of_ratios("B300=0.3636", "B200=0.82")
    assert cost_of_ratios("B200=0.41", "B200=0.82").endswith("= 0.500")


@pytest.mark.parametrize(
    "words",
    [
        ["--price-ratio", "0.4", "--throughput-ratio", "B200=0.8"],
        ["--price-ratio", "B200=0.4"],
        ["--price-ratio", "B200=x", "--throughput-ratio", "B200=0.8"],
        ["--system", "A,1,1", "--price-ratio", "B=1", "--throughput-ratio", "B=1"],
        ["--system", "A,1"],
        ["--system", "A,-1,5"],
        ["--system", "A,1,nan"],
        ["--system", "A,1,5", "--system", "A,2,5"],
        [],
    ],
)
def test_costs_that_cannot_be_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *words]) == 1
    assert "bench_serving: error: " in capsys.readouterr().err


def write_ladder(folder: Path, steps: list[Step], limit: float = 5.0) -> Path:
    (folder / "raw").mkdir(parents=True)
    loads = [vars(s.load) for s in steps]
    (folder / "settings.json").write_text(json.dumps({"nodes": 1, "loads": loads}))
    args = bench_serving.argparse.Namespace(ttft_limit=limit, ttft_percentile=95, min_success=0.99)
    bench_serving.write_results(folder, steps, args)
    return folder


def test_measured_systems_are_compared_only_under_the_same_load_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_ladder(tmp_path / "a", [step(1.0, tok_s=1000), step(2.0, 9.0, tok_s=1500)])
    b = write_ladder(tmp_path / "b", [step(1.0, tok_s=2000)])
    other = write_ladder(tmp_path / "c", [step(1.0)], limit=1.5)
    none = write_ladder(tmp_path / "d", [step(1.0, 9.0)])
    assert main(["cost", "--system", f"A,36,{a}", "--system", f"B,36,{b}"]) == 0
    out = capsys.readouterr().out
    assert "| A | 36 | 1,000 | 10.000 |" in out and "| B | 36 | 2,000 | 5.000 | 1.00 | 2.00 | 0.50 |" in out
    assert main(["cost", "--system", f"A,36,{a}", "--system", f"C,36,{other}"]) == 1
    assert "different loads or limits" in capsys.readouterr().err
    assert main(["cost", "--system", f"D,36,{none}"]) == 1
    assert "no load of" in capsys.readouterr().err


def test_the_ttft_is_that_of_answered_requests(tmp_path: Path) -> None:
    """A stream that broke off had a first token, too; one that was refused has 0."""
    args = bench_serving.argparse.Namespace(
        gsp_system_prompt_len=10,
        gsp_question_len=10,
        backend="b",
        dataset_name="d",
        request_rate="1",
        max_concurrency=None,
    )
    rows = [
        {"ok": ok, "ttft": ttft, "tokens": 10, "texts": 10, "latency": ttft + 1, "error": "" if ok else "broken"}
        for ok, ttft in ((True, 1.0), (True, 3.0), (False, 0.01), (False, 0.0))
    ]
    (tmp_path / "r.jsonl").write_text(json.dumps(bench_client.result(args, rows, 10.0)))
    found = bench_serving.step_of(tmp_path / "r.jsonl", Load(20, 10, 0.5, 2, 4, 1.0), nodes=2)
    assert (found.ttft_p50, found.ttft_p95) == (2.0, pytest.approx(2.9))
    assert (found.success, found.tok_s, found.error) == (0.5, 1.0, "broken")  # 20 tokens in 10 s on two nodes


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"completed": 3}', "x"])
def test_a_line_that_is_not_the_clients_is_an_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(line)
    with pytest.raises(BenchError, match="is no result of sglang's client"):
        bench_serving.step_of(tmp_path / "r.jsonl", step(1.0).load, 1)

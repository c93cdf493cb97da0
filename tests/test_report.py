"""glmquant report: the figures are those of verify, plan and validate; the page is small and inert."""

from __future__ import annotations

import json
import os
import re
import stat
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import support
import torch
from checkpoints import edit_json, shard, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from make_full_output import make_full_output
from safetensors.torch import save_file
from support import FakeBackend
from test_sources import fp8  # noqa: F401 (a fixture)

import glmquant
from glmquant import operate, pipeline
from glmquant import reporting as room
from glmquant.checkpoint.source import inspect
from glmquant.cli import main
from glmquant.errors import CheckpointError, OutputError
from glmquant.mxfp4.error import WORST_BLOCK, WeightError
from glmquant.mxfp4.format import BLOCK, unpack
from glmquant.reporting import Written, charts, keys
from glmquant.reporting.page import Facts, make_page
from glmquant.reporting.rows import MXFP4, Codes, Row, choose, count_codes, default_sample, inventory
from glmquant.reporting.summary import WORST, summarize
from glmquant.serving.aiter_tables import Row as TableRow
from glmquant.serving.aiter_tables import Tables
from glmquant.serving.kernel_keys import KernelShape, rules
from glmquant.serving.key_report import KeyReport, ShapeLine
from glmquant.serving.launch import Launch

QUANTIZED = "model.layers.4.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def done(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report with everything: of all weights, MTP layer included, with the source."""
    out = support.output(tiny, "moe-mtp").output
    return operate.report(out, tiny, html=tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def full_out(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of GLM-5.2 in MXFP4, over holes."""
    out = tmp_path_factory.mktemp("full") / "GLM-5.2-MXFP4"
    make_full_output(full, out)
    return out


@pytest.fixture(scope="module")
def full_rows(full_out: Path) -> list[Row]:
    return [row for rows in inventory(inspect(full_out)[0]).values() for row in rows]


@pytest.fixture(scope="module")
def full_done(full_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Of headers alone. site_packages is a folder without packages: what is installed here must not count."""
    html = tmp_path_factory.mktemp("report") / "full.html"
    return operate.report(full_out, html=html, sample=0, site_packages=[full_out])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def parse(html: Path | str) -> ElementTree.Element:
    """The page as XML: one unescaped or unclosed thing anywhere is an error."""
    return ElementTree.fromstring(html if isinstance(html, str) else html.read_text())


def words(element: ElementTree.Element | None) -> str:
    assert element is not None
    return " ".join("".join(element.itertext()).split())


def section(html: Path | str, name: str) -> ElementTree.Element | None:
    return parse(html).find(f".//section[@id='{name}']")


# The figures


def test_every_error_is_the_one_that_verify_measures(tiny: Path, done: Written) -> None:
    proof = {error.name: error for error in glmquant.verify(support.output(tiny, "moe-mtp").output, tiny).errors}
    measured = {line["name"]: line for line in lines(done.jsonl) if "sqnr_db" in line}
    assert measured.keys() == proof.keys()
    for name, error in proof.items():
        assert measured[name]["sqnr_db"] == pytest.approx(error.sqnr, abs=1e-6)
        assert measured[name]["worst_block"] == pytest.approx(error.worst_block, abs=1e-9)
    ranked = sorted(proof.values(), key=lambda error: error.sqnr)
    assert [row.name for row in done.summary.worst] == [error.name for error in ranked[:WORST]]
    assert done.ok and done.sample == 1 and done.summary.beyond == 0
    table = words(section(done.html, "worst"))
    assert all(error.name in table and f"{error.sqnr:.2f}" in table for error in ranked[:WORST])
    assert f"{ranked[0].sqnr:.2f} dB" in words(parse(done.html).find(".//dl"))


def test_sizes_are_those_of_the_plan_and_of_the_headers(tiny: Path, done: Written) -> None:
    plan = glmquant.plan(tiny, recipe="moe-mtp").plan
    expected = {(row.group, row.dtype_out): (row.parameters, row.bytes_out) for row in plan.groups()}
    assert {(g.group, g.format): (g.parameters, g.nbytes) for g in done.summary.groups} == expected
    assert done.summary.nbytes == plan.total_size == done.validation.nbytes
    assert done.summary.plain_bytes == plan.bytes_in and done.summary.tensors == len(plan.jobs)
    found = lines(done.jsonl)
    assert {line["name"] for line in found} == {job.source.name for job in plan.jobs} and len(found) == len(plan.jobs)
    assert sum(line["bytes"] for line in found) == plan.total_size
    assert Counter(line["format"] for line in found)["MXFP4"] == sum(job.quantized for job in plan.jobs)
    layer = {line["name"]: (line["group"], line["layer"], line["mtp"], line["projection"]) for line in found}
    assert layer[QUANTIZED] == ("routed", 4, False, "down_proj")
    assert layer["model.layers.5.mlp.shared_experts.up_proj.weight"] == ("shared", 5, True, "up_proj")
    text = words(section(done.html, "sizes"))
    assert all(f"{nbytes:,}" in text for _, nbytes in expected.values()) and f"{plan.total_size:,}" in text


def test_codes_and_scales_are_those_of_the_independent_decoder(tiny: Path, done: Written) -> None:
    tensors = support.tensors(support.output(tiny, "moe-mtp").output)
    packed = tensors[QUANTIZED][1].numpy()
    codes, scale = unpack(packed), tensors[QUANTIZED + "_scale"][1].numpy()
    (line,) = (line for line in lines(done.jsonl) if line["name"] == QUANTIZED)
    assert line["blocks"] == scale.size and line["shape"] == [packed.shape[0], 2 * packed.shape[1]]
    assert line["saturated_share"] == pytest.approx(np.isin(codes, (7, 15)).mean())
    assert line["scale_range"] == [scale.min(), scale.max()]
    every = [tensors[row["name"] + "_scale"][1].numpy().ravel() for row in lines(done.jsonl) if "blocks" in row]
    assert done.summary.codes.scales == tuple(np.bincount(np.concatenate(every), minlength=256))


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.binary(min_size=16 * n, max_size=16 * n), st.binary(min_size=n, max_size=n))
    )
)
@settings(max_examples=60, deadline=None)
def test_blocks_are_counted_one_by_one(content: tuple[bytes, bytes]) -> None:
    packed, scale = content
    packed = bytes(16) + packed  # one block of zeros at least, whose scale must not count
    scale = b"\x01" + scale
    found = count_codes(memoryview(packed), memoryview(scale))
    blocks = unpack(np.frombuffer(packed, np.uint8)).reshape(-1, BLOCK)
    zero = [all(code in (0, 8) for code in block) for block in blocks]
    assert (found.blocks, found.zero_blocks) == (len(blocks), sum(zero))
    assert found.codes == tuple(np.bincount(blocks.ravel(), minlength=16))
    assert found.scales == tuple(np.bincount([s for s, z in zip(scale, zero, strict=True) if not z], minlength=256))


def test_the_engines_say_what_validate_says(done: Written) -> None:
    found = section(done.html, "engines")
    table = found.find(".//table/tbody")  # type: ignore[union-attr]
    rows = [[words(cell) for cell in row] for row in table]  # type: ignore[union-attr]
    names = " ".join(row[0] for row in rows)
    assert "sglang 0.5.13.post1" in names and "vllm" in names
    for row in rows:
        target = next(name for name in map(str, done.validation.targets) if name.split()[1] in row[0])
        counts: Counter[str] = Counter()
        for group in done.validation.coverage[target].values():
            counts.update(group)
        assert [int(cell) for cell in row[1:5]] == [counts[v] for v in ("ok", "slow", "silent misload", "crash")]
    assert section(done.html, "kernels") is None


def test_kernel_keys_are_those_of_each_profile(full_done: Written) -> None:
    """The published sizes: 2048 over the ranks, and with the shared expert fused 257 experts of which 9 are used."""
    found = section(full_done.html, "kernels")
    assert "AITER is not installed" in words(found)
    rows = [[words(cell) for cell in row] for row in found.find(".//tbody")]  # type: ignore[union-attr]
    served = {tuple(row[:8]) for row in rows}
    for profile, width in (("latency, TP8 x DP1", "256"), ("throughput, TP4 x DP2", "512")):
        assert (profile, "target", "fused", "MXFP4", "6144", width, "257", "9") in served
        assert (profile, "target", "if apart", "MXFP4", "6144", width, "256", "8") in served
        assert (profile, "draft", "fused", "bf16", "6144", width, "257", "9") in served


def test_a_key_says_what_is_tuned(tmp_path: Path) -> None:
    shape = KernelShape("target", "gfx950", 256, 6144, 256, 257, 9, "Silu", "bf16", "fp4", "fp4", "QuantType.per_1x32")
    line = ShapeLine(shape, True, True, {1: TableRow(("a", "b"), "2.0", "f")}, (2, 4))
    columns = ("token", "model_dim")
    tables = Tables(tmp_path, "0.1", (), columns, columns, rules()["unknown"], True, False, False, None, {})
    launch = Launch("sglang", "0.5.23", "0.5.23", "latency", 8, 1, 1, 5, (), (), (), (), True, True, ())
    row = keys._row("latency", KeyReport(launch, tables, (line,), ""), line)
    assert (row["tuned"], row["token counts not tuned"], row["weights"]) == ("1 of 3", "2, 4", "MXFP4")


def test_a_checkpoint_that_no_profile_serves_has_no_keys(tiny: Path, tmp_path: Path) -> None:
    """Not quantized, or too small for the ranks of a profile."""
    assert keys.kernel_keys(*inspect(tiny)) == ([], "")
    assert keys.kernel_keys(*inspect(support.output(tiny, "moe").output), [tmp_path])[0] == []


@pytest.mark.parametrize("count", [1, 300])
def test_kernel_keys_make_a_section_when_there_are_any(done: Written, count: int) -> None:
    rows = [{"tokens": n, "inter_dim": 256, "table": "<miss>"} for n in range(count)]
    facts = Facts(done.html, None, 1.0, done.summary, done.validation, "x.jsonl", "0", rows, "of aiter 0.1 & others")
    text = words(section(make_page(facts), "kernels"))
    assert "of aiter 0.1 & others" in text and "inter_dim" in text and "<miss>" in text
    assert ("100 more" in text) == (count > 200)


# Sources of other kinds


def test_an_fp8_source_is_what_it_stands_for(fp8: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    coded, plain = fp8
    out = support.output(coded, "moe").output
    a = operate.report(out, coded, html=tmp_path / "a.html")
    b = operate.report(out, plain, html=tmp_path / "b.html")
    assert a.summary.compared == b.summary.compared == a.summary.packed > 0
    assert a.jsonl.read_bytes() == b.jsonl.read_bytes()


def test_a_source_with_fused_experts_is_taken_apart(tiny: Path, tmp_path: Path) -> None:
    """As transformers 5 saves: experts of a layer in two 3-D parameters."""
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, (_, tensor) in support.tensors(tiny).items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found:
            parts.setdefault(found[1], {})[f"{found[2]}.{found[3]}"] = tensor
        else:
            tensors[name] = tensor
    for experts, found in parts.items():
        count = len(found) // 3
        pairs = [torch.cat([found[f"{e}.gate_proj"], found[f"{e}.up_proj"]]) for e in range(count)]
        tensors[f"{experts}.gate_up_proj"] = torch.stack(pairs)
        tensors[f"{experts}.down_proj"] = torch.stack([found[f"{e}.down_proj"] for e in range(count)])
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_bytes((tiny / "config.json").read_bytes())
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    out = support.output(tiny, "moe").output
    a = operate.report(out, fused, html=tmp_path / "a.html")
    b = operate.report(out, tiny, html=tmp_path / "b.html")
    assert a.summary.compared == b.summary.compared > 0
    assert a.jsonl.read_bytes() == b.jsonl.read_bytes()


def test_without_a_source_codes_are_counted_and_the_page_says_what_is_missing(tiny: Path, tmp_path: Path) -> None:
    found = operate.report(support.output(tiny, "moe").output, html=tmp_path / "r.html")
    assert found.ok and found.summary.read == found.summary.packed > 0 == found.summary.compared
    assert not any("sqnr_db" in line for line in lines(found.jsonl))
    assert "Not measured" in words(section(found.html, "sqnr")) and "--source" in found.html.read_text()
    assert "Weights that stand out" in words(section(found.html, "worst"))


def test_a_source_it_was_not_made_from_is_noticed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make_backends", lambda *_: [FakeBackend()])
    out = glmquant.quantize(tiny, tmp_path / "out").output
    found = operate.report(out, tiny, html=tmp_path / "r.html")
    assert found.validation.ok and not found.ok and found.summary.beyond == found.summary.compared > 0
    assert "further off than MXFP4 rounding can be" in words(section(found.html, "worst"))


def test_what_cannot_be_compared_has_a_note(tiny: Path, tmp_path: Path) -> None:
    gone, wide, sick = (f"model.layers.3.mlp.experts.{n}.up_proj.weight" for n in (0, 1, 2))
    source = tmp_path / "source"

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == sick:
            tensor = tensor.clone()
            tensor[1, 2] = float("nan")
        return torch.cat([tensor, tensor]) if name == wide else tensor

    support.copy(tiny, source, change)
    for path, tensors in ((source / file, found) for file, found in support.shards(source).items()):
        if gone in tensors:
            save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path, {"format": "pt"})
    with edit_json(source / support.INDEX) as index:
        del index["weight_map"][gone]
    found = operate.report(support.output(tiny, "moe").output, source, html=tmp_path / "r.html")
    notes = {line["name"]: line["note"] for line in lines(found.jsonl) if "note" in line}
    assert notes.keys() == {gone, wide, sick} and found.summary.noted == 3
    assert notes[gone] == "not in the source" and "in the source" in notes[wide] and "NaN or Inf in rows" in notes[sick]
    assert found.summary.compared == found.summary.packed - 3 and found.summary.read == found.summary.packed
    assert not {row.name for row in found.summary.worst} & notes.keys()
    assert gone in words(section(found.html, "method"))


def test_weights_of_zeros_and_exact_ones_have_no_figure(tmp_path: Path) -> None:
    """Infinity is no JSON, and no place on an axis."""
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, {"model.safetensors": {name: ("BF16", [4, 32]) for name in names}})
    stored = {f"{name}{end}": ("U8", [4, n]) for name in names for end, n in (("", 16), ("_scale", 1))}
    write_checkpoint(out, {"model.safetensors": stored})
    found = operate.report(out, source, html=tmp_path / "r.html")
    assert found.summary.compared == 2 and found.summary.overall is None
    assert [line["sqnr_db"] for line in lines(found.jsonl)] == [None, None]
    assert "Every weight compared is exact" in words(parse(found.html))


def test_a_nan_scale_is_shown(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    support.copy(
        support.output(tiny, "moe").output,
        out,
        lambda name, t: torch.full_like(t, 255) if name == QUANTIZED + "_scale" else t,
    )
    found = operate.report(out, tiny, html=tmp_path / "r.html")
    assert "blocks have a NaN scale" in words(section(found.html, "scales"))
    (line,) = (line for line in lines(found.jsonl) if line["name"] == QUANTIZED)
    assert "NaN" in line["note"] and "sqnr_db" not in line


# The sample


def test_a_sample_has_every_layer_and_projection(tiny: Path) -> None:
    rows = [row for rows in inventory(inspect(support.output(tiny, "moe-mtp").output)[0]).values() for row in rows]
    packed = {row.name for row in rows if row.format == MXFP4}
    place = {row.name: (row.module.group, row.module.layer, row.projection) for row in rows}
    assert choose(rows, 0) == frozenset() and choose(rows, 1) == packed
    few, more = choose(rows, 0.001), choose(rows[::-1], 0.3)
    assert few < more < packed
    for chosen, share in ((few, 0.001), (more, 0.3)):
        sums, of = Counter(place[name] for name in chosen), Counter(place[name] for name in packed)
        assert sums == {where: -(-round(count * share * 1000) // 1000) for where, count in of.items()}


def test_the_default_sample_of_the_full_size_is_minutes_of_work(full_rows: list[Row]) -> None:
    rows = full_rows
    for compared, most in ((True, 10e9), (False, 60e9)):
        share = default_sample(rows, compared)
        chosen = choose(rows, share)
        assert 0 < share < 0.1 and sum(row.parameters for row in rows if row.name in chosen) < most
        assert len({(r.module.layer, r.module.group, r.projection) for r in rows if r.name in chosen}) == 75 * 6


def test_the_page_says_which_share_was_read(tiny: Path, tmp_path: Path) -> None:
    found = operate.report(support.output(tiny, "moe").output, tiny, html=tmp_path / "r.html", sample=0.1)
    assert 0 < found.summary.compared == found.summary.read < found.summary.packed
    text = words(section(found.html, "method"))
    assert f"{found.summary.read:,} of {found.summary.packed:,} MXFP4 weights were read: 10.00% of each layer" in text
    assert sum("blocks" in line for line in lines(found.jsonl)) == found.summary.read


# The page


def test_the_page_is_inert_and_asks_for_nothing(done: Written) -> None:
    text = done.html.read_text()
    root = parse(text)
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "img", "iframe", "object", "embed", "form", "base", "a", "use", "foreignObject"}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")}
    assert [e.attrib["href"] for e in root.iter() if "href" in e.attrib] == ["data:,"]
    assert "url(" not in text and "@import" not in text and "http:" not in text and "https:" not in text
    policy = root.find(".//meta[@http-equiv='Content-Security-Policy']").attrib["content"]  # type: ignore[union-attr]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(set(ids)) == len(ids)
    assert {e.attrib["aria-labelledby"] for e in root.iter("section")} <= set(ids)
    assert all(svg.attrib.get("aria-label") for svg in root.iter("svg"))
    assert not re.search(r"\b(nan|inf)\b", " ".join(e.attrib.get("d", "") + str(e.attrib) for e in root.iter("line")))


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&amp;\x1b[31m\u202e\uffff<b>"
    stored = {f"model.layers.0.{evil}.weight{end}": ("U8", [4, n]) for end, n in (("", 16), ("_scale", 1))}
    stored[evil * 9] = ("BF16", [2])
    folder = write_checkpoint(tmp_path / "<i>x", {"<u>.safetensors": stored}, rope=evil)
    found = operate.report(folder, html=tmp_path / "r.html")
    text = found.html.read_text()
    root = parse(text)
    assert not {e.tag for e in root.iter()} & {"script", "u"} and "\x1b" not in text and "\u202e" not in text
    assert "<script>alert(1)</script>\"'&amp;\\x1b[31m" in words(section(text, "worst"))
    assert words(root.find(".//h1")) == "<i>x"
    assert {line["name"] for line in lines(found.jsonl)} == {name for name in stored if not name.endswith("_scale")}


def test_58_000_tensors_make_a_small_page(full_out: Path, full_done: Written, full_rows: list[Row]) -> None:
    found = full_done
    assert found.summary.tensors == len(lines(found.jsonl)) == 59_585
    assert found.html.stat().st_size < 100_000 and found.summary.nbytes == 437_987_305_472
    # and with an error for a few weights of each layer and projection
    codes, chosen = Codes(1000, 1, tuple(range(256)), (2000,) * 16), choose(full_rows, 0.02)
    errors = {name: WeightError(name, 80.0, 1.0 + at % 97 / 100, WORST_BLOCK) for at, name in enumerate(chosen)}
    seen = (replace(r, codes=codes, error=errors[r.name]) if r.name in chosen else r for r in full_rows)
    summary = summarize(seen)
    assert summary.compared == len(chosen) > 1000
    page = make_page(Facts(full_out, full_out, 0.02, summary, found.validation, "r.jsonl", "0"))
    assert len(parse(page).findall(".//section[@id='sqnr']//svg//circle")) == 75 * 6
    assert 50_000 < len(page.encode()) < 500_000


def test_rows_are_not_kept(done: Written) -> None:
    """Of a weight that streams by, a few numbers stay."""
    row = done.summary.worst[0]
    assert row.error and row.codes
    many = (replace(row, name=f"{at}", codes=replace(row.codes), error=row.error) for at in range(5000))
    tracemalloc.start()
    summary = summarize(many)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert summary.compared == 5000 and peak < 1_000_000


def test_more_layers_than_any_model_has_do_not_blow_it_up(done: Written) -> None:
    spread = next(iter(next(iter(done.summary.sqnr.values())).values()))
    many = {f"routed p{i}": dict.fromkeys(range(2000), spread) for i in range(20)}
    summary = replace(done.summary, sqnr=many)
    page = make_page(Facts(done.html, done.html, 1.0, summary, done.validation, "r.jsonl", "0"))
    assert len(page.encode()) < 5_000_000 and "The first 200 layers" in words(section(page, "sqnr"))


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        ([], True),
        ([("a", 0.0)], False),
        ([("a", 1.0)], True),
        ([("a", 1e-12), ("b", 1.0)], True),
        ([("a<", 0.3)], False),
    ],
)
def test_charts_of_odd_values_are_well_formed(values: list[tuple[str, float]], logarithmic: bool) -> None:
    root = ElementTree.fromstring(charts.bars(values, "label", "axis", logarithmic))
    bars = root.findall(".//rect")
    assert len(bars) == sum(value > 0 for _, value in values)
    assert all(0 < float(bar.attrib["height"]) <= 190 and 0 <= float(bar.attrib["y"]) <= 190 for bar in bars)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_axis_steps_are_few_and_inside(low: float, length: float, about: int) -> None:
    found = charts.steps(low, low + length, about)
    assert all(low - 1e-9 <= value <= low + length for value in found) and len(found) <= 2 * about + 1
    assert found == sorted(set(found))


# What is wrong with the checkpoint


def test_findings_are_on_the_page_and_in_the_exit_code(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = support.copy(support.output(tiny, "moe").output, tmp_path / "out")
    with edit_json(out / "config.json") as config:
        config["quantization_config"]["exclude"] = ["lm_head"]
    assert main(["report", str(out)]) == 1
    said = capsys.readouterr()
    assert "errors: see the page, or `glmquant validate" in said.out and "Traceback" not in said.err
    text = words(section(tmp_path / "out-report.html", "findings"))
    assert "not-covered" in text and "crash" in text
    assert "crash" in words(section(tmp_path / "out-report.html", "engines"))


def test_a_model_that_is_not_known_still_has_sizes(tmp_path: Path) -> None:
    tensors = {"a.weight": ("U8", [4, 16]), "a.weight_scale": ("U8", [4, 1]), "b.weight": ("BF16", [4, 4])}
    folder = write_checkpoint(tmp_path / "x", {"model.safetensors": tensors}, model_type="nobody")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"a.weight": torch.ones(4, 32), "b.weight": torch.ones(4, 4)}, source / "model.safetensors")
    for original in (None, source):
        found = operate.report(folder, original, html=tmp_path / f"{original is None}.html")
        assert not found.ok and found.summary.tensors == 2 and found.summary.read == 1
        assert "so no engine could be asked" in words(section(found.html, "engines"))
    assert "All weights together have 0.00 dB" in words(section(found.html, "sqnr"))


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight": ("U8", [4, 16])},
        {"a.weight": ("U8", [4, 16]), "a.weight_scale": ("U8", [4, 2])},
        {"a.weight": ("U8", [4, 8]), "a.weight_scale": ("U8", [4, 1])},
        {"a.weight": ("U8", [64]), "a.weight_scale": ("U8", [4])},
        {"a.weight": ("U8", [0, 16]), "a.weight_scale": ("U8", [0, 1])},
        {"a.weight": ("BF16", [4, 16]), "a.weight_scale": ("U8", [4, 1])},
    ],
)
def test_what_is_no_packed_weight_is_listed_as_it_is(tmp_path: Path, tensors: dict) -> None:
    folder = write_checkpoint(tmp_path / "x", {"model.safetensors": tensors})
    found = operate.report(folder, html=tmp_path / "r.html")
    assert found.summary.packed == 0 and found.summary.tensors == len(tensors)
    assert {line["name"]: line["format"] for line in lines(found.jsonl)} == {n: t[0] for n, t in tensors.items()}


def test_a_weight_over_a_hole_that_nobody_can_read_is_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", {"model.safetensors": {}})
    wide = {"a.weight": ("U8", [1, 16_000_000]), "a.weight_scale": ("U8", [1, 1_000_000])}
    (folder / "model.safetensors").write_bytes(shard(wide))
    found = operate.report(folder, html=tmp_path / "r.html")
    assert found.summary.read == 0 and "too large" in lines(found.jsonl)[0]["note"]


def test_a_shard_that_is_gone_when_it_is_read_is_a_note(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = support.copy(support.output(tiny, "moe").output, tmp_path / "out")
    real = room.measured

    def then(*args: Any) -> Any:
        (out / "model-00002-of-00003.safetensors").unlink()
        return real(*args)

    monkeypatch.setattr(room, "measured", then)
    found = operate.report(out, tiny, html=tmp_path / "r.html")
    assert found.summary.noted > 0 and "cannot be read" in words(section(found.html, "method"))


# The files


def test_the_same_input_gives_the_same_bytes_whatever_the_threads(tiny: Path, done: Written, tmp_path: Path) -> None:
    out = support.output(tiny, "moe-mtp").output
    before = support.fingerprint(out), support.fingerprint(tiny)
    again = operate.report(out, tiny, html=tmp_path / "report.html", workers=5)
    assert again.html.read_bytes() == done.html.read_bytes()
    assert again.jsonl.read_bytes() == done.jsonl.read_bytes()
    assert (support.fingerprint(out), support.fingerprint(tiny)) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.jsonl"]
    assert stat.S_IMODE(again.html.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("which", ["out-report.html", "out-report.jsonl"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_existing_file_is_left_alone(tiny: Path, tmp_path: Path, which: str, kind: str) -> None:
    out = tmp_path / "out"
    out.symlink_to(support.output(tiny, "moe").output)
    taken = tmp_path / which
    taken.write_text("mine") if kind == "file" else taken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=rf"{which} exists\n.*Remove it, or name another"):
        operate.report(out)
    assert taken.read_text() == "mine" if kind == "file" else taken.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"out", which}


def test_files_inside_what_is_read_are_refused(tiny: Path, tmp_path: Path) -> None:
    out = support.output(tiny, "moe").output
    for html, jsonl in ((out / "r.html", tmp_path / "r"), (tmp_path / "r.html", tiny / "sub" / "r")):
        with pytest.raises(OutputError, match="which a report leaves alone"):
            operate.report(out, tiny, html=html, jsonl=jsonl)
    with pytest.raises(OutputError, match="cannot be one file"):
        operate.report(out, html=tmp_path / "r", jsonl=tmp_path / "." / "r")
    with pytest.raises(OutputError, match=r"r\.jsonl: cannot be written: No such file"):
        operate.report(out, html=tmp_path / "no" / "r.html")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_run_that_fails(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def fail(_: Facts) -> str:
        raise error

    monkeypatch.setattr(room, "make_page", fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else error):
        operate.report(support.output(tiny, "moe").output, html=tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_during_the_run_is_left_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(facts: Facts) -> str:
        (tmp_path / "r.html").write_text("mine")
        return make_page(facts)

    monkeypatch.setattr(room, "make_page", appear)
    with pytest.raises(OutputError, match="appeared during the run"):
        operate.report(support.output(tiny, "moe").output, html=tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == "mine"


def test_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert room.default_page(Path("a/b/")) == tmp_path / "a/b-report.html"
    assert room.default_page(Path()) == tmp_path.parent / f"{tmp_path.name}-report.html"
    snapshot = Path("/cache/models--amd--GLM-5.2-MXFP4/snapshots/0123")
    assert room.default_page(snapshot) == tmp_path / "amd-GLM-5.2-MXFP4-report.html"


# The command


def test_the_command_says_what_it_wrote(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = support.output(tiny, "moe").output
    html, jsonl = tmp_path / "page.html", tmp_path / "tensors.jsonl"
    words_ = ["report", str(out), "--source", str(tiny), "--html", str(html), "--jsonl", str(jsonl)]
    assert main([*words_, "--targets", "vllm", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["html"] == str(html) and said["jsonl"] == str(jsonl) and said["beyond_mxfp4"] == 0
    assert said["compared"] == said["packed"] > 0 and said["sqnr_db"]["worst"] <= said["sqnr_db"]["median"]
    assert "sglang" not in words(section(html, "engines")) and said["tensors"] == len(lines(jsonl))
    assert main(words_) == 1 and f"{html} exists" in capsys.readouterr().err
    html.unlink(), jsonl.unlink()
    assert main(words_) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{html}: {said['tensors']} tensors, ") and "SQNR: median" in text


@pytest.mark.parametrize("sample", ["-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(tiny: Path, tmp_path: Path, sample: str) -> None:
    with pytest.raises(CheckpointError, match="is not a share between 0 and 1"):
        operate.report(tiny, sample=float(sample), html=tmp_path / "r.html")
    assert main(["report", str(tiny), "--sample", sample, "--html", str(tmp_path / "r.html")]) == 1


def test_a_source_that_is_none_is_an_error_before_anything_is_written(
    tiny: Path, tmp_path: Path, call: Callable[..., Any] = operate.report
) -> None:
    out = support.output(tiny, "moe").output
    with pytest.raises(CheckpointError, match="already quantized"):
        call(out, out, html=tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []

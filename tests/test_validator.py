"""The validator: one small checkpoint per finding, made of headers alone, and the cases that people ran into.

Case numbers are those of the field: public threads about MXFP4 checkpoints, cited beside each test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_full_output import make_full_output

from glmquant import checks, validator
from glmquant.checkpoint.header import encode_header, tensor_nbytes
from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.layout import expected_tensors
from glmquant.engines import patterns
from glmquant.engines.model import Verdict
from glmquant.engines.targets import parse_targets
from glmquant.exclusions import resolve
from glmquant.findings import Finding, Report
from glmquant.mxfp4.config import quantization_config
from glmquant.recipe import load_architecture
from glmquant.validator import validate_folder

GLM = json.loads((Path(__file__).parent / "data/glm-5.2/config.json").read_text())
ARCHITECTURE = load_architecture("glm_moe_dsa")
TARGETS = "sglang>=0.5.13,vllm"
NEW, OLD, VLLM = "sglang 0.5.23", "sglang 0.5.15.post1", "vllm 0.33.0"
INDEX = "model.safetensors.index.json"
SIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# GLM-5.2 with 4 layers: 0 dense, 1 to 3 MoE, 4 the MTP layer; layer 3 shares the indexer of layer 2.
LAYERS = 4
MTP = f"model.layers.{LAYERS}"
P1, P2, P3 = "model.layers.1", "model.layers.2", "model.layers.3"
PACKED = {
    "moe": r"model\.layers\.[0-3]\.mlp\.(shared_experts|experts\.\d+)\.",
    "moe-mtp": r"model\.layers\.\d\.mlp\.(shared_experts|experts\.\d+)\.",
    "routed": r"model\.layers\.[0-3]\.mlp\.experts\.\d+\.",
    "routed-mtp": r"model\.layers\.\d\.mlp\.experts\.\d+\.",
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Change = Callable[[Tensors, dict[str, Any]], None]


def small_config(**overrides: Any) -> dict[str, Any]:
    config = GLM | {
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": GLM["indexer_types"][:LAYERS],
        "n_routed_experts": 256,
    }
    return json.loads(json.dumps(config | overrides))


def make(folder: Path, recipe: str = "moe", *changes: Change, targets: str = TARGETS, **overrides: Any) -> Path:
    """Headers over holes, index, config and side files of a good checkpoint, with changes."""
    config = small_config(**overrides)
    layers = read_layers(config)
    tensors: Tensors = {}
    formats = {}
    for name, shape in expected_tensors(ARCHITECTURE.tensors, config, layers).items():
        module = name.rpartition(".")[0]
        packed = re.match(PACKED[recipe], name) is not None
        if len(shape) == 2 and "embed_tokens" not in name:
            formats[module] = "mxfp4" if packed else "plain"
        tensors[name] = ("F32" if name.endswith("bias") and "e_score" in name else "BF16", shape)
        if packed:
            pack(tensors, module)
    exclude = resolve(formats, layers, ARCHITECTURE, parse_targets(targets)).texts
    config["quantization_config"] = quantization_config(exclude, "0.13")
    for change in changes:
        change(tensors, config)
    folder.mkdir()
    write_shard(folder / "model-00001-of-00001.safetensors", tensors)
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    total = sum(tensor_nbytes(*tensor) for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in SIDE:
        (folder / name).write_text("{}")
    return folder


def write_shard(path: Path, tensors: Tensors) -> None:
    rows, end = [], 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + tensor_nbytes(dtype, shape)
        rows.append((name, dtype, shape, begin, end))
    header = encode_header(rows, {"format": "pt"})
    with open(path, "wb") as handle:
        handle.write(header)
        handle.truncate(len(header) + end)


def pack(tensors: Tensors, module: str) -> None:
    _, (rows, columns) = tensors[f"{module}.weight"]
    tensors[f"{module}.weight"] = ("U8", (rows, columns // 2))
    tensors[f"{module}.weight_scale"] = ("U8", (rows, columns // 32))


# Changes


def exclude(change: Callable[[list[str]], list[str]]) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        block["exclude"] = change(block["exclude"])

    return apply


def add(*entries: str) -> Change:
    return exclude(lambda found: [*found, *entries])


def remove(pattern: str) -> Change:
    def apply(found: list[str]) -> list[str]:
        kept = [entry for entry in found if not re.fullmatch(pattern, entry)]
        assert len(kept) < len(found)
        return kept

    return exclude(apply)


def only(*entries: str) -> Change:
    return exclude(lambda found: list(entries))


def drop(pattern: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [name for name in tensors if re.fullmatch(pattern, name)]
        assert names
        for name in names:
            del tensors[name]

    return apply


def rename(pattern: str, to: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [name for name in tensors if re.search(pattern, name)]
        assert names
        for name in names:
            tensors[re.sub(pattern, to, name)] = tensors.pop(name)

    return apply


def put(name: str, dtype: str, *shape: int) -> Change:
    return lambda tensors, config: tensors.__setitem__(name, (dtype, shape))


def dtype(pattern: str, new: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [name for name in tensors if re.fullmatch(pattern, name)]
        assert names
        for name in names:
            tensors[name] = (new, tensors[name][1])

    return apply


def packed(*modules: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for module in modules:
            pack(tensors, module)

    return apply


def plain(pattern: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [n.removesuffix("_scale") for n in tensors if re.fullmatch(pattern + r"\.weight_scale", n)]
        assert names
        for name in names:
            rows, columns = tensors[name][1]
            tensors[name] = ("BF16", (rows, columns * 2))
            del tensors[f"{name}_scale"]

    return apply


def setting(path: str, value: Any) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            config = config[parent]
        if value is ...:
            del config[key]
        else:
            config[key] = value

    return apply


def stacked(tensors: Tensors, config: dict[str, Any]) -> None:
    """transformers 5: the experts of a layer in two 3-D tensors."""
    drop(rf"{P1}\.mlp\.experts\..*")(tensors, config)
    tensors[f"{P1}.mlp.experts.gate_up_proj"] = ("U8", (256, 4096, 3072))
    tensors[f"{P1}.mlp.experts.down_proj"] = ("U8", (256, 6144, 1024))


def check(folder: Path, targets: str = TARGETS) -> Report:
    return validate_folder(folder, parse_targets(targets))


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def the(report: Report, code: str) -> Finding:
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, f"{code} in {report.findings}"
    return found[0]


def effects(finding: Finding) -> dict[str, str]:
    """Engine -> its verdict."""
    found = {}
    for effect in finding.effects:
        found |= {part.split()[0]: effect.verdict for part in effect.targets.split(", ")}
    return found


# A good checkpoint


@pytest.mark.parametrize("recipe", PACKED)
def test_a_good_checkpoint_has_no_finding(tmp_path: Path, recipe: str) -> None:
    report = check(make(tmp_path / "c", recipe), "sglang>=0.5.13")
    wanted = {"needs-flag"} if recipe.startswith("routed") else set()
    assert set(codes(report)) == wanted
    assert report.ok and set(report.verdicts.values()) <= {Verdict.OK, Verdict.SLOW}


def test_coverage_counts_every_asking_module_once(tmp_path: Path) -> None:
    report = check(make(tmp_path / "c"))
    assert set(report.coverage) == {str(target) for target in report.targets}
    new = report.coverage[NEW]
    assert new["target attention"] == {"ok": 4 * LAYERS, "slow": 0, "silent misload": 0, "crash": 0}
    assert new["target routed"]["ok"] == 3 and new["draft routed"]["ok"] == 1 and new["draft mtp_glue"]["ok"] == 1
    assert "draft mtp_glue" not in report.coverage[VLLM]


@pytest.mark.parametrize("recipe", PACKED)
def test_the_full_size_layout_is_clean(full: Path, tmp_path: Path, recipe: str) -> None:
    make_full_output(full, tmp_path / "out", recipe)
    report = check(tmp_path / "out")
    assert report.ok and report.tensors > 117_000
    assert set(codes(report)) <= {"side-file-missing", "needs-flag"}
    assert report.tensor_parallel[NEW] == [1, 2, 4, 8, 16]
    assert report.tensor_parallel[OLD] == [1, 2, 4, 8]


# Every code once: what is changed, the code, its severity, and what the engines do.

CRASH, SILENT, SLOW, OK = "crash", "silent misload", "slow", "ok"
SCALE = rf"{P1}\.mlp\.experts\.3\.down_proj\.weight_scale"
ALL_CRASH, ALL_SILENT = {"sglang": CRASH, "vllm": CRASH}, {"sglang": SILENT, "vllm": SILENT}
Q = "quantization_config."
SILENT_CRASH, OK_CRASH = {"sglang": SILENT, "vllm": CRASH}, {"sglang": OK, "vllm": CRASH}
E3 = f"{P1}.mlp.experts.3"
CASES: list[tuple[str, str, Change, str, dict[str, str]]] = [
    ("tensor-missing", "moe", drop(rf"{P1}\.mlp\.experts\.3\.up_proj\..*"), "error", ALL_SILENT),
    ("indexer-missing", "moe", drop(rf"{P1}\.self_attn\.indexer\..*"), "error", ALL_SILENT),
    ("mtp-absent", "moe", drop(rf"{MTP}\..*"), "error", {"sglang": SILENT, "vllm": CRASH}),
    ("mtp-undeclared", "moe", setting("num_nextn_predict_layers", 0), "error", {"sglang": CRASH}),
    ("tensor-unexpected", "moe", put(f"{P1}.self_attn.rotary_emb.inv_freq", "F32", 32), "warning", {"sglang": OK}),
    ("tensor-misnamed", "moe", rename(SCALE, f"{E3}.down_proj.weight_scale_inv"), "error", SILENT_CRASH),
    ("scale-orphan", "moe", put(f"{P1}.self_attn.o_proj.weight_scale", "F32", 6144, 1), "error", OK_CRASH),
    ("experts-3d", "moe", stacked, "error", {"sglang": SILENT}),
    ("scale-missing", "moe", drop(SCALE), "error", ALL_SILENT),
    ("scale-dtype", "moe", dtype(SCALE, "F8_E8M0"), "error", ALL_SILENT),
    ("scale-shape", "moe", put(f"{P1}.mlp.experts.3.up_proj.weight_scale", "U8", 2048, 1), "error", {"sglang": SILENT}),
    ("tensor-shape", "moe", put(f"{P1}.self_attn.q_b_proj.weight", "BF16", 100, 2048), "error", {"sglang": CRASH}),
    ("weight-dtype", "moe", dtype(rf"{P1}\.self_attn\.o_proj\.weight", "F8_E4M3"), "error", {"sglang": SILENT}),
    ("weight-int8", "moe", dtype(rf"{P1}\.mlp\.experts\.3\.up_proj\.weight", "I8"), "info", {}),
    ("kv-b-proj-packed", "moe", packed(f"{P1}.self_attn.kv_b_proj"), "error", {"sglang": CRASH}),
    ("correction-bias-dtype", "moe", dtype(r".*\.1\..*correction_bias", "BF16"), "error", {"sglang": SILENT}),
    ("indexer-schedule", "moe", setting("index_topk_freq", 1), "error", {"sglang": SILENT}),
    ("config-not-quantized", "moe", setting("quantization_config", ...), "error", ALL_CRASH),
    ("config-method", "moe", setting(Q + "quant_method", "mxfp4"), "error", {"sglang": CRASH}),
    ("layer-config", "moe", setting(Q + "layer_quant_config", {"*self_attn*": {}}), "warning", {}),
    ("config-scheme", "moe", setting(Q + "global_quant_config.weight.group_size", 16), "error", ALL_CRASH),
    ("entry-invalid-regex", "moe", add("re:("), "error", ALL_CRASH),
    ("entry-glob", "moe", add("*self_attn*"), "warning", {}),
    ("entry-unmatched", "moe", add(f"{P1}.self_attn.indexers_proj"), "warning", {}),
    ("half-a-fused-pair", "moe", remove(rf"{P1}\.self_attn\.q_a_proj"), "error", ALL_CRASH),
    ("not-covered", "moe", remove(rf"{P1}\.self_attn\.q_b_proj"), "error", ALL_CRASH),
    ("excluded-but-packed", "moe", add(f"{P1}.mlp.experts"), "error", ALL_CRASH),
    ("mixed-formats", "moe", plain(rf"{E3}\.(gate|up)_proj"), "error", ALL_CRASH),
    ("never-quantized", "moe", packed("lm_head"), "error", ALL_CRASH),
]  # fmt: skip


@pytest.mark.parametrize(("code", "recipe", "change", "severity", "expected"), CASES, ids=[case[0] for case in CASES])
def test_a_mistake_has_its_code(
    tmp_path: Path, code: str, recipe: str, change: Change, severity: str, expected: dict[str, str]
) -> None:
    report = check(make(tmp_path / "c", recipe, change), f"{NEW.replace(' ', '==')},{VLLM.replace(' ', '==')}")
    finding = next(f for f in report.findings if f.code == code)
    assert finding.severity == severity
    assert finding.names and finding.count >= len(finding.names) and finding.message
    assert {**effects(finding), **expected} == effects(finding)
    assert report.ok is (severity != "error")


@pytest.mark.parametrize(
    ("leaf", "shape", "expected"),
    [
        ("q_b_proj", (32768, 2048), ALL_SILENT),
        ("kv_b_proj", (57344, 512), ALL_SILENT),
        ("indexer.weights_proj", (64, 6144), {"sglang": CRASH, "vllm": SILENT}),
        ("o_proj", (12288, 16384), ALL_CRASH),
    ],
)
def test_too_many_rows_are_cut_by_some_loaders_and_refused_by_others(
    tmp_path: Path, leaf: str, shape: tuple[int, int], expected: dict[str, str]
) -> None:
    """sglang 0.5.23 and vLLM 0.33.0, loaded (tests/conformance, damaged tensors)."""
    folder = make(tmp_path / "c", "moe", put(f"{P1}.self_attn.{leaf}.weight", "BF16", *shape))
    report = check(folder, f"{NEW.replace(' ', '==')},{VLLM.replace(' ', '==')}")
    assert effects(the(report, "tensor-shape")) == expected


KEYS = [
    ("export", ..., "The export key should be included"),
    ("export.kv_cache_group", None, "has no len()"),
    ("layer_quant_config", ..., "not iterable"),
    ("layer_type_quant_config", None, "not iterable"),
    ("global_quant_config", ..., "no attribute 'get'"),
    ("exclude", None, "not iterable"),
]


@pytest.mark.parametrize(("key", "value", "text"), KEYS, ids=[row[0] for row in KEYS])
def test_a_missing_config_key_is_told_in_the_engines_words(tmp_path: Path, key: str, value: Any, text: str) -> None:
    report = check(make(tmp_path / "c", "moe", setting(Q + key, value)))
    finding = the(report, "config-key")
    assert finding.severity == "error" and any(text in effect.message for effect in finding.effects)
    assert report.verdicts[NEW] is report.verdicts[OLD] is Verdict.CRASH
    assert report.verdicts[VLLM] is (Verdict.OK if key == "layer_quant_config" else Verdict.CRASH)


def test_lost_fusion_is_a_warning_and_names_the_entry(tmp_path: Path) -> None:
    report = check(make(tmp_path / "c", "moe", add("model.decoder.mlp.shared_experts.up_proj")), "sglang>=0.5.18")
    finding = the_any(report, "fusion-lost", "target")
    assert finding.severity == "warning" and "model.decoder.mlp.shared_experts.up_proj" in finding.effects[0].message
    assert report.ok and report.coverage[NEW]["target routed"]["slow"] == 3


def the_any(report: Report, code: str, word: str) -> Finding:
    return next(f for f in report.findings if f.code == code and f.message.startswith(word))


def test_a_list_that_takes_too_long_to_match_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "BUDGET", 0.1)
    report = check(make(tmp_path / "c", "moe", add("re:(.|.)*x$")))
    assert "entry 're:(.|.)*x$' takes too long" in the(report, "entry-cost").message


def test_formats_that_cannot_fuse_need_a_flag_before_0_5_18(tmp_path: Path) -> None:
    report = check(make(tmp_path / "c", "routed"))
    finding = the(report, "needs-flag")
    assert finding.severity == "warning" and finding.targets == "sglang 0.5.13.post1-0.5.17"
    assert report.flags[OLD] == ["--disable-shared-experts-fusion"] and NEW not in report.flags


def test_a_draft_that_fuses_formats_apart_crashes(tmp_path: Path) -> None:
    change = plain(rf"{MTP}\.mlp\.shared_experts\..*")
    report = check(make(tmp_path / "c", "moe-mtp", change, targets="sglang==0.5.20"), "sglang>=0.5.20")
    finding = the(report, "fusion-mismatch")
    assert finding.targets == "sglang 0.5.22-0.5.23" and effects(finding) == {"sglang": CRASH}


def test_row_parallel_modules_that_are_not_covered_misload_without_a_word(tmp_path: Path) -> None:
    report = check(make(tmp_path / "c", "moe", remove(rf"{P1}\.self_attn\.o_proj")))
    finding = the(report, "not-covered")
    assert finding.names == (f"{P1}.self_attn.o_proj",) and set(effects(finding).values()) == {SILENT}
    assert set(report.verdicts.values()) == {Verdict.SILENT}
    assert report.coverage[NEW]["target attention"]["silent misload"] == 1


def test_a_wrong_total_size_is_a_warning(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 100
    (folder / INDEX).write_text(json.dumps(index))
    assert the(check(folder), "total-size").severity == "warning"


def test_missing_side_files_are_told_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    (folder / "chat_template.jinja").unlink()
    assert the(check(folder), "side-file-missing").names == ("chat_template.jinja",)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert codes(check(folder)) == []
    (folder / "tokenizer.json").unlink()
    assert the(check(folder), "side-file-missing").names == ("tokenizer.json",)


def test_sizes_that_tensor_parallelism_would_cut(tmp_path: Path) -> None:
    """Field case 61: 1408 / 8 is no multiple of 32 (vllm#48173, sglang#3345)."""
    report = check(make(tmp_path / "c", "moe", moe_intermediate_size=1408))
    findings = [f for f in report.findings if f.code == "tensor-parallel"]
    assert {f.severity for f in findings} == {"warning"}
    assert report.tensor_parallel[VLLM] == [1, 2, 4] and "--tp 8" in findings[0].names
    assert report.tensor_parallel[OLD] == [1]  # shares that are padded go wrong on all ranks but the first


def test_other_schedule_mistakes(tmp_path: Path) -> None:
    """sglang <= 0.5.19 reads the schedule keys, later ones indexer_types first: both must be there."""
    gone = [setting(key, ...) for key in ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")]
    finding = the(check(make(tmp_path / "types", "moe", *gone), "sglang>=0.5.13"), "indexer-schedule")
    assert finding.targets == "sglang 0.5.13.post1-0.5.19"
    report = check(make(tmp_path / "formula", "moe", setting("indexer_types", ...)))
    assert "indexer-schedule" not in codes(report) and report.ok


def test_an_unreadable_config_is_a_finding_not_a_traceback(tmp_path: Path) -> None:
    assert "config" in codes(check(make(tmp_path / "a", "moe", setting("num_hidden_layers", "4"))))
    assert "config" in codes(check(make(tmp_path / "b", "moe", setting("model_type", "llama"))))


def test_a_mistake_no_target_is_known_to_take_is_an_error_all_the_same(tmp_path: Path) -> None:
    finding = the(check(make(tmp_path / "c", "moe", drop(SCALE)), "atom"), "scale-missing")
    assert finding.severity == "error" and finding.effects == ()


def test_every_code_has_a_test() -> None:
    tested = {case[0] for case in CASES} | set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', Path(__file__).read_text()))
    known = set(checks.TENSOR_CODES) | set(validator.LIST_CODES)
    for module in (checks, validator):
        text = Path(str(module.__file__)).read_text()
        known |= set(re.findall(r'(?:Mistake|Finding|wrong|self\._finding)\(\s*"([a-z0-9-]+)"', text))
    elsewhere = {"not-modelled", "engine-note", "not-served", "vision-absent"}  # test_siblings.py
    assert len(known) > 30 and known - tested - elsewhere - {"config"} == set()


# The field: what people ran into (sections A to C of our collection of public threads)


def test_case_1_entries_under_another_models_prefix(tmp_path: Path) -> None:
    """vllm#54547: none of 1550 entries in `model.language_model.*` naming match anything."""
    change = exclude(lambda found: [e.replace("model.layers.", "model.language_model.layers.") for e in found])
    report = check(make(tmp_path / "c", "moe", change))
    assert {"entry-unmatched", "not-covered"} <= set(codes(report)) and not report.ok


def test_case_2_experts_listed_one_by_one(tmp_path: Path) -> None:
    """vllm#46757: leaves alone do not name the container that sglang before 0.5.21 asks for."""
    leaves = [f"{P2}.mlp.experts.{e}.{p}_proj" for e in range(256) for p in ("gate", "up", "down")]
    change = plain(rf"{P2}\.mlp\.experts\.\d+\.\w+")
    report = check(make(tmp_path / "c", "moe", change, add(*leaves)))
    assert the(report, "container-not-covered").targets == "sglang 0.5.13.post1-0.5.20"


def test_case_3_mtp_under_checkpoint_names_only(tmp_path: Path) -> None:
    """sglang#30265, #30379: model.layers.<MTP>.eh_proj is asked as model.eh_proj before 0.5.16."""
    report = check(make(tmp_path / "c", "moe", leaves_only("moe")))
    finding = the_any(report, "not-covered", "draft")
    assert finding.targets == "sglang 0.5.13.post1-0.5.15.post1" and finding.names[0].startswith("model.decoder.")
    assert report.coverage[OLD]["draft mtp_glue"]["crash"] == 1 and report.coverage[NEW]["draft mtp_glue"]["ok"] == 1


def leaves_only(recipe: str) -> Change:
    """The list as AMD Quark writes it: every un-quantized Linear by its checkpoint name."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["exclude"] = [
            name.removesuffix(".weight")
            for name, (kind, shape) in tensors.items()
            if name.endswith(".weight") and kind == "BF16" and len(shape) == 2 and "embed" not in name
        ]

    return apply


def test_case_4_mtp_shared_experts_veto_fusion_of_the_target(tmp_path: Path) -> None:
    """sglang#36870: in 0.5.18 three leaves of the MTP layer un-fuse all target layers."""
    report = check(make(tmp_path / "c", "moe", leaves_only("moe")), "sglang>=0.5.18")
    assert the(report, "fusion-lost").targets == "sglang 0.5.18" and report.ok


def test_case_5_bf16_mtp_layer_that_the_list_leaves_out(tmp_path: Path) -> None:
    """vllm#49275: the MTP layer is stored in bf16 and not in the list."""
    change = exclude(lambda found: [e for e in found if MTP not in e and "decoder" not in e and "eh_proj" not in e])
    report = check(make(tmp_path / "c", "moe", leaves_only("moe"), change))
    assert {f.message.split(":")[0] for f in report.findings if f.code == "not-covered"} == {"draft"}
    assert the(report, "container-not-covered").severity == "error"


def test_case_8_a_name_that_is_already_fused(tmp_path: Path) -> None:
    """sglang#37673: a fused name counts from 0.5.21 on only."""
    report = check(
        make(
            tmp_path / "c",
            "moe",
            remove(rf"{P1}\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)"),
            add(f"{P1}.self_attn.fused_qkv_a_proj_with_mqa", f"{P1}.self_attn.fused_qkv_a_proj"),
        )
    )
    assert the(report, "not-covered").targets == "sglang 0.5.13.post1-0.5.20"


def test_case_11_and_12_shared_experts_of_another_format(tmp_path: Path) -> None:
    """amd/Quark#25, sglang#38621: bf16 shared experts fused into quantized ones."""
    report = check(make(tmp_path / "c", "moe", plain(rf"{P1}\.mlp\.shared_experts\..*")), "sglang>=0.5.18")
    assert "fusion-mismatch" in codes(report) and not report.ok


def test_case_13_a_module_that_does_not_exist(tmp_path: Path) -> None:
    """ROCm/ATOM#451: self_attn.indexers_proj names nothing."""
    entries = [f"model.layers.{n}.self_attn.indexers_proj" for n in range(3)]
    finding = the(check(make(tmp_path / "c", "moe", add(*entries))), "entry-unmatched")
    assert (finding.severity, finding.names, finding.count) == ("warning", tuple(entries), 3)


def test_entries_for_modules_that_never_ask_are_not_worth_a_word(tmp_path: Path) -> None:
    harmless = ["lm_head", "model.embed_tokens", f"{P1}.mlp.gate", f"{P1}.input_layernorm", "model.norm", MTP]
    assert codes(check(make(tmp_path / "c", "moe", add(*harmless)), "sglang>=0.5.16")) == []


def test_case_16_globs_and_parents_match_nothing(tmp_path: Path) -> None:
    """Run against vLLM 0.33 and sglang: only names and re: count."""
    report = check(make(tmp_path / "c", "moe", only("*self_attn*", f"{P1}.self_attn", "lm_head")))
    assert the(report, "entry-glob").names == ("*self_attn*",)
    assert the(report, "entry-unmatched").names == (f"{P1}.self_attn",)
    assert "not-covered" in codes(report)


def test_case_16_an_unescaped_dot_reaches_further(tmp_path: Path) -> None:
    """re:model.layers.1.* also matches layer 10; here it also covers what is packed in layer 1."""
    report = check(make(tmp_path / "c", "moe", add("re:model.layers.1.mlp.*")))
    assert set(report.verdicts.values()) == {Verdict.CRASH}
    assert the(report, "excluded-but-packed").names


@pytest.mark.parametrize("half", ["self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.up_proj"])
def test_case_17_half_a_pair(tmp_path: Path, half: str) -> None:
    """Found different quantization schemes for the shards."""
    change = remove(rf"{P1}\.{half}") if "attn" in half else add(f"{P1}.{half}")
    report = check(make(tmp_path / "c", "moe", change), VLLM.replace(" ", "=="))
    finding = the(report, "half-a-fused-pair")
    assert "Found different quantization schemes" in finding.effects[0].message


def test_case_18_scale_of_a_block_fp8_layer_under_quarks_name(tmp_path: Path) -> None:
    """vllm#54556: an excluded layer kept in FP8 has weight_scale instead of weight_scale_inv."""
    report = check(
        make(
            tmp_path / "c",
            "moe",
            dtype(rf"{P1}\.self_attn\.o_proj\.weight", "F8_E4M3"),
            put(f"{P1}.self_attn.o_proj.weight_scale", "F32", 48, 128),
        )
    )
    assert "fp8-unread" in codes(report) and not report.ok


def test_case_19_scale_named_after_the_quantizer(tmp_path: Path) -> None:
    """amd/Quark#44: <module>.weight_quantizer.scale."""
    report = check(make(tmp_path / "c", "moe", rename(SCALE, f"{P1}.mlp.experts.3.down_proj.weight_quantizer.scale")))
    assert "tensor-misnamed" in codes(report) and "scale-missing" not in codes(report)


def test_case_20_and_57_experts_in_3_d_tensors(tmp_path: Path) -> None:
    """vllm#44739, Model-Optimizer#2011: fused expert tensors."""
    report = check(make(tmp_path / "c", "moe", stacked))
    assert the(report, "experts-3d").count == 2 and "tensor-missing" not in codes(report)


def test_case_25_27_28_29_mtp_declared_but_absent(tmp_path: Path) -> None:
    """Mapika/GLM-5.2-NVFP4, llm-compressor#2735, transformers 5.24, vllm#37667: silent in sglang, loud in vLLM."""
    report = check(make(tmp_path / "c", "moe", drop(rf"{MTP}\..*")))
    finding = the(report, "mtp-absent")
    assert effects(finding) == {"sglang": SILENT, "vllm": CRASH} and "tensor-missing" not in codes(report)
    assert check(make(tmp_path / "d", "moe", drop(rf"{MTP}\..*"), setting("num_nextn_predict_layers", 0))).ok


def test_case_26_mtp_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    """PhalaCloud/GLM-5.2-W4AFP8: model-00041-of-00041 was on disk and not in the index."""
    folder = make(tmp_path / "c", "moe", drop(rf"{MTP}\.eh_proj\.weight"))
    write_shard(folder / "model-00002-of-00002.safetensors", {f"{MTP}.eh_proj.weight": ("BF16", (6144, 12288))})
    assert "unindexed-shard" in codes(check(folder))


def test_case_31_mtp_quantized_by_accident(tmp_path: Path) -> None:
    """Quark 0.13's template packs the MTP layer's experts and eh_proj too; vLLM has no packed eh_proj."""
    report = check(make(tmp_path / "c", "moe-mtp", packed(f"{MTP}.eh_proj"), remove(r"(.*\.)?eh_proj|re:.*eh_proj.*")))
    assert the(report, "never-quantized").targets == "vllm 0.30.0-0.33.0"


def test_a_list_that_is_no_list_of_texts(tmp_path: Path) -> None:
    report = check(make(tmp_path / "c", "moe", setting(Q + "exclude", [1, 2])))
    assert "config-key" in codes(report) and not report.coverage

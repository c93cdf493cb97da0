"""What doctor says about installed packages, on packages made up here; on real wheels in tests/conformance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from serving_support import install, install_aiter, published_rows, short_checkpoint, with_exclude

from glmquant import operate
from glmquant.cli import main
from glmquant.engines.model import rules_for
from glmquant.errors import GlmquantError
from glmquant.serving.doctor import Diagnosis, examine_stack, observed
from glmquant.serving.launch import Wish
from glmquant.serving.stack import open_stack

QUARK = "srt/layers/quantization/quark"
BARE = "#include <cuda_runtime.h>\n"


def install_sglang(
    root: Path, release: str, like: str = "", leave: Iterable[str] = (), pin: str = "transformers==5.19.0"
) -> Path:
    """A package whose files say what the release `like` says, except for `leave`."""
    rules = rules_for("sglang", like or release)
    files: dict[str, str] = {
        "kernels/jit/csrc/elementwise/fused_metadata_copy.cuh": BARE
        if (like or release) in ("0.5.13.post1", "0.5.14")
        else f"#ifndef USE_ROCM\n{BARE}#endif\n",
        "srt/arg_groups/overrides.py": 'declared["dsa_prefill_backend"] = "tilelang"\n',
    }
    if rules["draft_list"] == "literals":
        files["srt/models/glm4_moe.py"] = "def _resolve_nextn_quant_config(): ...\n"
    if rules["veto"] != "none":
        files["srt/models/deepseek_common/utils.py"] = "can_fuse_shared_expert\n"
    if rules["veto"] == "not_mtp":
        files[f"{QUARK}/quark.py"] = "    def _is_draft_layer(self): ...\n"
    if rules["container_leaf"]:
        files[f"{QUARK}/utils.py"] = '    if layer_name.endswith(".experts"): ...\n'
    return install(root, "sglang", release, {path: text for path, text in files.items() if path not in leave}, [pin])


def install_rest(root: Path, hip: str = "'7.2.0'", transformers: str = "5.19.0", knows: bool = True) -> Path:
    install(root, "torch", "2.13.0+rocm7.2", {"version.py": f"cuda = None\nhip: Optional[str] = {hip}\n"})
    model = {"models/glm_moe_dsa/configuration_glm_moe_dsa.py": ""} if knows else {}
    install(root, "transformers", transformers, model)
    install(root, "tilelang", "0.1.6")
    return root


def good(root: Path, release: str = "0.5.23") -> Path:
    """A stack that has nothing wrong with it."""
    install_aiter(root, published_rows())
    return install_sglang(install_rest(root), release)


def statuses(found: Diagnosis) -> dict[str, str]:
    return {line.code: line.status for line in found.lines}


def look(root: Path) -> dict[str, str]:
    return {line.code: line.status for line in examine_stack(open_stack([root]))}


@pytest.mark.parametrize(
    "release", ["0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.18", "0.5.19", "0.5.21", "0.5.23"]
)
def test_files_say_what_the_release_does(release: str, tmp_path: Path) -> None:
    rules = rules_for("sglang", release)
    found = observed(open_stack([install_sglang(tmp_path, release)]))
    assert found == {name: rules[name] for name in ("draft_list", "veto", "container_leaf")}


def test_a_good_stack_is_ok_and_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from glmquant.cli import main;"
        f"code = main(['doctor', '--site-packages', {str(good(tmp_path))!r}]);"
        "bad = {'torch', 'sglang', 'aiter', 'transformers', 'tilelang', 'quark'} & set(sys.modules);"
        "assert not bad, bad; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fix " not in done.stdout and "ok    sglang 0.5.23" in done.stdout


def test_an_old_release_is_refused(tmp_path: Path) -> None:
    lines = {line.code: line for line in examine_stack(open_stack([install_sglang(tmp_path, "0.5.12", "0.5.14")]))}
    assert lines["sglang"].status == "fix" and "index_skip_topk_offset" in lines["sglang"].text


def test_a_newer_release_and_a_checkout_are_noted(tmp_path: Path) -> None:
    assert look(install_sglang(tmp_path / "a", "0.6.0"))["sglang"] == "note"
    install_sglang(tmp_path / "b", "0.5.23")
    (tmp_path / "b/sglang-0.5.23.dist-info/METADATA").unlink()
    lines = {line.code: line for line in examine_stack(open_stack([tmp_path / "b"]))}
    assert "no release number" in lines["sglang"].text and lines["veto"].status == "ok"


def test_a_patched_tree_is_noticed(tmp_path: Path) -> None:
    lines = {line.code: line for line in examine_stack(open_stack([install_sglang(tmp_path, "0.5.15", "0.5.19")]))}
    assert lines["draft-list"].status == lines["veto"].status == "note"
    assert "0.5.15 as released does otherwise" in lines["veto"].text
    assert lines["container-leaf"].status == "ok"


@pytest.mark.parametrize("missing", ["sglang", "torch", "transformers", "tilelang", "aiter"])
def test_what_is_missing_is_to_be_fixed(missing: str, tmp_path: Path) -> None:
    good(tmp_path)
    for path in (*tmp_path.glob(f"{missing}*/METADATA"), *tmp_path.glob(f"{missing}/__init__.py")):
        path.unlink()
    (tmp_path / missing).rename(tmp_path / f"not-{missing}")
    found = operate.doctor(site_packages=[tmp_path])
    code = {"tilelang": "sparse-attention"}.get(missing, missing)
    assert [line.code for line in found.lines if line.status == "fix"] == [code] and not found.ok


def test_cuda_torch_and_old_transformers(tmp_path: Path) -> None:
    assert look(install_rest(tmp_path / "a", hip="None"))["torch"] == "fix"
    assert look(install_rest(tmp_path / "b", transformers="4.57.1", knows=False))["transformers"] == "fix"
    install_sglang(install_rest(tmp_path / "c", transformers="5.12.1"), "0.5.23")
    assert look(tmp_path / "c")["transformers"] == "note"
    install(tmp_path / "c", "amd-quark", "0.11.1")
    install(tmp_path / "c", "vllm", "0.33.0")
    found = look(tmp_path / "c")
    assert (found["quark"], found["vllm"]) == ("note", "note")


def test_the_patch_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_sglang(tmp_path / "old", "0.5.14")
    words = ["doctor", "--site-packages", str(tmp_path / "old"), "--write-patch", str(tmp_path / "guard.patch")]
    assert main(words) == 1
    assert "apply with patch -p1" in capsys.readouterr().out
    assert "+#include <hip/hip_runtime.h>" in (tmp_path / "guard.patch").read_text()
    assert main(words) == 1
    assert "exists" in capsys.readouterr().err
    install_sglang(tmp_path / "new", "0.5.15")
    main(["doctor", "--site-packages", str(tmp_path / "new"), "--write-patch", str(tmp_path / "other.patch")])
    assert "nothing to mend" in capsys.readouterr().out and not (tmp_path / "other.patch").exists()


def test_a_checkpoint_whose_kernels_are_tuned(tmp_path: Path) -> None:
    found = operate.doctor(short_checkpoint("moe-mtp"), site_packages=[good(tmp_path)])
    assert found.ok and statuses(found)["checkpoint"] == "ok"
    keys = [(line.status, line.text.partition(":")[0]) for line in found.lines if line.code == "kernel-keys"]
    assert keys[:2] == [
        ("ok", "target MXFP4 6144x256, 257 experts, top 9"),
        ("ok", "draft MXFP4 6144x256, 257 experts, top 9"),
    ]
    assert keys[2:] == [("note", "if shared experts were not fused")] * 2


def test_an_untuned_draft_is_noted_an_untuned_target_is_to_be_fixed(tmp_path: Path) -> None:
    good(tmp_path)
    found = operate.doctor(short_checkpoint("moe"), site_packages=[tmp_path])
    assert found.ok and [line.status for line in found.lines if line.code == "kernel-keys"][:2] == ["ok", "note"]
    found = operate.doctor(short_checkpoint("routed"), profile="throughput", site_packages=[tmp_path])
    fixes = [line for line in found.lines if line.status == "fix"]
    assert [line.code for line in fixes] == ["kernel-keys"]
    assert "256 experts, top 8: 5 of 16 token counts tuned" in fixes[0].text and "tune-input" in fixes[0].fix


def test_what_a_checkpoint_needs_of_an_old_release(tmp_path: Path) -> None:
    found = operate.doctor(short_checkpoint("routed"), site_packages=[good(tmp_path, "0.5.14")])
    texts = {line.code: line.text for line in found.lines}
    assert "needs --disable-shared-experts-fusion" in texts["flag"]
    assert texts["launch"].startswith("Draft depth 3 instead of 5")
    assert statuses(found)["rocm-guard"] == "fix"


def test_a_lost_fusion_is_to_be_fixed(tmp_path: Path) -> None:
    folder = with_exclude("moe", add=["model.decoder.mlp.shared_experts.down_proj"])
    found = operate.doctor(folder, site_packages=[good(tmp_path)])
    fixes = [line for line in found.lines if line.status == "fix"]
    assert {line.code for line in fixes} == {"fusion", "kernel-keys"}
    assert any("glmquant exclusions fix" in line.fix for line in fixes)


def test_a_checkpoint_that_does_not_load_or_fit(tmp_path: Path) -> None:
    good(tmp_path)
    found = operate.doctor(with_exclude("moe", []), site_packages=[tmp_path])
    assert statuses(found)["checkpoint"] == "fix" and not found.ok
    found = operate.doctor(short_checkpoint("moe"), wish=Wish(tp=3), site_packages=[tmp_path])
    assert next(line for line in found.lines if line.code == "checkpoint").fix == "Legal here: 1, 2, 4, 8, 16."


def test_a_table_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    good(tmp_path)
    for path in tmp_path.glob("aiter/configs/**/*tuned_fmoe*.csv"):
        path.write_text("")
    found = operate.doctor(short_checkpoint("moe"), site_packages=[tmp_path])
    assert statuses(found)["aiter"] == "fix" and "kernel-keys" not in statuses(found)


def test_json_and_text_are_safe_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path)
    (tmp_path / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.23+\x1b[31mred\n")
    main(["doctor", "--site-packages", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out
    assert main(["doctor", "--site-packages", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and {line["status"] for line in found["lines"]} <= {"ok", "note"}


def test_develop_installs_are_found_through_pth_files(tmp_path: Path) -> None:
    install_sglang(tmp_path / "checkout", "0.5.23")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sglang.pth").write_text(f"import os\n# comment\n{tmp_path / 'checkout'}\n\x00\nnowhere\n")
    stack = open_stack([site])
    assert stack.release("sglang") == "0.5.23" and stack.package("sglang") == tmp_path / "checkout/sglang"
    with pytest.raises(GlmquantError, match="is not a folder"):
        open_stack([tmp_path / "nowhere"])

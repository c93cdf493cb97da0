"""What does this sglang make of an exclude list?   python sglang_match.py [CONFIG] < CASES > ANSWERS

One line of JSON per case:
    {"exclude": [...], "config": {"num_hidden_layers": 78, ...}, "prefixes": [...], "draft_prefixes": [...]}
`config` updates a small GLM config with 256 experts, for which sglang considers fusing the shared expert;
an optional "quantization_config" updates the Quark block. CONFIG: a config.json to ask about instead, of
GLM-5.3-Flash, on four tensor-parallel ranks of an MI355X. One line per answer:
    {"target": [true, false, "error: ..."], "draft": [...], "draft_unquantized": false,
     "fuse_target": true, "fuse_draft": false}
where true means that the release keeps the module un-quantized and a text is the error it raises. If the
release refuses the configuration, "target_error" or "draft_error" says why; that role's answers are null.

Every answer is the release's own: its loader makes the QuarkConfig, its model class runs up to the point
where it hands the (for the draft: rewritten) config to its layers, and its should_ignore_layer answers.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accounting
import ckpt
import sglang_boot


class Reached(Exception):
    """Raised in place of building the layers, carrying what they would have been built with."""

    def __init__(self, quant_config: Any, fused: bool) -> None:
        self.quant_config = quant_config
        self.fused = fused


def _stop() -> Callable[..., Any]:
    def layers(config: Any, quant_config: Any = None, *args: Any, **kwargs: Any) -> None:
        model = sys._getframe(1).f_locals["self"]  # the causal LM under construction
        raise Reached(quant_config, bool(model.num_fused_shared_experts))

    return layers


class FourRanks:
    """The parallel state, but tensor-parallel 4: GLM-5.3-Flash is fused on four or eight ranks only."""

    tp_size = moe_tp_size = 4

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Matcher:
    def __init__(self, base: dict[str, Any]) -> None:
        self.release = sglang_boot.import_sglang()
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.layers.quantization.quark.utils import should_ignore_layer
        from sglang.srt.model_loader import loader
        from sglang.srt.models import deepseek_nextn, deepseek_v2

        self.loader, self.load_config, self.should_ignore_layer = loader, LoadConfig(), should_ignore_layer
        with tempfile.TemporaryDirectory() as folder:
            config = base | {"quantization_config": ckpt.quantization_config([])}
            Path(folder, "config.json").write_text(json.dumps(config))
            self.args = sglang_boot.boot(Path(folder), {})
            # 0.5.13 caches one hf_config and renames its architecture for the draft: keep the roles apart
            self.models = {r: copy.deepcopy(sglang_boot.model_config(self.args, r)) for r in sglang_boot.ROLES}
        deepseek_v2.DeepseekV2Model = _stop()
        deepseek_nextn.DeepseekModelNextN = _stop()
        if base["model_type"] == "glm5_next":
            from sglang.srt.models import glm5_next

            glm5_next.Glm5NextModel = _stop()
            parallel = glm5_next.get_parallel
            glm5_next.get_parallel = lambda: FourRanks(parallel())
            glm5_next._is_cuda, glm5_next._use_aiter_gfx95 = False, True
        try:
            from sglang.srt.arg_groups import overrides
        except ImportError:
            return
        # 0.5.17 and earlier write "not fused" into the process for good; the next case is another process
        overrides.declare_load_time_override = lambda *args, **kwargs: None

    def build(self, case: dict[str, Any], role: str) -> Reached:
        model = copy.copy(self.models[role])
        hf = model.hf_config = copy.copy(model.hf_config)
        for key, value in case.get("config", {}).items():
            setattr(hf, key, value)
        hf.quantization_config = copy.deepcopy(
            ckpt.quantization_config(case["exclude"]) | case.get("quantization_config", {})
        )
        disabled = getattr(self.args, "disable_shared_experts_fusion", None)
        try:
            quant = self.loader._get_quantization_config(model, self.load_config)
            self.loader._initialize_model(model, self.load_config, quant)
        except Reached as reached:
            return reached
        finally:
            # 0.5.14 and earlier keep the same verdict in the server arguments
            if getattr(self.args, "disable_shared_experts_fusion", None) != disabled:
                self.args.disable_shared_experts_fusion = disabled
        raise AssertionError("the model was built without reaching its layers")

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for role, key in (("target", "prefixes"), ("draft", "draft_prefixes")):
            prefixes = case.get(key, [])
            try:
                reached = self.build(case, role)
            except Exception as e:
                out |= {role: None, f"fuse_{role}": None, f"{role}_error": f"{type(e).__name__}: {e}"}
                continue
            quant = reached.quant_config
            out[role] = [quant is None or self.ignored(p, quant) for p in prefixes]
            out[f"fuse_{role}"] = reached.fused
            if role == "draft":
                out["draft_unquantized"] = quant is None
        return out

    def ignored(self, prefix: str, quant: Any) -> bool | str:
        try:
            # the call that QuarkConfig.get_quant_method opens with
            return self.should_ignore_layer(
                prefix, ignore=quant.exclude_layers, fused_mapping=quant.packed_modules_mapping
            )
        except Exception as e:
            return f"error: {e}"


def main() -> None:
    answers = accounting.answer_on_stdout()
    matcher = Matcher(json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else ckpt.config(experts=256))
    for line in sys.stdin:
        print(json.dumps(matcher.answer(json.loads(line))), file=answers)
    answers.flush()


if __name__ == "__main__":
    main()

"""What does this vLLM make of an exclude list?   python vllm_match.py < CASES > ANSWERS

Lines of JSON in and out as for sglang_match.py, without the fusion answers: vLLM fuses shared experts only
when an environment variable asks for it. Target and draft share one quantization config and the draft keeps
the checkpoint's names, so "draft" answers differ from "target" only by the prefixes they were asked for.

The config is made by vLLM's own code and passes through the constructor of its ROCm model class, which puts
its packed_modules_mapping into it; should_ignore_layer answers, asked as get_quant_method_target asks it.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import accounting
import ckpt
import vllm_boot


class Reached(Exception):
    """Raised in place of building the layers, carrying the config they would have been built with."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config


def _stop(model: Any, *, vllm_config: Any, prefix: str) -> None:
    raise Reached(vllm_config.quant_config)


class Matcher:
    def __init__(self) -> None:
        self.release = vllm_boot.import_vllm()
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.models.deepseek_v32.amd.model import DeepseekV32ForCausalLM

        self.should_ignore_layer, self.initialize_model = should_ignore_layer, initialize_model
        DeepseekV32ForCausalLM.model_cls = _stop
        with tempfile.TemporaryDirectory() as folder:
            config = ckpt.config(experts=256) | {"quantization_config": ckpt.quantization_config([])}
            Path(folder, "config.json").write_text(json.dumps(config))
            self.config = vllm_boot.engine_config(Path(folder), {})
            with set_current_vllm_config(self.config):
                vllm_boot.start_worker()

    def build(self, case: dict[str, Any]) -> Reached:
        config = copy.copy(self.config)
        model = config.model_config = copy.copy(config.model_config)
        hf = model.hf_config = copy.copy(model.hf_config)
        for key, value in case.get("config", {}).items():
            setattr(hf, key, value)
        hf.quantization_config = copy.deepcopy(
            ckpt.quantization_config(case["exclude"]) | case.get("quantization_config", {})
        )
        config.quant_config = type(config)._get_quantization_config(model, config.load_config)
        try:
            self.initialize_model(config, model_config=model)
        except Reached as reached:
            return reached
        raise AssertionError("the model was built without reaching its layers")

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        roles = {"target": case.get("prefixes", []), "draft": case.get("draft_prefixes", [])}
        try:
            quant = self.build(case).quant_config
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
            return {"target": None, "draft": None, "target_error": text, "draft_error": text}
        out: dict[str, Any] = {r: [self.ignored(p, quant) for p in asked] for r, asked in roles.items()}
        return out | {"draft_unquantized": False}

    def ignored(self, prefix: str, quant: Any) -> bool | str:
        try:
            return self.should_ignore_layer(
                prefix,
                ignore=quant.quant_config.get("exclude"),
                fused_mapping=quant.packed_modules_mapping,
                # the question of a RoutedExperts module, which has this name and no other
                check_children=prefix.endswith(".mlp.experts"),
            )
        except Exception as e:
            return f"error: {e}"


def main() -> None:
    answers = accounting.answer_on_stdout()
    matcher = Matcher()
    for line in sys.stdin:
        print(json.dumps(matcher.answer(json.loads(line))), file=answers)
    answers.flush()


if __name__ == "__main__":
    main()

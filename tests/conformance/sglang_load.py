"""Would this sglang load these checkpoints?   python sglang_load.py [options] CHECKPOINT [CHECKPOINT ...]

Runs the real sglang that is importable on CPU, up to and including model.load_weights (not the kernel-layout
shuffles after it, and no forward pass), for the target model and for its MTP draft, and prints one line of
JSON per checkpoint. sglang is imported once; each model is loaded in a forked child.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import accounting
import sglang_boot

# The registry falls back to a generic class without an error, so a load must name one of these.
CLASSES = (
    "GlmMoeDsaForCausalLM",
    "GlmMoeDsaForCausalLMNextN",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "Qwen3MoeForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextForConditionalGenerationNextN",
)


def load(checkpoint: Path, role: str, options: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"loaded": False, "stage": "config", "error": None}
    stream = None
    with accounting.collected_warnings() as warnings:
        try:
            import torch
            from sglang.srt.configs.load_config import LoadConfig
            from sglang.srt.model_loader import loader

            config = sglang_boot.model_config(sglang_boot.boot(checkpoint, options), role)
            hf = config.hf_config
            result |= {"architecture": hf.architectures[0], "quantization": config.quantization}
            default = loader.DefaultModelLoader(LoadConfig())
            result["stage"] = "quant_config"
            quant = loader._get_quantization_config(config, default.load_config)
            gate = getattr(quant, "can_fuse_shared_expert", None)
            result["can_fuse"] = gate() if gate else None
            result["stage"] = "build"
            with loader.set_default_torch_dtype(config.dtype), torch.device("cpu"):
                model = loader._initialize_model(config, default.load_config, quant)
            result["model_class"] = type(model).__name__
            if result["model_class"] not in CLASSES:
                raise RuntimeError(f"sglang chose {result['model_class']}, not a class that is modelled")
            result["fused_shared_experts"] = getattr(model, "num_fused_shared_experts", None)
            result["schemes"] = accounting.schemes(model)
            result["stage"] = "load_weights"
            stream = accounting.Checkpoint(lambda: default._get_all_weights(config, model))
            # a draft takes its embedding and its head from the target
            shared = ("model.embed_tokens.weight", "lm_head.weight") if role == "draft" else ()
            # a checkpoint with a vision tower too has the language model's names below another prefix
            below = "model." if accounting.text(hf) is hf else "model.language_model."
            draft_experts = f"{below}layers.{accounting.text(hf).num_hidden_layers}.mlp.experts"
            with loader.set_default_torch_dtype(config.dtype):
                result |= accounting.load_twice(
                    model,
                    stream,
                    hf,
                    shared,
                    lambda name: draft_experts if role == "draft" else below + name.removeprefix("model."),
                )
            result |= {"loaded": True, "stage": "done"}
        except Exception as e:
            result |= accounting.describe(e, "sglang", stream)
    result["warnings"] = list(warnings)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=accounting.checkpoint_path, metavar="CHECKPOINT")
    parser.add_argument("--role", action="append", choices=sglang_boot.ROLES, help="default: both")
    parser.add_argument("--server-args", default={}, type=json.loads, metavar="JSON", help="for ServerArgs")
    args = parser.parse_args()
    answers = accounting.answer_on_stdout()
    release = sglang_boot.import_sglang()
    roles = tuple(args.role or sglang_boot.ROLES)
    for checkpoint in args.checkpoints:
        started = time.perf_counter()
        result: dict[str, Any] = {"checkpoint": str(checkpoint), "engine": "sglang", "release": release}
        for role in roles:
            result |= accounting.in_child(lambda c=checkpoint, r=role: {r: load(c, r, args.server_args)}, (role,))
        result["seconds"] = round(time.perf_counter() - started, 2)
        print(json.dumps(accounting.verdict(result, roles)), file=answers, flush=True)


if __name__ == "__main__":
    main()

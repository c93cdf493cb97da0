"""Would this vLLM load these checkpoints?   python vllm_load.py [options] CHECKPOINT [CHECKPOINT ...]

Runs the real vLLM that is importable on CPU, up to and including model.load_weights (no layout shuffles
after it, no forward pass), for the target and then, as in a worker in the same process and with the same
quantization config, for its MTP draft. Prints one line of JSON per checkpoint. vLLM is imported once; each
checkpoint is loaded in a forked child.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accounting
import vllm_boot

ROLES = ("target", "draft")
CLASSES = (
    "DeepseekV32ForCausalLM",
    "DeepseekV32MTP",
    "DeepseekV3ForCausalLM",
    "DeepSeekMTP",
    "Qwen3MoeForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextMTP",
)


def load(checkpoint: Path, roles: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {r: {"loaded": False, "stage": "not reached", "error": None} for r in roles}
    with accounting.collected_warnings() as warnings:
        try:
            result["target"]["stage"] = "config"
            config = vllm_boot.engine_config(checkpoint, options)
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(config):
                vllm_boot.start_worker()
                load_role(result["target"], "target", config, config.model_config)
        except Exception as e:
            result["target"] |= accounting.describe(e, "vllm", None)
        # A real worker ends with a target that does not load; the draft only needs one that was built.
        if "draft" in roles and "model_class" in result["target"]:
            try:
                result["draft"]["stage"] = "config"
                from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

                drafter = SimpleNamespace(speculative_config=config.speculative_config, vllm_config=config)
                draft = SpecDecodeBaseProposer._create_draft_vllm_config(drafter)
                with set_current_vllm_config(draft):
                    load_role(result["draft"], "draft", draft, config.speculative_config.draft_model_config)
            except Exception as e:
                result["draft"] |= accounting.describe(e, "vllm", None)
    for role in roles:
        result[role]["warnings"] = list(warnings)
    return result


def load_role(result: dict[str, Any], role: str, config: Any, model_config: Any) -> None:
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    hf = model_config.hf_config
    result |= {"architecture": hf.architectures[0], "quantization": model_config.quantization}
    result["stage"] = "build"
    loader = DefaultModelLoader(config.load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        model = loader.create_model(vllm_config=config, model_config=model_config)
    result["model_class"] = type(model).__name__
    if result["model_class"] not in CLASSES:
        raise RuntimeError(f"vLLM chose {result['model_class']}, not a class that is modelled")
    # the target keeps the answer in its inner model, the draft at the top; a model without shared experts has none
    inner = getattr(getattr(model, "language_model", model), "model", None)
    holder = model if hasattr(model, "is_fused_shared_expert_enabled") else inner
    result["fused_shared_experts"] = int(bool(getattr(holder, "is_fused_shared_expert_enabled", False)))
    result["can_fuse"] = None
    result["schemes"] = accounting.schemes(model)
    result["stage"] = "load_weights"
    stream = accounting.Checkpoint(lambda: loader.get_all_weights(model_config, model))
    # a draft shares the target's embedding and head
    shared = ("embed_tokens.weight", "shared_head.head.weight") if role == "draft" else ()
    # a checkpoint with a vision tower too has the language model's names below another prefix
    below = "model." if accounting.text(hf) is hf else "model.language_model."
    try:
        result |= accounting.load_twice(model, stream, hf, shared, lambda module: _expert_prefix(module, below))
    except Exception as e:
        result |= accounting.describe(e, "vllm", stream)
        return
    result |= {"loaded": True, "stage": "done"}


def _expert_prefix(module: str, below: str) -> str:
    module = module.replace(".mtp_block", "")
    module = module[: module.index(".mlp.experts") + len(".mlp.experts")]
    return below + module.removeprefix("language_model.").removeprefix("model.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=accounting.checkpoint_path, metavar="CHECKPOINT")
    parser.add_argument("--role", choices=["target"], help="skip the draft")
    parser.add_argument("--engine-args", default={}, type=json.loads, metavar="JSON", help="for EngineArgs")
    parser.add_argument(
        "--fuse-shared-experts", action="store_true", help="VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1"
    )
    args = parser.parse_args()
    answers = accounting.answer_on_stdout()
    release = vllm_boot.import_vllm(args.fuse_shared_experts)
    roles = ROLES[:1] if args.role else ROLES
    for checkpoint in args.checkpoints:
        started = time.perf_counter()
        result: dict[str, Any] = {"checkpoint": str(checkpoint), "engine": "vllm", "release": release}
        result |= accounting.in_child(lambda c=checkpoint: load(c, roles, args.engine_args), roles)
        result["seconds"] = round(time.perf_counter() - started, 2)
        print(json.dumps(accounting.verdict(result, roles)), file=answers, flush=True)


if __name__ == "__main__":
    main()

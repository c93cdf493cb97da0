"""Start the sglang that is importable as a tensor-parallel worker would, on CPU, as if on one MI355X."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import gpustubs

STUBS = [
    "triton",
    "torchvision",
    "IPython",
    "tvm_ffi",
    "sentencepiece",
    "sgl_kernel",
    "partial_json_parser",
    "xgrammar",
    "aiter",
]
ROLES = ("target", "draft")


def import_sglang() -> str:
    """Import everything that loading needs, once; returns the release."""
    os.environ["SGLANG_USE_AITER"] = "1"
    gpustubs.pretend_mi355x()
    gpustubs.install(STUBS)
    import torch

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes only: DeepseekV3ForCausalLM packs kv_b_proj again after loading, into no parameter."""
        n, d = x.shape
        return torch.zeros(n, d // 2, dtype=torch.uint8), torch.zeros(n, d // 32, dtype=torch.uint8)

    gpustubs.ANSWERS["aiter.ops.triton.quant.dynamic_mxfp4_quant"] = packed

    torch.set_num_threads(1)
    import sglang
    import transformers

    for name in ("AutoImageProcessor", "AutoVideoProcessor"):  # need torchvision in some releases
        if getattr(getattr(transformers, name, None), "is_dummy", False):
            setattr(transformers, name, gpustubs.stub_class(name))
    from sglang.srt.utils import common

    common.get_amdgpu_memory_capacity = lambda: 288 * 1024.0
    from sglang.srt.distributed import parallel_state

    if hasattr(parallel_state, "is_cuda_alike"):
        parallel_state.is_cuda_alike = lambda: False  # process groups live on CPU
    from sglang.srt.layers.rotary_embedding import factory

    # The CPU rope only knows yarn; rope owns no checkpoint tensor, so use the GPU's class.
    factory.get_rope_cpu = lambda *args: factory.get_rope(*args[:8])
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    # Copy in order, not from a pool of threads: faster here, and the first error is the same every time.
    deepseek_weight_loader.should_async_load = lambda tensor: False
    import sglang.srt.model_loader.loader
    import sglang.srt.models.glm4_moe
    from sglang.srt.models.registry import ModelRegistry  # noqa: F401  imports every model, slowly

    return sglang.__version__


def boot(checkpoint: Path, options: dict[str, Any]) -> Any:
    """ServerArgs -> published context -> one-rank process groups. Returns the server arguments."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt import runtime_context
    except ImportError:  # 0.5.13
        runtime_context = None

    speculative = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    args = ServerArgs(model_path=str(checkpoint), device="cpu", skip_tokenizer_init=True, **(speculative | options))
    if hasattr(runtime_context, "SpawnRanks"):  # 0.5.21 and later
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
    elif hasattr(runtime_context, "publish"):
        runtime_context.publish(args, role="scheduler")
    else:  # 0.5.18 and earlier
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    initialize_moe_config(*[args][: len(inspect.signature(initialize_moe_config).parameters)])
    with tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{scratch}/rendezvous",
        )
        initialize_model_parallel()
    return args


def model_config(args: Any, role: str) -> Any:
    """The release's own ModelConfig for `role`, and the per-model runtime state that goes with it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    config = ModelConfig.from_server_args(args, is_draft_model=role == "draft")
    if "model_config" in inspect.signature(initialize_dp_attention).parameters:
        initialize_dp_attention(args, config)
    else:
        initialize_dp_attention(args)
    with contextlib.suppress(ImportError):
        from sglang.srt.distributed.bootstrap import init_layer_runtime  # 0.5.21 and later

        init_layer_runtime(model_config=config)
    return config

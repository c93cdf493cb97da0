"""Start the vLLM that is importable, as one worker would, on CPU and as if on one MI355X."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import gpustubs

STUBS = [
    "triton",
    "torchvision",
    "IPython",
    "aiter",
    "openai_harmony",
    "uvloop",
    "xgrammar",
    "partial_json_parser",
    "llguidance",
]


def import_vllm(fuse_shared_experts: bool = False) -> str:
    """Import everything that loading needs, once; returns the release."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ROCM_USE_AITER"] = "1"
    os.environ["VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"] = str(int(fuse_shared_experts))
    _pretend_rocm()
    gpustubs.install(STUBS, pretend_installed=["aiter"])
    import torch

    torch.set_num_threads(1)
    import vllm
    from vllm.platforms import rocm
    from vllm.triton_utils.importing import TritonLanguagePlaceholder

    # kernels name dtypes where they are defined; none is run
    TritonLanguagePlaceholder.__getattr__ = _no_value

    library = torch.library.Library("_C", "FRAGMENT")
    for name, arguments in (("silu_and_mul", ""), ("silu_and_mul_with_clamp", ", float limit")):
        if not hasattr(torch.ops._C, name):
            # looked up while building; declared without a kernel, so that a call raises
            library.define(f"{name}(Tensor! out, Tensor input{arguments}) -> ()")
    vllm.glmquant_library = library  # a library goes away with its object
    rocm.RocmPlatform.device_type = "cpu"
    rocm.RocmPlatform.dist_backend = "gloo"
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.default_loader
    import vllm.models.deepseek_v32.amd.model
    import vllm.models.deepseek_v32.amd.mtp
    import vllm.v1.spec_decode.llm_base_proposer
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # a fresh interpreter would lack the stubs
    # fills buffers on "cuda" that only a forward pass reads
    expert_map_manager.init_aiter_topK_meta_data = lambda *args, **kwargs: None
    return vllm.__version__


def _no_value(self: Any, name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def _pretend_rocm() -> None:
    import torch

    gpustubs.pretend_mi355x()
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0
    # made while building, used only in a forward pass
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (), {"__init__": lambda self, *args, **kwargs: None}))
    smi = types.ModuleType("amdsmi")  # what vLLM asks to recognise the platform
    smi.AmdSmiException = type("AmdSmiException", (Exception,), {})
    smi.AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    smi.amdsmi_init = smi.amdsmi_shut_down = lambda *args: None
    smi.amdsmi_get_processor_handles = lambda: [0]
    smi.amdsmi_get_gpu_asic_info = lambda handle: {
        "target_graphics_version": "gfx950",
        "device_id": "0x75a3",
        "market_name": "AMD Instinct MI355X",
    }
    smi.amdsmi_get_gpu_device_uuid = lambda handle: "0"
    smi.amdsmi_get_gpu_memory_total = lambda *args: 288 << 30
    smi.amdsmi_topo_get_link_type = lambda *args: {"hops": 1, "type": 2}
    smi.amdsmi_topo_get_numa_node_number = lambda *args: 0
    sys.modules["amdsmi"] = smi


def engine_config(checkpoint: Path, options: dict[str, Any]) -> Any:
    """The VllmConfig of a server that drafts with the MTP layer of `checkpoint`."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    }
    return EngineArgs(model=str(checkpoint), **(defaults | options)).create_engine_config()


def start_worker() -> None:
    """One-rank process groups; to be called with the engine's config set as current."""
    import torch
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    with tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{scratch}/rendezvous",
        )
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("cpu"), 1)

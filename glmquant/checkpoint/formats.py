"""How each Linear weight is stored, from dtypes and companions in the headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glmquant.checkpoint.header import TensorInfo

PLAIN = ("BF16", "F16", "F32")
BLOCK_FP8 = "fp8"
"""The word for a block-scaled FP8 weight: E4M3, and a float32 scale for each 128 x 128 block."""
FP8_BLOCK = (128, 128)
"""Rows and columns of the only blocks that both sglang and vLLM read beside MXFP4."""
FP8_SCALES = ("weight_scale_inv", "weight_scale")
"""Names of its scale: DeepSeek's (FP8 checkpoints, sglang), and Quark's (vLLM)."""


def module_name(tensor: str) -> str:
    """`a.b.q_proj` of `a.b.q_proj.weight`."""
    return tensor.rpartition(".")[0]


def is_linear_weight(tensor: str, rank: int, lookups: Collection[str]) -> bool:
    """Whether a tensor is the weight of a Linear module: what an exclude list talks about.

    `lookups` are modules whose 2-D weight is looked up by row (embeddings), not multiplied.
    """
    return rank == 2 and tensor.endswith(".weight") and module_name(tensor) not in lookups


def stored_formats(tensors: Mapping[str, TensorInfo], lookups: Collection[str]) -> dict[str, str]:
    """Linear module -> `mxfp4` (uint8 weight), `plain` (bf16, f16, f32), `fp8` (block-scaled), else the dtype."""
    formats = {}
    for name, tensor in tensors.items():
        if is_linear_weight(name, len(tensor.shape), lookups):
            kind = "mxfp4" if tensor.dtype == "U8" else "plain" if tensor.dtype in PLAIN else tensor.dtype.lower()
            module = module_name(name)
            formats[module] = BLOCK_FP8 if tensor.dtype == "F8_E4M3" and fp8_scale(module, tensors) else kind
    return formats


def fp8_scale(module: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The name of a block-scaled weight's scale, without the module's; '' if it has none of the right shape."""
    blocks = tuple(-(-size // step) for size, step in zip(tensors[f"{module}.weight"].shape, FP8_BLOCK, strict=True))
    for name in FP8_SCALES:
        scale = tensors.get(f"{module}.{name}")
        if scale is not None and scale.dtype == "F32" and scale.shape == blocks:
            return name
    return ""


def fp8_scales(tensors: Mapping[str, TensorInfo], formats: Mapping[str, str]) -> dict[str, str]:
    """FP8 module -> the name of its scale, without the module's."""
    return {module: fp8_scale(module, tensors) for module, kind in formats.items() if kind == BLOCK_FP8}

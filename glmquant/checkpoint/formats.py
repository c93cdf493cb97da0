"""How each Linear weight is stored, from dtypes and companions in the headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glmquant.checkpoint.header import TensorInfo

PLAIN = ("BF16", "F16", "F32")


def module_name(tensor: str) -> str:
    """`a.b.q_proj` of `a.b.q_proj.weight`."""
    return tensor.rpartition(".")[0]


def is_linear_weight(tensor: str, rank: int, lookups: Collection[str]) -> bool:
    """Whether a tensor is the weight of a Linear module: what an exclude list talks about.

    `lookups` are modules whose 2-D weight is looked up by row (embeddings), not multiplied.
    """
    return rank == 2 and tensor.endswith(".weight") and module_name(tensor) not in lookups


def stored_formats(tensors: Mapping[str, TensorInfo], lookups: Collection[str]) -> dict[str, str]:
    """Linear module -> `mxfp4` (uint8 weight), `plain` (bf16, f16, f32), else the weight's dtype in lower case."""
    formats = {}
    for name, tensor in tensors.items():
        if is_linear_weight(name, len(tensor.shape), lookups):
            kind = "mxfp4" if tensor.dtype == "U8" else "plain" if tensor.dtype in PLAIN else tensor.dtype.lower()
            formats[module_name(name)] = kind
    return formats

"""The quantization_config that AMD Quark 0.13 writes for MXFP4, as plain data (a test compares it with Quark's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _tensor_spec(is_dynamic: bool) -> dict[str, Any]:
    return {
        "dtype": "fp4",
        "is_dynamic": is_dynamic,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "block_size": None,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
        "zero_point_type": "int32",
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }


def quantization_config(exclude: Sequence[str], quark_version: str) -> dict[str, Any]:
    """config.json's quantization_config: static fp4 weights, dynamic fp4 inputs, both per group of 32.

    sglang and vLLM need `export.kv_cache_group` a list, `layer_quant_config` and `layer_type_quant_config` maps and
    `exclude` a list, all present (sglang 0.5.23 layers/quantization/quark/quark.py:623-638).
    """
    return {
        "global_quant_config": {
            "input_tensors": _tensor_spec(is_dynamic=True),
            "output_tensors": None,
            "weight": _tensor_spec(is_dynamic=False),
            "bias": None,
            "target_device": None,
        },
        "exclude": list(exclude),
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": quark_version,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }

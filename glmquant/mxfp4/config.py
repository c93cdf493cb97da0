"""The quantization_config that AMD Quark 0.13 writes for MXFP4, as plain data (tests compare it with Quark's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glmquant.checkpoint.formats import FP8_BLOCK


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


def block_fp8_spec() -> dict[str, Any]:
    """A layer_quant_config entry: static E4M3 weights in blocks of 128 x 128, dynamic E4M3 inputs per group of 128.

    What Quark 0.13 makes of transformers' block-scaled FP8 (torch/export/prequantized_config_converter.py,
    FP8LinearConfigConverter), and what sglang (0.5.21 quark.py _get_block_fp8_config) and vLLM (0.30 quark.py
    _is_fp8_w8a8) compare.
    """
    groups = {"ch_axis": -1, "group_size": FP8_BLOCK[1], "block_size": None}
    blocks = {"ch_axis": None, "group_size": None, "block_size": list(FP8_BLOCK)}
    return {
        "input_tensors": _fp8_spec({"is_dynamic": True, "qscheme": "per_group", **groups}, "PerGroupMinMaxObserver"),
        "output_tensors": None,
        "weight": _fp8_spec({"is_dynamic": False, "qscheme": "per_block", **blocks}, "PerBlock2DMinMaxObserver"),
        "bias": None,
        "target_device": None,
    }


def _fp8_spec(scheme: dict[str, Any], observer: str) -> dict[str, Any]:
    return {
        "dtype": "fp8_e4m3",
        **scheme,
        "symmetric": True,
        "round_method": "half_even",
        "scale_type": "float",
        "zero_point_type": "int32",
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "observer_cls": observer,
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }


def quantization_config(exclude: Sequence[str], quark_version: str, fp8_keys: Sequence[str] = ()) -> dict[str, Any]:
    """config.json's quantization_config: static fp4 weights, dynamic fp4 inputs, both per group of 32.

    `fp8_keys` are patterns of modules that stay block-scaled FP8.

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
        "layer_quant_config": {key: block_fp8_spec() for key in fp8_keys},
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

#!/usr/bin/env python3
"""Make a tiny random checkpoint of any model type that exclusions/ knows, from its YAML file and a full-size config.

    python scripts/make_tiny.py tests/data/siblings/deepseek_v3.json /tmp/tiny                 # bf16
    python scripts/make_tiny.py tests/data/siblings/deepseek_v3.json /tmp/tiny --fp8           # block-scaled FP8
    python scripts/make_tiny.py my-config.json /tmp/tiny --set num_hidden_layers=6 --lean

Sizes in the config are replaced by small ones (`SMALL`), everything else is kept. The names and shapes are those that
the YAML file promises, optional ones too unless `--lean`. The same options give the same bytes.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also found when this file is loaded by its path

import glm_layout as layout
from make_tiny_glm import _setting, byte_tokenizer, shard_limit

from glmquant.checkpoint.layers import read_layers
from glmquant.checkpoint.layout import promised_tensors
from glmquant.recipe import Architecture, load_architecture

# Only keys that a config has are replaced.
SMALL: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "hidden_size": 128,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "topk_group": 1,
    "v_head_dim": 64,
    "vocab_size": 512,
}
SMALL_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "projection_intermediate_size": 160,
}
"""Of a vision tower, whose `out_hidden_size` is the language model's hidden size."""
# Linear weights that block-scaled checkpoints keep in bf16.
NEVER_FP8 = ("mlp.gate", "eh_proj", "embed_tokens", "lm_head", "shared_head.head", "weights_proj")


def make_tiny(
    source: Mapping[str, Any],
    out: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    fp8: bool = False,
    lean: bool = False,
    shards: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a random checkpoint for the config `source`, made small, into the new folder `out`; return its config.

    Args:
        changes: keys of the config (of the language model's part of it), after `SMALL`.
        fp8: linear weights in block-scaled FP8 where the published checkpoints have them, else all in bf16.
        lean: without the tensors that the YAML file calls optional.
    """
    architecture = load_architecture(source["model_type"])
    config = tiny_config(source, architecture, changes or {})
    if fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    tensors: dict[str, tuple[layout.Tensor, torch.Tensor]] = {}
    for name, promise in promised_tensors(
        architecture.tensors,
        architecture.keys.of(config),
        read_layers(config, architecture.keys),
        architecture.keys.tower(config),
    ):
        if lean and promise.optional:
            continue
        value, dtype = random_tensor(name, promise.shape, promise.dtype, seed), promise.dtype
        if fp8 and is_fp8(name, promise.shape):
            (value, scale), dtype = to_fp8(value), "F8_E4M3"
            tensors[f"{name}_scale_inv"] = layout.Tensor(f"{name}_scale_inv", tuple(scale.shape), "F32"), scale
        tensors[name] = layout.Tensor(name, promise.shape, dtype), value
    found = sorted(tensor for tensor, _ in tensors.values())
    packed = layout.pack(found, shard_limit(found, shards))
    layout.empty_folder(out)
    for file, shard in packed.items():
        ordered = layout.stored_order(shard)
        with open(out / file, "wb") as f:
            f.write(layout.header(ordered, {"format": "pt"}))
            for tensor in ordered:
                f.write(tensors[tensor.name][1].contiguous().view(torch.uint8).numpy().tobytes())
    (out / "model.safetensors.index.json").write_text(layout.index(packed))
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    vocab = architecture.keys.of(config)["vocab_size"]
    byte_tokenizer(vocab).save(str(out / "tokenizer.json"))
    template = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (out / "tokenizer_config.json").write_text(json.dumps(template, indent=2) + "\n")
    (out / "generation_config.json").write_text('{"_from_model_config": true}\n')
    return config


def tiny_config(source: Mapping[str, Any], architecture: Architecture, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`source` with small sizes; explicit lists with a word a layer are cut to its layers."""
    config: dict[str, Any] = json.loads(json.dumps(source))
    config.pop("quantization_config", None)
    inner: dict[str, Any] = dict(architecture.keys.of(config))
    full = inner[architecture.keys.layers]
    inner |= {key: value for key, value in SMALL.items() if inner.get(key)}
    inner |= changes
    layers = inner[architecture.keys.layers]
    inner |= {key: value[:layers] for key, value in inner.items() if isinstance(value, list) and len(value) == full}
    if "num_key_value_heads" in inner and "num_key_value_heads" not in changes:
        full_size = architecture.keys.of(source)
        grouped = full_size["num_key_value_heads"] < full_size["num_attention_heads"]
        inner["num_key_value_heads"] = 2 if grouped else inner["num_attention_heads"]
    inner |= {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if inner.get(key) is not None}
    if not architecture.keys.inside:
        return inner
    tower = architecture.keys.vision
    if tower and tower.inside in config:
        config[tower.inside] |= SMALL_TOWER | {"out_hidden_size": inner["hidden_size"]}
    return config | {architecture.keys.inside: inner}


def is_fp8(name: str, shape: tuple[int, ...]) -> bool:
    """Whether published block-scaled checkpoints (DeepSeek-V3, Kimi-K2, GLM-5.3-Flash) have this tensor in FP8."""
    if name.startswith("model.visual."):
        return False
    module = name.removesuffix(".weight")
    return name.endswith(".weight") and len(shape) == 2 and not module.endswith(NEVER_FP8)


def to_fp8(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [out, in] to E4M3 and float32 scales a block of 128 x 128."""
    rows, columns = (-(-size // 128) for size in value.shape)
    scale = torch.empty(rows, columns)
    out = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = value[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].float()
            scale[i, j] = block.abs().max() / 448
            out[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def random_tensor(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Values that depend on seed and name only; norms and biases are random too: a mix-up must show."""
    mean, std = (1.0, 0.1) if "norm." in name and name.endswith(".weight") else (0.0, 0.02 if len(shape) > 1 else 0.1)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    return torch.empty(shape, dtype=kind).normal_(mean, std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="a config.json, of any size")
    add("out", type=Path, metavar="OUT", help="folder to create; must be new or empty")
    add("--fp8", action="store_true", help="linear weights in block-scaled FP8")
    add("--lean", action="store_true", help="without optional tensors, such as the MTP layer's copy of the embedding")
    add("--shards", type=int, default=2, metavar="N", help="files to aim at, never more (default 2)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random weights (default 0)")
    add("--set", dest="changes", type=_setting, action="append", default=[], metavar="KEY=JSON", help="a config key")
    args = vars(parser.parse_args())
    try:
        make_tiny(
            json.loads(args.pop("config").read_text()), args.pop("out"), **args | {"changes": dict(args["changes"])}
        )
    except (OSError, ValueError, KeyError) as err:
        parser.error(str(err))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Make a tiny GLM-5.2 checkpoint with random weights, laid out like the published one.

The published config is scaled down; transformers' own GlmMoeDsaForCausalLM, built from it, must hold exactly
the tensors that are written. Added is what transformers drops or changes: the MTP layer (at index
num_hidden_layers, without embeddings of its own), the router in BF16 and its correction bias in F32.
Shards are packed by the published rule, so layers and experts straddle them.

    python scripts/make_tiny_glm.py /tmp/tiny                                # 4 MB, 3 shards
    python scripts/make_tiny_glm.py /tmp/wide --layers 2 --hidden 6144 --moe-intermediate 2048  # 1.5 GB
    python scripts/make_tiny_glm.py /tmp/odd --set index_topk_freq=4 --set n_shared_experts=2

The same options give the same bytes. Memory use is that of one tensor, whatever the size.
"""

import argparse
import json
import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also found when this file is loaded by its path

import glm_layout as layout

# Scaled down, and not worth an option each. The indexer schedule gives full, full, shared, full, shared, ...
SMALL: dict[str, Any] = {
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_skip_topk_offset": 2,
    "index_topk": 64,
    "index_topk_freq": 2,
    "kv_lora_rank": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    "v_head_dim": 64,
}

# The published special tokens, in the published order: the eos ids are the 1st, 8th and 10th.
SPECIAL_TOKENS = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
SPECIAL_TOKENS += ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""

README = """\
---
license: cc0-1.0
library_name: transformers
---
# A tiny random checkpoint in the GLM-5.2 layout

Written by `scripts/make_tiny_glm.py` to test tools with. The weights are random numbers: it says nothing.

{layers} decoder layers ({dense} dense), {mtp} MTP layer, {experts} routed experts, hidden size {hidden};
{tensors:,} tensors, {size:,} bytes.
"""

LICENSE = """\
The weights are random numbers and the tokenizer is a plain table of bytes. Both are dedicated to the public
domain under CC0 1.0: https://creativecommons.org/publicdomain/zero/1.0/
"""


def make_tiny_glm(
    out: Path,
    *,
    layers: int = 5,
    dense_layers: int = 1,
    experts: int = 8,
    hidden: int = 128,
    moe_intermediate: int = 64,
    intermediate: int = 256,
    vocab: int = 512,
    shards: int = 3,
    seed: int = 0,
    mtp: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Write a random checkpoint into the new folder `out`. `overrides` are any other keys of config.json."""
    sizes = {
        "first_k_dense_replace": dense_layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": moe_intermediate,
        "n_routed_experts": experts,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(mtp),
        "vocab_size": vocab,
    }
    config = tiny_config({**sizes, **(overrides or {})})
    found = layout.tensors(config)
    check_against_transformers(config, found)
    packed = layout.pack(found, shard_limit(found, shards))

    layout.empty_folder(out)
    for file, shard in packed.items():
        ordered = layout.stored_order(shard)
        with open(out / file, "wb") as f:
            f.write(layout.header(ordered, {"format": "pt"}))
            for t in ordered:
                f.write(random_tensor(t, config, seed).view(torch.uint8).numpy())
    (out / "model.safetensors.index.json").write_text(layout.index(packed))
    write_side_files(out, config, found)


def tiny_config(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The published config with `SMALL`, then `changes`, and what follows from them. Refuses nonsense."""
    published = json.loads(layout.CONFIG.read_text())
    if unknown := changes.keys() - published.keys():
        raise ValueError(f"not a key of GLM-5.2's config.json: {', '.join(sorted(unknown))}")
    c: dict[str, Any] = published | SMALL | changes
    eos = c["vocab_size"] - len(SPECIAL_TOKENS)
    derived = {
        "eos_token_id": [eos, eos + 7, eos + 9],
        "head_dim": c["qk_nope_head_dim"],
        "indexer_types": layout.indexer_types({**c, "indexer_types": None}),
        "mlp_layer_types": layout.mlp_layer_types({**c, "mlp_layer_types": None}),
        "num_key_value_heads": c["num_attention_heads"],
        "pad_token_id": eos,
        "qk_head_dim": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    }
    c |= {k: v for k, v in derived.items() if k not in changes}

    if eos < 256:
        raise ValueError(f"vocab must be at least {256 + len(SPECIAL_TOKENS)}: bytes and special tokens")
    if not 0 <= c["first_k_dense_replace"] <= c["num_hidden_layers"] or c["num_hidden_layers"] < 1:
        raise ValueError("need at least one layer, and no more dense layers than layers")
    if any(len(c[k]) != c["num_hidden_layers"] for k in ("indexer_types", "mlp_layer_types")):
        raise ValueError("indexer_types and mlp_layer_types need one entry a layer")
    if c["n_routed_experts"] < c["num_experts_per_tok"]:
        raise ValueError(f"need at least {c['num_experts_per_tok']} experts (num_experts_per_tok)")
    for t in layout.tensors(c):
        if len(t.shape) == 2 and t.shape[1] % 32:
            raise ValueError(f"{t.name} would have {t.shape[1]} in_features: MXFP4 needs a multiple of 32")
    return c


def check_against_transformers(config: Mapping[str, Any], found: list[layout.Tensor]) -> None:
    """Raise unless transformers' model for this config saves the same tensors, the MTP layer left aside."""
    with torch.device("meta"):  # names and shapes, no memory
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_dict(dict(config)))
    theirs: dict[str, tuple[int, ...]] = {}
    for name, t in model.state_dict().items():
        # In memory experts are fused, [experts, out, in]; saved, each is a tensor of its own.
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if not fused:
            theirs[name] = tuple(t.shape)
            continue
        parts = fused[2].split("_")
        for e in range(t.shape[0]):
            for part in parts:
                theirs[f"{fused[1]}.{e}.{part}_proj.weight"] = (t.shape[1] // len(parts), t.shape[2])

    mtp = tuple(f"model.layers.{config['num_hidden_layers'] + i}." for i in range(config["num_nextn_predict_layers"]))
    ours = {t.name: t.shape for t in found if not t.name.startswith(mtp)}
    if differ := ours.items() ^ theirs.items():
        raise ValueError(f"transformers expects other tensors: {min(differ)} and {len(differ) - 1} more")


def shard_limit(found: list[layout.Tensor], shards: int) -> int:
    """The smallest size limit (to half a percent) that packs the tensors into at most `shards` files."""
    if shards < 1:
        raise ValueError("shards must be at least 1")
    total = sum(t.nbytes for t in found)
    limit = total // shards
    while len(layout.pack(found, limit)) > shards:
        limit += total // shards // 200 + 1
    return limit


def random_tensor(t: layout.Tensor, config: Mapping[str, Any], seed: int) -> torch.Tensor:
    """Values that depend on seed and name only. Norms and biases are random too: a mix-up must show."""
    mean, std = 0.0, config["initializer_range"]
    if "norm." in t.name:
        mean, std = float(t.name.endswith(".weight")), 0.1
    elif t.name.endswith("e_score_correction_bias"):
        std = 0.1
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {t.name}".encode()))
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[t.dtype]
    return torch.empty(t.shape, dtype=dtype).normal_(mean, std, generator=generator)


def write_side_files(out: Path, config: Mapping[str, Any], found: list[layout.Tensor]) -> None:
    def write_json(name: str, value: Mapping[str, Any]) -> None:
        (out / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

    # Not through transformers, which would change head_dim and add keys.
    write_json("config.json", config)
    generation = {k: config[k] for k in ("eos_token_id", "pad_token_id", "transformers_version")}
    write_json("generation_config.json", {"_from_model_config": True, **generation})
    byte_tokenizer(config["vocab_size"]).save(str(out / "tokenizer.json"))
    write_json(
        "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIAL_TOKENS[0],
            "model_max_length": config["max_position_embeddings"],
            "pad_token": SPECIAL_TOKENS[0],
            "padding_side": "left",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (out / "LICENSE").write_text(LICENSE)
    (out / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    (out / "README.md").write_text(
        README.format(
            layers=config["num_hidden_layers"],
            dense=config["first_k_dense_replace"],
            mtp=config["num_nextn_predict_layers"],
            experts=config["n_routed_experts"],
            hidden=config["hidden_size"],
            tensors=len(found),
            size=sum(t.nbytes for t in found),
        )
    )


def byte_tokenizer(vocab: int) -> Tokenizer:
    """One token a byte, unused tokens up to the size of the vocabulary, special tokens last as published."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<|unused_{i}|>" for i in range(vocab - len(words) - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"the value of {text!r} is not JSON") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder to create; must be new or empty")
    add("--layers", type=int, default=5, metavar="N", help="decoder layers, MTP not counted (default 5)")
    add("--dense-layers", type=int, default=1, metavar="N", help="of these, leading dense ones (default 1)")
    add("--experts", type=int, default=8, metavar="N", help="routed experts in each MoE layer (default 8)")
    add("--hidden", type=int, default=128, metavar="N", help="hidden size (default 128; GLM-5.2: 6144)")
    add("--moe-intermediate", type=int, default=64, metavar="N", help="width of an expert (default 64; 2048)")
    add("--intermediate", type=int, default=256, metavar="N", help="width of dense MLPs (default 256; 12288)")
    add("--vocab", type=int, default=512, metavar="N", help="vocabulary, at least 266 (default 512; 154880)")
    add("--shards", type=int, default=3, metavar="N", help="files to aim at, never more (default 3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random weights (default 0)")
    add("--no-mtp", dest="mtp", action="store_false", help="leave the MTP layer out")
    add(
        "--set",
        dest="overrides",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="any other key of config.json, e.g. num_attention_heads=8; may be repeated",
    )
    args = vars(parser.parse_args())
    args["overrides"] = dict(args["overrides"])
    try:
        make_tiny_glm(**args)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    files = sorted(args["out"].glob("*.safetensors"))
    print(f"{args['out']}: {len(files)} shards, {sum(f.stat().st_size for f in files):,} bytes")


if __name__ == "__main__":
    main()

"""The published tensor layout of GLM-5.2 (model_type glm_moe_dsa): names, shapes, dtypes, shards.

Standard library only. Used by make_tiny_glm.py (a small checkpoint) and make_full_layout.py (the real one,
without data).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "tests/data/glm-5.2/config.json"
INDEX = ROOT / "tests/data/glm-5.2/model.safetensors.index.json.gz"
SHARD_LIMIT = 5 * 1024**3  # bytes of tensors in a published shard
ITEMSIZE = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

Config = Mapping[str, Any]


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


def tensors(config: Config) -> list[Tensor]:
    """Every tensor of the checkpoint that `config` describes, in plain lexicographic order of names."""
    vocab, hidden, layers = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    found = [
        Tensor("lm_head.weight", (vocab, hidden)),
        Tensor("model.embed_tokens.weight", (vocab, hidden)),
        Tensor("model.norm.weight", (hidden,)),
    ]
    for i in range(layers + config["num_nextn_predict_layers"]):
        p = f"model.layers.{i}."
        found += [Tensor(p + name, shape, dtype) for name, shape, dtype in _layer(config, i)]
    return sorted(found)


def _layer(c: Config, i: int) -> Iterator[Tensor]:
    """One layer's tensors, named from the layer on. The MTP layer is full, sparse, and brings its glue."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    q, kv, nope, rope, v = (
        c[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    mtp = i >= c["num_hidden_layers"]

    yield Tensor("input_layernorm.weight", (hidden,))
    yield Tensor("post_attention_layernorm.weight", (hidden,))
    yield Tensor("self_attn.q_a_proj.weight", (q, hidden))
    yield Tensor("self_attn.q_a_layernorm.weight", (q,))
    yield Tensor("self_attn.q_b_proj.weight", (heads * (nope + rope), q))
    yield Tensor("self_attn.kv_a_proj_with_mqa.weight", (kv + rope, hidden))
    yield Tensor("self_attn.kv_a_layernorm.weight", (kv,))
    yield Tensor("self_attn.kv_b_proj.weight", (heads * (nope + v), kv))
    yield Tensor("self_attn.o_proj.weight", (hidden, heads * v))
    if mtp or indexer_types(c)[i] == "full":
        n, d = c["index_n_heads"], c["index_head_dim"]
        yield Tensor("self_attn.indexer.wq_b.weight", (n * d, q))
        yield Tensor("self_attn.indexer.wk.weight", (d, hidden))
        yield Tensor("self_attn.indexer.k_norm.weight", (d,))
        yield Tensor("self_attn.indexer.k_norm.bias", (d,))
        yield Tensor("self_attn.indexer.weights_proj.weight", (n, hidden))

    if not mtp and mlp_layer_types(c)[i] == "dense":
        yield from _mlp("mlp.", hidden, c["intermediate_size"])
    else:
        experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
        yield Tensor("mlp.gate.weight", (experts, hidden))
        yield Tensor("mlp.gate.e_score_correction_bias", (experts,), "F32")
        yield from _mlp("mlp.shared_experts.", hidden, inner * c["n_shared_experts"])
        for e in range(experts):
            yield from _mlp(f"mlp.experts.{e}.", hidden, inner)

    if mtp:  # embed_tokens and shared_head.head are the base model's: not stored again
        yield Tensor("eh_proj.weight", (hidden, 2 * hidden))
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield Tensor(norm + ".weight", (hidden,))


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(prefix + "gate_proj.weight", (inner, hidden))
    yield Tensor(prefix + "up_proj.weight", (inner, hidden))
    yield Tensor(prefix + "down_proj.weight", (hidden, inner))


def indexer_types(c: Config) -> list[str]:
    """Which layers own an indexer ("full"). GLM-5 and 5.1 name neither list nor schedule: all layers do."""
    freq, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
    return c.get("indexer_types") or [
        "shared" if max(i - offset + 1, 0) % freq else "full" for i in range(c["num_hidden_layers"])
    ]


def mlp_layer_types(c: Config) -> list[str]:
    dense, layers = c["first_k_dense_replace"], c["num_hidden_layers"]
    return c.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]


def pack(found: Iterable[Tensor], limit: int) -> dict[str, list[Tensor]]:
    """Greedy shards, as published: a tensor that would pass `limit` bytes opens the next shard."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for t in found:
        if shards[-1] and size + t.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += t.nbytes
    n = len(shards)
    return {f"model-{k:05d}-of-{n:05d}.safetensors": shard for k, shard in enumerate(shards, 1)}


def stored_order(shard: Iterable[Tensor]) -> list[Tensor]:
    """The order inside a file that safetensors itself writes: wide dtypes first, then names."""
    return sorted(shard, key=lambda t: (-ITEMSIZE[t.dtype], t.name))


def header(shard: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors header of a file that stores its tensors in the given order, length word included."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for t in shard:
        start, end = end, end + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index(shards: Mapping[str, Iterable[Tensor]]) -> str:
    """model.safetensors.index.json in the published form: only total_size as metadata, no final newline."""
    found = sorted((t, file) for file, shard in shards.items() for t in shard)
    total = sum(t.nbytes for t, _ in found)
    weight_map = {t.name: file for t, file in found}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def empty_folder(out: Path) -> None:
    """Create `out`, or refuse it: nothing is ever written over."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: name a new one")
    out.mkdir(parents=True, exist_ok=True)

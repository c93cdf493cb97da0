#!/usr/bin/env python3
"""How much does a recipe cost? Evaluate small GLM-5.2-layout checkpoints, bf16 or MXFP4, on the CPU.

    python scripts/eval_tiny.py moe=out/moe routed=out/routed --json evals.json

prints one Markdown table with a row for the reference (default: the trained tiny checkpoint of the tests)
and one for each NAME=FOLDER:

  loss, MTP loss   mean cross-entropy of the next token; of the one after it, by the MTP layer
  mean KL, MTP KL  mean KL divergence of the reference's distribution from the checkpoint's
  top-1 agreement  how often both find the same token the likeliest
  MTP acceptance   how often the MTP layer's likeliest token is its own base model's

Only the weights are quantized here: an engine that also quantizes activations adds its own error. Arithmetic
is float32, sums are float64, the result is deterministic. A folder is a checkpoint in the published layout:
weights bf16 or f32, or MXFP4 as `X.weight` uint8 [out, in/2] (low nibble first) with `X.weight_scale` uint8
[out, in/32].
"""

import argparse
import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

DATA = Path(__file__).resolve().parent.parent / "tests/data/tiny-glm"
BATCH = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [out, in/2] and uint8 [out, in/32] -> float32 [out, in]."""
    rows = packed.shape[0]
    if packed.shape[1] != 16 * scale.shape[1] or rows != scale.shape[0]:
        raise ValueError(f"weight {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit together")
    if (scale == 255).any():
        raise ValueError("a scale is NaN (E8M0 byte 255)")
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, -1, 32).long()
    exponents = scale.to(torch.int32) - 127
    return torch.ldexp(table[codes], exponents[..., None]).view(rows, -1)


class MTP(nn.Module):
    """From the hidden state at t and the token at t + 1 to the logits of the token at t + 2.

    Embedding, lm_head and rotary table are the base model's, whose hidden state comes after its final norm.
    """

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        c = copy.deepcopy(config)
        c.num_hidden_layers += 1
        c.mlp_layer_types = [*c.mlp_layer_types, "sparse"]
        c.indexer_types = [*c.indexer_types, "full"]
        c.layer_types = [*c.layer_types, "indexed_attention"]
        self.enorm = GlmMoeDsaRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = GlmMoeDsaRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(c, c.num_hidden_layers - 1)
        self.shared_head = nn.ModuleDict({"norm": GlmMoeDsaRMSNorm(c.hidden_size, c.rms_norm_eps)})

    def forward(self, base: GlmMoeDsaForCausalLM, hidden: Tensor, next_ids: Tensor) -> Tensor:
        embedded = F.embedding(next_ids, base.model.embed_tokens.weight)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        batch, length = next_ids.shape
        mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
        positions = torch.arange(length)[None]
        rotary = base.model.rotary_emb(x, positions)
        x, _ = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return base.lm_head(self.shared_head["norm"](x))


class Model(NamedTuple):
    base: GlmMoeDsaForCausalLM
    mtp: MTP | None
    mxfp4_weights: int


def load_model(folder: Path) -> Model:
    settings = json.loads((folder / "config.json").read_text())
    for key in ("quantization_config", "architectures", "model_type", "transformers_version", "dtype"):
        settings.pop(key, None)
    config = GlmMoeDsaConfig(**settings)
    tensors, quantized = load_tensors(folder)

    prefix = f"model.layers.{config.num_hidden_layers}."
    mtp_state = {_mtp_name(k.removeprefix(prefix)): t for k, t in tensors.items() if k.startswith(prefix)}
    base_state = {k: t for k, t in tensors.items() if not k.startswith(prefix)}
    base = GlmMoeDsaForCausalLM(config).float().eval()
    base.load_state_dict(fuse_experts(base_state, config.n_routed_experts))
    mtp = None
    if mtp_state:
        mtp = MTP(base.config).float().eval()
        mtp.load_state_dict(fuse_experts(mtp_state, config.n_routed_experts))
    return Model(base, mtp, quantized)


def load_tensors(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Every tensor in float32, and how many of them were MXFP4. Files and index must agree."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    raw: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                if weight_map.get(name) != file:
                    raise ValueError(f"{folder}: {name} is in {file}, the index says {weight_map.get(name)}")
                raw[name] = f.get_tensor(name)
    if missing := weight_map.keys() - raw.keys():
        raise ValueError(f"{folder}: {len(missing)} tensors of the index are in no file, e.g. {min(missing)}")

    tensors: dict[str, Tensor] = {}
    quantized = 0
    for name, t in raw.items():
        if name.endswith(".weight_scale"):
            continue
        if t.dtype == torch.uint8:
            if name + "_scale" not in raw:
                raise ValueError(f"{folder}: {name} is uint8 but has no {name}_scale")
            tensors[name] = decode_mxfp4(t, raw[name + "_scale"])
            quantized += 1
        elif t.dtype in (torch.bfloat16, torch.float32):
            tensors[name] = t.float()
        else:
            raise ValueError(f"{folder}: {name} is {t.dtype}; known are bf16, f32 and MXFP4 (uint8)")
    return tensors, quantized


def fuse_experts(state: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """The checkpoint's tensors, one an expert, as transformers holds them: all experts in one."""
    fused: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, t in state.items():
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+\.\w+_proj)\.weight", name):
            parts.setdefault(match[1], {})[match[2]] = t
        else:
            fused[name] = t
    for prefix, part in parts.items():
        if len(part) != 3 * experts:
            raise ValueError(f"{prefix} has {len(part)} tensors, not {3 * experts}")
        gate_up = [torch.cat((part[f"{e}.gate_proj"], part[f"{e}.up_proj"])) for e in range(experts)]
        fused[prefix + ".gate_up_proj"] = torch.stack(gate_up)
        fused[prefix + ".down_proj"] = torch.stack([part[f"{e}.down_proj"] for e in range(experts)])
    return fused


def _mtp_name(name: str) -> str:
    glue = name.split(".")[0] in ("enorm", "hnorm", "eh_proj", "shared_head")
    return name if glue else "layer." + name


def load_chunks(tokenizer: Path, text: Path, length: int) -> Tensor:
    """The text as rows of `length` tokens, each a context of its own. A rest that fills no row is dropped."""
    with open(text, encoding="utf-8", newline="") as f:
        ids = Tokenizer.from_file(str(tokenizer)).encode(f.read(), add_special_tokens=False).ids
    rows = len(ids) // length
    if not rows:
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than one context of {length}")
    return torch.tensor(ids[: rows * length]).view(rows, length)


@dataclass
class Row:
    """A line of the table. Sums while batches come in, means after `finish`."""

    checkpoint: str
    mxfp4_weights: int
    tokens: int = 0
    loss: float = 0.0
    perplexity: float = 0.0
    mean_kl: float = 0.0
    top1_agreement: float = 0.0
    mtp_loss: float | None = None
    mtp_acceptance: float | None = None
    mtp_kl: float | None = None


class Logits(NamedTuple):
    base: Tensor
    mtp: Tensor | None


def run(model: Model, ids: Tensor) -> Logits:
    hidden = model.base.model(ids, use_cache=False).last_hidden_state
    base = model.base.lm_head(hidden).float()
    return Logits(base, model.mtp(model.base, hidden[:, :-1], ids[:, 1:]).float() if model.mtp else None)


@torch.no_grad()
def evaluate(reference: Model, others: Mapping[str, Model], chunks: Tensor) -> list[Row]:
    """The reference's row first. It runs once for each batch, whatever the number of checkpoints."""
    models = {"bf16 reference": reference, **others}
    rows = [Row(name, model.mxfp4_weights) for name, model in models.items()]
    for ids in chunks.split(BATCH):
        expected = run(reference, ids)
        for row, model in zip(rows, models.values(), strict=True):
            add_batch(row, expected if model is reference else run(model, ids), expected, ids)
    for row in rows:
        finish(row, *chunks.shape)
    return rows


def add_batch(row: Row, got: Logits, expected: Logits, ids: Tensor) -> None:
    row.loss += _nll(got.base[:, :-1], ids[:, 1:])
    row.mean_kl += _kl(expected.base, got.base)
    row.top1_agreement += _matches(expected.base, got.base)
    if got.mtp is not None:
        row.mtp_loss = (row.mtp_loss or 0.0) + _nll(got.mtp[:, :-1], ids[:, 2:])
        row.mtp_acceptance = (row.mtp_acceptance or 0.0) + _matches(got.mtp, got.base[:, 1:])
        if expected.mtp is not None:
            row.mtp_kl = (row.mtp_kl or 0.0) + _kl(expected.mtp, got.mtp)


def finish(row: Row, chunks: int, length: int) -> None:
    """Sums to means. A context of n tokens has n - 1 targets, and n - 2 for the MTP layer's loss."""
    row.tokens = chunks * (length - 1)
    row.loss /= row.tokens
    row.perplexity = math.exp(row.loss)
    row.mean_kl /= chunks * length
    row.top1_agreement /= chunks * length
    if row.mtp_loss is not None and row.mtp_acceptance is not None:
        row.mtp_loss /= chunks * (length - 2)
        row.mtp_acceptance /= row.tokens
    if row.mtp_kl is not None:
        row.mtp_kl /= row.tokens


def _nll(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").double().item()


def _kl(expected: Tensor, got: Tensor) -> float:
    p, q = expected.log_softmax(-1).double(), got.log_softmax(-1).double()
    return (p.exp() * (p - q)).sum().item()


def _matches(a: Tensor, b: Tensor) -> int:
    return int((a.argmax(-1) == b.argmax(-1)).sum().item())


def table(rows: Iterable[Row]) -> str:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [
        "| checkpoint | MXFP4 weights | loss | mean KL | top-1 agreement | MTP loss | MTP acceptance | MTP KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [r.checkpoint, str(r.mxfp4_weights), number(r.loss, 4), number(r.mean_kl, 5)]
        cells += [number(r.top1_agreement, 4), number(r.mtp_loss, 4), number(r.mtp_acceptance, 4)]
        lines.append(f"| {' | '.join([*cells, number(r.mtp_kl, 5)])} |")
    return "\n".join(lines)


def _folder(text: str) -> Path:
    if not Path(text, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkpoint: it has no config.json")
    return Path(text)


def _named_folder(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    return (name, _folder(folder)) if equals else (Path(text).resolve().name, _folder(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="*",
        type=_named_folder,
        metavar="NAME=FOLDER",
        help="checkpoint to evaluate, and its name in the table; none: the reference only",
    )
    add(
        "--reference",
        type=_folder,
        default=DATA / "checkpoint",
        metavar="FOLDER",
        help="bf16 checkpoint that the others are compared with; its tokenizer is used for all",
    )
    add("--text", type=Path, default=DATA / "eval.txt", metavar="FILE", help="text to evaluate on, UTF-8")
    add("--seq-len", type=int, default=256, metavar="N", help="tokens in a context (default 256)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="also write the rows to this file, unrounded")
    args = parser.parse_args()
    if len(dict(args.checkpoints)) < len(args.checkpoints):
        parser.error("two checkpoints have the same name")
    if args.seq_len < 3:
        parser.error("--seq-len must be at least 3")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)

    try:
        chunks = load_chunks(args.reference / "tokenizer.json", args.text, args.seq_len)
        reference = load_model(args.reference)
        others = {name: load_model(folder) for name, folder in args.checkpoints}
    except (OSError, ValueError) as e:
        parser.error(str(e))
    rows = evaluate(reference, others, chunks)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

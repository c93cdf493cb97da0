"""Tiny checkpoints of the sibling models, quantized by glmquant, whole and with one thing wrong.

Rope scaling is left out of the configs: it owns no tensor, and sglang computes YaRN's table on a GPU only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import glmquant
from glmquant.engines.targets import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
CONFIGS = ROOT / "tests/data/siblings"
# 256 wide experts need no padding in either engine, which would hide what happens at the real sizes.
SMALL: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "rope_scaling": None}
# sglang considers fusing the shared expert with 256 experts or 384; DeepSeek's MTP layer has another name at 61.
FUSING = SMALL | {"hidden_size": 64, "n_routed_experts": 256, "num_hidden_layers": 2}
AT_61 = FUSING | {"num_hidden_layers": 61, "first_k_dense_replace": 60}


@dataclass(frozen=True)
class Sibling:
    """A config of tests/data/siblings, with what is changed in it."""

    name: str
    config: str
    changes: dict[str, Any] = field(default_factory=lambda: SMALL)
    engines: tuple[str, ...] = ("sglang", "vllm")
    form: str = "auto"

    @property
    def has_mtp(self) -> bool:
        return bool(json.loads((CONFIGS / f"{self.config}.json").read_text()).get("num_nextn_predict_layers"))

    def source(self, folder: Path) -> Path:
        from make_tiny import make_tiny

        make_tiny(json.loads((CONFIGS / f"{self.config}.json").read_text()), folder, changes=self.changes)
        return folder


SIBLINGS = {
    found.name: found
    for found in (
        Sibling("deepseek_v3", "deepseek_v3"),
        Sibling("deepseek_v3 256 experts", "deepseek_v3", FUSING),
        Sibling("deepseek_v3 256 experts 61 layers", "deepseek_v3", AT_61),
        Sibling("deepseek_v32", "deepseek_v32"),
        Sibling("deepseek_v32 256 experts", "deepseek_v32", FUSING),
        Sibling("kimi_k2", "kimi_k2"),
        Sibling("kimi_k2 384 experts", "kimi_k2", FUSING | {"n_routed_experts": 384}),
        Sibling("qwen3_moe", "qwen3_moe"),
        # sglang builds experts on every layer of a Qwen3 model; vLLM asks for gate_up_proj, which only a regex can name
        Sibling("qwen3_moe dense layer", "qwen3_moe", SMALL | {"mlp_only_layers": [1]}, ("vllm",), "regex"),
        Sibling("glm-5", "glm-5", {"hidden_size": 256, "moe_intermediate_size": 256}),
    )
}
ENGINES = (Target("sglang", "0.5.23"), Target("vllm", "0.33.0"))


def targets(sibling: Sibling) -> str:
    return ",".join(f"{t.engine}=={t.release}" for t in ENGINES if t.engine in sibling.engines)


def quantized(sibling: Sibling, source: Path, out: Path, **options: Any) -> Path:
    glmquant.quantize(source, out, targets=targets(sibling), form=sibling.form, **options)
    return out


Change = Callable[[Path], None]


def with_list(change: Callable[[list[str]], list[str]]) -> Change:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["exclude"] = change(config["quantization_config"]["exclude"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def wrong_lists(good: list[str]) -> Iterator[tuple[str, Change]]:
    """Lists with one thing wrong: each kind of entry taken away, and entries for packed modules added."""
    yield "empty", with_list(lambda found: [])
    tails = dict.fromkeys(re.sub(r"^model\.(layers\.\d+\.|decoder\.)?", "", entry) for entry in good)
    for tail in tails:
        kept = [entry for entry in good if not entry.endswith(tail)]
        yield f"without {tail}", with_list(lambda found, kept=kept: kept)
    for entry in (
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.experts.0.down_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
        r"re:model\.layers\.1\.mlp\.shared_experts\..*",
        r"re:.*experts$",
        "model.layers.1.mlp.gate_up_proj",
    ):
        yield f"with {entry}", with_list(lambda found, entry=entry: [*found, entry])


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load all tensors, change them, and write them as one shard."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()


def wrong_tensors(names: list[str]) -> Iterator[tuple[str, Change]]:
    """One tensor of each kind missing, one unknown."""
    seen: dict[str, str] = {}
    for name in sorted(names):
        kind = re.sub(r"experts\.\d+\.", "experts.", re.sub(r"^model\.layers\.[0-2]\.", "main ", name))
        seen.setdefault(kind, name)
    for name in seen.values():
        if "rotary" not in name and not re.search(r"layers\.\d+\.(embed_tokens|shared_head\.head)", name):
            yield f"no {name}", lambda folder, name=name: rewrite(folder, lambda found: found.pop(name))
    yield "unknown", lambda folder: rewrite(folder, _unknown)


def _unknown(tensors: dict[str, Any]) -> None:
    import torch

    tensors["model.layers.1.self_attn.surprise.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)


def copy(folder: Path, out: Path, change: Change) -> Path:
    shutil.copytree(folder, out)
    change(out)
    return out

"""What the tests of serving share: short checkpoints with GLM-5.2's real widths, and made-up installed packages."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from glm_layout import CONFIG, tensors
from make_full_output import make_full_output
from support import new_folder

FP4 = "torch.float4_e2m1fn_x2"
UNTUNED = (
    "token",
    "model_dim",
    "inter_dim",
    "expert",
    "topk",
    "act_type",
    "dtype",
    "q_dtype_a",
    "q_dtype_w",
    "q_type",
    "use_g1u1",
    "doweight_stage1",
)

# get_padded_M as four generations of AITER have it (what it computes, not its text).
ROUNDING = {
    "0.1.7": """
def get_padded_M(M):
    if 1 <= M <= 16:
        return 16
    if M < 1024:
        return 1 << (M - 1).bit_length()
    return 1024
""",
    "early 2026": """
def get_padded_M(M):
    if M < 16 or M < 1024:
        return 1 << (M - 1).bit_length()
    return 1024 if M < 2048 else 2048 if M < 16384 else 16384
""",
    "spring 2026": """
def get_padded_M(M):
    if M == 20480:
        return 20480
    return nextPow2(M) if M < 131072 else 131072
""",
    "summer 2026": """
_PADDED_M_TIERS = [32768, 131072]
def get_padded_M(M):
    if M < _PADDED_M_TIERS[0]:
        return nextPow2(M)
    return max(tier for tier in _PADDED_M_TIERS if tier <= M)
""",
}
# The lookup's exceptions that a release announces in its source.
EXCEPTIONS = """
def lookup(topk, is_ep):
    topk -= int(is_ep)
    for fallback_tier in ():
        pass
"""


@cache
def short_checkpoint(recipe: str) -> Path:
    """GLM-5.2 cut to 5 layers and the MTP layer, quantized: true headers, no data. Nobody writes into it."""
    config = json.loads(CONFIG.read_text())
    config |= {key: config[key][:5] for key in ("mlp_layer_types", "indexer_types")} | {"num_hidden_layers": 5}
    source = new_folder("short")
    source.mkdir()
    header, end = {}, 0
    for tensor in tensors(config):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    body = json.dumps(header).encode()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(body).to_bytes(8, "little") + body)
        file.truncate(8 + len(body) + end)
    (source / "config.json").write_text(json.dumps(config))
    out = new_folder(f"short-{recipe}")
    make_full_output(source, out, recipe)
    return out


def with_exclude(recipe: str, change: Iterable[str] | None = None, add: Iterable[str] = ()) -> Path:
    """A short checkpoint with another exclude list: `change` instead, `add` in addition."""
    source, out = short_checkpoint(recipe), new_folder("changed")
    out.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (out / path.name).hardlink_to(path)
        else:
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    block = config["quantization_config"]
    block["exclude"] = [*(block["exclude"] if change is None else change), *add]
    (out / "config.json").write_text(json.dumps(config))
    return out


def table(columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def tuned(token: int, inter: int, expert: int, topk: int, **more: object) -> dict[str, object]:
    """A row of a tuned table for GLM-5.2's MXFP4 experts on MI355X."""
    values = (token, 6144, inter, expert, topk, "ActivationType.Silu", "torch.bfloat16", FP4, FP4)
    row = dict(zip(UNTUNED, (*values, "QuantType.per_1x32", 1, 0), strict=True))
    return {"gfx": "gfx950", "cu_num": 256, **row, "kernelName1": "one", "kernelName2": "two", "us": 2.5, **more}


def published_rows() -> list[dict[str, object]]:
    """The keys of aiter/configs/model_configs/glm5_fp4_tuned_fmoe.csv at ROCm/aiter 01ff06ed7fc8 (2026)."""
    powers = [2**n for n in range(16)]
    fused = [tuned(token, inter, 257, 9) for inter in (2048, 1024, 512, 256) for token in powers]
    return fused + [tuned(token, 512, 256, 8) for token in (2, 4, 16, 32, 64)]


def install_aiter(
    root: Path,
    rows: Iterable[Mapping[str, object]] = (),
    rounding: str = "summer 2026",
    gfx: bool = True,
    more: Iterable[str] = (),
    untuned: Iterable[str] = UNTUNED,
) -> Path:
    """A package `aiter` that cannot be imported: its main table is empty, `rows` are in one of a model's."""
    columns = [*(["gfx"] if gfx else []), "cu_num", *UNTUNED, *more, "kernelName1", "kernelName2", "us"]
    configs = root / "aiter/configs"
    (configs / "model_configs").mkdir(parents=True)
    (root / "aiter/__init__.py").write_text("raise SystemExit('aiter was imported')\n")
    (root / "aiter/fused_moe.py").write_text(ROUNDING[rounding] + EXCEPTIONS * (rounding == "summer 2026"))
    (configs / "tuned_fmoe.csv").write_text(table(columns, []))
    (configs / "untuned_fmoe.csv").write_text(table(untuned, []))
    kept = [{name: value for name, value in row.items() if name in columns} for row in rows]
    (configs / "model_configs/glm5_fp4_tuned_fmoe.csv").write_text(table(columns, kept))
    return root


def install(root: Path, name: str, release: str, files: Mapping[str, str] = {}, requires: Iterable[str] = ()) -> Path:
    """A package that cannot be imported, with metadata as pip leaves it."""
    package = root / name.replace("-", "_")
    package.mkdir(parents=True, exist_ok=True)
    for path, text in {"__init__.py": f"raise SystemExit('{name} was imported')\n", **files}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    info = root / f"{name}-{release}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n{needs}")
    return root

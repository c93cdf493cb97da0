"""Helpers to hand-make, edit and compare checkpoint folders. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}

Tensors = Mapping[str, tuple[str, list[int]]]


def raw_shard(header: str | bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file with exactly this header, right or wrong."""
    text = json.dumps(header) if isinstance(header, dict) else header
    body = text.encode() if isinstance(text, str) else text
    return len(body).to_bytes(8, "little") + body + data


def shard(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """A well-formed file of zeros: name -> (dtype, shape)."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + WIDTH[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return raw_shard(header, bytes(end))


def write_checkpoint(folder: Path, shards: Mapping[str, Tensors], **config: Any) -> Path:
    """A well-formed folder: config.json, index and shards."""
    folder.mkdir()
    for file, tensors in shards.items():
        (folder / file).write_bytes(shard(tensors))
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", **config}))
    return folder


@contextmanager
def edit_json(path: Path) -> Iterator[dict[str, Any]]:
    """Change a JSON file in place."""
    value = json.loads(path.read_bytes())
    yield value
    path.write_text(json.dumps(value))


@contextmanager
def edit_header(path: Path) -> Iterator[dict[str, Any]]:
    """Change a shard's header in place; the data stays."""
    raw = path.read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data_start])
    yield header
    path.write_bytes(raw_shard(header, raw[data_start:]))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }

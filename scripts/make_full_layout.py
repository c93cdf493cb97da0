#!/usr/bin/env python3
"""Write the real GLM-5.2 checkpoint without its data: config, index and 282 sparse shards.

Every shard has its true header (names, dtypes, shapes, offsets, size in bytes) and a hole in place of the
tensors. So a tool that reads headers only can be run on all 59,585 tensors in a second, on any disk that
knows sparse files: 1.5 TB long, a few MB on disk. All weights read as zero. Needs Python only.

    python scripts/make_full_layout.py /tmp/glm-5.2
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also found when this file is loaded by its path

import glm_layout as layout


def make_full_layout(out: Path, *, config: Path = layout.CONFIG, index: Path = layout.INDEX) -> None:
    """Write config.json, model.safetensors.index.json and sparse shards into the new folder `out`."""
    config_bytes = config.read_bytes()
    index_bytes = gzip.decompress(index.read_bytes()) if index.suffix == ".gz" else index.read_bytes()
    shards = _shards(_parse(config, config_bytes), _parse(index, index_bytes))

    layout.empty_folder(out)
    for file, shard in shards.items():
        # As published: no __metadata__. With it, no file would have its published size.
        head = layout.header(layout.stored_order(shard))
        with open(out / file, "wb") as f:
            f.write(head)
            f.truncate(len(head) + sum(t.nbytes for t in shard))
    (out / "config.json").write_bytes(config_bytes)
    (out / "model.safetensors.index.json").write_bytes(index_bytes)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _shards(config: dict[str, Any], index: dict[str, Any]) -> dict[str, list[layout.Tensor]]:
    """File -> tensors. Names are known twice (config, index), and so is the size: they must agree."""
    found = layout.tensors(config)
    weight_map = index["weight_map"]
    if differ := weight_map.keys() ^ {t.name for t in found}:
        raise ValueError(f"config and index differ in {len(differ)} tensor names, e.g. {min(differ)}")
    total = sum(t.nbytes for t in found)
    if total != index["metadata"]["total_size"]:
        raise ValueError(f"tensors take {total:,} bytes, the index says {index['metadata']['total_size']:,}")

    shards: dict[str, list[layout.Tensor]] = {file: [] for file in sorted(set(weight_map.values()))}
    for t in found:
        shards[weight_map[t.name]].append(t)
    return shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create; must be new or empty")
    parser.add_argument("--config", type=Path, default=layout.CONFIG, help="config.json (default: GLM-5.2's)")
    parser.add_argument(
        "--index", type=Path, default=layout.INDEX, help="its index, .json or .json.gz (default: GLM-5.2's)"
    )
    args = parser.parse_args()
    try:
        make_full_layout(args.out, config=args.config, index=args.index)
    except KeyError as e:
        parser.error(f"{args.config} or {args.index} lacks the key {e}")
    except (OSError, ValueError) as e:
        parser.error(str(e))
    shards = list(args.out.glob("*.safetensors"))
    length = sum(f.stat().st_size for f in shards)
    used = sum(f.stat().st_blocks * 512 for f in shards)
    print(f"{args.out}: {len(shards)} shards, {length:,} bytes long, {used:,} bytes on disk")


if __name__ == "__main__":
    main()

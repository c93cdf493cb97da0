#!/usr/bin/env python3
"""Write the headers of what `glmquant quantize` would write, without the data.

    make_full_output.py SRC OUT [--recipe moe]

SRC is a checkpoint, for example the full-size layout of make_full_layout.py. OUT gets true headers over holes, the
index and config.json, so that `glmquant validate OUT` runs on GLM-5.2's full size on any disk.
"""

import argparse
import json
import sys
from pathlib import Path

import glmquant
from glmquant.mxfp4.config import quantization_config


def make_full_output(source: Path, out: Path, recipe: str | None = None) -> glmquant.PlanResult:
    """Write the planned output's headers, index and config to `out`, a new or empty folder; return the plan."""
    result = glmquant.plan(source, recipe=recipe)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    for shard in result.plan.shards:
        with open(out / shard.file, "wb") as handle:
            handle.write(shard.header)
            handle.truncate(shard.file_size)
    index = {"metadata": {"total_size": result.plan.total_size}, "weight_map": result.plan.weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {**result.checkpoint.config, "quantization_config": quantization_config(result.exclusions.texts, "0.13")}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--recipe", help="moe (default), moe-mtp, routed, routed-mtp, or a recipe file")
    args = parser.parse_args()
    try:
        result = make_full_output(args.source, args.out, args.recipe)
    except (glmquant.GlmquantError, OSError) as err:
        print(f"make_full_output: error: {err}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(result.plan.shards)} shards, {len(result.plan.weight_map):,} tensors, no data")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

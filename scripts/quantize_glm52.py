#!/usr/bin/env python3
"""Quantize GLM-5.2 to MXFP4: the script to copy and adapt.

    quantize_glm52.py /models/GLM-5.2 /models/GLM-5.2-MXFP4 [--recipe moe-mtp] [--device cuda]

Needs the bf16 checkpoint on disk (1.5 TB, e.g. `hf download zai-org/GLM-5.2 --local-dir /models/GLM-5.2`) and about
0.44 TB for the output. Memory stays below 2 GB. `glmquant quantize` does the same from the shell.
"""

import argparse
import logging
import sys

import glmquant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("output", metavar="OUT")
    parser.add_argument("--recipe", default="moe")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    # Which engine releases must load the result. Naming fewer gives the exclude list more freedom.
    targets = "sglang>=0.5.13"

    try:
        # 1. Plan from headers alone (seconds): sizes to the byte, and whether a list exists for all targets.
        planned = glmquant.plan(args.source, recipe=args.recipe, targets=targets)
        print(f"{planned.plan.bytes_in:,} bytes -> {planned.plan.total_size:,}, disk {planned.disk_needed:,}")
        for need in planned.exclusions.needs:
            print(f"note: {need}")  # launch flags and speed: they are in the output's README.md too

        # 2. Quantize, shard by shard. Stops at the first problem; without config.json nothing takes it for finished.
        done = glmquant.quantize(
            args.source,
            args.output,
            recipe=args.recipe,
            targets=targets,
            device=args.device,  # "cpu": the fused kernel, Quark's bits; "cuda" (ROCm too): Quark itself
            base_model="zai-org/GLM-5.2",
            progress=True,
        )
    except glmquant.GlmquantError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1

    # 3. The report is the validator's, from the files on disk.
    for finding in done.report.findings:
        print(f"{finding.severity}: {finding.code}: {finding.message} {finding.fix}")
    return 0 if done.report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

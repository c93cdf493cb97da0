#!/usr/bin/env python3
"""What does each recipe cost? Quantize the trained tiny checkpoint of the tests with all of them and evaluate.

    python scripts/accuracy_tiny.py

prints the Markdown table of eval_tiny.py, whose docstring explains the columns. 1 to 2 minutes.
"""

import argparse
import tempfile
from pathlib import Path

import eval_tiny
import torch

import glmquant
from glmquant.recipe import load_architecture


def main() -> None:
    recipes = list(load_architecture("glm_moe_dsa").recipes)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"recipes (default: {' '.join(recipes)})")
    parser.add_argument("--contexts", type=int, metavar="N", help="evaluate on the first N contexts of 256 tokens only")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices are small: two threads take twice the CPU time and no less of yours
    torch.use_deterministic_algorithms(True)
    print(eval_tiny.table(accuracy(args.recipes or recipes, args.contexts)))


def accuracy(recipes: list[str], contexts: int | None = None) -> list[eval_tiny.Row]:
    """One row for the bf16 checkpoint and one a recipe."""
    source = eval_tiny.DATA / "checkpoint"
    chunks = eval_tiny.load_chunks(source / "tokenizer.json", eval_tiny.DATA / "eval.txt", 256)
    models = {}
    with tempfile.TemporaryDirectory() as work:
        for recipe in recipes:
            result = glmquant.quantize(source, Path(work, recipe), recipe=recipe)
            models[recipe] = eval_tiny.load_model(result.output)
    return eval_tiny.evaluate(eval_tiny.load_model(source), models, chunks[:contexts])


if __name__ == "__main__":
    main()

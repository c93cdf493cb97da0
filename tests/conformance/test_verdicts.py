"""What the validator says of a checkpoint is what the engines' loaders do with it.

Over checkpoints with one thing wrong each, and over random formats with random lists: no crash and no silent damage
missed, no false alarm. Each test prints its confusion matrix.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ckpt
import harness
import pytest
import verdict_cases as vc
from test_differential import random_entry

from glmquant.checkpoint.formats import stored_formats
from glmquant.checkpoint.source import inspect
from glmquant.engines.targets import Target
from glmquant.findings import Report
from glmquant.validator import validate_folder

pytestmark = pytest.mark.conformance

SEED = int(os.environ.get("GLMQUANT_VERDICT_SEED", "20261130"))
RANDOM_CASES = int(os.environ.get("GLMQUANT_VERDICT_CASES", "100"))
# Each release takes every second case, neighbours the others, to stay within minutes; 1 gives all cases to all.
STRIDE = int(os.environ.get("GLMQUANT_VERDICT_STRIDE", "2"))
# One of each way that sglang makes the draft's list and decides on fusion, and vLLM.
RELEASES = [
    Target(engine, release)
    for engine, release in (("sglang", "0.5.15.post1"), ("sglang", "0.5.19"), ("sglang", "0.5.23"), ("vllm", "0.33.0"))
    if release in harness.releases(engine)
]
PROCESSES = 2


def load(target: Target, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """harness.load, by several processes."""
    parts = [folders[i::PROCESSES] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        answers = list(pool.map(lambda part: harness.load(target.engine, target.release, part), parts))
    return [answers[i % PROCESSES][i // PROCESSES] for i in range(len(folders))]


def real_verdict(answer: dict[str, Any], damaged: bool, could_fuse: Iterable[str]) -> str:
    """`damaged`: a tensor is not what its place needs, so that a load without an error is wrong all the same."""
    roles = [answer["target"], answer["draft"]]
    if not all(role["loaded"] for role in roles):
        return "crash"
    if damaged or any(role["unfilled"] or role["odd_copies"] or role["experts"]["different"] for role in roles):
        return "silent misload"
    return "slow" if any(not answer[role]["fused_shared_experts"] for role in could_fuse) else "ok"


def our_verdict(report: Report, target: Target) -> str:
    """Without launch flags, as the harness loads."""
    return "crash" if str(target) in report.flags else report.verdicts[str(target)].value


def could_fuse(folder: Path, baseline: dict[str, Any]) -> list[str]:
    """Roles whose shared experts have the format of their routed experts, in a release that fuses such ones."""
    checkpoint, _ = inspect(folder)
    if checkpoint.config["n_routed_experts"] != 256:
        return []
    formats = stored_formats(checkpoint.tensors, vc.ARCHITECTURE.lookups)
    kinds: dict[str, set[str]] = {"target": set(), "draft": set()}
    for module, kind in formats.items():
        if "experts." in module:
            kinds["draft" if module.startswith(vc.MTP) else "target"].add(kind)
    if len(kinds["target"]) > 1:  # one answer for the whole model, and here it must be no
        return []
    return [role for role, found in kinds.items() if len(found) == 1 and baseline[role]["fused_shared_experts"]]


def compare(target: Target, names: Sequence[str], folders: Sequence[Path], damaged: Sequence[bool]) -> None:
    answers = load(target, folders)
    baseline = answers[0]
    matrix: Counter[tuple[str, str]] = Counter()
    wrong = []
    for name, folder, answer, hurt in zip(names, folders, answers, damaged, strict=True):
        real = real_verdict(answer, hurt, could_fuse(folder, baseline))
        report = validate_folder(folder, [target])
        ours = our_verdict(report, target)
        matrix[ours, real] += 1
        if ours != real:
            errors = {role: answer[role].get("error") for role in ("target", "draft")}
            wrong.append(f"{name}: we say {ours} {[f.code for f in report.findings]}, it does {real} {errors}")
    words = ("ok", "slow", "silent misload", "crash")
    print(f"\n{target}, {len(names)} checkpoints; rows: ours, columns: {', '.join(words)}")
    for ours in words:
        print(f"  {ours:15}" + "".join(f"{matrix[ours, real]:6}" for real in words))
    assert not wrong, f"{target}: {len(wrong)} of {len(names)} differ:\n" + "\n".join(wrong[:40])


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[vc.Case], list[Path]]:
    root = tmp_path_factory.mktemp("mutated")
    found = list(vc.cases())
    assert found[0].name == "good moe-mtp 256"  # the baseline: what a release fuses when it may
    return found, [case.write(root / str(i)) for i, case in enumerate(found)]


@pytest.mark.parametrize("target", RELEASES, ids=str)
def test_one_thing_wrong(target: Target, mutated: tuple[list[vc.Case], list[Path]]) -> None:
    mine = RELEASES.index(target) % STRIDE
    seen = [
        (case, folder)
        for number, (case, folder) in enumerate(zip(*mutated, strict=True))
        if target.engine not in case.unseen and (number % STRIDE == mine or number == 0 or "256" in case.name)
    ]
    names, damaged = [case.name for case, _ in seen], [case.damaged for case, _ in seen]
    compare(target, names, [folder for _, folder in seen], damaged)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Path]]:
    """Random formats on disk, with a list that is right for other formats or random."""
    rng = random.Random(SEED)
    root = tmp_path_factory.mktemp("mixed")
    names, folders = ["baseline"], [next(vc.cases()).write(root / "0")]
    for number in range(1, RANDOM_CASES + 1):
        experts = rng.choice((8, 8, 8, 8, 8, 256))
        cfg = vc.config(experts)
        stored = vc.RECIPES[rng.choice(list(vc.RECIPES))]
        listed = stored if rng.random() < 0.7 else vc.RECIPES[rng.choice(list(vc.RECIPES))]
        entries = rng.choice((vc.good_list(cfg, listed), ckpt.unquantized(cfg, listed)))
        entries += [random_entry(rng, vc.LAYERS) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
        linear = [m for m, kind in vc.formats_of(cfg, stored).items() if kind == "plain" or ".mlp.shared" in m]
        flipped = rng.sample(linear, rng.choice((0, 0, 0, 1, 2)))
        change = vc.flip(*flipped) if flipped else vc.nothing
        folders.append(ckpt.write(root / str(number), entries, stored, cfg=cfg, mutate=change))
        names.append(f"random {number} (seed {SEED}): flipped {flipped}, list {entries[-4:]}")
    return names, folders


@pytest.mark.parametrize("target", RELEASES, ids=str)
def test_random_formats_and_lists(target: Target, mixed: tuple[list[str], list[Path]]) -> None:
    names, folders = mixed
    print(f"seed {SEED}")
    compare(target, names, folders, [False] * len(names))

"""scripts/eval_tiny.py and accuracy_tiny.py: what each recipe costs on the trained tiny checkpoint.

The numbers of the whole text are in the README; here are those of its first 4 contexts, for speed.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import accuracy_tiny
import eval_tiny
import numpy as np
import pytest
import support
import torch
from safetensors.torch import save_file
from support import RECIPES, TRAINED

import glmquant
from glmquant.mxfp4.format import decode

CONTEXTS = 4
# loss, mean KL, top-1 agreement, MTP loss, MTP acceptance, MTP KL: MTP alone differs from a recipe to its -mtp.
MEASURED = {
    "bf16 reference": (2.7711, 0.0, 1.0, 2.8780, 0.6804, 0.0),
    "moe": (2.7779, 0.00275, 0.9658, 2.8770, 0.6833, 0.00173),
    "moe-mtp": (2.7779, 0.00275, 0.9658, 2.8824, 0.6814, 0.00518),
    "routed": (2.7746, 0.00165, 0.9775, 2.8764, 0.6784, 0.00109),
    "routed-mtp": (2.7746, 0.00165, 0.9775, 2.8825, 0.6794, 0.00407),
}
TOLERANCE = (2e-4, 3e-5, 2e-3, 2e-4, 2e-3, 3e-5)  # another CPU sums in another order


@cache
def rows() -> dict[str, eval_tiny.Row]:
    chunks = eval_tiny.load_chunks(TRAINED / "tokenizer.json", eval_tiny.DATA / "eval.txt", 256)[:CONTEXTS]
    models = {recipe: eval_tiny.load_model(support.output(TRAINED, recipe).output) for recipe in RECIPES}
    return {row.checkpoint: row for row in eval_tiny.evaluate(eval_tiny.load_model(TRAINED), models, chunks)}


def numbers(row: eval_tiny.Row) -> tuple[float, ...]:
    assert row.mtp_loss is not None and row.mtp_acceptance is not None and row.mtp_kl is not None
    return (row.loss, row.mean_kl, row.top1_agreement, row.mtp_loss, row.mtp_acceptance, row.mtp_kl)


@pytest.mark.parametrize("name", MEASURED)
def test_each_recipe_costs_what_was_measured(name: str) -> None:
    found = numbers(rows()[name])
    off = [abs(a - b) - limit for a, b, limit in zip(found, MEASURED[name], TOLERANCE, strict=True)]
    assert max(off) <= 0, found


def test_recipes_order_as_their_reasons_say() -> None:
    moe, moe_mtp, routed, routed_mtp = (rows()[recipe] for recipe in RECIPES)
    assert routed.mean_kl < 0.7 * moe.mean_kl  # bf16 shared experts: 40% less over the whole text
    for without, with_mtp in ((moe, moe_mtp), (routed, routed_mtp)):
        assert numbers(without)[:3] == numbers(with_mtp)[:3]  # the MTP layer does not touch the base model
        assert numbers(without)[5] < numbers(with_mtp)[5]
    assert [row.mxfp4_weights for row in (moe, moe_mtp, routed, routed_mtp)] == [204, 255, 192, 240]


def test_two_decoders_written_apart_agree_on_every_code_and_scale() -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    theirs = eval_tiny.decode_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale))
    assert np.array_equal(theirs.numpy(), decode(packed, scale))


def test_accuracy_tiny_quantizes_and_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_tiny.py", "routed", "--contexts", "1"])
    with deterministic():
        accuracy_tiny.main()
    lines = capsys.readouterr().out.strip().splitlines()[-4:]
    assert lines[0].startswith("| checkpoint | MXFP4 weights | loss | mean KL |")
    assert re.fullmatch(r"\| bf16 reference \| 0 \| \d\.\d{4} \| 0\.00000 \| 1\.0000 \|.*", lines[2])
    assert re.fullmatch(r"\| routed \| 192 \| \d\.\d{4} \| 0\.00\d{3} \| 0\.9\d{3} \|.*", lines[3])


class deterministic:
    """The scripts ask torch for deterministic algorithms: undo it for the tests that follow."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["eval_tiny.py", *map(str, arguments)])
    with deterministic():
        eval_tiny.main()


def test_eval_tiny_prints_rows_and_writes_them_unrounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def f(x):\n    return x\n" * 5)
    output = support.output(TRAINED, "moe").output
    files = ("--text", tmp_path / "text", "--json", tmp_path / "rows.json")
    run(monkeypatch, f"mine={output}", "--seq-len", 16, *files)
    table = capsys.readouterr().out.strip().splitlines()
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert [row["checkpoint"] for row in saved] == ["bf16 reference", "mine"]
    assert [row["mxfp4_weights"] for row in saved] == [0, 204]
    for row, line in zip(saved, table[2:], strict=True):
        assert line.startswith(f"| {row['checkpoint']} | {row['mxfp4_weights']} | {row['loss']:.4f} | ")
    assert saved[0]["tokens"] % 15 == 0 and saved[0]["mean_kl"] == 0 < saved[1]["mean_kl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=CKPT", "a=CKPT"], "two checkpoints have the same name"),
        (["nowhere"], "nowhere is not a checkpoint: it has no config.json"),
        (["--seq-len", "2"], "--seq-len must be at least 3"),
        (["--seq-len", "1000000"], "fewer than one context of 1000000"),
    ],
)
def test_eval_tiny_refuses_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *(a.replace("CKPT", str(TRAINED)) for a in arguments))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_eval_tiny_refuses_what_does_not_fit_together(tmp_path: Path) -> None:
    good = support.output(TRAINED, "moe").output
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    file, packed = support.tensors(good)[name]
    scale = support.tensors(good)[name + "_scale"][1]

    def broken(case: str, changes: dict[str, torch.Tensor | None]) -> Path:
        folder = support.copy(good, tmp_path / case)
        shard = support.shards(good)[file] | changes
        save_file({k: t for k, t in shard.items() if t is not None}, folder / file)
        return folder

    for case, changes, message in (
        ("gone", {name: None}, f"1 tensors of the index are in no file, e.g. {name}"),
        ("short", {name: packed[:, :-16].contiguous()}, "do not fit together"),
        ("nan", {name + "_scale": torch.full_like(scale, 255)}, "a scale is NaN"),
        ("int8", {name: packed.to(torch.int8)}, "known are bf16, f32 and MXFP4"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            eval_tiny.load_model(broken(case, changes))


def test_a_checkpoint_without_mtp_has_no_mtp_columns(tiny: Path, tmp_path: Path) -> None:
    from make_tiny_glm import make_tiny_glm

    make_tiny_glm(tmp_path / "source", layers=2, experts=2, mtp=False)
    output = glmquant.quantize(tmp_path / "source", tmp_path / "out").output
    [reference, row] = eval_tiny.evaluate(
        eval_tiny.load_model(tmp_path / "source"),
        {"moe": eval_tiny.load_model(output)},
        torch.arange(64).view(2, 32),
    )
    assert row.mtp_loss is row.mtp_kl is reference.mtp_acceptance is None
    assert row.mean_kl > 0
    assert eval_tiny.table([row]).splitlines()[-1].endswith("| - | - | - |")

"""What the tests of the whole job share: outputs of glmquant and of Quark itself, and looks at both.

Outputs are made once a session (importing Quark alone takes 15 s). Nobody writes into them.
"""

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import glmquant
from glmquant.mxfp4.backend import Buffer
from glmquant.pipeline import QuantizeResult

torch.set_num_threads(1)  # on busy cores its threads wait for each other: twice as fast so

RECIPES = ("moe", "moe-mtp", "routed", "routed-mtp")
TRAINED = Path(__file__).parent / "data/tiny-glm/checkpoint"
INDEX = "model.safetensors.index.json"


def new_folder(name: str) -> Path:
    """A path that does not exist yet, in a place of its own, removed with the session."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_session())) / name


@cache
def _session() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="glmquant-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def output(source: Path, recipe: str) -> QuantizeResult:
    """What glmquant makes of a checkpoint."""
    return glmquant.quantize(source, new_folder(recipe), recipe=recipe)


@cache
def quark_output(source: Path, recipe: str) -> Path:
    """What Quark's own whole-folder call makes of it, told to leave out what the recipe leaves out."""
    from quark.torch import LLMTemplate, ModelQuantizer

    out = new_folder("quark")
    keep = plain_modules(source, recipe)
    config = LLMTemplate.get("glm_moe_dsa").get_config(scheme="mxfp4", exclude_layers=keep)
    ModelQuantizer(config).direct_quantize_checkpoint(
        pretrained_model_path=str(source), save_path=str(out), device="cpu"
    )
    return out


def plain_modules(source: Path, recipe: str) -> list[str]:
    return [name for name, kind in glmquant.plan(source, recipe=recipe).plan.formats.items() if kind == "plain"]


def tensors(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Every tensor with the shard it lies in."""
    return {name: (file, tensor) for file, shard in shards(folder).items() for name, tensor in shard.items()}


def shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as f:
            found[path.name] = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    return found


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read_json(path: Path) -> dict:
    return json.loads(path.read_bytes())


def copy(folder: Path, to: Path, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> Path:
    """A copy to write into, each tensor passed through `change`."""
    shutil.copytree(folder, to)
    for file, shard in shards(folder).items() if change else ():
        save_file({name: change(name, tensor) for name, tensor in shard.items()}, to / file, {"format": "pt"})
    return to


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Contents, modes and times of all files and folders below `folder`."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


class FakeBackend:
    """Stands in for Quark where the numbers do not matter: every code is 1, every scale 2."""

    name, version, chunk_elements, threads = "quark", "0.13", 1000, 0

    def quantize_into(self, source: Buffer, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
        packed[:] = b"\x11" * len(packed)
        scale[:] = b"\x02" * len(scale)
        return -1

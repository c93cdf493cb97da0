"""Checkpoints shared by all tests. `tiny` and `full` are made once: a test that changes one works on a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2 scaled down: 5 layers, MTP layer 5, 8 experts, 3 shards, random weights."""
    from make_tiny_glm import make_tiny_glm  # imports torch and transformers

    out = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_tiny_glm(out)
    return out


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2 itself, 282 shards with true headers over holes."""
    from make_full_layout import make_full_layout

    out = tmp_path_factory.mktemp("checkpoints") / "GLM-5.2"
    make_full_layout(out)
    return out


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that copies a checkpoint into this test's own folder, to be changed there."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-of-{folder.name}", symlinks=True))

    return copy


class Nothing:
    """A backend in place of AMD Quark, which takes 15 s to import: packs everything to zero."""

    name, version = "nothing", "0"

    def quantize(self, raw: memoryview, dtype: str, shape: tuple[int, int], name: str) -> Iterator[tuple[Any, Any]]:
        import numpy as np

        rows, columns = shape
        yield np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 32), np.uint8)


@pytest.fixture
def no_quark(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a whole run that do not look at the numbers."""
    monkeypatch.setattr("glmquant.pipeline._make_backend", lambda device: Nothing())

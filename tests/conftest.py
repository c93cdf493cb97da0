"""Checkpoints shared by all tests. `tiny` and `full` are made once: a test that changes one works on a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

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

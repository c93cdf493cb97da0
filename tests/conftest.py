"""Checkpoints shared by all tests. `tiny` and `full` are made once: a test that changes one works on a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import HubServer


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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub, with huggingface_hub turned to it; it reads most of its settings when it is imported."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    from glmquant.checkpoint import hub, push

    with HubServer().running() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None))
        monkeypatch.setattr(hub, "SOON", (0.01, 0.01))
        for module in (hub, push):
            monkeypatch.setattr(module, "PATIENT", (0.01, 0.01, 0.01))
            monkeypatch.setattr(module, "SOON", (0.01, 0.01))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HTTP_PROXY", raising=False)
        monkeypatch.delenv("http_proxy", raising=False)
        _http.close_session()
        yield running
        _http.close_session()

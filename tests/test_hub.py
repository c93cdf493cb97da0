"""The real huggingface_hub client against a local server that speaks the Hub's API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import support
from checkpoints import contents, raw_shard
from hub_server import HubServer, git_id, sha256

import glmquant
from glmquant.checkpoint import hub, hub_client, push
from glmquant.checkpoint.hub import HubShards, HubSource, fetch_small, least_disk, parse_repo
from glmquant.checkpoint.hub_client import Repo, Stopped, retried
from glmquant.checkpoint.push import Pusher
from glmquant.checkpoint.source import ShardReader, open_source
from glmquant.cli import main
from glmquant.errors import CheckpointError, OutputError

ROOT = Path(__file__).resolve().parent.parent
REPO = "org/model"
SHARDS = [f"model-{k:05}-of-00005.safetensors" for k in range(1, 6)]
DATA = 200_000
"""Bytes of weights in each shard."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint on disk: 5 shards of 0.2 MB."""
    return make(tmp_path / "source", 0)


def make(folder: Path, seed: int) -> Path:
    noise = random.Random(seed)
    folder.mkdir()
    (folder / "sub").mkdir()
    weight_map = {}
    for k, file in enumerate(SHARDS):
        name = f"model.layers.{k}.mlp.weight"
        weight_map[name] = file
        header = {name: {"dtype": "BF16", "shape": [100, DATA // 200], "data_offsets": [0, DATA]}}
        (folder / file).write_bytes(raw_shard(header, noise.randbytes(DATA)))
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", "seed": seed}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_bytes(noise.randbytes(1_100_000))
    (folder / "sub/empty.txt").write_bytes(b"")
    return folder


@pytest.fixture
def source(server: HubServer, folder: Path, tmp_path: Path) -> HubSource:
    """Its headers, with the log of the server emptied after that."""
    server.add(REPO, folder)
    found = fetch_small(Repo(REPO), tmp_path / "small")
    server.requests.clear()
    return found


def each() -> list[set[str]]:
    return [{file} for file in SHARDS]


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("zai-org/GLM-5.2", Repo("zai-org/GLM-5.2")),
        ("zai-org/GLM-5.2@v1", Repo("zai-org/GLM-5.2", "v1")),
        ("a/b@refs/pr/1", Repo("a/b", "refs/pr/1")),
        ("/models/GLM-5.2", None),
        ("./models/GLM", None),
        ("../GLM", None),
        ("GLM", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("a/", None),
    ],
)
def test_what_is_a_repository(text: str, repo: Repo | None) -> None:
    assert parse_repo(text) == repo
    assert repo is None or str(repo) == text


def test_a_local_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_repo("org/model") == Repo("org/model")
    (tmp_path / "org/model").mkdir(parents=True)
    assert parse_repo("org/model") is None


def test_local_work_does_not_import_huggingface_hub() -> None:
    code = (
        "import sys; from glmquant.checkpoint import hub, push; hub.parse_repo('a/b');"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# Headers


def test_headers_without_a_byte_of_a_weight(server: HubServer, folder: Path, tmp_path: Path) -> None:
    commit = server.add(REPO, folder)
    found = fetch_small(Repo(REPO), tmp_path / "small")
    assert found.repo == Repo(REPO, commit)
    lengths = [(folder / file).stat().st_size - DATA for file in SHARDS]
    assert server.sent(r"GET /cdn/.*safetensors") == sum(lengths)
    assert len(server.of(r"GET /cdn/.*safetensors")) == 2 * len(SHARDS)
    local, remote = open_source(folder), open_source(found.folder, found.headers)
    assert (remote.config, remote.tensors, remote.side_files) == (local.config, local.tensors, local.side_files)
    assert [h.digest for h in remote.shards] == [h.digest for h in local.shards]
    fetched = contents(found.folder)
    assert fetched == {name: content for name, content in contents(folder).items() if name not in SHARDS}
    assert found.identity == {file: sha256((folder / file).read_bytes()) for file in SHARDS}


def test_all_is_of_the_commit_that_was_resolved(server: HubServer, folder: Path, tmp_path: Path) -> None:
    commit = server.add(REPO, folder)
    found = fetch_small(Repo(REPO, "main"), tmp_path / "small")
    server.repos[REPO].commit({file: b"something else" for file in SHARDS})
    with HubShards(found, each(), tmp_path / "work") as shards:
        for file in SHARDS:
            assert shards.path(file).read_bytes() == (folder / file).read_bytes()
            shards.done(file)
    asked = server.of("/resolve/")
    assert len(asked) > 15 and all(f"/resolve/{commit}/" in request.path for request in asked)
    assert len(server.of("/api/models")) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside", "org/model@{commit}: '../outside': not a file name of a checkpoint"),
        ("/etc/x", "org/model@{commit}: '/etc/x': not a file name of a checkpoint"),
        ("a\nb", "org/model@{commit}: 'a\\nb': not a file name of a checkpoint"),
        ("sub/x.safetensors", "org/model@{commit}: sub/x.safetensors: a shard in a subfolder, which no index can name"),
    ],
)
def test_a_strangers_names(server: HubServer, folder: Path, tmp_path: Path, name: str, message: str) -> None:
    server.add(REPO, folder)
    commit = server.repos[REPO].commit({name: b"x"})
    with pytest.raises(CheckpointError) as caught:
        fetch_small(Repo(REPO), tmp_path / "small")
    assert caught.value.message == message.format(commit=commit)
    assert not (tmp_path / "small").exists()


def test_weights_in_other_formats_are_not_fetched(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MAX_SMALL_BYTES", 2_000_000)
    server.add(REPO, folder)
    server.repos[REPO].commit({"pytorch_model.bin": bytes(2_000_001)})
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin has 2,000,001 bytes and is no safetensors shard"):
        fetch_small(Repo(REPO), tmp_path / "small")
    assert server.of("/resolve/") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "header cut short"),
        ((10**9).to_bytes(8, "little") + bytes(50), "over the format's limit"),
        (raw_shard("not json"), "not valid JSON"),
    ],
)
def test_damaged_headers(server: HubServer, folder: Path, tmp_path: Path, content: bytes, message: str) -> None:
    server.add(REPO, folder)
    server.repos[REPO].commit({SHARDS[1]: content})
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch_small(Repo(REPO), tmp_path / "small")
    assert SHARDS[1] in caught.value.message


# Shards


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_more_than_max_disk(server: HubServer, source: HubSource, folder: Path, tmp_path: Path, bound: int) -> None:
    """Sampled at every chunk that arrives and every shard that goes."""
    size = max(file.size for name, file in source.files.items() if name in SHARDS)
    server.fault("GET /cdn/", times=99, slow=0.0005)
    work, seen, ahead = tmp_path / "work", [], []

    def sample(_: int = 0) -> None:
        total = 0
        for entry in os.scandir(work):
            with suppress(FileNotFoundError):  # renamed or dropped meanwhile
                total += entry.stat().st_size
        seen.append(total)

    with HubShards(source, each(), work, bound * size, advance=sample) as shards:
        for file in SHARDS:
            path = shards.path(file)
            assert path.read_bytes() == (folder / file).read_bytes()
            with ShardReader(path, source.headers[file]) as reader:
                reader.check_unchanged()
            deadline = time.monotonic() + 5
            while bound > 1 and file != SHARDS[-1] and len(os.listdir(work)) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            ahead.append(len(os.listdir(work)))
            shards.done(file)
            sample()
    assert 0 < max(seen) <= bound * size
    assert min(bound, 2) <= max(ahead) <= bound
    assert os.listdir(work) == []
    assert server.sent("GET /cdn/") == sum((folder / file).stat().st_size for file in SHARDS)


def test_max_disk_that_cannot_be_kept(source: HubSource, tmp_path: Path) -> None:
    uses = [{SHARDS[0], SHARDS[1]}, {SHARDS[1], SHARDS[2]}]
    size = source.files[SHARDS[0]].size
    with pytest.raises(CheckpointError) as caught:
        HubShards(source, uses, tmp_path / "work", 2 * size - 1)
    assert caught.value.message == (
        f"--max-disk {2 * size - 1:,} is less than the {2 * size:,} bytes of source shards that are needed at once"
    )
    assert caught.value.hint == f"Give --max-disk {2 * size} or more."
    assert not (tmp_path / "work").exists()


def test_least_disk() -> None:
    sizes = {"a": 1, "b": 10, "c": 100}
    assert least_disk([{"a"}, {"b"}, {"c"}], sizes) == 100
    assert least_disk([{"a", "b"}, {"b", "c"}], sizes) == 110
    assert least_disk([{"a"}, {"b"}, {"a", "c"}], sizes) == 101
    assert least_disk([{"a"}, {"b"}, {"c"}, {"a"}], sizes) == 101
    assert least_disk([], sizes) == 0


def test_shards_that_several_outputs_share_with_the_least_room(source: HubSource, tmp_path: Path) -> None:
    uses = [{SHARDS[k], SHARDS[k + 1]} for k in range(4)]
    with HubShards(source, uses, tmp_path / "work", 2 * source.files[SHARDS[0]].size) as shards:
        for k, use in enumerate(uses):
            assert all(shards.path(file).exists() for file in use)
            shards.done(SHARDS[k])


def test_the_default_is_two_shards_a_worker(source: HubSource, tmp_path: Path) -> None:
    with HubShards(source, each(), tmp_path / "work", workers=2) as shards:
        wait_for(lambda: len(finished(tmp_path / "work")) == 4)
        time.sleep(0.05)
        assert finished(tmp_path / "work") == SHARDS[:4]
        shards.done(SHARDS[0])
        shards.path(SHARDS[4])


def finished(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_broken_connection_is_continued_in_the_shard(
    server: HubServer, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    server.fault(f"GET /cdn/.*{SHARDS[0]}", cut=150_000)
    server.fault(f"GET /cdn/.*{SHARDS[0]}", cut=30_000)
    with HubShards(source, [{SHARDS[0]}], tmp_path / "work") as shards:
        assert shards.path(SHARDS[0]).read_bytes() == (folder / SHARDS[0]).read_bytes()
    requests = server.of("GET /cdn/")
    starts = [int(re.findall(r"\d+", request.range)[0]) for request in requests]
    assert starts == [0, 150_000, 180_000]
    assert server.sent("GET /cdn/") == (folder / SHARDS[0]).stat().st_size


def test_a_stopped_run_is_continued_in_the_shard(
    server: HubServer, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    work, size = tmp_path / "work", (folder / SHARDS[0]).stat().st_size
    slow = server.fault(f"GET /cdn/.*{SHARDS[0]}", slow=0.02)
    with HubShards(source, each()[:1], work):
        wait_for(lambda: any(request.sent > 100_000 for request in server.of("GET /cdn/")))
    assert slow.times == 0
    (left,) = work.iterdir()
    had = left.stat().st_size
    assert 0 < had < size
    server.requests.clear()
    (work / "stranger.safetensors").write_bytes(b"of another run")
    with HubShards(source, each()[:1], work) as shards:
        assert shards.path(SHARDS[0]).read_bytes() == (folder / SHARDS[0]).read_bytes()
    assert [request.range for request in server.of("GET /cdn/")] == [f"bytes={had}-{size - 1}"]
    assert finished(work) == SHARDS[:1]


def test_a_whole_shard_that_was_left_is_checked_and_used(
    server: HubServer, source: HubSource, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    damaged = bytearray((folder / SHARDS[1]).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "work" / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes())
    (tmp_path / "work" / SHARDS[1]).write_bytes(damaged)
    with HubShards(source, each()[:2], tmp_path / "work") as shards:
        for file in SHARDS[:2]:
            with ShardReader(shards.path(file), source.headers[file]):
                assert shards.path(file).read_bytes() == (folder / file).read_bytes()
    assert server.of(f"GET /cdn/.*{SHARDS[0]}") == []
    assert len(server.of(f"GET /cdn/.*{SHARDS[1]}")) == 1


def test_a_server_that_knows_no_ranges(server: HubServer, source: HubSource, folder: Path, tmp_path: Path) -> None:
    server.fault("GET /cdn/", cut=100_000)
    server.fault("GET /cdn/", no_range=True)
    with HubShards(source, each()[:1], tmp_path / "work") as shards:
        assert shards.path(SHARDS[0]).read_bytes() == (folder / SHARDS[0]).read_bytes()
    assert len(server.of("GET /cdn/")) == 2


def test_wrong_bytes_are_fetched_again(server: HubServer, source: HubSource, folder: Path, tmp_path: Path) -> None:
    server.fault("GET /cdn/", corrupt=True)
    with HubShards(source, each()[:1], tmp_path / "work") as shards:
        assert shards.path(SHARDS[0]).read_bytes() == (folder / SHARDS[0]).read_bytes()
    assert len(server.of("GET /cdn/")) == 2


def test_bytes_that_stay_wrong(server: HubServer, source: HubSource, folder: Path, tmp_path: Path) -> None:
    server.fault("GET /cdn/", times=9, corrupt=True)
    content = bytearray((folder / SHARDS[0]).read_bytes())
    expected, content[0] = sha256(bytes(content)), content[0] ^ 1
    with HubShards(source, each()[:1], tmp_path / "work") as shards, pytest.raises(CheckpointError) as caught:
        shards.path(SHARDS[0])
    assert caught.value.message == (
        f"{source.repo}: {SHARDS[0]}: its checksum is {sha256(bytes(content))}, the Hub says {expected}; "
        "so again in a second download"
    )
    assert os.listdir(tmp_path / "work") == []


def test_a_full_disk(source: HubSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_client, "_continue", full)
    with HubShards(source, each()[:1], tmp_path / "work") as shards, pytest.raises(CheckpointError) as caught:
        shards.path(SHARDS[0])
    assert caught.value.message == f"{source.repo}: {SHARDS[0]}: {tmp_path / 'work'}: No space left on device"
    assert caught.value.hint == "Free space there."


# The user's cache


def test_the_hub_cache_is_used_and_not_changed(server: HubServer, folder: Path, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    server.add(REPO, folder)
    for name in (SHARDS[1], "config.json"):
        hf_hub_download(REPO, name)
    before = contents(tmp_path / "cache")
    server.requests.clear()
    found = fetch_small(Repo(REPO), tmp_path / "small")
    checkpoint = open_source(found.folder, found.headers)
    assert checkpoint.tensors == open_source(folder).tensors
    with HubShards(found, each(), tmp_path / "work") as shards:
        for header in checkpoint.shards:
            with ShardReader(shards.path(header.file), header):
                assert shards.path(header.file).read_bytes() == (folder / header.file).read_bytes()
            shards.done(header.file)
    assert server.of(f"{SHARDS[1]}|config.json") == []
    assert len(server.of(f"GET /cdn/.*{SHARDS[0]}")) == 3
    assert contents(tmp_path / "cache") == before
    assert (tmp_path / "cache").exists() and SHARDS[1] in {path.name for path in (tmp_path / "cache").rglob("*")}


@pytest.mark.parametrize("revision", ["", "main", "COMMIT"])
def test_offline_with_all_in_the_cache(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    from huggingface_hub import constants, snapshot_download

    commit = server.add(REPO, folder)
    snapshot_download(REPO)
    online = fetch_small(Repo(REPO), tmp_path / "small")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    found = fetch_small(Repo(REPO, revision.replace("COMMIT", commit)), tmp_path / "none")
    assert found.repo == online.repo and found.identity == online.identity
    checkpoint = open_source(found.folder, found.headers)
    with HubShards(found, each(), tmp_path / "work", 0) as shards:
        for header in checkpoint.shards:
            with ShardReader(shards.path(header.file), header):
                shards.done(header.file)
    assert server.requests == [] and not (tmp_path / "none").exists()


def test_offline_with_something_missing(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    server.add(REPO, folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        fetch_small(Repo(REPO, "v2"), tmp_path / "small")
    assert caught.value.message == "HF_HUB_OFFLINE is set, and org/model@v2 is not in the hub cache"
    assert caught.value.hint == (
        "Unset HF_HUB_OFFLINE, or where there is a network: hf download org/model --revision v2"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(REPO, ignore_patterns=["*-00002-*", "*-00004-*"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        fetch_small(Repo(REPO), tmp_path / "small")
    assert caught.value.message == (
        f"HF_HUB_OFFLINE is set, and 2 of 5 shards of org/model are not in the hub cache: {SHARDS[1]} and others"
    )


# What a hub can answer


TOKEN = "HF_TOKEN to the token of an account that {}, or run `hf auth login`."
ERRORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "401": ({"status": 401}, "{at}: access refused (401)", "Set " + TOKEN.format("may")),
    "403": ({"status": 403}, "{at}: access refused (403)", "Set " + TOKEN.format("may")),
    "gated": (
        {"status": 403, "headers": {"X-Error-Code": "GatedRepo"}},
        "{at}: the repository is gated",
        "Accept its licence at {url}/org/model, and set " + TOKEN.format("did"),
    ),
    "404 repository": (
        {"status": 401, "headers": {"X-Error-Code": "RepoNotFound"}},
        "there is no org/model, neither as a folder nor on {url}",
        "Check the name. If it is private: set " + TOKEN.format("may"),
    ),
    "404 file": (
        {"status": 404, "headers": {"X-Error-Code": "EntryNotFound"}},
        "{at}: no such file",
        "Does {url}/org/model list it?",
    ),
    "410": ({"status": 410}, "{at}: the server answers 410: ", ""),
    "429": (
        {"status": 429, "times": 99},
        "{at}: too many requests (429), and so in every further try",
        "Wait some minutes; with a token (HF_TOKEN) the limits are higher.",
    ),
    "503": (
        {"status": 503, "times": 99},
        "{at}: the server answers 503, and so in every further try",
        "The Hub is in trouble (https://status.huggingface.co): try again later.",
    ),
    "dropped": (
        {"cut": 0, "times": 99},
        "{at}: the connection failed: ",
        "Check the network, HTTPS_PROXY and HF_ENDPOINT.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_a_shard(server: HubServer, source: HubSource, tmp_path: Path, case: str) -> None:
    options, message, hint = ERRORS[case]
    server.fault("GET /org/model/resolve/" if case != "dropped" else "GET /cdn/", **options)
    with HubShards(source, each()[:1], tmp_path / "work") as shards, pytest.raises(CheckpointError) as caught:
        shards.path(SHARDS[0])
    expected = message.format(at=f"{source.repo}: {SHARDS[0]}", url=server.url)
    assert caught.value.message.startswith(expected)
    assert caught.value.message == expected or expected.endswith(": ")
    assert caught.value.hint == hint.format(url=server.url)


@pytest.mark.parametrize("case", ["401", "gated", "404 repository", "429", "503"])
def test_errors_of_the_first_request(server: HubServer, tmp_path: Path, case: str) -> None:
    options, message, hint = ERRORS[case]
    server.fault("GET /api/models/", **options)
    with pytest.raises(CheckpointError) as caught:
        fetch_small(Repo(REPO), tmp_path / "small")
    assert caught.value.message == message.format(at=REPO, url=server.url)
    assert caught.value.hint == hint.format(url=server.url)


def test_what_the_server_itself_refuses(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(text: str) -> str:
        repo = parse_repo(text)
        assert repo
        with pytest.raises(CheckpointError) as caught:
            fetch_small(repo, tmp_path / "small")
        return caught.value.message

    server.add("org/open", folder)
    server.add("org/private", folder, private=True)
    commit = server.add("org/gated", folder, gated=True)
    assert message("org/none") == f"there is no org/none, neither as a folder nor on {server.url}"
    assert message("org/private").startswith("there is no org/private")
    assert message("org/open@v9") == "org/open has no revision 'v9'"
    gated = message("org/gated")
    assert gated.startswith(f"org/gated@{commit}: ") and gated.endswith(": the repository is gated")
    assert message("org/a--b").startswith("org/a--b: Cannot have -- or .. in repo_id")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert message("org/open") == "org/open: access refused (401)"
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert fetch_small(Repo("org/private"), tmp_path / "private").headers.keys() == set(SHARDS)


def test_the_token_stays_on_the_hub(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", server.token)
    server.add(REPO, folder, private=True)
    fetch_small(Repo(REPO), tmp_path / "small")
    assert {request.token for request in server.of("/resolve/|/api/")} == {server.token}
    assert {request.token for request in server.of("/cdn/")} == {""}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_passes_is_tried_again(server: HubServer, folder: Path, tmp_path: Path, status: int) -> None:
    server.add(REPO, folder)
    for where in ("GET /api/models", "resolve/.*config.json", "GET /cdn/.*00001-of"):
        server.fault(where, status=status, times=2)
    found = fetch_small(Repo(REPO), tmp_path / "small")
    assert found.headers.keys() == set(SHARDS)
    server.fault(f"GET /cdn/.*{SHARDS[2]}", status=status, times=3)
    with HubShards(found, each(), tmp_path / "work", workers=3) as shards:
        for file in SHARDS:
            assert shards.path(file).read_bytes() == (folder / file).read_bytes()


def test_messages_hold_no_signed_address() -> None:
    err = RuntimeError("Server error '503' for url 'https://cdn/x?Signature=secret'\nFor more information check: a")
    assert hub_client._short(err) == "Server error '503' for url 'https://cdn/x'"


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch, server: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"^org/model: the connection failed: .*refused") as caught:
        fetch_small(Repo(REPO), tmp_path / "small")
    assert caught.value.hint == "Check the network, HTTPS_PROXY and HF_ENDPOINT."


class Waits(threading.Event):
    """Notes how long it was waited for, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


def test_back_off() -> None:
    def failing(headers: dict[str, str], status: int = 503) -> Callable[[], None]:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        def call() -> None:
            request = httpx2.Request("GET", "http://hub/")
            raise HfHubHTTPError("no", response=httpx2.Response(status, headers=headers, request=request))

        return call

    def waits(call: Callable[[], None], position: Callable[[], int] = lambda: 0) -> list[float]:
        event = Waits()
        with pytest.raises(OSError, match="no"):
            retried(call, event, (1.0, 2.0, 4.0), position)
        return event.seconds

    assert waits(failing({})) == [1, 2, 4]
    assert waits(failing({"Retry-After": "3"}, 429)) == [3, 3, 4]
    assert waits(failing({"Retry-After": "9999"}, 429)) == [300, 300, 300]
    assert waits(failing({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 429)) == [1, 2, 4]
    assert waits(failing({}, 404)) == []
    positions = iter([0, 0, 0, 5, 5, 5, 5, 5, 5])
    assert waits(failing({}), lambda: next(positions)) == [1, 2, 1, 2, 4]
    assert hub_client.PATIENT[-1] == 60 and sum(hub_client.PATIENT) > 180 and sum(hub_client.SOON) < 10


# Stopping


def test_stop_ends_a_wait_at_once(server: HubServer, source: HubSource, tmp_path: Path) -> None:
    server.fault("GET /cdn/", times=9, slow=0.1)
    shards = HubShards(source, each(), tmp_path / "work")
    threading.Timer(0.2, shards.stop).start()
    begun = time.monotonic()
    with pytest.raises(Stopped):
        shards.path(SHARDS[0])
    shards.close()
    assert time.monotonic() - begun < 2
    assert not any(thread.name == "download" and thread.is_alive() for thread in threading.enumerate())


def environment(server: HubServer, tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy") and key[:3] != "HF_"}
    return {
        **kept,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }


SCRIPT = """
import sys
from pathlib import Path
from glmquant.checkpoint.hub import HubShards, fetch_small, parse_repo
work = Path(sys.argv[2])
hub = fetch_small(parse_repo(sys.argv[1]), work / "small")
files = sorted(hub.headers)
with HubShards(hub, [{file} for file in files], work / "shards") as shards:
    print("begun", flush=True)
    for file in files:
        shards.path(file)
        shards.done(file)
print("all", len(files), hub.repo.revision)
"""


def test_ctrl_c_while_waiting(server: HubServer, folder: Path, tmp_path: Path) -> None:
    server.add(REPO, folder)
    server.fault("GET /cdn/.*safetensors", times=2 * len(SHARDS))  # nothing wrong with the headers
    server.fault("GET /cdn/.*safetensors", times=99, slow=1.0)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, REPO, str(tmp_path)],
        cwd=ROOT,
        env=environment(server, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script has it ignored, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=20)
    assert errors.endswith("KeyboardInterrupt\n") and printed == ""
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("proxy", [False, True])
def test_the_environment_decides(server: HubServer, folder: Path, tmp_path: Path, proxy: bool) -> None:
    """HF_ENDPOINT, HF_TOKEN, HF_HOME and HTTP_PROXY, in a process of its own: they are read at import."""
    from huggingface_hub import hf_hub_download

    commit = server.add(REPO, folder, private=True)
    cache = tmp_path / "home/hub"
    hf_hub_download(REPO, SHARDS[3], cache_dir=cache, token=server.token)
    before = contents(cache)
    server.requests.clear()
    more = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": server.url} if proxy else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, REPO, str(tmp_path)],
        cwd=ROOT,
        env=environment(server, tmp_path, HF_TOKEN=server.token, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"begun\nall 5 {commit}\n", done.stderr
    assert {request.host for request in server.of("/api/models")} == {"hub.invalid" if proxy else server.url[7:]}
    assert server.of(SHARDS[3]) == []
    assert contents(cache) == before


# Uploads


@pytest.fixture
def output(folder: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for a finished output that is still being written: with the run's folder and a half-written shard."""
    (folder / ".glmquant").mkdir()
    (folder / ".glmquant/run.json").write_text("{}")
    (folder / f".{SHARDS[4]}.partial").write_bytes(b"half")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.setenv("HF_TOKEN", server.token)
    return folder


FILES = [*SHARDS, "config.json", "model.safetensors.index.json", "tokenizer.json", "README.md", "sub/empty.txt"]
TARGET = Repo("me/out")


def test_push(server: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "COMMIT_SHARDS", 2)
    with Pusher(TARGET, output, SHARDS) as pusher:
        for file in SHARDS:
            pusher.add(file)
        pusher.finish(FILES)
    repo = server.repos["me/out"]
    assert repo.private
    assert repo.files == {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        **{name: (output / name).read_bytes() for name in FILES},
    }
    assert repo.messages == [
        "",
        f"Add {SHARDS[0]} and 1 more",
        f"Add {SHARDS[2]} and 1 more",
        f"Add {SHARDS[4]}",
        "Add side files",
        "Add config.json",
    ]
    assert all("config.json" not in files for _, files in repo.commits[:-1])
    assert pusher.arrived == set(SHARDS) and all((output / file).exists() for file in SHARDS)


def test_push_and_drop(server: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two shards: `add` waits until they have arrived and gone."""
    monkeypatch.setattr(push, "COMMIT_SHARDS", 3)
    whole = {name: (output / name).read_bytes() for name in FILES}
    size = len(whole[SHARDS[0]])
    with Pusher(TARGET, output, SHARDS, private=False, drop=True, max_pending=2 * size) as pusher:
        for file in SHARDS:
            pusher.add(file)
            waiting = [name for name in SHARDS[: SHARDS.index(file) + 1] if (output / name).exists()]
            assert len(waiting) <= 2
        pusher.finish(FILES)
    assert not server.repos["me/out"].private
    assert {name: server.repos["me/out"].files[name] for name in FILES} == whole
    assert finished(output) == []
    again = Pusher(TARGET, output, SHARDS, drop=True)
    assert again.arrived == set(SHARDS)
    before = len(server.repos["me/out"].commits)
    with again:
        again.finish(FILES)
    assert len(server.repos["me/out"].commits) == before


def test_push_again_sends_nothing_twice(server: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "COMMIT_SHARDS", 1)
    (output / "config.json").rename(output / "later")
    with Pusher(TARGET, output, SHARDS) as pusher:
        pusher.add(SHARDS[0])
        wait_for(lambda: SHARDS[0] in pusher.arrived)
    (output / "later").rename(output / "config.json")
    server.requests.clear()
    with Pusher(TARGET, output, SHARDS) as pusher:
        assert pusher.arrived == {SHARDS[0]}
        pusher.finish(FILES)
    sent = sum(request.received for request in server.of("PUT /lfs/"))
    assert sent == sum((output / name).stat().st_size for name in [*SHARDS[1:], "tokenizer.json"])
    assert Pusher(Repo("me/second"), output, SHARDS).arrived == set()
    # Without the memos, the checksums say the same.
    for memo in (output / ".glmquant").glob("*.pushed"):
        memo.unlink()
    server.requests.clear()
    with Pusher(TARGET, output, SHARDS) as pusher:
        assert pusher.arrived == set()
        pusher.finish(FILES)
    assert server.of("PUT /lfs/|/commit/|/preupload/") == []


def test_a_shard_that_did_not_arrive_is_kept(server: HubServer, output: Path) -> None:
    server.fault("PUT /lfs/", times=99, corrupt=True)
    content = (output / SHARDS[0]).read_bytes()
    with Pusher(TARGET, output, SHARDS, drop=True) as pusher, pytest.raises(OutputError) as caught:
        pusher.add(SHARDS[0])
        pusher.finish(FILES)
    assert caught.value.message == (
        f"me/out: {SHARDS[0]} did not arrive as it is in {output}: the Hub has {sha256(b'?' + content[1:])}"
    )
    assert (output / SHARDS[0]).read_bytes() == content
    assert "config.json" not in server.repos["me/out"].files
    assert list((output / ".glmquant").glob("*.pushed")) == []


def test_a_shard_that_the_repository_ignores(server: HubServer, output: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.gitignore").write_text(SHARDS[0])
    server.add("me/out", tmp_path / "other")
    with Pusher(TARGET, output, SHARDS, drop=True) as pusher, pytest.raises(OutputError, match="no such file"):
        pusher.finish(FILES)
    assert (output / SHARDS[0]).exists()


def test_push_passes_over_what_passes(server: HubServer, output: Path) -> None:
    for where in ("POST /api/repos", "GET /api/models", "preupload", "batch", "PUT /lfs", "/commit/", "validate-yaml"):
        server.fault(where, status=503, times=2)
    with Pusher(TARGET, output, SHARDS) as pusher:
        pusher.finish(FILES)
    assert server.repos["me/out"].files["config.json"] == (output / "config.json").read_bytes()


def test_push_that_is_refused(server: HubServer, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "Name a new repository, or delete what is in this one."
    server.add("me/other", make(tmp_path / "other", 1))
    (output / "config.json").unlink()
    with pytest.raises(OutputError) as caught:
        Pusher(Repo("me/other"), output, SHARDS)
    assert caught.value.message == "me/other already holds a finished checkpoint (config.json)"
    with pytest.raises(OutputError) as caught:
        Pusher(Repo("me/other"), output, SHARDS[:2])
    assert caught.value.message == f"me/other already holds {SHARDS[2]}, which is no part of this output"
    assert caught.value.hint == hint
    with Pusher(TARGET, output, [*SHARDS, "gone.safetensors"]) as pusher, pytest.raises(OutputError) as caught:
        pusher.finish(["gone.safetensors"])
    assert caught.value.message == f"gone.safetensors is neither in {output} nor in me/out"
    (output / "README.md").write_text("---\nbad")
    with Pusher(TARGET, output, SHARDS) as pusher, pytest.raises(OutputError, match="license must be a string"):
        pusher.finish([*SHARDS, "README.md"])
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutputError) as caught:
        Pusher(TARGET, output, SHARDS)
    assert caught.value.message == "me/out: access refused (401)"
    assert caught.value.hint == "Set " + TOKEN.format("may")


def test_an_upload_that_fails_stops_the_run(server: HubServer, output: Path) -> None:
    server.fault("/commit/", status=503, times=99)
    with Pusher(TARGET, output, SHARDS, max_pending=0) as pusher:
        with pytest.raises(OutputError, match=rf"^me/out: {SHARDS[0]}: the server answers 503"):
            pusher.add(SHARDS[0])
        with pytest.raises(OutputError, match="the server answers 503"):
            pusher.add(SHARDS[1])


def test_stop_ends_a_push(server: HubServer, output: Path) -> None:
    server.fault("/commit/", slow=1.0)
    with Pusher(TARGET, output, SHARDS, max_pending=0) as pusher:
        threading.Timer(0.1, pusher.stop).start()
        begun = time.monotonic()
        with pytest.raises(Stopped):
            pusher.add(SHARDS[0])
        assert time.monotonic() - begun < 0.9


def test_the_git_id_is_gits(tmp_path: Path) -> None:
    """Of "hello\\n", as `git hash-object` prints it."""
    assert git_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


# the whole job


def test_a_repository_is_quantized_shard_by_shard_like_a_folder(server: HubServer, tiny: Path, tmp_path: Path) -> None:
    commit = server.add(REPO, tiny)
    planned = glmquant.plan(REPO)
    weights = sum(shard.file_size for shard in planned.checkpoint.shards)
    assert planned.plan.total_size == glmquant.plan(tiny).plan.total_size
    assert sum(server.sent(f"/{file}") for file in planned.plan.weight_map.values()) < weights
    bound = 2 * max(shard.file_size for shard in planned.checkpoint.shards)
    done = glmquant.quantize(REPO, tmp_path / "out", max_disk=bound, workers=2)
    assert done.report and done.report.ok
    expected = contents(support.output(tiny, "moe").output)
    found = contents(done.output)
    named = {"README.md", "glmquant.json", "glmquant.manifest.json"}  # these say where it came from
    assert found.keys() == expected.keys()
    assert {n: c for n, c in found.items() if n not in named} == {n: c for n, c in expected.items() if n not in named}
    record = json.loads(found["glmquant.json"])
    assert record["base_model"] == REPO and len(commit) == 40
    assert glmquant.verify(done.output, tiny).ok


def test_a_stopped_run_from_the_hub_is_continued_at_the_same_commit(
    server: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glmquant.errors import BackendError
    from glmquant.streaming import Streamer

    commit = server.add(REPO, tiny)
    publish = Streamer._publish

    def one(streamer: Streamer, *args: Any) -> None:
        publish(streamer, *args)
        raise BackendError("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streamer, "_publish", one)
        with pytest.raises(BackendError) as failed:
            glmquant.quantize(REPO, tmp_path / "out", workers=1)
    words = shlex.split(str(failed.value).partition("Continue with: ")[2])
    assert words[2] == f"{REPO}@{commit}"
    assert main(words[1:]) == 0
    ours = {n: c for n, c in contents(tmp_path / "out").items() if n.endswith(".safetensors")}
    theirs = contents(support.output(tiny, "moe").output)
    assert ours == {n: c for n, c in theirs.items() if n.endswith(".safetensors")}


def test_what_makes_no_sense_with_a_repository_is_refused(server: HubServer, tiny: Path, tmp_path: Path) -> None:
    server.add(REPO, tiny)
    with pytest.raises(CheckpointError, match="--delete-source-shards is for folders"):
        glmquant.quantize(REPO, tmp_path / "out", delete_source_shards=True)
    with pytest.raises(CheckpointError, match="--engine ray needs a source folder"):
        glmquant.quantize(REPO, tmp_path / "out", ray="")
    with pytest.raises(CheckpointError, match=r"--max-disk 10 is less than the [\d,]+ bytes"):
        glmquant.quantize(REPO, tmp_path / "out", max_disk=10)
    assert not (tmp_path / "out").exists()


# from the Hub to the Hub


@pytest.fixture
def mine(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub, logged in."""
    monkeypatch.setenv("HF_TOKEN", server.token)
    return server


SAYS_WHERE = {"README.md", "glmquant.json", "glmquant.manifest.json"}


def comparable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without those that name the source."""
    return {name: content for name, content in files.items() if name not in SAYS_WHERE}


class Watch:
    """The most bytes that were in a folder at one time, by suffix of the files' names."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.most, self._stop = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            found = 0
            with contextlib.suppress(OSError):  # folders come and go, and files
                for path in self._folder.rglob("*.safetensors*"):
                    with contextlib.suppress(OSError):
                        found += path.stat().st_blocks * 512 if path.suffix != ".json" else 0
            self.most = max(self.most, found)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_disk_smaller_than_source_and_output(
    mine: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "COMMIT_SHARDS", 1)
    monkeypatch.setattr("glmquant.pipeline.COMMIT_SHARDS", 1)
    mine.add(REPO, tiny)
    planned = glmquant.plan(REPO)
    biggest = max(shard.file_size for shard in planned.checkpoint.shards)
    with Watch(tmp_path) as watch:
        done = glmquant.quantize(
            REPO, tmp_path / "out", workers=1, max_disk=biggest, push_to_hub="me/made", drop_pushed=True
        )
    assert done.report and done.report.ok and str(done.report.folder).startswith("me/made@")
    made = mine.repos["me/made"]
    assert made.private and list(made.commits[-1][1]) and "config.json" not in made.commits[-2][1]
    assert comparable(made.files) == comparable(contents(support.output(tiny, "moe").output))
    assert not list((tmp_path / "out").glob("*.safetensors"))
    made_biggest = max(shard.file_size for shard in planned.plan.shards)
    whole = sum(shard.file_size for shard in (*planned.checkpoint.shards, *planned.plan.shards))
    assert 0 < watch.most <= biggest + 5 * (made_biggest + 4096) < whole
    sent = len(made.commits)
    again = glmquant.quantize(REPO, tmp_path / "out", resume=True, push_to_hub="me/made", drop_pushed=True)
    assert again.ok and len(made.commits) == sent


@pytest.mark.parametrize("drop", [False, True])
def test_a_stopped_push_is_continued(
    mine: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    monkeypatch.setattr(push, "COMMIT_SHARDS", 2)
    monkeypatch.setattr("glmquant.pipeline.COMMIT_SHARDS", 1)
    mine.fault("POST /api/models/me/made/commit/main", times=1)
    mine.fault("POST /api/models/me/made/commit/main", times=99, status=403)
    options = ["--push-to-hub", "me/made", *(["--drop-pushed"] if drop else [])]
    out = tmp_path / "out"
    assert main(["quantize", str(tiny), str(out), "--quiet", "--workers", "1", *options]) == 1
    assert not (out / "config.json").exists() or "config.json" not in mine.repos["me/made"].files
    mine.faults.clear()
    assert main(["quantize", str(tiny), str(out), "--quiet", "--resume", *options]) == 0
    expected = contents(support.output(tiny, "moe").output)
    assert comparable(mine.repos["me/made"].files) == comparable(expected)
    assert bool(list(out.glob("*.safetensors"))) is not drop and not (out / ".glmquant").exists()


def test_a_finished_output_is_pushed_by_resume(mine: HubServer, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    glmquant.quantize(tiny, out)
    before = contents(out)
    glmquant.quantize(tiny, out, resume=True, push_to_hub="me/made")
    assert mine.repos["me/made"].files == before == contents(out)
    assert main(["validate", "me/made"]) == 0
    (out / "chat_template.jinja").write_text("changed")
    glmquant.quantize(tiny, out, resume=True, push_to_hub="me/made", drop_pushed=True)
    assert mine.repos["me/made"].files == {**before, "chat_template.jinja": b"changed"}
    assert not list(out.glob("*.safetensors"))


def test_config_is_not_pushed_with_an_error_of_the_validator(
    mine: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glmquant import pipeline
    from glmquant.findings import Finding, Report

    validate = pipeline.validate_folder
    wrong = Finding("made-up", "error", "made up", (), 0)

    def failing(*args: Any) -> Report:
        return dataclasses.replace(validate(*args), findings=(wrong,))

    monkeypatch.setattr(pipeline, "validate_folder", failing)
    done = glmquant.quantize(tiny, tmp_path / "out", push_to_hub="me/made")
    assert not done.ok and "config.json" not in mine.repos["me/made"].files


def test_pushes_that_make_no_sense_are_refused(mine: HubServer, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options, message in (
        ({"drop_pushed": True}, "--drop-pushed without --push-to-hub"),
        ({"push_to_hub": "name"}, "not the name of a repository"),
        ({"push_to_hub": "me/made@v1"}, "not the name of a repository"),
        ({"push_to_hub": "me/made", "rank": 0, "world_size": 2}, "--push-to-hub is for one process"),
        ({"push_to_hub": "me/made", "drop_pushed": True, "delete_source_shards": True}, "exclude each other"),
    ):
        with pytest.raises(OutputError, match=message):
            glmquant.quantize(tiny, out, **options)
    mine.add("me/other", tiny)
    with pytest.raises(OutputError, match="me/other already holds"):
        glmquant.quantize(tiny, out, push_to_hub="me/other")
    assert not out.exists()

"""Several processes, and a Ray cluster, write one output: byte for byte what one process writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
import torture

import glmquant
from glmquant.cli import main
from glmquant.errors import BackendError, CheckpointError, OutputError

SIZE = 150_000  # bytes a shard: two dozen of them
SLOW = (
    "import sys, time\n"
    "from glmquant.mxfp4.kernel import FusedBackend\n"
    "from glmquant.cli import main\n"
    "real = FusedBackend.quantize_into\n"
    "FusedBackend.quantize_into = lambda *a: (time.sleep(0.02), real(*a))[1]\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("one") / "out"
    return torture.digests(glmquant.quantize(tiny, out, max_shard_size=SIZE).output)


def start(tiny: Path, out: Path, rank: int, size: int) -> subprocess.Popen[str]:
    words = ["quantize", tiny, out, "--max-shard-size", str(SIZE), "--workers", "1"]
    command = [sys.executable, "-c", SLOW, *words, "--rank", str(rank), "--world-size", str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(out: Path) -> int:
    return len(list((out / ".glmquant").glob("*.safetensors.json")))


def wait_for(shards: int, out: Path) -> None:
    deadline = time.monotonic() + 60
    while finished(out) < shards and time.monotonic() < deadline:
        time.sleep(0.01)
    assert finished(out) >= shards


def test_ranks_write_one_output_together(tiny: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    out = tmp_path / "out"
    ranks = [start(tiny, out, rank, 3) for rank in range(3)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert torture.digests(out) == expected
    ends = ["shards are left to other ranks" in text for text, _ in said]
    assert ends.count(False) >= 1  # whoever came last validated


def test_a_rank_that_is_killed_is_started_again(tiny: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    out = tmp_path / "out"
    first, second = start(tiny, out, 0, 2), start(tiny, out, 1, 2)
    wait_for(3, out)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    text, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and "rank 0 of 2 is done; " in text and "are left to other ranks" in text
    assert not (out / "config.json").exists()
    again = start(tiny, out, 1, 2)
    text, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "shards are left" not in text
    assert torture.digests(out) == expected


def test_a_rank_twice_another_run_and_other_settings_are_refused(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rank = start(tiny, out, 0, 2)
    wait_for(1, out)
    for options in ({"rank": 0, "world_size": 2}, {"resume": True}, {}):
        with pytest.raises(OutputError, match=r"is being written by another process \(process \d+ on"):
            glmquant.quantize(tiny, out, max_shard_size=SIZE, **options)
    with pytest.raises(OutputError, match="recipe was 'moe', now 'routed'"):
        glmquant.quantize(tiny, out, max_shard_size=SIZE, recipe="routed", rank=1, world_size=2)
    rank.communicate(timeout=120)
    assert rank.returncode == 0
    with pytest.raises(OutputError, match="rank 2 of 2: ranks count from 0 to 1"):
        glmquant.quantize(tiny, out, rank=2, world_size=2)
    for options in ({"rank": 1, "world_size": 2}, {"ray": ""}):
        with pytest.raises(CheckpointError, match="--delete-source-shards is for one process"):
            glmquant.quantize(tiny, tmp_path / "other", delete_source_shards=True, **options)


@pytest.mark.parametrize(("rank", "size"), [("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")])
def test_a_launchers_variables_say_the_rank(
    rank: str,
    size: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(size, "2")
    for number in "10":
        monkeypatch.setenv(rank, number)
        assert main(["quantize", str(tiny), str(tmp_path / "out")]) == 0
        text = capsys.readouterr().out
        assert ("rank 1 of 2 is done; 2 shards are left" in text) == (number == "1")
    assert torture.digests(tmp_path / "out") == torture.digests(support.output(tiny, "moe").output)
    assert main(["quantize", str(tiny), str(tmp_path / "other"), "--rank", "0"]) == 1
    assert "--rank and --world-size belong together" in capsys.readouterr().err


# Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000})
    yield found
    found.shutdown()


def test_two_ray_nodes_one_killed_in_mid_run_write_what_one_process_writes(
    cluster, tiny: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    out = tmp_path / "out"

    def kill() -> None:
        wait_for(2, out)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    done = glmquant.quantize(tiny, out, max_shard_size=SIZE, ray=cluster.address)
    killer.join()
    assert done.report and done.report.ok
    assert torture.digests(out) == expected


def test_an_error_in_a_ray_task_is_shown_as_it_is_and_the_run_can_be_continued(
    cluster, tiny: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    names = {"model.layers.2.self_attn.o_proj.weight"}
    support.copy(source, tmp_path / "zeros", lambda name, tensor: tensor.zero_() if name in names else tensor)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.2.*' is all zeros"):
        glmquant.quantize(tmp_path / "zeros", tmp_path / "out", ray=cluster.address)
    assert not (tmp_path / "out/config.json").exists()


def test_a_ray_cluster_that_is_not_there_is_an_error(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"Ray at 127\.0\.0\.1:1 cannot be used"):
        glmquant.quantize(tiny, tmp_path / "out", ray="127.0.0.1:1")
    assert not (tmp_path / "out").exists()

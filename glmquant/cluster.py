"""Shards as Ray tasks: any number of machines that see the same source and output folders (extra `glmquant[ray]`).

Each task writes one shard with one thread, so Ray's own scheduling (num_cpus=1) decides how many run where. A task
whose node dies is run again elsewhere and begins its shard anew. The driver writes the records of durable shards.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from glmquant.checkpoint.header import ShardHeader
from glmquant.checkpoint.manifest import ShardRecord
from glmquant.errors import BackendError, GlmquantError
from glmquant.mxfp4.backend import Backend
from glmquant.planner import ShardPlan
from glmquant.streaming import SourceShards, Streamer

RETRIES = 3


def write_on_ray(
    shards: Sequence[ShardPlan],
    headers: Mapping[str, ShardHeader],
    source: Path,
    output: Path,
    backend: Backend,
    address: str,
    allow_zeros: bool,
    published: Callable[[ShardRecord], object],
    advance: Callable[[int], object],
) -> None:
    """Write shards on a Ray cluster; the first error stops the rest.

    Args:
        address: of the cluster, as `ray.init` takes it; '' starts one on this machine.

    Raises:
        BackendError: Ray is not installed or cannot be reached, or a task failed for good.
        CheckpointError, OutputError: as of Streamer.run.
    """
    try:
        import ray
    except ImportError as err:
        raise BackendError("Ray is not installed", "pip install 'glmquant[ray]'") from err
    mine = not ray.is_initialized()
    if mine:
        try:
            _reach(address)
            ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
        except (OSError, RuntimeError, ValueError) as err:
            raise BackendError(f"Ray at {address or 'this machine'} cannot be used: {err}") from err
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(write_one)
        sizes = {shard.file: sum(job.source.nbytes for job in shard.jobs) for shard in shards}
        running = {
            task.remote(
                shard,
                {file: headers[file] for file in shard.sources},
                source.resolve(),
                output.resolve(),
                backend.name,
                allow_zeros,
            ): shard.file
            for shard in shards
        }
        while running:
            (done,), _ = ray.wait(list(running))
            file = running.pop(done)
            try:
                found = ray.get(done)
            except ray.exceptions.RayError as err:
                raise BackendError(f"{file}: its Ray task failed: {err}") from err
            if isinstance(found, GlmquantError):
                raise found
            published(found)
            advance(sizes[file])
    finally:
        if mine:
            ray.shutdown()


def _reach(address: str) -> None:
    """Ray itself tries an address at which nobody listens for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def write_one(
    shard: ShardPlan,
    headers: Mapping[str, ShardHeader],
    source: Path,
    output: Path,
    backend: str,
    allow_zeros: bool,
) -> ShardRecord | GlmquantError:
    """The task: one shard. An expected error is returned, so that Ray does not try again what cannot work."""
    from glmquant.mxfp4.choose import make_backends

    records: list[ShardRecord] = []
    try:
        backends = make_backends(backend, "cpu", 0.0)
        streamer = Streamer(backends, 1, lambda _: None, records.append, drop_behind=True, allow_zeros=allow_zeros)
        streamer.run([shard], SourceShards(headers, [shard], lambda file: source / file), output)
    except GlmquantError as err:
        return err
    return records[0]

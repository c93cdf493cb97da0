"""From what the user asks for to backends; each is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from glmquant.errors import BackendError
from glmquant.mxfp4.backend import Backend, CheckedBackend

BACKENDS = ("auto", "fused", "quark")


def make_backends(name: str, device: str, check: float) -> list[Backend]:
    """One backend per device; `auto` is the fused kernel on the CPU and Quark on anything else."""
    devices = _devices(device)
    on_cpu = all(found.startswith("cpu") for found in devices)
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}", f"Known: {', '.join(BACKENDS)}.")
    if name == "fused" and not on_cpu:
        raise BackendError(f"the fused kernel runs on the CPU, not on {device!r}", "Leave --backend or --device out.")
    if name == "quark" or not on_cpu:
        from glmquant.mxfp4.quark import QuarkBackend

        return [QuarkBackend(found) for found in devices]
    from glmquant.mxfp4.kernel import FusedBackend

    if not check:
        return [FusedBackend()]
    from glmquant.mxfp4.quark import QuarkBackend

    return [CheckedBackend(FusedBackend(), QuarkBackend("cpu"), check)]


def _devices(device: str) -> list[str]:
    """`cuda:0,1` names two devices, like `cuda:0,cuda:1`."""
    kind = device.partition(":")[0]
    return [f"{kind}:{part}" if part.isdigit() else part for part in device.split(",")]


def threads_for(backends: Sequence[Backend], wanted: int) -> int:
    """How many of the wanted threads the backends can use."""
    limit = backends[0].threads * len(backends)
    return min(wanted, limit) if limit else wanted

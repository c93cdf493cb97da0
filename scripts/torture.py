#!/usr/bin/env python3
"""Kills a quantization at every step and fails every system call it makes, and looks whether anything is lost.

    python scripts/torture.py kill            # SIGKILL before each system call, and at 200 random instants
    python scripts/torture.py fault           # EIO, ENOSPC, EDQUOT, EINTR and short counts in each system call
    python scripts/torture.py kill --every 7  # only each 7th step

After each: nothing that looks finished is left unless it is finished, the source is untouched, finished shards are
not written again when the run is resumed, and the resumed output has the same bytes in every file as an uninterrupted
one. The calls are those of the writer and the reader: open, ftruncate, fallocate, pwrite, preadv, fsync, rename,
unlink. Each run is a fork of this process, so a thousand of them take two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

import glmquant
from glmquant import pipeline
from glmquant.checkpoint import writer

sys.path.insert(0, str(Path(__file__).resolve().parent))

CALLS = ("open", "ftruncate", "fallocate", "pwrite", "preadv", "fsync", "rename", "unlink")
FAULTS = {
    "EIO": (*CALLS,),
    "ENOSPC": ("open", "ftruncate", "fallocate", "pwrite", "fsync", "rename"),
    "EDQUOT": ("fallocate", "pwrite", "fsync"),
    "EINTR": ("fallocate", "pwrite", "preadv", "fsync"),
    "short": ("pwrite", "preadv"),
}
Files = dict[str, str]


class Lost(Exception):
    """What must not happen."""


@contextlib.contextmanager
def hooked(act: Callable[[str, int], Any]) -> Iterator[list[str]]:
    """Calls `act(name, n)` before the n-th hooked system call. It may return an OSError to raise, or 'short'."""
    made: list[str] = []
    lock = threading.Lock()
    kept = {name: getattr(os, name) for name in CALLS if name != "fallocate"}
    fallocate = writer._fallocate

    def hook(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lock:
                made.append(name)
                number = len(made)
            told = act(name, number)
            if isinstance(told, OSError):
                if name == "fallocate":
                    ctypes.set_errno(told.errno or 0)
                    return -1
                raise told
            if told == "short" and name == "pwrite":
                return real(args[0], memoryview(args[1])[: max(1, len(args[1]) // 2)], *args[2:])
            if told == "short" and name == "preadv":
                return real(args[0], [args[1][0][: max(1, len(args[1][0]) // 2)]], *args[2:])
            return real(*args, **named)

        return call

    for name, real in kept.items():
        setattr(os, name, hook(name, real))
    writer._fallocate = hook("fallocate", fallocate)
    try:
        yield made
    finally:
        for name, real in kept.items():
            setattr(os, name, real)
        writer._fallocate = fallocate


def quantize(source: Path, out: Path, act: Callable[[str, int], Any], *, resume: bool = False, workers: int = 2) -> int:
    """In this process; the exit code that the command line would give."""
    try:
        with hooked(act):
            glmquant.quantize(source, out, workers=workers, resume=resume)
    except glmquant.GlmquantError as err:
        print(err, file=sys.stderr)
        return 1
    return 0


TRACE = Path(tempfile.gettempdir()) / f"torture-{os.getpid()}.txt"


def forked(work: Callable[[], int], kill_after: float | None = None) -> int:
    """Run in a child; its exit code, or minus the signal that ended it. 99 for an exception nobody expects."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            with open(TRACE, "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def digests(folder: Path) -> Files:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): xxhash.xxh3_128_hexdigest(p.read_bytes()) for p in sorted(paths)}


class Torture:
    """A source, what an uninterrupted run makes of it, and the checks after each accident."""

    def __init__(self, source: Path, work: Path) -> None:
        self.source, self.out = source, work / "out"
        self.before, self.now = digests(source), "a kill"
        reference = work / "reference"
        self.calls: list[str] = []
        begun = time.monotonic()
        with hooked(lambda *_: None) as made:
            glmquant.quantize(source, reference, workers=2)
            self.calls = list(made)
        self.seconds = time.monotonic() - begun
        self.expected = digests(reference)

    def accident(self, act: Callable[[str, int], Any], kill_after: float | None = None) -> int:
        shutil.rmtree(self.out, ignore_errors=True)
        code = forked(lambda: quantize(self.source, self.out, act), kill_after)
        self.check(code)
        return code

    def check(self, code: int) -> None:
        """Nothing half-done looks done; and after `resume` all is as if nothing had happened."""
        if code == 99:
            raise Lost("an exception that is no GlmquantError:\n" + TRACE.read_text())
        if digests(self.source) != self.before:
            raise Lost("the source was touched")
        finished = (self.out / "config.json").exists()
        if code == 0 and not finished:
            raise Lost("success without config.json")
        if finished:
            left = {name: value for name, value in digests(self.out).items() if not name.startswith(".glmquant/")}
            if left != self.expected:
                raise Lost("config.json is there, but something else is not what it should be")
        recorded = self._recorded()
        again = forked(lambda: quantize(self.source, self.out, lambda *_: None, resume=True))
        if again != 0:
            raise Lost(f"resume ended with {again}:\n{TRACE.read_text()}")
        if digests(self.out) != self.expected:
            raise Lost("the resumed output differs")
        if {name: inode for name, inode in self._inodes().items() if name in recorded} != recorded:
            raise Lost("a finished shard was written again")

    def _inodes(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.out.glob("*.safetensors")}

    def _recorded(self) -> dict[str, int]:
        kept = {path.name.removesuffix(".json") for path in (self.out / ".glmquant").glob("*.safetensors.json")}
        return {name: inode for name, inode in self._inodes().items() if name in kept}


def kill(torture: Torture, every: int, instants: int, seed: int) -> str:
    def before(step: int) -> Callable[[str, int], None]:
        def act(_: str, number: int) -> None:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)

        return act

    steps = range(1, len(torture.calls) + 1, every)
    killed = sum(torture.accident(before(step)) == -signal.SIGKILL for step in steps)
    chosen = random.Random(seed)
    at_random = [chosen.uniform(0, 0.8 * torture.seconds) for _ in range(instants)]
    late = sum(torture.accident(lambda *_: None, kill_after=seconds) == -signal.SIGKILL for seconds in at_random)
    return (
        f"{killed} kills before a system call of {len(torture.calls)}, {late} of {instants} at random instants: 0 lost"
    )


def fault(torture: Torture, every: int) -> str:
    def at(step: int, names: tuple[str, ...], kind: str) -> Callable[[str, int], Any]:
        def act(name: str, now: int) -> Any:
            if now != step or name not in names:  # threads may have changed the order
                return None
            return "short" if kind == "short" else OSError(code := getattr(errno, kind), os.strerror(code))

        return act

    injected = survived = 0
    for kind, names in FAULTS.items():
        steps = [step for step, name in enumerate(torture.calls, 1) if name in names]
        for step in steps[::every]:
            injected += 1
            torture.now = f"{kind} in {torture.calls[step - 1]}, call {step}"
            survived += torture.accident(at(step, names, kind)) == 0
    return f"{injected} faults, {survived} of them without harm, {injected - survived} with an error: 0 lost"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "fault"))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th step only")
    parser.add_argument("--instants", type=int, default=200, metavar="N", help="kill: how many random ones (200)")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--source", type=Path, help="a small checkpoint of several shards (default: one is made)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source = args.source
        if source is None:
            from make_tiny_glm import make_tiny_glm

            source = Path(work) / "source"
            make_tiny_glm(source, layers=3, experts=4, hidden=64, moe_intermediate=32, intermediate=64, shards=4)
        pipeline.validate_folder = lambda *_: None  # type: ignore[assignment] # reads only; half of the time
        torture = Torture(source, Path(work))
        begun = time.monotonic()
        try:
            if args.what == "kill":
                said = kill(torture, args.every, args.instants, args.seed)
            else:
                said = fault(torture, args.every)
        except Lost as lost:
            print(f"LOST after {torture.now}: {lost}", file=sys.stderr)
            return 1
    TRACE.unlink(missing_ok=True)
    print(f"{said} ({time.monotonic() - begun:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

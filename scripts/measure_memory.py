#!/usr/bin/env python3
"""Does memory grow with the size of a shard? Run `glmquant quantize` on small and on big shards and look.

    python scripts/measure_memory.py

makes 3 GB of random weights twice (two layers with few experts, of GLM-5.2's widths): in shards of 0.3 GB, and
in one of 3 GB. It quantizes each in a process of its own and prints a Markdown table:

  peak RSS         most memory that process held at once, Quark and torch included
  anonymous        of that, what no file backs: buffers and temporaries (the highest of samples 5 ms apart)
  nothing to do    the same for a checkpoint of 2 MB: what importing Quark and torch takes

Linux only. Needs 5 GB of disk, which it gives back, and about 3 minutes on two cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from make_tiny_glm import make_tiny_glm

ROOT = Path(__file__).resolve().parent.parent
# GLM-5.2's widths; its vocabulary, experts and layers would be 154880, 256 and 78.
WIDE = {"hidden": 6144, "moe_intermediate": 2048, "intermediate": 12288, "vocab": 24000, "experts": 26, "layers": 2}


class Usage(NamedTuple):
    peak: int
    anonymous: int
    seconds: float


def measure(name: str, folder: Path, options: dict[str, int]) -> str:
    """Make a checkpoint in `folder`, quantize it there, and return a line of the table."""
    make_tiny_glm(folder / "source", mtp=False, **options)
    sizes = [path.stat().st_size for path in (folder / "source").glob("*.safetensors")]
    usage = watch([sys.executable, "-m", "glmquant", "quantize", folder / "source", folder / "out", "--quiet"])
    cells = [name, str(len(sizes)), f"{max(sizes) / 1e9:.3f} GB", f"{sum(sizes) / 1e9:.3f} GB"]
    cells += [f"{usage.peak / 1e6:.0f} MB", f"{usage.anonymous / 1e6:.0f} MB", f"{usage.seconds:.0f} s"]
    return f"| {' | '.join(cells)} |"


def watch(command: list[object]) -> Usage:
    """Run a command to its end; raise if it fails."""
    begun, anonymous = time.monotonic(), 0
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        anonymous = max(anonymous, anonymous_now(process.pid))
        time.sleep(0.005)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Usage(usage.ru_maxrss * 1024, anonymous, time.monotonic() - begun)


def anonymous_now(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # it has just ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where to put the data (default: the temp folder)")
    work = parser.parse_args().work
    print("| | shards | largest | all | peak RSS | anonymous | time |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, options in (
        ("nothing to do", {"layers": 2, "shards": 1}),
        ("small shards", WIDE | {"shards": 11}),
        ("one big shard", WIDE | {"shards": 1}),
    ):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            print(measure(name, Path(folder), options), flush=True)


if __name__ == "__main__":
    main()

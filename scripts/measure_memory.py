#!/usr/bin/env python3
"""Does memory grow with the size of a shard? Run `glmquant quantize` on small and on big shards and look.

    python scripts/measure_memory.py

makes 5 GB of random weights twice (two layers with few experts, of GLM-5.2's widths): in shards of 0.3 GB, and
in one of 5 GB. It quantizes each with either backend, in a process of its own, and prints a Markdown table:

  peak RSS    most memory that process held at once, its code included
  anonymous   of that, what no file backs: buffers and temporaries (the highest of samples 5 ms apart)

The rows of the tiny checkpoint show what starting takes: for quark, importing torch and Quark.
Linux only. Needs 8 GB of disk, which it gives back, and about 5 minutes on two cores.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from make_tiny_glm import make_tiny_glm

ROOT = Path(__file__).resolve().parent.parent
# GLM-5.2's widths; its vocabulary, experts and layers would be 154880, 256 and 78.
WIDE = {"hidden": 6144, "moe_intermediate": 2048, "intermediate": 12288, "vocab": 24000, "experts": 51, "layers": 2}
CHECKPOINTS = {
    "tiny": {"layers": 2, "shards": 1},
    "small shards": WIDE | {"shards": 17},
    "one big shard": WIDE | {"shards": 1},
}


class Usage(NamedTuple):
    peak: int
    anonymous: int
    seconds: float


def measure(source: Path, out: Path, backend: str) -> Usage:
    command = [sys.executable, "-m", "glmquant", "quantize", source, out, "--quiet", "--backend", backend]
    begun, peak, anonymous = time.monotonic(), 0, 0
    # Not ru_maxrss of wait4, which begins with what this process, the parent, holds.
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            peak = max(peak, _bytes(status.get("VmHWM")))
            anonymous = max(anonymous, _bytes(status.get("RssAnon")))
            time.sleep(0.005)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Usage(peak, anonymous, time.monotonic() - begun)


def _bytes(field: str | None) -> int:
    return int(field.split()[0]) * 1024 if field else 0  # none: it is just ending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where to put the data (default: the temp folder)")
    work = parser.parse_args().work
    print("| backend | checkpoint | shards | largest | peak RSS | anonymous | time |\n|---|---|--:|--:|--:|--:|--:|")
    for name, options in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory(dir=work) as folder:
            source = Path(folder, "source")
            make_tiny_glm(source, mtp=False, **options)
            sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
            for backend in ("fused", "quark"):
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    usage = measure(source, Path(out, "out"), backend)
                cells = [backend, name, str(len(sizes)), f"{max(sizes) / 1e9:.3f} GB"]
                cells += [f"{usage.peak / 1e6:.0f} MB", f"{usage.anonymous / 1e6:.0f} MB", f"{usage.seconds:.1f} s"]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How fast is glmquant, next to other tools and to what the disk allows?

    python scripts/bench.py                                    # all tools, 3 rounds: 40 minutes on two cores
    python scripts/bench.py --tools glmquant,limit,quark:1     # some tools; TOOL:RUNS overrides --runs
    python scripts/bench.py growth                             # 1, 2, 4, 8 GB: is the cost a line?
    python scripts/bench.py scaling                            # 1 to n threads: whole job and limit
    python scripts/bench.py whole                              # full-size shards of holes: what all of GLM-5.2 costs
    python scripts/bench.py kernel                             # elements per second on 1 to n threads, no files

Makes a checkpoint with GLM-5.2's tensor shapes (5 GB: few layers and experts, small vocabulary) and has each tool write
it as MXFP4, the same modules each, in turn (A B C, A B C, ...), so that a busy machine hurts all alike. Prints a
Markdown table and stores it with every single run as JSON. Other tools are installed into .bench/ with pip.

  limit            reads the input and writes as many bytes as glmquant does, with fsync, and does nothing else
  glmquant         the fused kernel                      quark           Quark's direct_quantize_checkpoint
  glmquant-quark   glmquant with --backend quark         llm-compressor  its model_free_ptq; auto-round: its model-free

Seconds are those of the call that does the work, in a process of its own: no imports. glmquant and limit sync what they
write; what the others leave to the system is not charged to them. `others` is how many cores everything else on the
machine kept busy meanwhile, stolen time included. Linux only; 15 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Run = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
# GLM-5.2's widths; its vocabulary, experts and layers would be 154880, 256 and 78.
SIZES = {"hidden": 6144, "moe_intermediate": 2048, "intermediate": 12288, "vocab": 1024, "experts": 22, "layers": 3}
# Tool -> packages of which the versions matter. A tool in PEERS runs in a venv of its own.
TOOLS = {
    "glmquant": ("glmquant", "numpy"),
    "limit": (),
    "glmquant-quark": ("glmquant", "amd-quark", "torch"),
    "quark": ("amd-quark", "torch", "safetensors"),
    "llm-compressor": ("llmcompressor", "compressed-tensors", "torch", "safetensors"),
    "auto-round": ("auto-round", "torch", "safetensors"),
}
PEERS = {"llm-compressor": "llmcompressor==0.14.0.1", "auto-round": "auto-round==0.16.1"}
REFERENCE = "glmquant"
# GB -> experts of the one MoE layer that make a source of that size and 0.4 GB more, most of it experts, as GLM-5.2 is.
GROWTH = {1: 2, 2: 15, 4: 42, 8: 95}
CHUNK = 1024 * 1024  # stays in the second-level cache


class NotMeasured(Exception):
    """Why a tool has no numbers; shown in the table."""


# ---- The parent: input, peers, runs -----------------------------------------------------------------------------


def make_source(folder: Path, shards: int = 4, **sizes: int) -> Path:
    """The checkpoint to quantize, made once. `sizes` replace those of SIZES."""
    if not folder.exists():
        import glm_layout
        from make_tiny_glm import SMALL, make_tiny_glm

        print(f"making {folder} ...", file=sys.stderr)
        published = json.loads(glm_layout.CONFIG.read_text())
        unfinished = folder.with_name(folder.name + ".partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        sizes = SIZES | sizes
        overrides = {key: published[key] for key in (*SMALL, "num_experts_per_tok")}
        overrides["num_experts_per_tok"] = min(overrides["num_experts_per_tok"], sizes["experts"])
        make_tiny_glm(unfinished, mtp=False, shards=shards, overrides=overrides, **sizes)
        unfinished.rename(folder)
    return folder


def interpreter(tool: str, work: Path) -> str:
    """The Python that has the tool; installs it if need be."""
    if tool not in PEERS:
        return sys.executable
    venv = work / tool
    python, stamp = venv / "bin/python", venv / f".{PEERS[tool]}"
    if not stamp.exists():
        print(f"installing {PEERS[tool]} into {venv} ...", file=sys.stderr)
        constraints = str(ROOT / "constraints.txt")
        pip = [str(python), "-m", "pip", "install", "-q", "-c", constraints, PEERS[tool]]
        for command in ([sys.executable, "-m", "venv", str(venv)], pip):
            if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
                raise NotMeasured(f"pip cannot install {PEERS[tool]}")
        stamp.touch()
    return str(python)


def run_once(tool: str, python: str, job: Run, work: Path, *, cold: bool, timeout: float) -> Run:
    """One run in a child process: what the child says of itself, and its memory as seen from here."""
    out, log = work / "out", work / f"{tool}.log"
    result = work / "out.json"
    shutil.rmtree(out, ignore_errors=True)
    result.unlink(missing_ok=True)
    settle(Path(job["source"]), cold)
    begun, peak, anonymous = time.monotonic(), 0, 0
    command = [python, __file__, "child", tool, job["source"], str(out)]
    with open(log, "wb") as output, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output) as p:
        assert p.stdin
        p.stdin.write(json.dumps(job).encode())
        p.stdin.close()
        while p.poll() is None:
            held = [memory(pid) for pid in tree(p.pid)]
            peak, anonymous = max(peak, sum(m[0] for m in held)), max(anonymous, sum(m[1] for m in held))
            if time.monotonic() - begun > timeout:
                for pid in reversed(list(tree(p.pid))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                raise NotMeasured(f"stopped after {timeout:.0f} s")
            time.sleep(0.01)
    if p.returncode or not result.exists():
        lines = log.read_text(errors="replace").split("\n")
        raise NotMeasured(f"failed: {next((line for line in reversed(lines) if line.strip()), 'no message')[:200]}")
    bytes_out = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    shutil.rmtree(out)
    found: Run = json.loads(result.read_text())
    return found | {
        "process_seconds": time.monotonic() - begun,
        "peak_rss": peak,
        "anonymous": anonymous,
        "bytes_out": bytes_out,
    }


def settle(source: Path, cold: bool) -> None:
    """Nothing waits to be written, and the input is in the page cache (or is not)."""
    os.sync()
    for path in source.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.read(CHUNK):
                pass


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants, parents first."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from tree(int(child))


def memory(pid: int) -> tuple[int, int]:
    """The most a process has held so far, and what of it no file backs now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0, 0
    status = dict(line.split(":", 1) for line in lines)
    peak, anonymous = (int(status.get(field, "0").split()[0]) * 1024 for field in ("VmHWM", "RssAnon"))
    return peak, anonymous


def make_job(source: Path, recipe: str, workers: int) -> Run:
    """What a child is told."""
    import glmquant

    planned = glmquant.plan(source, recipe=recipe).plan
    return {
        "source": str(source),
        "recipe": recipe,
        "workers": workers,
        "bytes": sum(path.stat().st_size for path in source.glob("*.safetensors")),
        "keep": [name for name, kind in planned.formats.items() if kind == "plain"],
        "sizes": {shard.file: shard.file_size for shard in planned.shards},
        "quantized": sum(kind == "mxfp4" for kind in planned.formats.values()),
    }


def bench(args: argparse.Namespace) -> Run:
    work: Path = args.work
    job = make_job(args.source or make_source(work / "source"), args.recipe, machine()["cores"])
    result: Run = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "input": {
            "bytes": job["bytes"],
            "shards": len(job["sizes"]),
            "quantized_weights": job["quantized"],
            "recipe": args.recipe,
            "page_cache": "cold" if args.cold else "warm",
        },
        "runs": {tool: [] for tool in args.tools},
        "not_measured": {},
    }
    for number in range(max(args.tools.values())):
        for tool, wanted in args.tools.items():
            if number >= wanted or tool in result["not_measured"]:
                continue
            try:
                python = interpreter(tool, work)
                run = run_once(tool, python, job, work, cold=args.cold, timeout=args.timeout)
            except NotMeasured as why:
                result["not_measured"][tool] = str(why)
                print(f"{tool}: {why}", file=sys.stderr)
            else:
                result["runs"][tool].append(run)
                print(f"{tool}: {run['seconds']:.2f} s", file=sys.stderr)
            (args.json or work / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(work / "out", ignore_errors=True)
    (work / "out.json").unlink(missing_ok=True)
    return result


def growth(args: argparse.Namespace) -> str:
    """The whole job on sources of growing size, and how far each is from the line through all."""
    work: Path = args.work
    cores = machine()["cores"]
    jobs = [
        make_job(make_source(work / f"source-{gb}", gb, layers=2, experts=experts), args.recipe, cores)
        for gb, experts in GROWTH.items()
        if gb <= args.most
    ]
    runs: list[list[Run]] = [[] for _ in jobs]
    for _ in range(args.runs):
        for found, job in zip(runs, jobs, strict=True):
            for other in jobs:  # memory may not hold all of them
                if other is not job:
                    settle(Path(other["source"]), cold=True)
            found.append(run_once(REFERENCE, sys.executable, job, work, cold=args.cold, timeout=args.timeout))
            print(f"{job['bytes'] / 1e9:.2f} GB: {found[-1]['seconds']:.2f} s", file=sys.stderr)
    sizes = [job["bytes"] / 1e9 for job in jobs]
    seconds = [[run["seconds"] for run in found] for found in runs]
    medians = [statistics.median(column) for column in seconds]
    slope, start = statistics.linear_regression(sizes, medians)
    lines = [title(), "", "| GB in | seconds | line | off | anonymous |", "|--:|--:|--:|--:|--:|"]
    for size, column, middle, found in zip(sizes, seconds, medians, runs, strict=True):
        line = start + slope * size
        held = max(run["anonymous"] for run in found) / 1e6
        lines.append(f"| {size:.2f} | {spread(column, 2)} | {line:.2f} | {middle / line - 1:+.1%} | {held:,.0f} MB |")
    return "\n".join([*lines, "", f"seconds = {start:.2f} + {slope:.3f} x GB"])


def scaling(args: argparse.Namespace) -> str:
    """The whole job and the limit on 1 to n threads."""
    work: Path = args.work
    cores = machine()["cores"]
    source = args.source or make_source(work / "source")
    steps = [2**power for power in range(cores.bit_length()) if 2**power < cores] + [cores]
    tools = [(tool, make_job(source, args.recipe, count)) for count in steps for tool in (REFERENCE, "limit")]
    runs: list[list[Run]] = [[] for _ in tools]
    for _ in range(args.runs):
        for found, (tool, job) in zip(runs, tools, strict=True):
            found.append(run_once(tool, sys.executable, job, work, cold=args.cold, timeout=args.timeout))
            print(f"{tool}, {job['workers']} threads: {found[-1]['seconds']:.2f} s", file=sys.stderr)
    lines = [title(), "", "| tool | threads | seconds | CPU s | times faster than 1 |", "|---|--:|--:|--:|--:|"]
    for (tool, job), found in zip(tools, runs, strict=True):
        alone = next(r for (t, _), r in zip(tools, runs, strict=True) if t == tool)
        ratios = [one["seconds"] / run["seconds"] for one, run in zip(alone, found, strict=True)]
        cells = [tool, str(job["workers"]), spread([run["seconds"] for run in found], 2)]
        cells += [spread([run["cpu_seconds"] for run in found], 1), spread(ratios, 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def whole(args: argparse.Namespace) -> str:
    """Some full-size shards of GLM-5.2 with holes for weights, written for real, and from that the whole model.

    Reading a hole costs the CPU about what reading a cached page does, and no disk. What the disk adds is arithmetic:
    bytes by its speed, unless the cores are slower.
    """
    from make_full_layout import make_full_layout

    import glmquant
    from glmquant.mxfp4.kernel import FusedBackend
    from glmquant.streaming import SourceShards, Streamer

    layout, out = args.work / "full", args.work / "out"
    if not layout.exists():
        make_full_layout(layout)
    planned = glmquant.plan(layout, recipe=args.recipe)
    cores = machine()["cores"]
    step = max(1, len(planned.plan.shards) // args.shards)
    chosen = planned.plan.shards[::step][: args.shards]
    headers = {header.file: header for header in planned.checkpoint.shards}
    bytes_in = sum(headers[shard.file].file_size for shard in chosen)
    bytes_out = sum(shard.file_size for shard in chosen)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    quiet: Callable[[object], object] = lambda _: None  # noqa: E731
    streamer = Streamer([FusedBackend()], cores, quiet, quiet, drop_behind=True, allow_zeros=True)
    begun, used = time.monotonic(), cpu_seconds()
    streamer.run(chosen, SourceShards(headers, chosen, lambda file: layout / file), out)
    seconds, used = time.monotonic() - begun, cpu_seconds() - used
    shutil.rmtree(out)
    total_in, total_out = planned.checkpoint.file_bytes, planned.plan.disk_needed
    work = used * total_in / bytes_in
    lines = [
        f"{title()}; {len(chosen)} shards of {len(headers)}, {bytes_in / 1e9:.0f} GB of holes in, "
        f"{bytes_out / 1e9:.1f} GB out: {seconds:.0f} s, {used:.0f} CPU s, "
        f"{memory(os.getpid())[0] / 1e6:.0f} MB at most",
        "",
        f"All of GLM-5.2, {total_in / 1e12:.2f} TB in and {total_out / 1e12:.2f} TB out, {work:.0f} CPU s:",
        "",
        "| disk, GB/s | " + " | ".join(f"{count} cores" for count in (2, 8, 32)) + " |",
        "|--:|--:|--:|--:|",
    ]
    for disk in (0.5, 1, 3, 7, 14):
        minutes = [max((total_in + total_out) / disk / 1e9, work / count) / 60 for count in (2, 8, 32)]
        lines.append(f"| {disk:g} | " + " | ".join(f"{value:.0f} min" for value in minutes) + " |")
    return "\n".join(lines)


def title() -> str:
    host = machine()
    return f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {host['cores']} cores of {host['cpu']}"


def machine() -> Run:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": total,
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---- The table --------------------------------------------------------------------------------------------------


def table(result: Run) -> str:
    """The result in Markdown: medians, and the least and the most in parentheses."""
    host, data = result["machine"], result["input"]
    lines = [
        f"{result['date']}, {host['cores']} cores of {host['cpu']}; {data['bytes'] / 1e9:.2f} GB in {data['shards']} "
        f"shards, {data['quantized_weights']} weights to MXFP4 (recipe `{data['recipe']}`), page cache "
        f"{data['page_cache']}",
        "",
        f"| tool | runs | seconds | CPU s | MB/s in | time / {REFERENCE} | peak RSS | anonymous | GB out | others |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    reference = result["runs"].get(REFERENCE, [])
    for tool, runs in result["runs"].items():
        if tool in result["not_measured"] and not runs:
            lines.append(f"| {tool} | 0 | not measured: {result['not_measured'][tool]} |" + " |" * 7)
            continue
        columns = {key: [run[key] for run in runs] for key in runs[0]}
        # Each run is compared with the one of its own round.
        ratios = [run["seconds"] / other["seconds"] for run, other in zip(runs, reference, strict=False)]
        cells = [
            tool,
            str(len(runs)),
            spread(columns["seconds"], 2),
            spread(columns["cpu_seconds"], 1),
            f"{data['bytes'] / statistics.median(columns['seconds']) / 1e6:,.0f}",
            spread(ratios, 2),
            f"{max(columns['peak_rss']) / 1e6:,.0f} MB",
            f"{max(columns['anonymous']) / 1e6:,.0f} MB",
            f"{statistics.median(columns['bytes_out']) / 1e9:.3f}",
            spread(columns["others"], 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for tool, runs in result["runs"].items():
        if runs and runs[0]["versions"]:
            lines.append(f"{tool}: {', '.join(f'{name} {number}' for name, number in runs[0]['versions'].items())}  ")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    middle, least, most = (f"{v:.{digits}f}" for v in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least}-{most})"


# ---- The child: one tool, once ----------------------------------------------------------------------------------


def child(tool: str, out: Path) -> None:
    """Do the work once and write <out>.json. What stdin holds is `job` of `bench`."""
    job = json.load(sys.stdin)
    begun = time.monotonic()
    stage = prepare(tool, job, out)
    ready, before, busy = time.monotonic(), cpu_seconds(), busy_seconds()
    stage()
    done, used, busy = time.monotonic(), cpu_seconds() - before, busy_seconds() - busy
    for path in out.rglob("*"):
        with open(path, "rb") if path.is_file() else contextlib.nullcontext() as file:
            if file:
                os.fsync(file.fileno())
    versions = {}
    for package in TOOLS[tool]:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    found = {
        "seconds": done - ready,
        "cpu_seconds": used,
        "others": max(0.0, busy - used) / (done - ready),
        "import_seconds": ready - begun,
        "sync_seconds": time.monotonic() - done,
        "versions": versions,
    }
    out.with_suffix(".json").write_text(json.dumps(found))


def prepare(tool: str, job: Run, out: Path) -> Callable[[], object]:
    """Imports what the tool needs; the call that is left is what gets timed."""
    source, keep = job["source"], job["keep"]
    if tool == "limit":
        return lambda: copy_bytes(Path(source), out, job["sizes"], job["workers"])
    if tool in ("glmquant", "glmquant-quark"):
        import glmquant

        if tool == "glmquant-quark":
            from glmquant.mxfp4.quark import QuarkBackend

            QuarkBackend()  # imports Quark
        backend = "fused" if tool == "glmquant" else "quark"
        options = {"recipe": job["recipe"], "workers": job["workers"], "backend": backend}
        return lambda: glmquant.quantize(source, out, **options)
    if tool == "quark":
        from glmquant.mxfp4.quark import missing_compiler

        missing_compiler()  # puts ninja on the PATH
        from quark.torch import LLMTemplate, ModelQuantizer

        config = LLMTemplate.get("glm_moe_dsa").get_config(scheme="mxfp4", exclude_layers=keep)
        quantizer = ModelQuantizer(config)
        return lambda: quantizer.direct_quantize_checkpoint(
            pretrained_model_path=source, save_path=str(out), device="cpu"
        )
    if tool == "llm-compressor":
        from llmcompressor import model_free_ptq

        return lambda: model_free_ptq(source, out, scheme="MXFP4", ignore=keep, device="cpu")
    from auto_round import AutoRound

    # Plain rounding, as the others do; by default it searches for better scales.
    plain = {"iters": 0, "disable_opt_rtn": True, "enable_torch_compile": False, "device_map": "cpu"}
    rounder = AutoRound(source, scheme="MXFP4", model_free=True, ignore_layers=",".join(keep), **plain)
    return lambda: rounder.quantize_and_save(str(out))


def copy_bytes(source: Path, out: Path, sizes: dict[str, int], cores: int) -> None:
    """Read all of every shard, write `sizes` bytes of it, sync; two shards a core at once, so that syncs overlap.

    What is written is sent to the disk at once, as glmquant does: a quarter faster than to leave it to the sync.
    """
    out.mkdir(parents=True)
    sync_file_range = ctypes.CDLL(None).sync_file_range
    sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def copy(file: str) -> None:
        left, buffer = sizes[file], memoryview(bytearray(CHUNK))
        with open(source / file, "rb", buffering=0) as reader, open(out / file, "wb", buffering=0) as writer:
            os.posix_fallocate(writer.fileno(), 0, left)
            total, read = os.fstat(reader.fileno()).st_size, 0
            while count := reader.readinto(buffer):
                read += count
                share = min(count, left - sizes[file] * (total - read) // total)
                written = writer.write(buffer[:share])
                sync_file_range(writer.fileno(), sizes[file] - left, written, 2)
                left -= written
            os.fsync(writer.fileno())
            assert not left, f"{file}: {left} bytes not written"

    with ThreadPoolExecutor(2 * cores if cores > 1 else 1) as pool:
        list(pool.map(copy, sizes))


def cpu_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for pid in list(tree(os.getpid()))[1:]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def busy_seconds() -> float:
    """Of all cores since the machine was started."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


# ---- The kernel alone -------------------------------------------------------------------------------------------


def bench_kernel(rounds: int, with_quark: bool) -> None:
    """Elements per second: each kernel, a memory copy, and Quark's own calls, on a [2048, 6144] weight a thread.

    CPU time counts what the threads themselves did; wall time also holds what other processes took.
    """
    import numpy as np
    import torch

    from glmquant.mxfp4 import kernel
    from glmquant.mxfp4.quark import QuarkBackend

    rows, columns = 2048, 6144
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    values = {
        "BF16": weight.view(torch.int16).numpy(),
        "F16": weight.half().numpy(),
        "F32": weight.float().numpy(),
    }
    sources = {dtype: [array.copy() for _ in range(cores)] for dtype, array in values.items()}
    outputs = [
        (np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 32), np.uint8)) for _ in range(cores)
    ]
    touched = [np.zeros_like(values["BF16"]) for _ in range(cores)]

    def run(name: str, dtype: str, thread: int) -> None:
        os.environ[kernel.VARIABLE] = name
        packed, scale = outputs[thread]
        source = sources[dtype][thread]
        assert kernel.quantize_into(source.data, dtype, columns, packed.data, scale.data) == -1

    def copy(thread: int) -> None:
        np.copyto(touched[thread], sources["BF16"][thread])

    best = kernel.available()[0]
    jobs: dict[tuple[str, int], Callable[[int], object]] = {("copy BF16", 1): copy}
    for dtype in sources:
        jobs |= {(f"{name} {dtype}", 1): partial(run, name, dtype) for name in kernel.available()}
    for count in range(2, cores + 1):
        jobs |= {("copy BF16", count): copy, (f"{best} BF16", count): partial(run, best, "BF16")}
    if with_quark:
        backend = QuarkBackend()
        jobs["Quark BF16", 1] = lambda _: backend._quantize(weight)

    times: dict[tuple[str, int], list[tuple[float, float]]] = {job: [] for job in jobs}
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(rounds):
            for job, call in jobs.items():
                wall, cpu = time.perf_counter(), time.process_time()
                list(pool.map(call, range(job[1])))
                times[job].append((time.perf_counter() - wall, time.process_time() - cpu))

    median = {job: [statistics.median(column) for column in zip(*both, strict=True)] for job, both in times.items()}
    print(f"[{rows}, {columns}] a thread, {title()}, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    print(f"{'':14}{'threads':>8}{'G elements/s':>14}{'per CPU s':>11}{'x 1 thread':>12}{'x Quark':>9}")
    for (name, count), (wall, cpu) in median.items():
        line = (
            f"{name:14}{count:8}{count * rows * columns / wall / 1e9:14.3f}{count * rows * columns / cpu / 1e9:11.3f}"
        )
        line += f"{count * median[name, 1][0] / wall:12.2f}"
        print(line + (f"{count * median['Quark BF16', 1][0] / wall:9.1f}" if with_quark else ""))


# ---- Command line -----------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tools", default=",".join(TOOLS), metavar="TOOL[:RUNS],...", help="in this order; default: all")
    add("--runs", type=int, default=3, metavar="N", help="runs of each tool (default 3)")
    add("--timeout", type=float, default=float("inf"), metavar="S", help="a tool that takes longer is not measured")
    add("--work", type=Path, default=ROOT / ".bench", metavar="FOLDER", help="input, outputs, venvs (default .bench)")
    add("--source", type=Path, metavar="FOLDER", help="another input")
    add("--recipe", default="moe", help="what to quantize (default moe)")
    add("--cold", action="store_true", help="drop the input from the page cache before each run, not load it")
    add("--json", type=Path, metavar="FILE", help="where to store the result (default: bench.json in --work)")
    verbs = parser.add_subparsers(dest="verb", metavar="[growth | scaling | whole | kernel]")
    line = verbs.add_parser("growth", help="the whole job on 1, 2, 4 and 8 GB")
    line.add_argument("--most", type=int, default=8, metavar="GB", help="the largest source")
    verbs.add_parser("scaling", help="the whole job and the limit on 1 to n threads")
    full = verbs.add_parser("whole", help="full-size shards, and what the whole model costs from that")
    full.add_argument("--shards", type=int, default=12, metavar="N", help="shards to write (default 12: 19 GB)")
    kernel = verbs.add_parser("kernel", help="elements per second on 1 to n threads")
    kernel.add_argument("--rounds", type=int, default=15)
    kernel.add_argument("--no-quark", action="store_true", help="leave out Quark, whose import takes 15 s")
    one = verbs.add_parser("child")  # for this script itself
    one.add_argument("tool", choices=TOOLS)
    one.add_argument("source", type=Path)
    one.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    words = [word.partition(":") for word in args.tools.split(",")]
    if unknown := [tool for tool, _, _ in words if tool not in TOOLS]:
        parser.error(f"unknown tool {unknown[0]!r}; known: {', '.join(TOOLS)}")
    try:
        args.tools = {tool: int(runs or args.runs) for tool, _, runs in words}
    except ValueError:
        parser.error("--tools: runs must be a number")
    if min(args.tools.values()) < 1:
        parser.error("at least one run of each tool")
    return args


def main() -> None:
    args = parse()
    if args.verb == "kernel":
        bench_kernel(args.rounds, not args.no_quark)
    elif args.verb == "child":
        child(args.tool, args.out)
    else:
        args.work = args.work.resolve()
        args.work.mkdir(parents=True, exist_ok=True)
        print(
            {"growth": growth, "scaling": scaling, "whole": whole}.get(args.verb, lambda args: table(bench(args)))(args)
        )


if __name__ == "__main__":
    main()

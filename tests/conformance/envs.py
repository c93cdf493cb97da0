"""Environments in which released serving engines run on CPU, installed from the package registry.

    python envs.py [sglang-RELEASE | vllm-RELEASE ...]      (default: all below)

One *base* virtual environment per transformers pin holds torch and the small dependencies; every engine
release is only its own wheel, unpacked without dependencies into a folder that is put on PYTHONPATH. So ten
releases cost ten wheels, not ten environments. Everything lives under $GLMQUANT_CONFORMANCE_DIR (default:
.conformance in the repository root). torch comes from wherever pip finds it: set PIP_EXTRA_INDEX_URL to the
CPU index of PyTorch to avoid a large CUDA build.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
# What the engines import on the way to a loaded model; GPU packages among their dependencies are stubs
# (gpustubs.py), and their own pins of torch are ignored on purpose: they name CUDA builds.
COMMON = [
    "numpy==2.4.6",
    "aiohttp",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "dill",
    "einops",
    "fastapi",
    "jinja2",
    "loguru",
    "msgspec",
    "openai==2.8.0",
    "orjson",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "pyyaml",
    "pyzmq",
    "regex",
    "requests",
    "setproctitle",
    "tqdm",
    "uvicorn",
    "watchfiles",
]

SGLANG_RELEASES = (
    "0.5.13.post1",
    "0.5.14",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
VLLM_RELEASES = ("0.33.0",)
# With GLMQUANT_CONFORMANCE_QUICK: the last release with the old names of the draft's modules, and the newest.
QUICK_SGLANG_RELEASES = ("0.5.15.post1", "0.5.23")


class EnvironmentUnavailable(Exception):
    """The package registry cannot be reached, so the engine cannot be installed here."""


@dataclass(frozen=True)
class Engine:
    """A release of an engine: what its folder holds and which transformers it runs with."""

    name: str
    release: str

    @property
    def transformers(self) -> str:
        old = self.name == "sglang" and _key(self.release) < _key("0.5.22")
        return "5.12.1" if old else "5.19.0"

    @property
    def requirements(self) -> list[str]:
        extra = {
            "sglang": ["compressed-tensors==0.18.0", "gguf==0.19.0"],
            "vllm": ["compressed-tensors==0.17.0", "openai==2.25.0"],
        }
        return [f"{self.name}=={self.release}", *extra[self.name]]

    @property
    def python(self) -> Path:
        return root() / f"base-transformers-{self.transformers}" / "bin" / "python"

    @property
    def folder(self) -> Path:
        return root() / f"{self.name}-{self.release}"

    def environ(self) -> dict[str, str]:
        """The process environment for `python`: this release, and nothing of the caller's Python."""
        drop = ("PYTHON", "VIRTUAL_ENV", "SGLANG_", "VLLM_", "COV_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        return env | {
            "PYTHONPATH": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


def engines() -> list[Engine]:
    """The releases to test: fewer when GLMQUANT_CONFORMANCE_QUICK is set."""
    quick = bool(os.environ.get("GLMQUANT_CONFORMANCE_QUICK"))
    sglang = QUICK_SGLANG_RELEASES if quick else SGLANG_RELEASES
    return [Engine("sglang", r) for r in sglang] + [Engine("vllm", r) for r in VLLM_RELEASES]


def root() -> Path:
    default = Path(__file__).resolve().parents[2] / ".conformance"
    return Path(os.environ.get("GLMQUANT_CONFORMANCE_DIR") or default).resolve()


def ensure(engine: Engine) -> Engine:
    """Install what `engine` needs unless it is there already; safe to interrupt and to run twice at once."""
    base = engine.python.parents[1]
    with _building(base, [TORCH, f"transformers=={engine.transformers}", *COMMON]) as todo:
        if todo:
            subprocess.run([sys.executable, "-m", "venv", str(base)], check=True)
            # torch first and alone, so that no other requirement takes part in choosing its build
            _pip(engine.python, TORCH)
            _pip(engine.python, TORCH, f"transformers=={engine.transformers}", *COMMON)
    with _building(engine.folder, engine.requirements) as todo:
        if todo:
            _pip(engine.python, "--no-deps", "--target", str(engine.folder), *engine.requirements)
    return engine


@contextlib.contextmanager
def _building(folder: Path, spec: list[str]) -> Iterator[bool]:
    """Yield whether `folder` must be built; its stamp, written last, says that it was and from what."""
    digest = hashlib.sha256("\n".join([sys.version, *spec]).encode()).hexdigest()
    stamp = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == digest:
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield True
        stamp.write_text(digest)


# What pip prints when it could not talk to the registry, as opposed to a pin that does not exist.
_OFFLINE = re.compile(
    r"Retrying \(|Max retries exceeded|ConnectionError|NewConnectionError|ProxyError|Read timed out|"
    r"ReadTimeout|name resolution|Network is unreachable|SSLError|50[234] Server Error"
)


def _pip(python: Path, *args: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        text = done.stdout + done.stderr
        tail = text.strip()[-2000:]
        if _OFFLINE.search(text):
            raise EnvironmentUnavailable(f"pip could not reach the registry: {tail}")
        raise RuntimeError(f"{' '.join(command)} failed: {tail}")


def _key(release: str) -> tuple[int, ...]:
    """0.5.15.post1 sorts after 0.5.15 and before 0.5.16."""
    return tuple(int(n) for n in re.findall(r"\d+", release))


def main() -> int:
    chosen = engines()
    if sys.argv[1:]:
        known = {f"{e.name}-{e.release}": e for e in chosen}
        unknown = set(sys.argv[1:]) - set(known)
        if unknown:
            sys.exit(f"no such engine releases: {sorted(unknown)}; known: {', '.join(known)}")
        chosen = [known[name] for name in sys.argv[1:]]
    for engine in chosen:
        print(f"{engine.name} {engine.release} in {root()}", flush=True)
        try:
            ensure(engine)
        except EnvironmentUnavailable as e:
            sys.exit(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())

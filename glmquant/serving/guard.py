"""The include in sglang's fused_metadata_copy.cuh that hides deep drafts from ROCm, and the patch that mends it.

Without the guard the kernel does not compile on ROCm (no cuda_runtime.h). It is wanted when more than 3 tokens are
drafted ahead (dsa_backend.py: speculative_num_steps > 3); the failure is caught, and compiling tried again at every
step. Source: sglang#29373, first in 0.5.15; sglang 0.5.13.post1-0.5.23 read.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from glmquant.serving.stack import Stack, read_text

# Below the package's folder: since 0.5.17, and before.
PATHS = (
    "kernels/jit/csrc/elementwise/fused_metadata_copy.cuh",
    "jit_kernel/csrc/elementwise/fused_metadata_copy.cuh",
)
_INCLUDE = "#include <cuda_runtime.h>"
_GUARDED = ("#ifndef USE_ROCM", _INCLUDE, "#else", "#include <hip/hip_runtime.h>", "#endif")


@dataclass(frozen=True, slots=True)
class Guard:
    """The file, and whether its include is guarded (or gone); `text` is what it holds."""

    path: Path
    present: bool
    text: str


def find_guard(stack: Stack) -> Guard | None:
    """None if sglang, or the file in it, is not there."""
    path = stack.find("sglang", PATHS)
    text = read_text(path)
    if path is None or not text:
        return None
    return Guard(path, not _bare_lines(text), text)


def _bare_lines(text: str) -> list[int]:
    """Numbers of the lines that include cuda_runtime.h whatever the platform is."""
    depth, found = 0, []
    for number, line in enumerate(text.splitlines()):
        word = re.match(r"\s*#\s*(\w+)", line)
        if word and word[1] in ("if", "ifdef", "ifndef"):
            depth += 1
        elif word and word[1] == "endif":
            depth -= 1
        elif depth == 0 and re.match(r"\s*#\s*include\s*[<\"]cuda_runtime\.h[>\"]", line):
            found.append(number)
    return found


def patch(guard: Guard) -> str:
    """A unified diff for `patch -p1` in the folder that holds the package `sglang`; '' if there is nothing to mend."""
    before = guard.text.splitlines(keepends=True)
    bare = set(_bare_lines(guard.text))
    after: list[str] = []
    for number, line in enumerate(before):
        end = "\r\n" if line.endswith("\r\n") else "\n"
        after += [word + end for word in _GUARDED] if number in bare else [line]
    parts = guard.path.parts
    name = "/".join(parts[len(parts) - parts[::-1].index("sglang") - 1 :]) if "sglang" in parts else guard.path.name
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))

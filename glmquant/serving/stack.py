"""Finds installed packages and reads their files without importing them: no GPU code runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path

from glmquant.errors import GlmquantError

# Larger than any source file or table that is read here (the biggest, a tuned table, has 3 MB).
MAX_TEXT = 64 * 2**20


@dataclass(frozen=True)
class Stack:
    """One Python environment.

    Attributes:
        folders: where packages are looked for: this process's path, or the folders given.
        own: whether it is the environment of this process, whose import hooks (editable installs) count too.
    """

    folders: tuple[Path, ...]
    own: bool

    @cached_property
    def _installed(self) -> Mapping[str, Distribution]:
        found: dict[str, Distribution] = {}
        for dist in distributions(path=[str(folder) for folder in self.folders]):
            name = dist.metadata["Name"]
            if name:
                found.setdefault(_normal(name), dist)
        return found

    def release(self, *names: str) -> str:
        """Version of the first of these distributions that is installed, '' if none is."""
        for name in names:
            if dist := self._installed.get(_normal(name)):
                return dist.version or ""
        return ""

    def requirements(self, name: str) -> list[str]:
        """What a distribution says it needs (PEP 508), [] if it is not installed or says nothing."""
        dist = self._installed.get(_normal(name))
        return list(dist.requires or []) if dist else []

    def package(self, name: str) -> Path | None:
        """The folder of a top-level package, None if there is none."""
        for folder in self.folders:
            if (folder / name / "__init__.py").is_file():
                return folder / name
        if self.own and (spec := importlib.util.find_spec(name)) and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
        for folder in self.folders:  # a namespace package
            if (folder / name).is_dir():
                return folder / name
        return None

    def find(self, package: str, paths: Iterable[str]) -> Path | None:
        """The first of these files, given below a package's folder, that exists."""
        root = self.package(package)
        return next((root / path for path in paths if root and (root / path).is_file()), None)


def read_text(path: Path | None) -> str:
    """A file's text, '' if it is missing, unreadable or larger than anything that is looked for."""
    try:
        if path is None or path.stat().st_size > MAX_TEXT:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def open_stack(folders: Sequence[str | Path] = ()) -> Stack:
    """The environment of this process, or that of `folders` (site-packages, and what their .pth files add).

    Raises:
        GlmquantError: one is not a folder.
    """
    if not folders:
        return Stack(tuple(Path(entry) for entry in sys.path if entry), True)
    found: list[Path] = []
    for given in map(Path, folders):
        if not given.is_dir():
            raise GlmquantError(f"{given} is not a folder", "--site-packages wants the folder that packages lie in.")
        found.append(given)
        for pth in sorted(given.glob("*.pth")):
            lines = read_text(pth).splitlines()
            found += [given / line for line in map(str.strip, lines) if _is_folder(given, line)]
    return Stack(tuple(dict.fromkeys(found)), False)


def _is_folder(base: Path, line: str) -> bool:
    try:
        return bool(line) and not line.startswith(("#", "import ")) and (base / line).is_dir()
    except (OSError, ValueError):
        return False


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")

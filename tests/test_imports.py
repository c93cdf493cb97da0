"""Who may import whom: start-up stays light, and the checker stays independent of the maker."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from make_full_output import make_full_output

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "glmquant"
HEAVY = {"torch", "quark", "transformers", "numpy", "safetensors", "huggingface_hub", "tqdm"}

# cli -> pipeline -> {planner, exclusions, validator, card, checkpoint.writer, mxfp4, ...} -> {checkpoint, recipe,
# engines} -> errors: a module may import its own level and those below.
ROOM = 2
LEVELS = {
    "glmquant.errors": 0,
    "glmquant.text": 0,
    "glmquant.checkpoint": 1,
    "glmquant.engines": 1,
    "glmquant.recipe": 1,
    "glmquant.checkpoint.writer": ROOM,
    "glmquant.checkpoint.manifest": ROOM,
    "glmquant.checkpoint.push": ROOM,
    "glmquant.pipeline": 3,
    "glmquant.operate": 3,
    "glmquant.cli": 4,
    "glmquant.__main__": 5,
}


def level(module: str) -> int:
    """That of the longest prefix in `LEVELS`; any other module is a room between pipeline and checkpoint."""
    known = [prefix for prefix in LEVELS if f"{module}.".startswith(f"{prefix}.")]
    return 5 if module == "glmquant" else LEVELS[max(known, key=len)] if known else ROOM


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Modules a file imports anywhere, inside functions too; those under TYPE_CHECKING are no imports."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: write absolute imports"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inner & MODULES
            found |= modules if len(modules) == len(inner) else modules | {node.module}
    return found


MODULES = {module_of(path) for path in PACKAGE.rglob("*.py")}
IMPORTS = {module_of(path): imports_of(path) for path in PACKAGE.rglob("*.py")}
INSIDE = {module: found & MODULES for module, found in IMPORTS.items()}


def reached_from(module: str) -> set[str]:
    found, todo = set(), [module]
    while todo:
        for other in INSIDE[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


def test_imports_go_down_only() -> None:
    up = [(a, b) for a, others in INSIDE.items() for b in others if level(b) > level(a)]
    assert up == []
    assert LEVELS.keys() <= MODULES | {"glmquant.checkpoint", "glmquant.engines"}


def test_imports_make_no_circle() -> None:
    assert set(TopologicalSorter(INSIDE).static_order()) == MODULES


def test_errors_stands_on_nothing() -> None:
    assert INSIDE["glmquant.errors"] == set()


def test_the_validator_reaches_nothing_of_the_maker() -> None:
    reached = reached_from("glmquant.validator")
    assert "glmquant.checkpoint.source" in reached
    maker = (
        "glmquant.checkpoint.writer",
        "glmquant.checkpoint.manifest",
        "glmquant.planner",
        "glmquant.exclusions",
        "glmquant.mxfp4",
    )
    assert [module for module in reached if module.startswith(maker)] == []


def test_only_the_quark_backend_imports_quark_and_torch() -> None:
    users = {m for m, found in IMPORTS.items() for name in found if name.split(".")[0] in ("torch", "quark")}
    assert users == {"glmquant.mxfp4.quark"}


def test_the_package_imports_no_script() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert scripts and not scripts & {name for found in IMPORTS.values() for name in found}


@pytest.fixture(scope="module")
def quantized(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a quantized checkpoint over holes: enough for `validate`."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    make_full_output(tiny, out)
    return out


@pytest.mark.parametrize("argv", [[], ["--help"], ["plan", "SRC"], ["exclusions", "SRC"], ["validate", "OUT"]])
def test_verbs_that_write_nothing_import_nothing_heavy(tiny: Path, quantized: Path, argv: list[str]) -> None:
    argv = [{"SRC": str(tiny), "OUT": str(quantized)}.get(arg, arg) for arg in argv]
    code = (
        "import sys, glmquant\n"
        "if sys.argv[1:]:\n"
        "    from glmquant.cli import main\n"
        "    try:\n"
        "        code = main()\n"
        "    except SystemExit as stop:\n"
        "        code = stop.code\n"
        "    assert code == 0, code\n"
        "print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = set(done.stderr.splitlines()[-1].removeprefix("loaded: ").split())
    assert "glmquant" in loaded and not HEAVY & loaded

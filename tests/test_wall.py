"""The wall: no path of imports leads from an attack or a solver to the truth or to what compares with it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedprism

SOURCE = Path(fedprism.__file__).parent
FORBIDDEN = ("fedprism.truth", "fedprism.simulation", "fedprism.scoring", "fedprism.metrics")
DYNAMIC = {"importlib", "runpy", "pkgutil", "gc", "inspect"}


def module_names(root: Path) -> dict[str, Path]:
    names = {}
    for path in root.rglob("*.py"):
        parts = ("fedprism", *path.relative_to(root).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Everything a module imports anywhere in its text, as absolute names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {n if n in modules or base == "fedprism" else base for n in names}
    return found


def reachable(start: str, modules: dict[str, Path]) -> set[str]:
    """Modules of the package reached from `start`, following imports."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        # Importing the package itself loads nothing: it hands names out when they are asked for.
        if name in seen or name not in modules or name == "fedprism":
            continue
        seen.add(name)
        waiting += imports_of(name, modules[name], modules)
        waiting += [name.rpartition(".")[0]]  # importing a.b runs a
    return seen


def breaches(root: Path) -> list[str]:
    """Every way through the wall below a source folder, in words."""
    modules = module_names(root)
    found = []
    for name, path in modules.items():
        if not name.startswith(("fedprism.attacks", "fedprism.solvers")):
            continue
        direct = imports_of(name, path, modules)
        for target in sorted(reachable(name, modules)):
            if target.startswith(FORBIDDEN):
                found.append(f"{name} reaches {target}")
        for imported in sorted(direct):
            if imported.startswith(FORBIDDEN):
                found.append(f"{name} imports {imported}")
            if imported == "fedprism" or imported.split(".")[0] in DYNAMIC:
                found.append(f"{name} imports {imported}, through which anything can be reached")
            if imported.startswith("fedprism.") and imported not in modules:
                found.append(f"{name} asks the package for {imported}, which may be anything")
            own = imported.startswith("fedprism.solvers") or not imported.startswith("fedprism")
            if name.startswith("fedprism.solvers") and not own:
                found.append(f"solver {name} imports {imported}")
        called = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        found += [f"{name} calls {word}" for word in sorted(called & {"__import__", "eval", "exec", "open"})]
    return found


def test_nothing_leads_from_attacks_or_solvers_to_the_truth() -> None:
    assert breaches(SOURCE) == []


def test_metrics_and_solvers_import_nothing_else_of_fedprism() -> None:
    modules = module_names(SOURCE)
    for family in ("fedprism.metrics", "fedprism.solvers"):
        for name, path in modules.items():
            if name.startswith(family):
                outside = {i for i in imports_of(name, path, modules) if i.startswith("fedprism")}
                assert all(i.startswith(family) for i in outside), (name, outside)


def test_only_simulation_and_scoring_import_the_truth() -> None:
    modules = module_names(SOURCE)
    importers = {
        name
        for name, path in modules.items()
        if any(i.startswith("fedprism.truth") for i in imports_of(name, path, modules))
    }
    assert importers == {"fedprism", "fedprism.simulation", "fedprism.scoring"}


def test_importing_the_attacks_does_not_load_the_truth() -> None:
    code = (
        "import sys, fedprism.attacks, fedprism.solvers, fedprism.running; "
        f"print([m for m in sys.modules if m.startswith({FORBIDDEN!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "line",
    [
        "from fedprism.truth import Truth",
        "from fedprism import scoring",
        "from fedprism import score",
        "import fedprism as fp",
        "from ..simulation import simulate",
        "from fedprism.helper import anything",
        "def f():\n    from fedprism.metrics import psnr",
        "import importlib",
        "f = __import__('fedprism.truth')",
    ],
)
@pytest.mark.parametrize("family", ["attacks", "solvers"])
def test_the_checker_finds_a_planted_breach(tmp_path: Path, line: str, family: str) -> None:
    (tmp_path / family).mkdir()
    for name in ("__init__", "truth", "scoring", "simulation", "metrics"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "helper.py").write_text("from fedprism.truth import Truth\nanything = Truth\n")
    (tmp_path / family / "__init__.py").write_text("")
    (tmp_path / family / "method.py").write_text(line + "\n")
    assert breaches(tmp_path)

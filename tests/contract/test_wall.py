"""The rooms: who may import whom, and the wall: no attack or solver can reach the truth or what compares with it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedprism
from rooms import ABOVE_THE_WALL, BELOW_THE_WALL, ROOMS, imports_of, may_import, module_names, room_of

SOURCE = Path(fedprism.__file__).parent
DYNAMIC = {"importlib", "runpy", "pkgutil", "gc", "inspect"}
GUARDED = ("network", "solvers", "attacks")
MOST_TOP_MODULES = 12
"""Beside the package's own `__init__` and `__main__`."""
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Modules of the package reached from `start`, following imports."""
    reached, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        # Importing the package itself loads nothing: it hands names out when they are asked for.
        if name in reached or name not in graph or name == "fedprism":
            continue
        reached.add(name)
        waiting += graph[name]
        waiting += [name.rpartition(".")[0]]  # importing a.b runs a
    return reached


def breaches(root: Path) -> list[str]:
    """Every way through the wall below a source folder, in words."""
    modules = module_names(root)
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    found = []
    for name, path in modules.items():
        if room_of(name) not in GUARDED:
            continue
        direct = graph[name]
        for target in sorted({*reachable(name, graph), *direct}):
            if room_of(target) in BELOW_THE_WALL:
                found.append(f"{name} reaches {target}")
        for imported in sorted(direct):
            if imported == "fedprism" or imported.split(".")[0] in DYNAMIC:
                found.append(f"{name} imports {imported}, through which anything can be reached")
            if imported.startswith("fedprism.") and imported not in modules:
                found.append(f"{name} asks the package for {imported}, which may be anything")
        called = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        found += [f"{name} calls {word}" for word in sorted(called & {"__import__", "eval", "exec", "open"})]
    return found


def test_nothing_leads_from_attacks_or_solvers_to_the_truth() -> None:
    assert breaches(SOURCE) == []


def test_every_room_imports_only_what_it_may() -> None:
    modules = module_names(SOURCE)
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules.items()
        if room_of(name) not in ("", "__main__")
        for imported in imports_of(name, path, modules)
        if imported.startswith("fedprism.") and imported in modules
        if room_of(imported) not in may_import(room_of(name))
    ]
    assert wrong == []
    assert {room_of(name) for name in modules} - {"", "__main__"} == set(ROOMS)


def test_a_room_imports_only_rooms_that_stand_above_it() -> None:
    order = list(ROOMS)
    for room in ROOMS:
        assert all(order.index(other) <= order.index(room) for other in may_import(room)), room
    assert not set(ABOVE_THE_WALL) & set(BELOW_THE_WALL)


def test_nothing_private_of_another_room_is_used() -> None:
    modules = module_names(SOURCE)
    wrong = []
    for name, path in modules.items():
        tree = ast.parse(path.read_text())
        foreign = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedprism"):
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    if room_of(target) == room_of(name):
                        continue
                    foreign.add(alias.asname or alias.name)
                    if alias.name.startswith("_") and not alias.name.startswith("__"):
                        wrong.append(f"{name} imports {target}")
        wrong += [
            f"{name} uses {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in foreign
            if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in OF_NAMED_TUPLES
        ]
    assert wrong == []


def test_no_attack_is_defined_below_the_wall() -> None:
    attacks = {"Attack", "Reduction", "UpdateAttack", "Then"}
    wrong = [
        f"{name}.{node.name}"
        for name, path in module_names(SOURCE).items()
        if room_of(name) in BELOW_THE_WALL
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases} & attacks
    ]
    assert wrong == []


def test_the_top_of_the_package_stays_small() -> None:
    assert len({path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}) <= MOST_TOP_MODULES


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("fedprism.attacks, fedprism.solvers, fedprism.network, fedprism.runner", tuple(BELOW_THE_WALL)),
        ("fedprism.client", ("solvers", "attacks")),
        ("fedprism", tuple(ROOMS)),
    ],
)
def test_an_import_does_not_load_what_it_has_no_business_with(imported: str, absent: tuple[str, ...]) -> None:
    code = (
        f"import sys, {imported}; print([m for m in sys.modules if m.startswith('fedprism.') "
        f"and m.split('.')[1] in {absent!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "line",
    [
        "from fedprism.truth import Truth",
        "from fedprism import evaluation",
        "from fedprism import score",
        "import fedprism as fp",
        "from ..simulation import simulate",
        "from fedprism.helper import anything",
        "def f():\n    from fedprism.metrics import psnr",
        "import importlib",
        "f = __import__('fedprism.truth')",
    ],
)
@pytest.mark.parametrize("family", GUARDED)
def test_the_checker_finds_a_planted_breach(tmp_path: Path, line: str, family: str) -> None:
    (tmp_path / family).mkdir()
    for name in ("__init__", "truth", "evaluation", "simulation", "metrics"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "helper.py").write_text("from fedprism.truth import Truth\nanything = Truth\n")
    (tmp_path / family / "__init__.py").write_text("")
    (tmp_path / family / "method.py").write_text(line + "\n")
    assert breaches(tmp_path)

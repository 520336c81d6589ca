"""The rooms of the house, from the top down, and what each of them may import: the one list, for tests and docs."""

from __future__ import annotations

import ast
from pathlib import Path

VOCABULARY = (
    *("types", "inputs", "errors", "threats", "losses", "optimizers", "randomness", "checks", "naming", "pixels"),
)
"""Modules at the top of the package that say what everything else is about."""

ABOVE_THE_WALL: dict[str, tuple[str, str]] = {
    "display": ("how values show themselves: short text, tables and pictures for notebooks", ""),
    "vocabulary": (
        "what flows between the rooms: `types`, `errors`, `threats`, `losses`, `optimizers`, and small helpers",
        "display",
    ),
    "runtime": ("devices, processes, progress, memory, differentiating twice", "vocabulary"),
    "files": ("tensor files, results published in one step, JSON, locks, pictures", "vocabulary"),
    "network": ("the map of a network: layers, what feeds them, where the input enters", "vocabulary"),
    "solvers": ("the mathematics, as functions on tensors", "runtime"),
    "defenses": ("one file per defense; the privacy accountant", "vocabulary"),
    "client": (
        "the forward model of a client, which simulator and attacks share",
        "vocabulary runtime network defenses",
    ),
    "attacks": ("one file per method", "vocabulary runtime network solvers defenses client"),
    "runner": ("hands an attack only the knowledge it declares", "vocabulary runtime attacks"),
}
BELOW_THE_WALL: dict[str, tuple[str, str]] = {
    "truth": ("what really happened, and its folder", "display vocabulary files"),
    "metrics": ("how close two pictures are", ""),
    "data": ("data sets by name", "vocabulary"),
    "models": ("networks by name, and those of a user's own", "vocabulary"),
    "simulation": (
        "federations: scenario, rounds, what a threat model sees",
        "display vocabulary runtime network defenses client truth",
    ),
    "evaluation": (
        "scores, residuals, ceilings, baselines, and words for them",
        "display vocabulary runtime solvers defenses client attacks runner truth metrics data simulation",
    ),
    "utility": ("accuracy and cost of a defense", "vocabulary runtime files defenses client"),
    "inspection": ("what a client sees in a model before it trains", "vocabulary files client"),
    "captures": ("recorded updates on disk: reading, writing, growing", "vocabulary files solvers defenses models"),
    "integrations": (
        "recording Flower, NVFlare and plain PyTorch",
        "vocabulary runtime files solvers defenses client attacks runner truth models inspection captures",
    ),
    "experiments": (
        "trials, their outcomes, how they are run and kept",
        "display vocabulary runtime files attacks runner truth data evaluation",
    ),
    "audit": (
        "plans, the grid, gates, results",
        (
            "vocabulary runtime files network defenses client attacks runner truth metrics data models simulation "
            "evaluation utility captures experiments"
        ),
    ),
    "report": (
        "one page, the comparison of two audits",
        (
            "display vocabulary runtime files defenses client attacks data evaluation utility integrations experiments "
            "audit"
        ),
    ),
    "recorder": (
        "`fp.record`: attached to a run in three lines",
        "vocabulary runtime files captures integrations audit report",
    ),
    "cli": (
        "one file per command",
        (
            "display vocabulary runtime files defenses attacks runner truth metrics data models evaluation inspection "
            "captures audit report"
        ),
    ),
}
ROOMS = {**ABOVE_THE_WALL, **BELOW_THE_WALL}


def room_of(module: str) -> str:
    """The room of a module; the package itself and `python -m fedprism` are no rooms."""
    name = module.split(".")[1] if module.startswith("fedprism.") else ""
    return "vocabulary" if name in VOCABULARY else name


def may_import(room: str) -> set[str]:
    return {room, *ROOMS[room][1].split()}


def module_names(root: Path) -> dict[str, Path]:
    """Every module of a source folder by its full name."""
    names = {}
    for path in root.rglob("*.py"):
        parts = ("fedprism", *path.relative_to(root).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Everything a module imports anywhere in its text, as absolute names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            imported |= {n if n in modules or base == "fedprism" else base for n in names}
    return imported


def table() -> str:
    """The rooms as a table in Markdown."""
    lines = ["| room | what is in it | may import |", "|---|---|---|"]
    for room, (content, allowed) in ROOMS.items():
        if room == "truth":
            lines.append("| **the wall** | nothing above it imports anything below it | |")
        shown = room if room == "vocabulary" else f"`{room}`"
        lines.append(f"| {shown} | {content} | {', '.join(allowed.split()) or 'nothing'} |")
    return "\n".join(lines)

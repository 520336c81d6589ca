"""What a capture does not tell, and the line of a plan that tells it."""

from __future__ import annotations

from collections.abc import Collection

from fedprism.types import Knowledge

NEEDED = {"input_shape": "[3, 32, 32]", "loss": '"cross_entropy"', "batch_size": "8"}
"""What most attacks refuse to go without, with a value as a plan writes it."""
HELPFUL = {
    "bounds": "[0.0, 1.0]",
    "local_lr": "0.1",
    "local_epochs": "1",
    "local_batch_size": "8",
    "local_optimizer": '"sgd"',
    "local_momentum": "0.0",
}
"""What attacks do better with."""


def untold(knowledge: Knowledge, *, gradients: bool = False) -> tuple[str, ...]:
    """Names of what is not known; `gradients`: clients sent single gradients, so that nothing is local training."""
    granted = knowledge.granted()
    wanted = (*NEEDED, *(name for name in HELPFUL if not (gradients and name.startswith("local_"))))
    rule = knowledge.local_optimizer
    if rule is not None and not rule.takes_momentum:
        granted |= {"local_momentum"}
    return tuple(name for name in wanted if name not in granted)


def line_to_add(names: Collection[str]) -> str:
    """What to write under [captures] in a plan, with values to be replaced by the true ones."""
    values = {**NEEDED, **HELPFUL}
    return f"knowledge = {{ {', '.join(f'{name} = {values[name]}' for name in names)} }}"


def in_words(names: Collection[str]) -> str:
    """The names in a sentence: what attacks need, and what they do better with."""
    parts = []
    if needed := [name for name in names if name in NEEDED]:
        parts.append(f"{' and '.join(needed)}, which attacks need")
    if helpful := [name for name in names if name in HELPFUL]:
        parts.append(f"{' and '.join(helpful)}, with which they do better")
    return "; ".join(parts)

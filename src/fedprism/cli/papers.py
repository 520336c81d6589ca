"""The distribution fedprism-papers, if it is installed: it is found through its entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from fedprism.errors import BadInput

GROUP = "fedprism.papers"


def papers() -> Any:
    """The package with RECIPES and what runs them."""
    installed = list(entry_points(group=GROUP))
    if not installed:
        raise BadInput("fedprism-papers is not installed. Run 'pip install ./papers' in a checkout of fedprism.")
    return installed[0].load()

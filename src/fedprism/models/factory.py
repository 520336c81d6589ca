"""Models out of a user's own code, named as `pkg.module:function`. Nothing else in fedprism imports foreign code."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from torch import nn

from fedprism.errors import BadInput, told


def from_factory(text: str, *, beside: Path | None = None, asked_as: str = "--model") -> nn.Module:
    """The model that `pkg.module:factory` returns; the module is looked for in the current folder and in `beside`."""
    module, _, factory = text.partition(":")
    # The console script, unlike `python -m`, does not look in the current folder.
    folders = [os.getcwd(), *([str(beside)] if beside is not None else [])]
    sys.path[:0] = folders
    try:
        model = getattr(importlib.import_module(module), factory)()
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"expected {asked_as} pkg.module:factory, a function that returns the model without arguments, found "
            f"'{text}' ({told(error)}); correct the name or the function."
        ) from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"expected {asked_as} {text} to return a torch.nn.Module, found {type(model).__name__}; return the model."
        )
    return model

"""What all commands have in common: `-h`, `-q`, `-v` and `--json`."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

from typer.core import TyperCommand, TyperOption

from fedprism.cli.terminal import PRINTING

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
PRINTED = "Printing"
"""The heading of these options in the help of each command."""


class Command(TyperCommand):
    """A command with the options of all commands, whose help also explains its arguments."""

    def __init__(
        self, *args: Any, params: Sequence[Any] = (), callback: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        explanations = {} if callback is None else _explanations(callback)
        for parameter in params:
            # click 8.5 clears the help of arguments that typer before 0.21 has set.
            parameter.help = getattr(parameter, "help", None) or explanations.get(parameter.name)
        super().__init__(*args, params=[*params, *_shared()], callback=callback, **kwargs)


def _explanations(callback: Callable[..., Any]) -> dict[str, str]:
    """The help in the annotations of a command's function."""
    hints = typing.get_type_hints(getattr(callback, "__wrapped__", callback), include_extras=True)
    said = {
        name: getattr(extra, "help", None)
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
    }
    return {name: text for name, text in said.items() if text}


def _shared() -> list[TyperOption]:
    return [
        _switch("quiet", "-q", "Print neither progress nor notes."),
        _switch("verbose", "-v", "Print more."),
        _switch("json", None, "Print the result as JSON."),
    ]


def _switch(name: str, letter: str | None, explanation: str) -> TyperOption:
    def remember(context: Any, parameter: Any, value: bool) -> None:
        setattr(PRINTING, name, value)

    return TyperOption(
        param_decls=[f"--{name}", *([letter] if letter else [])],
        is_flag=True,
        default=False,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help=explanation,
        rich_help_panel=PRINTED,
    )

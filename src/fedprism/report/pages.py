"""Pages for people: one HTML file with everything inside, nothing fetched from anywhere."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedprism.display.html import printable


def environment() -> Environment:
    """What every page is made with."""
    # Autoescape for every template: names of attacks, captures and classes are text, never markup.
    return Environment(
        loader=PackageLoader("fedprism.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )


def _printable(value: object) -> object:
    """Characters that turn a line around or cannot be seen do not reach a page."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

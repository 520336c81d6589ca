"""Explain an error in a plan: the key, its meaning, the value, and the nearest valid word."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedprism.checks import shown
from fedprism.naming import nearest

WHOLE = "the plan"
"""The place of an error that belongs to no key."""


def sentence(error: ValidationError, plan: type[BaseModel]) -> str:
    """The first problem that was found."""
    first = error.errors(include_url=False, include_context=False)[0]
    keys = first["loc"]
    place = "".join(c if c.isprintable() else "?" for c in ".".join(map(str, keys)))[:100] or WHOLE
    problem = " ".join(first["msg"].split()).removeprefix("Value error, ")[:400].rstrip(".")
    field, section = _described(keys, plan)
    if first["type"] == "extra_forbidden":
        where = f"[{place.rpartition('.')[0]}]" if len(keys) > 1 else "a plan"
        return f"{where} has no key {shown(str(keys[-1]))}; {nearest(str(keys[-1]), section)}"
    meaning = f" ({field.description})" if field is not None and field.description else ""
    if first["type"] == "missing":
        return f"the plan lacks '{place}'{meaning}."
    where = "the plan" if place == WHOLE else f"'{place}'{meaning} of the plan"
    if first["type"] == "value_error":
        return f"{where}: {problem}{'' if problem.endswith('?') else '.'}"
    return f"{where} is {shown(first['input'])}: {problem}."


def _described(keys: Sequence[Any], plan: type[BaseModel]) -> tuple[FieldInfo | None, list[str]]:
    """The field that keys lead to, as far as they lead to one, and the names beside the last key."""
    section: type[BaseModel] | None = plan
    field: FieldInfo | None = None
    names = list(plan.model_fields)
    for key in keys:
        fields = section.model_fields if section is not None else {}
        if key not in fields:
            continue
        field, names = fields[key], list(fields)
        section = next(_sections(field.annotation), None)
        names = list(section.model_fields) if section is not None else names
    return field, names


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Parts of a plan in the type of a field, such as that of an optional one or of a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and "settings" not in annotation.model_fields:
        yield annotation  # of methods the table's other keys are settings, whose names are theirs
    for inner in typing.get_args(annotation):
        yield from _sections(inner)

"""`fedprism check`: what fits a model and its data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from fedprism.cli.terminal import answer

if TYPE_CHECKING:
    from fedprism.audit.checking import Fit


def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="pkg.module:factory, or a name of the models' table.")],
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="pkg.module:factory, a data set by name, or a folder, npz or csv."),
    ] = None,
    loss: Annotated[str, typer.Option(metavar="LOSS", help="A name, or pkg.module:function.")] = "cross_entropy",
) -> None:
    """Show what fits a model: which attacks read which layer, what no attack reads, and what each costs."""
    from fedprism.audit import checking

    fit = checking.check(checking.setup_for(model, data, loss=loss))
    answer(dataclasses.asdict(fit), lambda: lines(fit))


def lines(fit: Fit) -> list[str]:
    """The answer as text, one line per layer and per attack."""
    text = [f"input {fit.inputs}; output {fit.outputs} per sample", "", "layers:"]
    for layer in fit.layers:
        reads = f"read by {' and '.join(layer.readers)}" if layer.readers else "read by no exact attack"
        sent = reads if layer.trained else "frozen, not sent"
        text.append(f"  {layer.weight}  {layer.kind} {layer.shape}: {sent}")
    if fit.searched:
        text.append("  gradient matching searches inputs that explain all trained layers at once")
    text += ["", "attacks that fit:"] + ([f"  {name}: {cost}" for name, cost in fit.attacks] or ["  none"])
    text += ["", "not tried:"] + [f"  {name}: {reason}" for name, reason in fit.left_out]
    if fit.unread:
        text += ["", f"no attack reads: {', '.join(fit.unread)}"]
    return text

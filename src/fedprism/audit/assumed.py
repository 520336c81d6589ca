"""What captures do not tell: usual values are tried in its place, and every result says which were assumed."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedprism.attacks import Attack, Then
from fedprism.audit.choosing import Skipped
from fedprism.captures.untold import in_words, line_to_add, untold
from fedprism.optimizers import SGD, Adam
from fedprism.types import Observation

MOST_TRIED = 3
"""Sets of values that are tried for one attack on one capture; each takes as long as the first."""
MOST_SHAPES = 2
"""Shapes of the input that are tried."""
USUAL_SIDES = (32, 28, 224, 64)
"""Pixels on each side of usual pictures."""
CHANNELS = (3, 1)
"""Channels of usual pictures."""
USUAL_BATCH = 32
"""Samples of a usual local step, where clients hold more than that."""

Assumed = tuple[tuple[str, Any], ...]
"""Fields of Knowledge with the values that are assumed for them."""


def assuming(observation: Observation, assumed: Assumed) -> Observation:
    """The same capture, with these values taken for known."""
    return dataclasses.replace(observation, knowledge=dataclasses.replace(observation.knowledge, **dict(assumed)))


def described(assumed: Assumed) -> str:
    return f", assuming {' and '.join(f'{name}={value}' for name, value in assumed)}" if assumed else ""


def shapes(observation: Observation) -> list[Assumed]:
    """What to assume about the shape of the inputs: nothing where it is known, else what the model accepts."""
    if observation.knowledge.input_shape is not None or observation.model is None:
        return [()]
    accepted: dict[int, tuple[int, ...]] = {}
    for shape in _usual_shapes(observation.rounds[0].params):
        if math.prod(shape) not in accepted and _accepts(observation.model, shape):
            accepted[math.prod(shape)] = shape
    return [(("input_shape", shape),) for shape in list(accepted.values())[:MOST_SHAPES]] or [()]


def _usual_shapes(params: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
    """By the first layer: pictures of as many channels, or of as many values, or plain rows."""
    first = next((tensor for tensor in params.values() if tensor.dim() > 1), None)
    if first is None:
        return []
    values = first.shape[1]
    if first.dim() == 4:
        return [(values, side, side) for side in USUAL_SIDES]
    squares = [(channels, math.isqrt(values // channels)) for channels in CHANNELS]
    return [*((c, side, side) for c, side in squares if side > 1 and c * side**2 == values), (values,)]


def _accepts(model: nn.Module, shape: tuple[int, ...]) -> bool:
    own = copy.deepcopy(model).eval()
    place = next((parameter for parameter in own.parameters()), torch.empty(0))
    try:
        with torch.no_grad():
            own(torch.zeros(1, *shape, device=place.device, dtype=place.dtype))
    except Exception:  # whatever a user's model says to an input of another shape
        return False
    return True


def tried(attack: Attack, observation: Observation) -> list[Assumed]:
    """Sets of values for what the attack needs and nobody tells: the usual ones, then one after the other changed."""
    values = _usual(attack, observation)
    usual = {name: choices[0] for name, choices in values.items()}
    others = [{**usual, name: value} for name, choices in values.items() for value in choices[1:]]
    return [tuple(each.items()) for each in (usual, *others)][:MOST_TRIED]


def _usual(attack: Attack, observation: Observation) -> dict[str, tuple[Any, ...]]:
    """For each field that is missing the values to try, the most usual first."""
    granted, known = observation.granted(), observation.knowledge
    values: dict[str, tuple[Any, ...]] = {}
    if "batch_size" in attack.needs - granted and not isinstance(attack, Then):
        values["batch_size"] = (1, 8)
    if "loss" in (attack.needs | attack.uses) - granted:
        values["loss"] = ("cross_entropy", "mse")
    if "local_epochs" in attack.needs | attack.uses and any(
        round.kind == "delta" and round.clients == 1 for round in observation.rounds
    ):
        sizes = known.batch_size if isinstance(known.batch_size, tuple) else (known.batch_size or 1,)
        largest = max(sizes, default=1)
        rule = known.local_optimizer or SGD()
        usual: dict[str, tuple[Any, ...]] = {
            "local_batch_size": (largest, USUAL_BATCH) if largest > USUAL_BATCH else (largest,),
            "local_epochs": (1, 5),
            "local_optimizer": (SGD(), Adam()),
            "local_lr": (0.1, 0.01),
        }
        # SGD's; Adam refuses any but none
        usual |= {"local_momentum": (0.0,)} if rule.takes_momentum else {}
        values |= {name: choices for name, choices in usual.items() if name not in granted}
    return values


def told_lacking(observation: Observation, name: str) -> list[Skipped]:
    """All that a capture does not tell, at once, and the line of the plan that tells it."""
    deltas = any(round.kind == "delta" for round in observation.rounds)
    names = untold(observation.knowledge, gradients=not deltas)
    if not names:
        return []
    why = (
        f"{in_words(names)}; usual values are tried for what is needed. To state the true ones, add "
        f"under [captures]: {line_to_add(names)}"
    )
    return [Skipped(what=f"knowledge that capture {name} lacks", why=why)]

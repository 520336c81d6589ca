"""The dense layers of MKOR: rows of the first one whose gradients belong to one class each.

With gradient rows G[n] and g[n] (weight, bias) of the first dense layer's rows that lead to class n, and features z[k]
of K samples, cross-entropy gives

    G[n] = sum over k of (p[n] - 1[y[k] = n]) z[k] / K,     g[n] the same with 1 in place of z[k].

While all logits are equal, p[n] is 1/N: the first part is the same in all rows, and the row of a class that no sample
has is nothing else. Subtracting it leaves the mean of the class's features, and how many samples it has.

Differs from the paper in: the loss is cross-entropy, for which the paper's equation 7 does not hold; rows may be gated
by brightness, so that samples of one class, and batches that hold every class, can be told apart; in the inconspicuous
form every node on a path is fed by little else than the path, without which ReLUs would cut it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.mkor.filters import Disguise, Layout, normal_like, uniform_within
from fedprism.errors import NotApplicable
from fedprism.network.stack import Stack
from fedprism.types import Update

DUMP_BIAS = 25.0
"""In nats, how far the dump class is ahead of the others: softmax leaves these about 1e-11 each."""
TAP = 4.0
"""The weights of a disguised path, in standard deviations of the layer's honest weights: large, but not the largest."""
MOST_PARALLEL = 16
"""Most paths side by side that are planted unasked: a bound, past which dropout hardly ever cuts all of them."""


class Reference(StrEnum):
    """What the rows of classes are compared with; the server decides when it chooses the parameters.

    ABSENT_CLASS: all logits are equal, and the row of a class that is absent from the batch is subtracted. DUMP_CLASS:
    one class, which cannot be read, takes all the probability, and nothing has to be subtracted.
    """

    ABSENT_CLASS = "absent_class"
    DUMP_CLASS = "dump_class"

    def __repr__(self) -> str:
        return f"Reference.{self.name}"


class Gate(StrEnum):
    """When the nodes of a class are active."""

    OPEN = "always"
    NESTED = "above one threshold of brightness each"
    SIDES = "on one side of a hyperplane each"


class Head(NamedTuple):
    """rows (classes, nodes, paths) of the first dense layer; slopes of the logit by each node's pre-activation."""

    rows: Tensor
    slopes: Tensor
    gate: Gate
    dump: int | None

    def tensors(self) -> dict[str, Tensor]:
        """As a trapdoor holds it."""
        dump = -1 if self.dump is None else self.dump
        return {"rows": self.rows, "slopes": self.slopes, "reading": torch.tensor([list(Gate).index(self.gate), dump])}

    @classmethod
    def of(cls, trapdoor: Mapping[str, Tensor]) -> Head:
        gate, dump = map(int, trapdoor["reading"].tolist())
        return cls(trapdoor["rows"].long(), trapdoor["slopes"], list(Gate)[gate % 3], None if dump < 0 else dump)


def plant_head(
    stack: Stack,
    params: Update,
    layout: Layout,
    rng: torch.Generator,
    *,
    disguise: Disguise | None,
    reference: Reference,
    nodes: int,
    paths: int | None,
    brightness: tuple[float, float],
) -> tuple[dict[str, Tensor], Head]:
    """The dense layers' changed parameters, and how to read their gradients."""
    changed = {
        f"{layer.name}.{part}": params[f"{layer.name}.{part}"].detach().clone()
        for layer in stack.dense
        for part in ("weight", "bias")
    }
    sides = disguise is not None and len(stack.dense) > 1 and "relu" in stack.activations
    if disguise is not None and nodes > 1:
        raise NotApplicable("mkor needs one node per class in its inconspicuous form, not more; leave nodes at 1.")
    if disguise is not None and disguise.untouched and reference is not Reference.DUMP_CLASS and len(stack.dense) > 1:
        raise NotApplicable(
            "mkor needs a dump class, not an absent class, if weights to the logits stay as they were, because "
            "logits then differ; set reference to dump_class."
        )
    gates = 2 if sides else nodes
    rows = _places(stack, gates, _paths(stack, gates, paths), disguise, rng)
    if sides:
        _pair_rows(stack, changed, rows[0], disguise, rng)
        gate = Gate.SIDES
    else:
        _equal_rows(stack, changed, rows[0], layout, disguise, brightness, rng)
        gate = Gate.NESTED if nodes > 1 else Gate.OPEN
    dump = None
    if reference is Reference.DUMP_CLASS:
        dump = int(torch.randint(stack.classes, (), generator=rng)) if disguise else stack.classes - 1
    slopes = _lead_on(stack, changed, rows, dump, disguise, rng)
    if sides and rows[0].shape[2] > 1:  # a sample is on either side of several hyperplanes: one of each pair answers
        rows[0], slopes, gate = rows[0].flatten(1).unsqueeze(1), slopes.flatten(1).unsqueeze(1) / 2, Gate.OPEN
    if "sigmoid" in stack.activations:
        slopes = slopes * _bend(stack, changed, rows)
    if dump is not None:
        changed[f"{stack.dense[-1].name}.bias"][dump] += DUMP_BIAS
    return changed, Head(rows[0], slopes, gate, dump)


def _paths(stack: Stack, gates: int, wanted: int | None) -> int:
    """How many nodes lead to each logit side by side: one, or, where dropout may cut any of them, many."""
    room = min((layer.layer.out_features for layer in stack.dense[:-1]), default=stack.classes) // stack.classes
    first = stack.dense[0].layer.out_features // (stack.classes * gates)
    most = min(first, room)
    if most < 1 or (wanted or 1) > most:
        raise NotApplicable(
            f"mkor needs {gates * (wanted or 1)} nodes per class in the first dense layer and {wanted or 1} in the "
            f"others, but there are {stack.dense[0].layer.out_features} and {room * stack.classes} for "
            f"{stack.classes} classes; ask for fewer nodes or paths."
        )
    return wanted or (min(most, MOST_PARALLEL) if stack.dropout > 0 else 1)


def _places(stack: Stack, gates: int, paths: int, disguise: Disguise | None, rng: torch.Generator) -> list[Tensor]:
    """For each dense layer the rows of each class: (classes, gates, paths), then (classes, paths), then (classes,)."""
    places = []
    for number, layer in enumerate(stack.dense):
        shape = (stack.classes, gates, paths) if number == 0 else (stack.classes, paths)
        if layer is stack.dense[-1]:
            shape = (stack.classes, 1, 1) if number == 0 else (stack.classes, 1)
            places.append(torch.arange(stack.classes).view(shape))
            continue
        width = layer.layer.out_features
        order = torch.randperm(width, generator=rng) if disguise else torch.arange(width)
        places.append(order[: math.prod(shape)].view(shape))
    return places


def _equal_rows(
    stack: Stack,
    changed: dict[str, Tensor],
    rows: Tensor,
    layout: Layout,
    disguise: Disguise | None,
    brightness: tuple[float, float],
    rng: torch.Generator,
) -> None:
    """Every row of every class is the same; with several nodes each has a threshold of brightness of its own."""
    name = stack.dense[0].name
    weight, bias = changed[f"{name}.weight"], changed[f"{name}.bias"]
    if disguise is not None:  # one honest row, so that all the others look like it and not like a mean
        spread = disguise.noise * float(weight.std())
        weight[rows] = weight[rows.flatten()[0]] + spread * normal_like(weight[rows], rng)
        bias[rows] = bias[rows.flatten()[0]].clone()
        return
    if rows.shape[1] == 1:
        weight[:] = 1.0 / weight.shape[1]
        bias[:] = 0.0
        return
    if "sigmoid" in stack.activations or layout.stretched:
        raise NotApplicable(
            "mkor needs ReLUs without batch norm for several nodes per class, but there are others; leave nodes at 1."
        )
    weight[rows] = _brightness(stack, layout, weight)
    offset = 0.0 if layout.averages else 0.5  # half of max - (1 - min), plus this, is the mean of max and min
    bias[rows] = (offset - thresholds(rows.shape[1], brightness)).to(bias).view(1, -1, 1)


def thresholds(nodes: int, brightness: tuple[float, float]) -> Tensor:
    """Levels of brightness that split images into equally likely parts, the first below all of them."""
    mean, std = brightness
    parts = torch.arange(1, nodes, dtype=torch.float64) / nodes
    return torch.cat([torch.tensor([-1.0], dtype=torch.float64), mean + std * torch.special.ndtri(parts)])


def _brightness(stack: Stack, layout: Layout, like: Tensor) -> Tensor:
    """Weights (features,) whose product with the features is the mean of the copies, less that of the companions."""
    weights = torch.zeros(stack.features, dtype=like.dtype)
    copies = layout.channels[0].numel() * stack.features[1] * stack.features[2]
    halves = [1.0] if layout.averages else [0.5, -0.5]
    for channels, gain, half in zip(layout.channels, layout.gain, halves, strict=True):
        weights[channels.flatten()] = (half / copies / gain.flatten()).view(-1, 1, 1)
    return weights.flatten().to(like)


def _pair_rows(
    stack: Stack, changed: dict[str, Tensor], rows: Tensor, disguise: Disguise | None, rng: torch.Generator
) -> None:
    """Honest rows, each beside a negative multiple of itself: whatever comes in, one of the two is active (Eq. 10)."""
    assert disguise is not None
    name = stack.dense[0].name
    weight, bias = changed[f"{name}.weight"], changed[f"{name}.bias"]
    ratio = torch.tensor([math.exp(uniform_within(rng, math.log(disguise.ratio))) for _ in range(rows[:, 0].numel())])
    ratio = ratio.to(weight)
    first, second = rows[:, 0].flatten(), rows[:, 1].flatten()
    weight[second], bias[second] = -ratio.unsqueeze(1) * weight[first], -ratio * bias[first]


def _lead_on(
    stack: Stack,
    changed: dict[str, Tensor],
    places: list[Tensor],
    dump: int | None,
    disguise: Disguise | None,
    rng: torch.Generator,
) -> Tensor:
    """Connect each class's nodes with its own logit alone; returns the weight of each node's paths, as `rows`.

    The dump class's logit hears of no node: its row, which cannot be read, would otherwise hold the sum of all samples,
    and noise that is relative to the whole tensor would be relative to that.
    """
    slopes = torch.ones(places[0].shape, dtype=changed[f"{stack.dense[0].name}.weight"].dtype)
    before = places[0].flatten(1)
    for layer, after in zip(stack.dense[1:], places[1:], strict=True):
        weight, bias = changed[f"{layer.name}.weight"], changed[f"{layer.name}.bias"]
        spread = float(weight.std())
        tap = TAP * spread if disguise else 1.0 / places[0].shape[2]
        if disguise and disguise.own_paths:
            slopes *= _own_taps(weight, bias, before, after, dump if layer is stack.dense[-1] else None, disguise, rng)
            before = after
            continue
        if disguise:
            if layer is not stack.dense[-1]:
                # Other nodes hear nothing of the paths, and these little of other nodes.
                weight[:, before.flatten()] = disguise.noise * spread * normal_like(weight[:, before.flatten()], rng)
            if layer is stack.dense[-1] and disguise.untouched:
                weight[:, before.flatten()] = disguise.noise * spread * normal_like(weight[:, before.flatten()], rng)
            else:
                weight[after.flatten()] = disguise.noise * spread * normal_like(weight[after.flatten()], rng)
            bias[after.flatten()] = tap / 2 if layer.activation == "relu" else 0.0
        else:
            weight.zero_()
            bias.zero_()
        for number, (ours, theirs) in enumerate(zip(after, before, strict=True)):
            if layer is stack.dense[-1] and number == dump:
                continue
            weight[ours.unsqueeze(1), theirs.unsqueeze(0)] = tap
        slopes *= tap * (after.shape[1] if layer is not stack.dense[-1] else 1)
        before = after
    return slopes


def _own_taps(
    weight: Tensor,
    bias: Tensor,
    before: Tensor,
    after: Tensor,
    dump: int | None,
    disguise: Disguise,
    rng: torch.Generator,
) -> Tensor:
    """Paths along the layer's own weights, made positive, and noise from them to all other nodes: equations 12 and 13.

    Returns the slopes, (classes, 1, 1). What leads into the path from elsewhere stays, and a ReLU may cut the path.
    """
    taps = weight[after.flatten(1)[:, 0], before[:, 0]].abs()
    weight[:, before.flatten()] = disguise.noise * float(weight.std()) * normal_like(weight[:, before.flatten()], rng)
    for number, (ours, theirs) in enumerate(zip(after, before, strict=True)):
        if number != dump:
            weight[ours.unsqueeze(1), theirs.unsqueeze(0)] = taps[number]
    bias[after.flatten()] = bias[after.flatten()].abs()
    return taps.view(-1, 1, 1)


def _bend(stack: Stack, changed: Mapping[str, Tensor], places: list[Tensor]) -> float:
    """The product of the sigmoids' slopes along a path, where features are those of a grey image."""
    grey = torch.tensor(0.5)
    for convolution in stack.convolutions:
        grey = torch.sigmoid(grey) if convolution.activation == "sigmoid" else grey
    bend, level = 1.0, None
    for layer, rows in zip(stack.dense[:-1], places, strict=False):
        weight, bias = changed[f"{layer.name}.weight"], changed[f"{layer.name}.bias"]
        row = rows.flatten()[0]
        before = grey * weight[row].sum() if level is None else level * weight[row].sum()
        level = torch.sigmoid(before + bias[row]) if layer.activation == "sigmoid" else before + bias[row]
        bend *= float(level * (1 - level)) if layer.activation == "sigmoid" else 1.0
    return bend

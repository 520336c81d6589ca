"""How much of an update guessed samples leave unexplained: the check behind every answer that is called exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.gradient_matching.forward import Forward, likely_forward
from fedprism.client.observed import adds_gradients, direction
from fedprism.defenses.pruning import Prune
from fedprism.errors import FedprismError
from fedprism.inputs import Inputs, first_tensor, tensors_of
from fedprism.network.network_map import network_map
from fedprism.network.splitting import features_before
from fedprism.randomness import generator
from fedprism.solvers.closed_form.dense import least_squares
from fedprism.solvers.separation.signals import candidate_labels
from fedprism.types import Batch, Observation, Update

HALF_FORMATS = (torch.bfloat16, torch.float16)
"""Number formats that updates are rounded to on their way, coarsest first."""

MOST_CLASSES = 100
"""Labels that are tried one by one, each at the cost of a gradient."""
LEAST_ERROR = 1e-6
"""Relative: what solvers that square their numbers leave in double precision."""

SAME_SIZE = 0.01
"""Relative difference of sizes that count as one size: far above rounding, far below the spread of gradients."""
MOSTLY = 0.9
"""Share of the nonzero entries of one size from which an update says signs only; in gradients it is a few percent."""
STRETCH = (0.5, 1.5)
"""Factors, drawn evenly, by which each number of an answer is multiplied to see whether the update depends on it."""
TOLD_APART = 0.1
"""Sine of the angle between two updates from which the observed one tells them apart: twice what is left unexplained
by an answer that counts as explaining it."""


def unexplained(observation: Observation, inputs: Inputs, labels: Tensor) -> float | None:
    """The share of the observed update that does not point along the update these samples give; None where unknowable.

    It is the sine of the angle between the two, over all tensors that were sent: 0 is all explained, 1 nothing. The
    scale of an update is never taken for known, because clipping, weights and learning rates change it. Where the sizes
    of entries say nothing about the samples, other samples would explain the update as well, and nothing is known.
    """
    if not len(labels) or any(len(tensor) != len(labels) for tensor in tensors_of(inputs)):
        return None
    try:
        forward = likely_forward(observation)
    except FedprismError:
        return None
    like = forward.target[0]
    guess = Batch(inputs, labels).to(like.device, like.dtype)
    predicted = forward(guess.inputs, guess.labels, create_graph=False)
    if only_signs(forward.target) or not _depends_on_sizes(observation, forward, guess, predicted):
        return None
    return sine(predicted, forward.target)


def only_signs(update: Iterable[Tensor]) -> bool:
    """Whether nearly all entries of each tensor have one size, as after sign compression or Adam's first step."""
    same, total = 0, 0
    for tensor in update:
        sizes = tensor[tensor != 0].abs().double()
        if len(sizes):
            same += int(((sizes - sizes.median()).abs() <= SAME_SIZE * sizes.median()).sum())
            total += len(sizes)
    return same > MOSTLY * total


def _depends_on_sizes(observation: Observation, forward: Forward, guess: Batch, predicted: list[Tensor]) -> bool:
    """Whether the observed update would be another one if the numbers in the samples had the same signs, other sizes.

    An optimizer that scales entries one by one is known, and hides sizes, or it is not known: then the update must not
    be one that such an optimizer makes of samples whose numbers it scaled in the same way.
    """
    floating = [tensor for tensor in tensors_of(guess.inputs) if tensor.is_floating_point()]
    summed = adds_gradients(observation.round, observation.knowledge)
    if summed is None:
        rooted = guess.map(lambda tensor: _root(tensor) if tensor.is_floating_point() else tensor)
        return sine(forward(rooted.inputs, guess.labels, create_graph=False), tuple(map(_root, forward.target))) > (
            TOLD_APART
        )
    if summed or not floating:
        return True
    rng, (low, high) = generator(0, "stretched"), STRETCH
    stretched = guess.map(
        lambda tensor: (
            tensor * (low + (high - low) * torch.rand(tensor.shape, generator=rng).to(tensor))
            if tensor.is_floating_point()
            else tensor
        )
    )
    return sine(forward(stretched.inputs, guess.labels, create_graph=False), tuple(predicted)) > TOLD_APART


def _root(tensor: Tensor) -> Tensor:
    """The square root of each entry's size, with its sign."""
    return tensor.sign() * tensor.abs().sqrt()


def sine(first: list[Tensor], second: tuple[Tensor, ...]) -> float:
    """The sine of the angle between two lists of tensors, each taken as one vector; 1 if one of them is zero."""
    products = [(_dot(a, b), _dot(a, a), _dot(b, b)) for a, b in zip(first, second, strict=True)]
    both, of_first, of_second = (math.fsum(column) for column in zip(*products, strict=True))
    if not (of_first > 0 and of_second > 0 and math.isfinite(of_first)):
        return 1.0
    # Not from the cosine: a difference of nearly equal numbers would lose half of the digits.
    factor = both / of_first
    pairs = zip(first, second, strict=True)
    missed = math.fsum(float((b.double() - factor * a.double()).square().sum()) for a, b in pairs)
    return math.sqrt(missed / of_second)


def rounding_error(update: Update) -> float:
    """The largest residual that rounding alone explains, for the number format that an update was sent in.

    The format is read off the numbers: values that half precision holds exactly were rounded to it on their way.
    """
    tensors = [tensor for tensor in update.values() if tensor.is_floating_point()]
    for dtype in HALF_FORMATS:
        if all(bool((tensor.to(dtype).to(tensor.dtype) == tensor).all()) for tensor in tensors):
            return torch.finfo(dtype).eps
    return max(LEAST_ERROR, *(math.sqrt(torch.finfo(tensor.dtype).eps) for tensor in tensors))


def certified(observation: Observation, inputs: Inputs, labels: Tensor | None) -> bool | None:
    """Whether these samples give the observed update to rounding error; None where nobody can tell."""
    residual = unexplained(observation, inputs, labels) if labels is not None else None
    if labels is None or residual is None:
        return None
    return within(residual, rounding_error(direction(observation.round)), left_by_noise(observation, inputs, labels))


def within(residual: float, limit: float, noise: float) -> bool | None:
    """Whether a residual shows that samples explain an update; None if it is small, and noise could leave as little.

    `noise` is what samples that are fitted to noise leave of it: the limit is meant for samples that are not fitted.
    """
    if residual > limit:
        return False
    return True if residual < limit * noise else None


def left_by_noise(observation: Observation, inputs: Inputs, labels: Tensor | None) -> float:
    """The residual that samples like these leave after they were fitted to noise in place of the update; 0 if none.

    Each fraction in the samples and their labels can make one number of the update fit, and the unknown scale one more.
    """
    fitted = (*tensors_of(inputs), *([] if labels is None else [labels]))
    free = 1 + sum(tensor.numel() for tensor in fitted if tensor.is_floating_point())
    sent = sum(map(_telling_numbers(observation), observation.round.update.values()))
    return math.sqrt(max(0, sent - free) / max(1, sent))


def _telling_numbers(observation: Observation) -> Callable[[Tensor], int]:
    """How many numbers of a tensor of the update say something: rows of zeros are those of units that are silent.

    Pruning that is known is followed entry by entry, so that zeros agree with every answer.
    """
    defense = observation.knowledge.defense
    pruned = defense is not None and any(isinstance(part, Prune) for part in defense.members)

    def count(tensor: Tensor) -> int:
        if not tensor.is_floating_point():
            return 0
        rows = tensor.reshape(len(tensor) if tensor.dim() else 1, -1) != 0
        return int(rows.sum() if pruned else rows.any(1).sum() * rows.shape[1])

    return count


def explaining_labels(observation: Observation, inputs: Inputs) -> Tensor | None:
    """The labels with which these samples explain the output layer's gradient best; None where they cannot be told.

    Where the output layer was not sent, those with which one sample explains the update best.

    What each sample sends back follows by least squares from its features, whatever the scale of the update. The sign
    of a delta may be either, where it is not known what was subtracted from what.
    """
    round, loss = observation.round, observation.knowledge.loss
    network = network_map(observation)
    last = network.output_layer()
    if loss is None or not len(first_tensor(inputs)):
        return None
    if last is None or last.weight not in round.update:
        single = losses.is_cross_entropy(loss) and len(first_tensor(inputs)) == 1
        return _most_explaining(observation, inputs, _every_class(network.outputs) if single else [])
    if last.inputs.dim() != 2:
        return None
    like = round.params[last.weight]
    samples = Batch(inputs, torch.empty(0)).to(like.device, like.dtype)
    with torch.no_grad():
        features = features_before(observation, round, last)(samples.inputs).double()
    sent = direction(round, observation.knowledge)
    gradient, weight = last.rows(sent).double(), last.rows(round.params).double()
    outputs = features @ weight.T
    if last.bias is not None:
        outputs = outputs + round.params[last.bias].double()
    if last.bias is not None and last.bias in round.update:
        features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        gradient = torch.cat([gradient, sent[last.bias].double().unsqueeze(1)], dim=1)
    signals = least_squares(features.T, gradient.T)
    signs = (1, -1) if round.kind == "delta" else (1,)
    if losses.name_of(loss) == "binary_cross_entropy":
        # A sample pushes up the outputs whose label is 1 and no others.
        yes = [(sign * signals < 0).long().cpu() for sign in signs]
        yes = [labels.squeeze(1) for labels in yes] if outputs.shape[1] == 1 else yes
        return _most_explaining(observation, inputs, yes)
    if not losses.takes_class_numbers(loss, outputs.shape[1]):
        return None
    classes = [candidate_labels(_itself, losses.resolve(loss), outputs, sign * signals).cpu() for sign in signs]
    labels = _most_explaining(observation, inputs, classes)
    # Labels of other losses may as well be numbers, and then these are none.
    return labels if losses.is_cross_entropy(loss) or certified(observation, inputs, labels) else None


def _every_class(outputs: Tensor) -> list[Tensor]:
    """Each label of one sample, where there are few enough to try them all."""
    few = outputs.dim() == 2 and 1 < outputs.shape[1] <= MOST_CLASSES
    return [torch.tensor([label]) for label in range(outputs.shape[1])] if few else []


def _most_explaining(observation: Observation, inputs: Inputs, labels: list[Tensor]) -> Tensor | None:
    return min(labels, key=lambda each: _or_all(unexplained(observation, inputs, each)), default=None)


def _itself(outputs: Tensor) -> Tensor:
    return 1.0 * outputs


def _or_all(residual: float | None) -> float:
    return 1.0 if residual is None else residual


def _dot(first: Tensor, second: Tensor) -> float:
    return float((first.double() * second.double()).sum())

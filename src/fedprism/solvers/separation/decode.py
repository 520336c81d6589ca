"""Samples out of several encodings of them: MixUp in closed form, InstaHide entry by entry.

An encoding is a weighted average of k samples, enc_e = sum_j c_ej x_m(e,j): with M the (encodings, samples) matrix of
the coefficients, enc = M X. InstaHide gives every entry a random sign, so that |enc| = |M X|. M is the same for every
entry of the inputs, and each entry is a separate problem in as many unknowns as there are samples.

Carlini et al., "Is Private Learning Possible with Instance Encoding?", 2021 (decoding, step 5), as used on
reconstructed encodings by Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in
Federated Learning", NeurIPS 2021.

Differs from the papers in: MixUp is solved by least squares, not by gradient descent. Signs are found by the
Douglas-Rachford iteration (Elser, Rankenburg, Thibault, "Searching with Iterated Maps", 2007) from random starts, and
then from the solutions of neighbouring entries; the residual tells which entries are solved. An entry's own sign, which
no |enc| tells, is the one that makes neighbouring entries agree, so that one sign for everything is left, where the
papers have colours inverted here and there. And coefficients need not be known: soft labels tell them (`labels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree
from torch import Tensor
from torch.nn.functional import one_hot

from fedprism.solvers.closed_form.dense import explains

CHECK_EVERY = 10
"""Iterations between two looks at which entries are solved."""
POLISHING = 20
"""Most steps of alternating signs and least squares."""
MOST_SWEEPS = 100
"""Most times that all entries try their neighbours' solutions."""
FITTINGS = 1000
"""Most rounds of fitting coefficients and inputs in turn; where many are open, they get better slowly."""
CLOSER = 0.999
"""Factor by which a distance must fall to count as smaller."""
FEW_CLOSER = 1e-3
"""Fraction of the entries that must come closer for another sweep."""
SOLVED_ROUNDINGS = 1e3
"""Distance of a solved entry, in rounding errors of its encodings in single precision."""
SUM_WEIGHT = 1e6
"""How much more known sums of coefficients weigh than the encodings, so that they hold to rounding error."""
INERTIA = 1e-12
"""Weight of the former coefficients, relative to the sums', which decides between samples that are the same."""
ALIKE = 1.001
"""What the likeness of two entries is taken from, so that no edge of the graph weighs 0, which would be none."""


class DecodeStatus(StrEnum):
    EXACT = "the inputs explain the encodings to rounding error"
    APPROXIMATE = "the inputs explain the encodings in part"
    UNDETERMINED = "there are too few encodings to tell the samples apart: one answer of many that fit"


class Decoding(NamedTuple):
    inputs: Tensor
    """(samples, *shape)"""
    coefficients: Tensor
    """(encodings, k), as given or as estimated from the labels."""
    classes: Tensor | None
    """(samples,) each sample's class, as given or as the soft labels tell it; None where neither was asked."""
    residual: float
    """Relative distance between the encodings that these inputs would give and those given."""
    condition: float
    """The condition number of the mixing: how much noise on the encodings grows. Infinite where it has no inverse."""
    solved: float
    """The fraction of the entries whose signs fit to rounding error; 1 where there are no signs to find."""
    ambiguity: frozenset[str]
    """{"sign"} where all inputs may as well be their negatives."""
    status: DecodeStatus


def decode_mixtures(
    encodings: Tensor,
    mapping: Tensor,
    coefficients: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    masked: bool = False,
    samples: int | None = None,
    ridge: float = 0.0,
    starts: int = 3,
    iterations: int = 200,
    rng: torch.Generator | None = None,
) -> Decoding:
    """The samples behind encodings (encodings, *shape), of which encoding e mixes the samples mapping[e], (…, k).

    coefficients (encodings, k): with what weight. If unknown, soft labels (encodings, classes) tell them: a sample's
    class is the one that all its encodings have. masked: entries carry random signs (InstaHide). samples: how many
    there are, the largest index plus one unless said. ridge: added to the squared singular values of the mixing,
    relative to the largest. starts, iterations, rng: of the search for signs.
    """
    mapping = mapping.to(encodings.device)
    _check(encodings, mapping, coefficients, labels)
    target = encodings.detach().flatten(1).double()
    shape, count = encodings.shape[1:], samples or int(mapping.max()) + 1
    search = _Search(masked, ridge, starts, iterations, rng or torch.Generator().manual_seed(0), tuple(shape))
    target = target.abs() if masked else target
    classes: Tensor | None = None
    if coefficients is not None:
        weights = coefficients.detach().to(target)
        inputs = search.solve(_matrix(mapping, weights, count), target)
    else:
        assert labels is not None
        soft = labels.detach().to(target)
        classes = sample_classes(soft, mapping, count)
        weights, inputs = _with_coefficients(search, target, mapping, soft, classes)
    matrix = _matrix(mapping, weights, count)
    errors = _errors(matrix, inputs, target, masked)
    residual = float(torch.linalg.vector_norm(errors) / torch.linalg.vector_norm(target).clamp(min=_TINY))
    solved = torch.linalg.vector_norm(errors, dim=0) <= _tolerance(target)
    values = torch.linalg.svdvals(matrix)
    deficient = len(values) < count or bool(values[-1] <= len(matrix) * torch.finfo(values.dtype).eps * values[0])
    # Signs need about two equations per unknown (2n - 1 for all x), and unlinked samples have a sign each.
    unlinked = masked and (len(matrix) < 2 * count - 1 or _unlinked_groups(mapping, count) > 1)
    status = DecodeStatus.EXACT if explains(residual, encodings.dtype) else DecodeStatus.APPROXIMATE
    return Decoding(
        inputs=inputs.reshape(count, *shape).to(encodings.dtype),
        coefficients=weights,
        classes=classes,
        residual=residual,
        condition=math.inf if deficient else float(values[0] / values[-1]),
        solved=float(solved.double().mean()) if masked else 1.0,
        ambiguity=frozenset({"sign"}) if masked else frozenset(),
        status=DecodeStatus.UNDETERMINED if deficient or unlinked else status,
    )


def sample_classes(labels: Tensor, mapping: Tensor, samples: int) -> Tensor:
    """(samples,) the class that is heaviest where it is lightest, over the encodings that a sample is in."""
    lightest = labels.new_full((samples, labels.shape[1]), torch.inf)
    rows = torch.arange(len(mapping), device=mapping.device).unsqueeze(1).expand_as(mapping)
    index = mapping.flatten().unsqueeze(1).expand(-1, labels.shape[1])
    lightest.scatter_reduce_(0, index, labels[rows.flatten()], "amin")
    return lightest.argmax(1)


_TINY = torch.finfo(torch.float64).tiny


class _Search(NamedTuple):
    """How the inputs (samples, entries) behind encodings are looked for, once the mixing matrix is known."""

    masked: bool
    ridge: float
    starts: int
    iterations: int
    rng: torch.Generator
    shape: tuple[int, ...]

    def solve(self, matrix: Tensor, target: Tensor) -> Tensor:
        inverse = self.inverse(matrix)
        if not self.masked:
            return inverse @ target
        inputs = self._from_anywhere(matrix, inverse, target)
        inputs = self._from_neighbours(matrix, inverse, target, inputs)
        return inputs * _agreeing_signs(inputs, self.shape)

    def refine(self, matrix: Tensor, target: Tensor, inputs: Tensor) -> Tensor:
        """The solution next to `inputs`."""
        inverse = self.inverse(matrix)
        return _polish(matrix, inverse, target, inputs) if self.masked else inverse @ target

    def inverse(self, matrix: Tensor) -> Tensor:
        """(samples, encodings): least squares by the singular values, damped by the ridge."""
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
        kept = values > max(matrix.shape) * torch.finfo(values.dtype).eps * values[0]
        damped = values / (values.square() + self.ridge * values[0] ** 2).clamp(min=_TINY)
        inverse: Tensor = vh.T @ (torch.where(kept, damped, 0.0).unsqueeze(1) * u.T)
        return inverse

    def _from_anywhere(self, matrix: Tensor, inverse: Tensor, target: Tensor) -> Tensor:
        """Douglas-Rachford between what has these magnitudes and what is a mixture, until entries are solved."""
        samples, entries = matrix.shape[1], target.shape[1]
        best = _Best(target.new_zeros(samples, entries), target.new_full((entries,), torch.inf))
        for _ in range(self.starts):
            still = best.unsolved(target)
            if len(still) == 0:
                break
            start = torch.randn(samples, len(still), generator=self.rng, dtype=torch.float64).to(target.device)
            state, goal = matrix @ start, target[:, still]
            for iteration in range(1, self.iterations + 1):
                sized = _signed(goal, state)
                mixture = matrix @ (inverse @ (2 * sized - state))
                state = state + mixture - sized
                if iteration % CHECK_EVERY and iteration < self.iterations:
                    continue
                inputs = _polish(matrix, inverse, goal, inverse @ _signed(goal, mixture))
                best.offer(still, inputs, _errors(matrix, inputs, goal, True))
                kept = torch.isin(still, best.unsolved(target))
                still, state, goal = still[kept], state[:, kept], goal[:, kept]
                if len(still) == 0:
                    break
        return best.inputs

    def _from_neighbours(self, matrix: Tensor, inverse: Tensor, target: Tensor, inputs: Tensor) -> Tensor:
        """Entries of images are like those beside them: what is unsolved tries its neighbours' solutions as starts."""
        best = _Best(inputs, torch.linalg.vector_norm(_errors(matrix, inputs, target, True), dim=0))
        for _ in range(MOST_SWEEPS):
            before = best.distance.clone()
            for source, still in _neighbours(self.shape, target.device):
                unsolved = torch.isin(still, best.unsolved(target))
                source, still = source[unsolved], still[unsolved]
                if len(still):
                    inputs = _polish(matrix, inverse, target[:, still], best.inputs[:, source])
                    best.offer(still, inputs, _errors(matrix, inputs, target[:, still], True))
            # Without noise every sweep solves a further ring; with noise it is over when little gets better.
            if float((best.distance < CLOSER * before).double().mean()) < FEW_CLOSER:
                break
        return best.inputs


class _Best(NamedTuple):
    """The best solution so far of each entry: inputs (samples, entries), distance (entries,)."""

    inputs: Tensor
    distance: Tensor

    def offer(self, entries: Tensor, inputs: Tensor, errors: Tensor) -> None:
        distance = torch.linalg.vector_norm(errors, dim=0)
        better = distance < self.distance[entries]
        self.inputs[:, entries[better]] = inputs[:, better]
        self.distance[entries[better]] = distance[better]

    def unsolved(self, target: Tensor) -> Tensor:
        return (self.distance > _tolerance(target)).nonzero().flatten()


def _with_coefficients(
    search: _Search, target: Tensor, mapping: Tensor, labels: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor]:
    """Coefficients and inputs, from encodings whose classes all differ, then by turns from all of them."""
    count, mixed_classes = len(classes), classes[mapping]
    alike = (mixed_classes.unsqueeze(2) == mixed_classes.unsqueeze(1)).to(target)
    sums = labels.gather(1, mixed_classes)
    weights = sums / alike.sum(2)
    clear = (alike.sum((1, 2)) == mapping.shape[1]).nonzero().flatten()
    matrix = _matrix(mapping, weights, count)
    enough = len(clear) >= (2 * count if search.masked else count)
    enough = enough and int(torch.linalg.matrix_rank(matrix[clear])) == count
    rows = clear if enough else torch.arange(len(mapping), device=mapping.device)
    inputs = search.solve(matrix[rows], target[rows])
    if len(clear) == len(mapping):
        return weights, inputs
    best = (math.inf, weights, inputs)
    for _ in range(FITTINGS):
        weights = _fitted(target, mapping, inputs, weights, alike, sums, search.masked)
        matrix = _matrix(mapping, weights, count)
        inputs = search.refine(matrix, target, inputs)
        distance = float(torch.linalg.vector_norm(_errors(matrix, inputs, target, search.masked)))
        if not distance < CLOSER * best[0]:
            break
        best = (distance, weights, inputs)
    return best[1], best[2]


def _fitted(
    target: Tensor, mapping: Tensor, inputs: Tensor, weights: Tensor, alike: Tensor, sums: Tensor, masked: bool
) -> Tensor:
    """The coefficients that explain each encoding best, given the inputs and the sums of those of one class."""
    gram = inputs @ inputs.T
    if masked:
        target = _signed(target, _matrix(mapping, weights, len(inputs)) @ inputs)
    products = (target @ inputs.T).gather(1, mapping)
    heavy = SUM_WEIGHT * gram.diagonal().mean()
    system = gram[mapping.unsqueeze(2), mapping.unsqueeze(1)] + heavy * alike
    inertia = INERTIA * heavy * torch.eye(mapping.shape[1], dtype=gram.dtype, device=gram.device)
    right = products + heavy * sums + (inertia @ weights.unsqueeze(2)).squeeze(2)
    fitted: Tensor = torch.linalg.solve(system + inertia, right.unsqueeze(2)).squeeze(2)
    return fitted.clamp(min=0.0)


def _matrix(mapping: Tensor, weights: Tensor, samples: int) -> Tensor:
    """(encodings, samples): the weight of each sample in each encoding."""
    return weights.new_zeros(len(mapping), samples).scatter_add(1, mapping, weights)


def _signed(magnitudes: Tensor, like: Tensor) -> Tensor:
    return torch.where(like >= 0, magnitudes, -magnitudes)


def _errors(matrix: Tensor, inputs: Tensor, target: Tensor, masked: bool) -> Tensor:
    mixtures = matrix @ inputs
    return (mixtures.abs() if masked else mixtures) - target


def _tolerance(target: Tensor) -> Tensor:
    """(entries,) the distance that rounding leaves of encodings in single precision."""
    length: Tensor = torch.linalg.vector_norm(target, dim=0)
    return SOLVED_ROUNDINGS * torch.finfo(torch.float32).eps * length


def _polish(matrix: Tensor, inverse: Tensor, target: Tensor, inputs: Tensor) -> Tensor:
    """Signs from the inputs, inputs from the signs: every step comes closer, up to the nearest dead end."""
    signs = matrix @ inputs >= 0
    for _ in range(POLISHING):
        inputs = inverse @ torch.where(signs, target, -target)
        before, signs = signs, matrix @ inputs >= 0
        if torch.equal(before, signs):
            break
    return inputs


def _neighbours(shape: tuple[int, ...], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of entries (as numbers) that lie next to each other: two pairs of tensors, one per order, for each axis."""
    numbers = torch.arange(math.prod(shape), device=device).reshape(shape)
    for axis, length in enumerate(shape):
        if length > 1:
            first, second = (numbers.narrow(axis, start, length - 1).flatten() for start in (0, 1))
            yield from ((first, second), (second, first))


def _agreeing_signs(inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(entries,) plus or minus 1, so that neighbours have the same sign in most samples, the surest pairs first."""
    entries = inputs.shape[1]
    pairs = list(_neighbours(shape, inputs.device))[::2]
    if not pairs:
        return inputs.new_ones(entries)
    first, second = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    directions = inputs / torch.linalg.vector_norm(inputs, dim=0).clamp(min=_TINY)
    alike = (directions[:, first] * directions[:, second]).sum(0)
    cost = (ALIKE - alike.abs()).cpu().numpy()
    graph = coo_array((cost, (first.cpu().numpy(), second.cpu().numpy())), shape=(entries, entries))
    order, parents = breadth_first_order(minimum_spanning_tree(graph.tocsr()), 0, directed=False)
    signs = [1.0] * entries
    columns = directions.T.cpu()
    for entry in order[1:].tolist():
        parent = int(parents[entry])
        signs[entry] = math.copysign(signs[parent], signs[parent] * float(columns[entry] @ columns[parent]))
    return inputs.new_tensor(signs)


def _unlinked_groups(mapping: Tensor, samples: int) -> int:
    """Into how many groups the samples fall that no encoding links."""
    member = one_hot(mapping.cpu(), samples).amax(1)
    return int(connected_components((member.T @ member).numpy(), directed=False)[0])


def _check(encodings: Tensor, mapping: Tensor, coefficients: Tensor | None, labels: Tensor | None) -> None:
    if mapping.dim() != 2 or len(mapping) != len(encodings) or len(encodings) == 0:
        raise ValueError(
            f"mapping must have shape (encodings, k) for at least one encoding, not {tuple(mapping.shape)} for "
            f"{len(encodings)} encodings. Give the samples in each encoding."
        )
    if not bool(torch.isfinite(encodings).all()):
        raise ValueError("encodings must be finite. Leave out those that are not.")
    if coefficients is not None and coefficients.shape != mapping.shape:
        raise ValueError(
            f"coefficients must have the shape of mapping, {tuple(mapping.shape)}, not {tuple(coefficients.shape)}. "
            "Give one for each sample in each encoding."
        )
    if coefficients is None and (labels is None or labels.dim() != 2 or len(labels) != len(mapping)):
        raise ValueError(
            f"coefficients are needed, or soft labels (encodings, classes) of {len(mapping)} encodings to estimate "
            "them from. Give one of them."
        )

"""Planted mixtures of photographs and what comes back out of their encodings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.defenses import Context, InstaHide, MixUp
from fedprism.solvers import DecodeStatus, decode_mixtures
from fedprism.solvers.separation.decode import sample_classes


class Encoded(NamedTuple):
    inputs: Tensor
    labels: Tensor
    encodings: Tensor
    soft: Tensor
    mapping: Tensor
    coefficients: Tensor


def encoded(
    defense: MixUp, *, samples: int, epochs: int, size: int = 16, seed: int = 0, classes: Sequence[int] | None = None
) -> Encoded:
    """Several epochs of a client's photographs, of mean 0 and spread 1, as the defense hands them to the model.

    classes: of the samples; as they are drawn unless said.
    """
    rng = torch.Generator().manual_seed(seed)
    photos = fp.data.load("photos", size=size)
    drawn = photos.draw(samples, rng)
    if classes is not None:
        of_class = [(photos.labels == number).nonzero().flatten() for number in range(photos.classes)]
        orders = [members[torch.randperm(len(members), generator=rng)].tolist() for members in of_class]
        drawn = photos.batch(torch.tensor([orders[number].pop() for number in classes]))
    inputs = (drawn.inputs - drawn.inputs.mean((0, 2, 3), True)) / drawn.inputs.std((0, 2, 3), keepdim=True)
    data = fp.Batch(inputs, drawn.labels)
    mixings, batches = [], []
    for _ in range(epochs):
        state = rng.get_state()
        mixings.append(defense.mixing(samples, rng))
        rng.set_state(state)
        batches.append(defense.on_batch(data, Context(), rng))
    return Encoded(
        inputs,
        drawn.labels,
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        torch.cat([mixing.partners for mixing in mixings]),
        torch.cat([mixing.coefficients for mixing in mixings]),
    )


def decibels(answer: Tensor, truth: Tensor) -> float:
    """The signal-to-noise ratio of the worst sample, of the range of the truth."""
    errors = (answer - truth).double().flatten(1).square().mean(1)
    return float(-10 * torch.log10(errors / (truth.max() - truth.min()).double() ** 2).min())


def either_sign(answer: Tensor, truth: Tensor) -> float:
    return max(decibels(answer, truth), decibels(-answer, truth))


def entry_by_entry(answer: Tensor, truth: Tensor) -> tuple[float, float]:
    """Decibels where each entry may have the other sign in all samples, and the share of entries of one sign.

    Neighbours tell the sign of an entry, and few mislead: at most 2 % over 250 draws of 8, 12 or 24 photographs.
    """
    signs = (answer * truth).sum(0).sign()
    positive = float((signs > 0).float().mean())
    return decibels(answer * signs, truth), max(positive, 1 - positive)


def test_mixup_comes_out_in_closed_form() -> None:
    planted = encoded(MixUp(4), samples=12, epochs=3)
    answer = decode_mixtures(planted.encodings, planted.mapping, planted.coefficients)
    assert answer.status is DecodeStatus.EXACT
    assert decibels(answer.inputs, planted.inputs) > 100
    assert answer.inputs.dtype == planted.inputs.dtype
    assert answer.ambiguity == frozenset()
    assert answer.solved == 1.0
    assert 1 <= answer.condition < 20


@pytest.mark.quality
@pytest.mark.parametrize(("samples", "epochs"), [(12, 3), (12, 8), (24, 12)])
def test_instahide_comes_out_up_to_one_sign(samples: int, epochs: int) -> None:
    planted = encoded(InstaHide(4), samples=samples, epochs=epochs)
    answer = decode_mixtures(planted.encodings, planted.mapping, planted.coefficients, masked=True)
    assert answer.status is DecodeStatus.EXACT
    assert answer.ambiguity == {"sign"}
    assert answer.solved == 1.0
    # One sign for all entries of all samples, not one for each: that is what neighbours are asked for.
    quality, of_one_sign = entry_by_entry(answer.inputs, planted.inputs)
    assert quality > 100
    assert of_one_sign > 0.9


@pytest.mark.quality
def test_instahide_read_as_mixup_gives_nothing_away() -> None:
    planted = encoded(InstaHide(4), samples=12, epochs=8)
    answer = decode_mixtures(planted.encodings, planted.mapping, planted.coefficients)
    assert answer.status is DecodeStatus.APPROXIMATE
    assert either_sign(answer.inputs, planted.inputs) < 30  # 16 to 20 over twenty draws, against more than 100


def test_solutions_spread_to_neighbours_where_starts_fail() -> None:
    planted = encoded(InstaHide(4), samples=20, epochs=8)
    few = {"starts": 1, "iterations": 60}
    flat = planted.encodings.flatten(1)
    order = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))
    image = decode_mixtures(planted.encodings, planted.mapping, planted.coefficients, masked=True, **few)
    shuffled = decode_mixtures(flat[:, order], planted.mapping, planted.coefficients, masked=True, **few)
    assert image.solved == 1.0
    assert shuffled.solved < image.solved


@pytest.mark.quality
@pytest.mark.parametrize(
    ("defense", "epochs"), [(MixUp(4), 6), (InstaHide(4), 8), (MixUp(2), 8), (InstaHide(2), 8)], ids=repr
)
def test_soft_labels_tell_the_coefficients(defense: MixUp, epochs: int) -> None:
    # So many encodings that some hold two samples of one class, and no class is in all of another's encodings.
    planted = encoded(defense, samples=12, epochs=epochs, classes=[0, 1, 2, 3, 4, 5] * 2)
    masked = isinstance(defense, InstaHide)
    answer = decode_mixtures(planted.encodings, planted.mapping, labels=planted.soft, masked=masked)
    assert answer.classes is not None
    assert torch.equal(answer.classes, planted.labels)
    # Some encodings hold two samples of one class, whose labels tell only the sum of their coefficients.
    mixed_classes = planted.labels[planted.mapping].sort(dim=1).values
    assert bool((mixed_classes[:, 1:] == mixed_classes[:, :-1]).any())
    torch.testing.assert_close(answer.coefficients, planted.coefficients, atol=1e-5, rtol=0)
    assert answer.status is DecodeStatus.EXACT
    quality, of_one_sign = entry_by_entry(answer.inputs, planted.inputs)
    assert quality > 100
    assert of_one_sign > 0.9


def test_a_sample_has_the_class_that_all_its_encodings_have() -> None:
    mapping = torch.tensor([[0, 1], [0, 2], [1, 2]])
    labels = torch.tensor([[0.7, 0.3, 0.0], [0.6, 0.0, 0.4], [0.0, 0.5, 0.5]])
    assert sample_classes(labels, mapping, 3).tolist() == [0, 1, 2]


@pytest.mark.quality
def test_noise_grows_by_no_more_than_the_condition_says() -> None:
    planted = encoded(MixUp(4), samples=12, epochs=6)
    rng = torch.Generator().manual_seed(1)
    noise = 0.05 * torch.randn(planted.encodings.shape, generator=rng)
    answer = decode_mixtures(planted.encodings + noise, planted.mapping, planted.coefficients)
    assert answer.status is DecodeStatus.APPROXIMATE
    largest = float(torch.linalg.matrix_norm(_mixing_matrix(planted), ord=2))
    error = torch.linalg.vector_norm(answer.inputs - planted.inputs)
    assert float(error) <= answer.condition / largest * float(torch.linalg.vector_norm(noise))
    # More epochs average it out.
    longer = encoded(MixUp(4), samples=12, epochs=24)
    noise = 0.05 * torch.randn(longer.encodings.shape, generator=rng)
    again = decode_mixtures(longer.encodings + noise, longer.mapping, longer.coefficients)
    assert decibels(again.inputs, longer.inputs) > decibels(answer.inputs, planted.inputs) + 3  # about 6


@pytest.mark.quality
def test_noisy_signs_are_found_well_enough() -> None:
    planted = encoded(InstaHide(4), samples=8, epochs=10)
    noise = 0.05 * torch.randn(planted.encodings.shape, generator=torch.Generator().manual_seed(1))
    answer = decode_mixtures(
        planted.encodings + noise, planted.mapping, planted.coefficients, masked=True, starts=2, iterations=100
    )
    assert answer.status is DecodeStatus.APPROXIMATE
    quality, of_one_sign = entry_by_entry(answer.inputs, planted.inputs)
    assert quality > 30
    assert of_one_sign > 0.9


@pytest.mark.quality
def test_a_ridge_helps_against_noise_on_few_encodings() -> None:
    planted = encoded(MixUp(4), samples=12, epochs=1)
    noise = torch.randn(planted.encodings.shape, generator=torch.Generator().manual_seed(1))
    plain, damped = (
        decode_mixtures(planted.encodings + noise, planted.mapping, planted.coefficients, ridge=ridge)
        for ridge in (0.0, 0.3)
    )
    # 6 dB and more over thirty draws.
    assert decibels(damped.inputs, planted.inputs) > decibels(plain.inputs, planted.inputs) + 2


def test_too_few_encodings_are_said_to_be_too_few() -> None:
    planted = encoded(MixUp(4), samples=12, epochs=2)
    few = decode_mixtures(planted.encodings[:8], planted.mapping[:8], planted.coefficients[:8], samples=12)
    assert few.status is DecodeStatus.UNDETERMINED
    assert few.condition == math.inf
    assert bool(torch.isfinite(few.inputs).all())
    signs = encoded(InstaHide(4), samples=12, epochs=1)
    answer = decode_mixtures(signs.encodings, signs.mapping, signs.coefficients, masked=True)
    assert answer.residual < 1e-6  # it fits, and is wrong
    assert answer.status is DecodeStatus.UNDETERMINED
    assert either_sign(answer.inputs, signs.inputs) < 20


def test_groups_that_no_encoding_links_have_signs_of_their_own() -> None:
    mapping = torch.tensor([[0, 1], [2, 3]] * 8)
    weights = torch.rand(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    encodings = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    assert decode_mixtures(encodings, mapping, weights, masked=True).status is DecodeStatus.UNDETERMINED


def test_same_generator_same_answer_and_arguments_left_alone() -> None:
    planted = encoded(InstaHide(4), samples=8, epochs=4, size=8)
    before = planted.encodings.clone(), planted.mapping.clone(), planted.coefficients.clone()
    torch.manual_seed(1)
    first, second = (
        decode_mixtures(
            planted.encodings,
            planted.mapping,
            planted.coefficients,
            masked=True,
            rng=torch.Generator().manual_seed(3),
        )
        for _ in range(2)
    )
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(before[0], planted.encodings)
    assert torch.equal(before[1], planted.mapping)
    assert torch.equal(before[2], planted.coefficients)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mapping": torch.zeros(3, 4, dtype=torch.int64)}, "mapping must have shape"),
        ({"coefficients": torch.ones(24, 3)}, "coefficients must have the shape"),
        ({"coefficients": None}, "coefficients are needed, or soft labels"),
        ({"encodings": torch.full((24, 3, 8, 8), torch.nan)}, "encodings must be finite"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Tensor | None], words: str) -> None:
    planted = encoded(MixUp(4), samples=12, epochs=2, size=8)
    given = {"encodings": planted.encodings, "mapping": planted.mapping, "coefficients": planted.coefficients}
    with pytest.raises(ValueError, match=f"^{words}.*[.] .*[.]$"):
        decode_mixtures(**{**given, **change})  # type: ignore[arg-type]


def _mixing_matrix(planted: Encoded) -> Tensor:
    size = (len(planted.mapping), len(planted.inputs))
    return torch.zeros(size, dtype=torch.float64).scatter_(1, planted.mapping, planted.coefficients)

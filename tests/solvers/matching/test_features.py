"""Feature inversion: images planted behind a small random network."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.solvers.matching.features import (
    FeatureInversion,
    FeatureStatus,
    feature_cosine,
    feature_error,
    first_guess,
    invert_features,
)

QUICK = FeatureInversion(iterations=400)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU()
    )


@pytest.fixture
def images(photos: fp.data.ImageSet) -> Tensor:
    return photos.draw(3, torch.Generator().manual_seed(1)).inputs


def noise(images: Tensor) -> Tensor:
    return torch.randn(images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.double).to(images)


def unit_box() -> tuple[Tensor, Tensor]:
    return torch.zeros(()), torch.ones(())


def features(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network(images).flatten(1)


@pytest.mark.quality
@pytest.mark.parametrize("distance", [feature_cosine, feature_error])
def test_the_features_of_photographs_are_reached(distance: object, network: nn.Module, images: Tensor) -> None:
    target, start = features(network, images), noise(images)
    found = invert_features(network, target, start, box=unit_box(), settings=QUICK, distance=distance)
    assert found.status is FeatureStatus.ITERATIONS
    assert found.inputs.shape == images.shape
    assert found.cosines.min() > 0.98  # 0.988 to 0.998; a single step reaches 0.78 to 0.90
    reached = torch.nn.functional.cosine_similarity(features(network, found.inputs), target)
    torch.testing.assert_close(found.cosines, reached, rtol=0, atol=1e-5)
    first = invert_features(network, target, start, box=unit_box(), settings=dataclasses.replace(QUICK, iterations=1))
    assert (found.objective < first.objective / 5).all()
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.quality
def test_exact_features_give_better_images_than_their_direction(network: nn.Module, images: Tensor) -> None:
    inputs, box = 4 * images - 2, (torch.tensor(-2.0), torch.tensor(2.0))
    target, start = features(network, inputs), first_guess(noise(images), QUICK)
    exact, direction = (
        invert_features(network, target, start, box=box, settings=QUICK, distance=distance).inputs
        for distance in (feature_error, feature_cosine)
    )
    # 1.8 to 6.8 dB better over eleven networks.
    assert fp.metrics.psnr((exact + 2) / 4, images).mean() > fp.metrics.psnr((direction + 2) / 4, images).mean() + 0.5


def test_the_direction_alone_counts_for_the_cosine(network: nn.Module, images: Tensor) -> None:
    target, start = features(network, images).double(), noise(images).double()
    quick = dataclasses.replace(QUICK, iterations=20)
    plain, scaled = (
        invert_features(network.double(), scale * target, start, settings=quick).inputs for scale in (1, 1e-12)
    )
    torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-6)


def test_an_image_does_not_depend_on_its_neighbours(network: nn.Module, images: Tensor) -> None:
    network, images = network.double(), images.double()
    target, start = features(network, images), noise(images)
    few = FeatureInversion(iterations=30)
    answers = [
        invert_features(network, target, start, box=unit_box(), settings=dataclasses.replace(few, microbatch=size))
        for size in (1, 2, 16)
    ]
    for other in answers[1:]:
        torch.testing.assert_close(other.inputs, answers[0].inputs, rtol=0, atol=1e-7)
        torch.testing.assert_close(other.objective, answers[0].objective, rtol=0, atol=1e-9)


def test_the_objective_is_the_distance_plus_the_images_own_variation(network: nn.Module, images: Tensor) -> None:
    network, images = network.double(), images.double()
    target = features(network, images)
    found = invert_features(network, target, noise(images), settings=FeatureInversion(iterations=5))
    for image, objective, z in zip(found.inputs, found.objective, target, strict=True):
        across = (image[:, :, 1:] - image[:, :, :-1]).abs().mean()
        down = (image[:, 1:] - image[:, :-1]).abs().mean()
        cosine = torch.dot(features(network, image[None])[0], z) / features(network, image[None]).norm() / z.norm()
        smoothness = FeatureInversion().total_variation
        assert float(objective) == pytest.approx(float(1 - cosine + smoothness * (across + down)), abs=1e-9)


@pytest.mark.parametrize("side", [32, 33])
def test_a_first_guess_has_the_spectrum_of_photographs(side: int) -> None:
    white = noise(torch.zeros(64, 3, side, side))
    guess = first_guess(white, FeatureInversion(falloff=1.0))
    power = torch.fft.rfft2(guess, norm="ortho").abs().square().mean((0, 1))
    # Four times the frequency, a sixteenth of the power; and along both sides alike.
    assert float(power[0, 2] / power[0, 8]) == pytest.approx(16, rel=0.5)
    assert float(power[2, 0] / power[8, 0]) == pytest.approx(16, rel=0.5)
    assert 0.03 < float(guess.std()) < 0.2
    assert first_guess(white, FeatureInversion(falloff=0.0)) is white
    rows = noise(torch.zeros(4, 6))
    assert first_guess(rows, FeatureInversion()) is rows  # no image


@pytest.mark.quality
def test_a_search_by_frequencies_leaves_less_noise_than_one_by_pixels(network: nn.Module, images: Tensor) -> None:
    target, answers = features(network, images), []
    for settings in (FeatureInversion(), FeatureInversion(total_variation=0.1, falloff=0.0)):
        few = dataclasses.replace(settings, iterations=60, total_variation=0.0)
        start = first_guess(noise(images), few)
        answers.append(invert_features(network, target, start, box=unit_box(), settings=few, distance=feature_error))
    by_frequencies, by_pixels = (float(found.inputs.diff(dim=-1).abs().mean()) for found in answers)
    assert by_frequencies < 0.92 * by_pixels  # 0.59 to 0.83 over eleven networks
    assert min(float(found.cosines.min()) for found in answers) > 0.9


@pytest.mark.quality
def test_bfloat16_costs_little(network: nn.Module, images: Tensor) -> None:
    target, settings = features(network, images), dataclasses.replace(QUICK, iterations=100)
    start = first_guess(noise(images), settings)
    plain, short = (
        invert_features(network, target, start, box=unit_box(), settings=dataclasses.replace(settings, bfloat16=chosen))
        for chosen in (False, True)
    )
    assert short.inputs.dtype == short.objective.dtype == torch.float32
    assert short.cosines.min() > plain.cosines.min() - 0.01


def test_every_iterate_lies_in_the_box(network: nn.Module, images: Tensor) -> None:
    low, high = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1), torch.tensor([0.6, 0.7, 0.8]).view(1, 3, 1, 1)
    seen: list[Tensor] = []

    def watched(inputs: Tensor) -> Tensor:
        seen.append(inputs.detach().clone())
        return network(inputs)

    settings = FeatureInversion(iterations=10, microbatch=2)
    found = invert_features(watched, features(network, images), noise(images), box=(low, high), settings=settings)
    for inputs in [*seen, found.inputs]:
        assert (inputs >= low).all()
        assert (inputs <= high).all()
    assert max(len(inputs) for inputs in seen) == 2  # memory: never more than a microbatch


def test_the_best_iterate_is_returned_even_if_later_ones_are_worse(network: nn.Module, images: Tensor) -> None:
    target = features(network, images)
    wild = FeatureInversion(iterations=6, lr=50.0)
    found = invert_features(network, target, images, box=unit_box(), settings=wild)
    torch.testing.assert_close(found.inputs, images)  # it started at the answer, and every step led away
    assert found.cosines.min() > 0.9999


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, 0.0])
def test_features_that_say_nothing_are_declared(spoiled: float, network: nn.Module, images: Tensor) -> None:
    target, start = features(network, images), noise(images)
    healthy = invert_features(network, target, start, box=unit_box(), settings=QUICK)
    target[1] = spoiled
    found = invert_features(network, target, start, box=unit_box(), settings=QUICK)
    assert found.status is FeatureStatus.PARTIAL
    assert found.inputs.isfinite().all()
    torch.testing.assert_close(found.inputs[1], start[1].clamp(0, 1))
    assert found.cosines[1] == 0
    assert found.objective[1] == torch.inf
    torch.testing.assert_close(found.cosines[[0, 2]], healthy.cosines[[0, 2]], rtol=0, atol=1e-3)
    alone = invert_features(network, target[1:2], start[1:2], settings=dataclasses.replace(QUICK, iterations=3))
    assert alone.status is FeatureStatus.UNUSABLE


def test_a_network_without_finite_features_is_declared(images: Tensor) -> None:
    start = noise(images)
    found = invert_features(
        lambda x: (x - 1e9).flatten(1).sqrt(), torch.ones(3, 3072), start, settings=FeatureInversion(iterations=3)
    )
    assert found.status is FeatureStatus.UNUSABLE
    torch.testing.assert_close(found.inputs, start)


def test_an_extra_objective_of_the_batch_takes_part(network: nn.Module, images: Tensor) -> None:
    target, start = features(network, images), noise(images)
    brightness = images.mean()
    sizes: list[int] = []

    def extra(inputs: Tensor) -> Tensor:
        sizes.append(len(inputs))
        return 10 * (inputs.mean() - brightness).abs()

    settings = dataclasses.replace(QUICK, microbatch=1, iterations=200)
    plain = invert_features(network, target, start, box=unit_box(), settings=settings)
    helped = invert_features(network, target, start, box=unit_box(), settings=settings, extra=extra)
    assert set(sizes) == {3}
    assert (helped.inputs.mean() - brightness).abs() < 0.01 < (plain.inputs.mean() - brightness).abs()
    assert helped.cosines.min() > 0.98


def test_inputs_without_height_and_width_have_no_variation(rng: torch.Generator) -> None:
    linear = nn.Linear(6, 12)
    inputs = torch.rand(4, 6, generator=rng)
    start = torch.randn(4, 6, generator=rng)
    found = invert_features(linear, features(linear, inputs), start, settings=QUICK, distance=feature_error)
    torch.testing.assert_close(found.inputs, inputs, rtol=0, atol=0.01)


def test_progress_counts_all_microbatches(network: nn.Module, images: Tensor) -> None:
    reports: list[tuple[int, int]] = []
    settings = FeatureInversion(iterations=3, microbatch=2)
    invert_features(
        network,
        features(network, images),
        noise(images),
        settings=settings,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert reports == [(done, 6) for done in range(1, 7)]


def test_an_empty_batch_and_a_missing_target(network: nn.Module, images: Tensor) -> None:
    nothing = invert_features(network, torch.zeros(0, 2048), images[:0])
    assert len(nothing.inputs) == 0
    assert nothing.status is FeatureStatus.ITERATIONS
    with pytest.raises(ValueError, match="target must hold one entry per image, not 2 for 3"):
        invert_features(network, features(network, images)[:2], images)


def test_the_settings_are_shown_as_they_are_made() -> None:
    assert eval(repr(FeatureInversion(lr=0.05))) == FeatureInversion(lr=0.05)

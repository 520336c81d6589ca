"""Blind separation: inputs planted behind a random mixing, what is found of them, and what must not matter."""

from __future__ import annotations

import warnings

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import FastICA
from torch import Tensor
from torch.nn.functional import normalize

import fedprism as fp
from fedprism.solvers import StudentICA, Unmixing, UnmixStatus, reduce_mixture, unmix
from fedprism.solvers.ica import contrasts
from fedprism.solvers.mixture import effective_rank

PIXELS = StudentICA(derivatives=False)
SEEDS = range(3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def colour(photos: fp.data.ImageSet, count: int, seed: int) -> Tensor:
    return photos.draw(count, seeded(seed)).inputs.double()


def planted(inputs: Tensor, units: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of a dense layer's weight and bias for inputs (n, ...) with random signals."""
    signals = torch.randn(units, len(inputs), generator=seeded(seed), dtype=torch.float64)
    return signals @ inputs.double().flatten(1), signals.sum(1)


def decibels(found: Tensor, inputs: Tensor) -> Tensor:
    """PSNR (n,) of each input's counterpart under the best assignment; values are not clipped."""
    found, inputs = found.double(), inputs.double().flatten(1)
    assert found.shape == inputs.shape
    errors = torch.stack([(found - one).square().mean(1) for one in inputs], dim=1)
    rows, order = linear_sum_assignment(errors.clamp(min=1e-30).log10().numpy())
    return -10 * errors.clamp(min=1e-30)[rows, order].log10()


def resemblance(found: Tensor, inputs: Tensor, *, centred: bool = True) -> Tensor:
    """Size of the correlation (n,), or of the cosine, of each input with its counterpart under the best assignment."""
    first, second = found.double(), inputs.double().flatten(1)
    if centred:
        first, second = first - first.mean(1, keepdim=True), second - second.mean(1, keepdim=True)
    cosines = (normalize(first) @ normalize(second).T).abs()
    return cosines[linear_sum_assignment(-cosines.numpy())]


@pytest.mark.quality
@pytest.mark.parametrize("seed", SEEDS)
def test_photographs_are_separated_by_their_derivatives(photos: fp.data.ImageSet, seed: int) -> None:
    images = colour(photos, 8, seed)
    found = unmix(*planted(images), image_shape=(3, 32, 32))
    pixels = unmix(*planted(images), image_shape=(3, 32, 32), objective=PIXELS)
    assert (found.status, found.rank, found.scaled, found.exact) == (UnmixStatus.SEPARATED, 8, True, False)
    # The worst image was seen at 25 to 43 dB and the median of a batch at 40 to 52; by pixels the mean is -4 to 18.
    assert decibels(found.sources, images).min() > 20
    assert decibels(found.sources, images).median() > 35
    assert decibels(pixels.sources, images).mean() < decibels(found.sources, images).median() - 15


@pytest.mark.quality
@pytest.mark.parametrize("seed", SEEDS)
def test_grey_images_are_separated_by_their_derivatives(photos: fp.data.ImageSet, seed: int) -> None:
    images = colour(photos, 6, seed).mean(1, keepdim=True)
    found = unmix(*planted(images), image_shape=(1, 32, 32))
    pixels = unmix(*planted(images), image_shape=(1, 32, 32), objective=PIXELS)
    assert decibels(found.sources, images).min() > 17  # 22 to 36
    assert decibels(pixels.sources, images).mean() < decibels(found.sources, images).mean() - 10  # by 18 to 35


@pytest.mark.quality
@pytest.mark.parametrize("seed", SEEDS)
def test_ten_grey_images_keep_their_likeness(photos: fp.data.ImageSet, seed: int) -> None:
    images = colour(photos, 10, seed).mean(1, keepdim=True)
    likeness = resemblance(unmix(*planted(images), image_shape=(1, 32, 32)).sources, images)
    # The median is 0.996 to 0.999 over twelve batches, and 0.52 to 0.77 by pixels. Now and then two are blended.
    assert likeness.median() > 0.98
    assert (likeness > 0.9).sum() >= 8


@pytest.mark.parametrize("seed", SEEDS)
def test_signals_along_one_axis_are_separated_by_their_derivatives(seed: int) -> None:
    # Two channels that step up and down together, at random places.
    steps = torch.rand(6, 1, 600, generator=seeded(seed)) < 0.05
    signals = torch.where(steps, torch.randn(6, 2, 600, generator=seeded(seed + 9)), 0).cumsum(2)
    found = unmix(*planted(signals), image_shape=(2, 600))
    pixels = unmix(*planted(signals), image_shape=(2, 600), objective=PIXELS)
    assert resemblance(found.sources, signals).min() > 0.999
    assert resemblance(pixels.sources, signals).min() < 0.9


@pytest.mark.parametrize("seed", range(5))
def test_embeddings_are_separated_by_their_zeros(seed: int) -> None:
    embeddings = torch.relu(torch.randn(10, 1024, generator=seeded(seed)) - 0.5)
    found = unmix(*planted(embeddings))
    assert resemblance(found.sources, embeddings, centred=False).min() > 0.999
    assert decibels(found.sources, embeddings).min() > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_answer_has_the_precision_of_the_gradient(photos: fp.data.ImageSet, dtype: torch.dtype) -> None:
    images = colour(photos, 8, 0)
    weight_grad, bias_grad = (grad.to(dtype) for grad in planted(images))
    found = unmix(weight_grad, bias_grad, image_shape=(3, 32, 32))
    assert found.sources.dtype == found.unmixing.dtype == dtype
    assert decibels(found.sources, images).min() > 30
    torch.testing.assert_close(found.unmixing @ weight_grad, found.sources, rtol=0, atol=1e-3)


def test_without_the_bias_gradient_shapes_come_out_but_not_sizes(photos: fp.data.ImageSet) -> None:
    images = colour(photos, 8, 0)
    weight_grad, _ = planted(images)
    for bias_grad in (None, torch.zeros(32, dtype=torch.float64)):
        found = unmix(weight_grad, bias_grad, image_shape=(3, 32, 32))
        assert not found.scaled
        assert resemblance(found.sources, images).min() > 0.98
        sizes = found.sources.square().mean(1)
        torch.testing.assert_close(sizes, torch.ones_like(sizes))
        assert (found.sources.mean(1) > 0).all()


@pytest.mark.quality
def test_derivatives_serve_fast_ica_no_better_than_ours(photos: fp.data.ImageSet) -> None:
    ours, theirs = [], []
    for seed in range(6):
        images = colour(photos, 10, seed)
        weight_grad, bias_grad = planted(images)
        mixture = reduce_mixture(weight_grad, bias_grad)
        signals = contrasts(mixture.coordinates, (3, 32, 32)).flatten(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = FastICA(whiten="unit-variance", max_iter=500, random_state=0).fit(signals.T.numpy())
        theirs.append(resemblance(torch.from_numpy(reference.components_) @ mixture.coordinates, images))
        ours.append(resemblance(unmix(weight_grad, bias_grad, image_shape=(3, 32, 32)).sources, images))
    # Not in every set: once in 24 two of ours were blended, which costs a mean over six sets more than all they gained.
    better = torch.stack(ours).mean(1) > torch.stack(theirs).mean(1)
    assert better.sum() >= 4
    assert torch.stack(ours).min(1).values.median() > torch.stack(theirs).min(1).values.median()


class TestNothingElseMatters:
    """What leaves the set of inputs as it is must leave the set of answers as it is."""

    @pytest.fixture
    def images(self, photos: fp.data.ImageSet) -> Tensor:
        return colour(photos, 8, 2)

    @pytest.fixture
    def plain(self, images: Tensor) -> Tensor:
        return unmix(*planted(images), image_shape=(3, 32, 32)).sources

    def test_the_order_of_the_samples(self, images: Tensor, plain: Tensor) -> None:
        weight_grad, bias_grad = planted(images)
        signals = torch.linalg.lstsq(images.flatten(1).T, weight_grad.T).solution.T
        order = torch.randperm(8, generator=seeded(1))
        other = unmix(signals[:, order] @ images[order].flatten(1), bias_grad, image_shape=(3, 32, 32)).sources
        assert decibels(other, plain).min() > 60

    @pytest.mark.parametrize("factor", [1e-9, 0.3, 1e9])
    def test_the_size_of_the_gradient(self, images: Tensor, plain: Tensor, factor: float) -> None:
        weight_grad, bias_grad = planted(images)
        other = unmix(factor * weight_grad, factor * bias_grad, image_shape=(3, 32, 32)).sources
        assert decibels(other, plain).min() > 60

    @pytest.mark.quality
    def test_signs_and_invertible_remixing_of_the_rows(self, images: Tensor, plain: Tensor) -> None:
        weight_grad, bias_grad = planted(images)
        signs = torch.randint(0, 2, (32, 1), generator=seeded(3)) * 2 - 1
        remixing = torch.randn(32, 32, generator=seeded(4), dtype=torch.float64)
        for turn in (torch.diag(signs.flatten().double()), remixing, remixing[:20]):
            other = unmix(turn @ weight_grad, turn @ bias_grad, image_shape=(3, 32, 32)).sources
            assert decibels(other, plain).min() > 30  # 38 to 76 where rows are mixed: the ascent ends at a tolerance

    def test_another_run(self, images: Tensor, plain: Tensor) -> None:
        assert torch.equal(unmix(*planted(images), image_shape=(3, 32, 32)).sources, plain)


class TestHowManySources:
    def noisy(self, photos: fp.data.ImageSet, relative: float) -> tuple[Tensor, Tensor]:
        weight_grad, bias_grad = planted(colour(photos, 8, 0))
        noise = torch.randn(32, 3073, generator=seeded(7), dtype=torch.float64) * relative * weight_grad.std()
        return weight_grad + noise[:, :-1], bias_grad + noise[:, -1]

    def found(self, gradients: tuple[Tensor, Tensor], components: int | None = None) -> Unmixing:
        return unmix(*gradients, components=components, image_shape=(3, 32, 32))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("count", [1, 2, 7, 20])
    def test_the_rank_tells(self, photos: fp.data.ImageSet, dtype: torch.dtype, count: int) -> None:
        weight_grad, bias_grad = planted(colour(photos, count, 0))
        found = self.found((weight_grad.to(dtype), bias_grad.to(dtype)))
        assert (len(found.sources), found.rank, found.status) == (count, count, UnmixStatus.SEPARATED)

    @pytest.mark.parametrize("relative", [1e-6, 1e-4, 1e-3])
    def test_also_under_a_little_noise(self, photos: fp.data.ImageSet, relative: float) -> None:
        found = self.found(self.noisy(photos, relative))
        assert (found.rank, found.status) == (8, UnmixStatus.SEPARATED)
        assert decibels(found.sources, colour(photos, 8, 0)).min() > 17

    def test_much_noise_is_noticed(self, photos: fp.data.ImageSet) -> None:
        found = self.found(self.noisy(photos, 0.3))
        assert found.status == UnmixStatus.NOISY
        assert found.mixture.noise == pytest.approx(0.3 * float(planted(colour(photos, 8, 0))[0].std()), rel=0.2)

    def test_the_rounding_of_a_model_sent_in_single_precision(self, photos: fp.data.ImageSet) -> None:
        model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=96, classes=10, seed=0)
        scenario = fp.Scenario(
            model=model, clients=[photos.draw(12, seeded(0))], protocol=fp.FedAvg(lr=0.01, epochs=2, batch_size=4)
        )
        seen = fp.simulate(scenario, fp.threats.honest_but_curious, device="cpu")[0].rounds[0]
        assert reduce_mixture(seen.update["1.weight"], seen.update["1.bias"]).rank == 12

    def test_more_than_there_are_and_fewer(self, photos: fp.data.ImageSet) -> None:
        gradients = planted(colour(photos, 6, 0))
        more, fewer = self.found(gradients, components=9), self.found(gradients, components=4)
        assert (len(more.sources), more.status) == (6, UnmixStatus.FEWER)
        assert (len(fewer.sources), fewer.rank) == (4, 6)

    @pytest.mark.parametrize("units", [8, 5])
    def test_no_more_than_the_layer_has_units(self, photos: fp.data.ImageSet, units: int) -> None:
        weight_grad, bias_grad = planted(colour(photos, 8, 0), units)
        # Sizes that fall evenly: a few units whose rows are equally strong would be taken for one source and noise.
        left, values, right = torch.linalg.svd(torch.cat([weight_grad, bias_grad[:, None]], 1), full_matrices=False)
        mixed = left @ torch.diag(0.4 ** torch.arange(units, dtype=values.dtype)) @ right
        found = self.found((mixed[:, :-1], mixed[:, -1]))
        assert (len(found.sources), found.status) == (units, UnmixStatus.FULL)

    @pytest.mark.parametrize("wrong", [0.0, torch.nan, torch.inf])
    def test_nothing_comes_of_nothing(self, wrong: float) -> None:
        found = unmix(torch.full((6, 12), wrong), torch.full((6,), wrong), image_shape=(3, 2, 2))
        assert found.status == UnmixStatus.EMPTY
        assert found.sources.shape == (0, 12)
        assert found.unmixing.shape == (0, 6)

    @pytest.mark.parametrize(
        ("singular", "dtype", "expected"),
        [
            ([], torch.float64, (0, True)),
            ([0.0, 0.0, 0.0], torch.float64, (0, True)),
            ([5.0, 3.0, 2.0, 1e-11, 1e-12], torch.float64, (3, True)),
            ([5.0, 3.0, 2.0, 1e-6, 5e-7], torch.float32, (3, True)),
            # Rounding error of a float32 gradient is no source.
            ([5.0, 3.0, 2e-3, 2e-7, 1e-7], torch.float32, (3, True)),
            ([5.0, 3.0, 2.0, 1e-3, 9e-4, 8e-4], torch.float64, (3, True)),
            # Neither a step nor an even floor: everything may be a source.
            ([0.6**power for power in range(20)], torch.float64, (20, False)),
            # Two steps: what stands out is the clearest one.
            ([5.0, 4.0, 0.1, 0.09, 1e-6, 9e-7], torch.float64, (4, True)),
        ],
    )
    def test_the_rank_of_given_singular_values(
        self, singular: list[float], dtype: torch.dtype, expected: tuple[int, bool]
    ) -> None:
        shape = torch.Size([max(1, len(singular)), 100])
        assert effective_rank(torch.tensor(singular, dtype=torch.float64), shape, dtype) == expected

    def test_white_noise_ends_where_gavish_and_donoho_say(self) -> None:
        noise = torch.randn(60, 400, generator=seeded(0), dtype=torch.float64)
        for strength, expected in ((100.0, 3), (45.0, 3)):
            left = torch.linalg.qr(torch.randn(60, 3, generator=seeded(1), dtype=torch.float64)).Q
            right = torch.linalg.qr(torch.randn(400, 3, generator=seeded(2), dtype=torch.float64)).Q
            mixed = noise + strength * left @ right.T
            rank, clear = effective_rank(torch.linalg.svdvals(mixed), mixed.shape, mixed.dtype)
            assert (rank, clear) == (expected, False)

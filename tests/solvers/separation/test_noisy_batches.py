"""Gradients that noise, pruning or fewer bits have altered: seldom worse than separation, and counted all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedprism as fp
from dense_clients import FEATURES, SHAPE, Client, altered, drawn, nearest
from fedprism.defenses import Defense
from fedprism.solvers import exact_batch, reduce_mixture
from fedprism.solvers.separation.mixture import rounding_errors, sent_as

BOX = torch.zeros(1, FEATURES), torch.ones(1, FEATURES)
ALTERATIONS = [
    *(fp.defenses.GaussianNoise(strength) for strength in (0.03, 0.1, 0.3, 1.0)),
    *(fp.defenses.Prune(ratio) for ratio in (0.5, 0.9, 0.97, 0.99)),
    *(fp.defenses.Quantize(bits) for bits in (4, 2, 1)),
    fp.chain(fp.defenses.GaussianNoise(0.1), fp.defenses.Prune(0.9)),
]


@pytest.fixture(scope="module")
def crops() -> fp.data.ImageSet:
    return fp.data.load("photos", size=12)


def gain(holder: Client, gradient: tuple[Tensor, Tensor]) -> float:
    """Decibels that the exact stage adds to what was separated."""
    weight_grad, bias_grad = (part.float() for part in gradient)
    answer = exact_batch(
        weight_grad, bias_grad, holder.downstream, components=len(holder.inputs), image_shape=SHAPE, box=BOX
    )
    ours, separated = (nearest(part.clamp(0, 1), holder.inputs) for part in (answer.inputs, answer.separation.sources))
    return float((ours - separated).mean())


def gains(crops: fp.data.ImageSet, alteration: Defense) -> list[float]:
    holders = [drawn(crops, 6 + 2 * (seed % 4), 64, seed) for seed in range(8)]
    return [gain(holder, altered(holder.gradient(), alteration, seed)) for seed, holder in enumerate(holders)]


@pytest.mark.quality
@pytest.mark.parametrize("alteration", ALTERATIONS, ids=repr)
def test_no_worse_than_separation_on_average_and_never_by_much(crops: fp.data.ImageSet, alteration: Defense) -> None:
    """An answer that explains an altered gradient better is not always nearer to the images."""
    answer = gains(crops, alteration)
    assert sum(answer) / len(answer) > -0.5
    assert min(answer) > -4


@pytest.mark.quality
def test_better_where_the_noise_allows(crops: fp.data.ImageSet) -> None:
    answer = gains(crops, fp.defenses.GaussianNoise(0.01))
    assert sum(answer) / len(answer) > 5


class TestShortFloats:
    @pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
    def test_are_recognised_by_their_entries(self, short: torch.dtype) -> None:
        entries = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
        assert sent_as(entries) is None
        assert sent_as(entries.to(short).float()) is short
        assert sent_as(entries.to(short)) is short

    @pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
    def test_leave_errors_of_the_size_that_is_expected(self, short: torch.dtype) -> None:
        sizes = torch.logspace(-9, 2, 12, dtype=torch.float64).unsqueeze(1)  # the smallest are not normal in float16
        entries = sizes * torch.randn(12, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rounded = entries.to(short).double()
        measured = (rounded - entries).square().mean(1).sqrt()
        expected = rounding_errors(rounded, None, short).squeeze(1)
        nonzero = rounded.ne(0).all(1)
        torch.testing.assert_close(expected[nonzero], measured[nonzero], rtol=0.1, atol=0)

    @pytest.mark.parametrize("short", ["bfloat16", "float16"])
    @pytest.mark.parametrize("count", [8, 32])
    def test_batches_are_counted(self, short: str, count: int) -> None:
        photos = fp.data.load("photos", size=32)
        model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=128, classes=10, seed=0)
        for seed in range(3):
            scenario = fp.Scenario(
                model=model,
                clients=[photos.draw(count, torch.Generator().manual_seed(seed))],
                defense=fp.defenses.Cast(short),
            )
            update = fp.simulate(scenario, fp.threats.eavesdropper, device="cpu")[0].rounds[0].update
            assert reduce_mixture(update["1.weight"], update["1.bias"]).rank == count

    def test_a_unit_that_only_a_black_image_reaches(self) -> None:
        rng = torch.Generator().manual_seed(0)
        columns, inputs = torch.randn(40, 5, generator=rng), torch.randn(5, 300, generator=rng)
        inputs[4], columns[30:, :4] = 0, 0  # those units have a bias gradient and no other
        weight_grad, bias_grad = ((columns @ part).bfloat16().float() for part in (inputs, torch.ones(5)))
        assert reduce_mixture(weight_grad, bias_grad).rank == 5

    def test_a_quiet_sample_is_not_taken_for_rounding(self) -> None:
        # Its directions are a thousand times weaker, but in units where nothing else is: no level would find it.
        rng = torch.Generator().manual_seed(0)
        loud, quiet = torch.randn(40, 6, generator=rng), torch.randn(20, 1, generator=rng)
        columns = torch.block_diag(loud, 1e-3 * quiet)
        gradient = (columns @ torch.randn(7, 300, generator=rng)).bfloat16().float()
        assert reduce_mixture(gradient, None).rank == 7

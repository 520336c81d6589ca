"""Priors of separated sources, the search for their likelihood's maximum, and what a known range adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.solvers import Downstream, ExactStatus, StudentICA, exact_batch, reduce_mixture, unmix
from fedprism.solvers.separation.ica import scale_rows
from fedprism.solvers.separation.likelihood import Prior, StudentT, TwoHumps, maximise_likelihood
from planted_mixtures import decibels, planted, resemblance, seeded

PRIORS: list[tuple[Prior, tuple[int, ...]]] = [
    (StudentT(tail=0.03), (3, 6, 5, 7)),
    (StudentT(tail=2.0), (3, 1, 40)),
    (StudentT(tail=0.3, neighbours=True), (3, 6, 5, 7)),
    (TwoHumps(), (3, 1, 40)),
]


@pytest.mark.parametrize(("prior", "shape"), PRIORS)
class TestPriors:
    def test_weights_are_the_slope_of_the_energy(self, prior: Prior, shape: tuple[int, ...]) -> None:
        sources = torch.randn(shape, generator=seeded(0), dtype=torch.float64).requires_grad_()
        power = sources.square().sum(1)
        (slope,) = torch.autograd.grad(prior.energy(power, shape[1]).sum(), sources)
        torch.testing.assert_close(prior.weights(power, shape[1]).unsqueeze(1) * sources, slope)

    def test_curvature_is_that_of_the_energy_or_more(self, prior: Prior, shape: tuple[int, ...]) -> None:
        sources = torch.randn(shape, generator=seeded(0), dtype=torch.float64)

        def energy(values: Tensor) -> Tensor:
            return prior.energy(values.view(shape).square().sum(1), shape[1]).sum()

        exact = torch.autograd.functional.hessian(energy, sources.flatten()).diagonal().view(shape).sum(1)
        curvature = prior.curvature(sources.square().sum(1), shape[1])
        assert (curvature >= exact - 1e-9).all()
        assert (curvature >= 0).all()

    @pytest.mark.parametrize("free", [True, False])
    def test_the_search_ends_where_nothing_is_gained(self, prior: Prior, shape: tuple[int, ...], free: bool) -> None:
        # Many places, so that there is one maximum; heavy tails for the sparse priors, none for the other.
        grid = (30, 40) if len(shape) == 4 else (1200,)
        values = torch.rand(4, shape[1], *grid, generator=seeded(1), dtype=torch.float64) - 0.5
        values = values if isinstance(prior, TwoHumps) else torch.tan(3 * values)
        values = values / values.flatten(1).std(1).view(-1, *[1] * (values.dim() - 1))
        mixing = torch.randn(4, 4, generator=seeded(2), dtype=torch.float64)
        white = (torch.linalg.qr(mixing).Q @ values.flatten(1)).view_as(values)
        first = maximise_likelihood(white, torch.eye(4, dtype=torch.float64), prior, 200, free=free)
        sources = first @ white.flatten(1)
        assert resemblance(sources, values).min() > 0.99
        again = maximise_likelihood(white, first, prior, 5, free=free)
        torch.testing.assert_close(again, first, rtol=0.02, atol=0.02 * float(first.abs().max()))
        if not free:
            torch.testing.assert_close(first.norm(dim=1), torch.ones(4, dtype=torch.float64))


def table(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    """Rows of a table whose columns are standardised over many more rows."""
    values = torch.rand(2000, columns, generator=seeded(seed))
    if kind == "binary":
        values = (values < 0.2 + 0.6 * torch.rand(columns, generator=seeded(seed + 1))).float()
    if kind == "exponential" or kind == "mixed":
        chosen = torch.arange(columns) % (1 if kind == "exponential" else 2) == 0
        values = torch.where(chosen, -values.clamp(min=1e-6).log(), values)
    return ((values - values.mean(0)) / values.std(0))[:rows]


def downstream_and_gradients(inputs: Tensor, units: int, seed: int) -> tuple[Downstream, Tensor, Tensor, Tensor]:
    """A network of two dense layers, the gradients of the first one, and labels."""
    torch.manual_seed(seed)
    first, last = nn.Linear(inputs.shape[1], units), nn.Linear(units, 5)
    labels = torch.randint(0, 5, (len(inputs),))
    loss = cross_entropy(last(torch.relu(first(inputs))), labels)
    weight_grad, bias_grad = torch.autograd.grad(loss, [first.weight, first.bias])
    weight, bias = last.weight.detach().double(), last.bias.detach().double()
    downstream = Downstream(
        network=lambda values: torch.relu(values) @ weight.T + bias,
        loss=cross_entropy,
        weight=first.weight.detach(),
        bias=first.bias.detach(),
    )
    return downstream, weight_grad, bias_grad, labels


class TestTables:
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("kind", ["uniform", "binary", "exponential", "mixed"])
    def test_rows_come_out_exactly(self, kind: str, seed: int) -> None:
        rows = table(kind, 12, 60, seed)
        downstream, *grads, labels = downstream_and_gradients(rows, 96, seed)
        answer = exact_batch(*grads, downstream, components=12)
        assert answer.status is ExactStatus.EXACT
        assert decibels(answer.inputs, rows).min() > 80
        assert answer.labels is not None
        assert sorted(answer.labels.tolist()) == sorted(labels.tolist())

    @pytest.mark.parametrize(("kind", "least"), [("uniform", 0.97), ("binary", 0.97), ("exponential", 0.9)])
    def test_separation_alone_goes_by_the_kurtosis(self, kind: str, least: float) -> None:
        rows = table(kind, 12, 500, 0)
        weight_grad, bias_grad = planted(rows, 64)
        answer = unmix(weight_grad, bias_grad)
        sparse = unmix(weight_grad, bias_grad, objective=StudentICA(tail=0.03))
        assert resemblance(answer.sources, rows).min() > least
        assert resemblance(sparse.sources, rows).mean() < resemblance(answer.sources, rows).mean() - 0.1


class TestRange:
    def mixture(self, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        inputs = torch.rand(6, 300, generator=seeded(0), dtype=torch.float64).round() - 0.4
        weight_grad, bias_grad = planted(inputs)
        weight_grad = weight_grad + noise * torch.randn(weight_grad.shape, generator=seeded(1), dtype=torch.float64)
        return weight_grad, bias_grad

    def test_a_source_too_large_for_its_range_is_made_smaller(self) -> None:
        weight_grad, bias_grad = self.mixture()
        low, high = torch.tensor(-0.4), torch.tensor(0.6)
        mixture = reduce_mixture(weight_grad, bias_grad / 2)  # every source twice as large
        loose = scale_rows(unmix(weight_grad, bias_grad / 2).rows, mixture) @ mixture.coordinates
        tight = scale_rows(unmix(weight_grad, bias_grad / 2).rows, mixture, (low, high)) @ mixture.coordinates
        assert loose.abs().max() > 1
        outside = ((tight < 1.02 * low) | (tight > 1.02 * high)).double().mean(1)
        assert outside.max() < 0.03
        torch.testing.assert_close(tight / loose, (tight / loose).mean(1, keepdim=True).expand_as(tight))

    @pytest.mark.parametrize("noise", [0.0, 0.05])
    def test_a_source_that_fits_stays_as_it_is(self, noise: float) -> None:
        weight_grad, bias_grad = self.mixture(noise)
        mixture = reduce_mixture(weight_grad, bias_grad, 6)
        rows = torch.linalg.pinv(mixture.basis.T @ torch.randn(32, 6, generator=seeded(0), dtype=torch.float64))
        box = (torch.tensor(-0.4), torch.tensor(0.6))
        assert torch.equal(scale_rows(rows, mixture, box), scale_rows(rows, mixture))

    def test_a_bound_of_zero_says_nothing_about_sizes(self) -> None:
        weight_grad, bias_grad = self.mixture()
        mixture = reduce_mixture(weight_grad, bias_grad)
        rows = unmix(weight_grad, bias_grad).rows
        box = (torch.tensor(0.0), torch.tensor(torch.inf))
        assert torch.equal(scale_rows(rows, mixture, box), scale_rows(rows, mixture))

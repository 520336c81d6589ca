"""The parts of participation recovery against brute force and against their own statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedprism.solvers import IdentifiabilityStatus, disaggregate, identifiable_users
from fedprism.solvers.participation.analytics import Analytics, read_analytics
from fedprism.solvers.participation.evidence import Evidence
from fedprism.solvers.participation.marginals import LONG, marginals
from fedprism.solvers.participation.proofs import distance_of_others
from fedprism.solvers.participation.subspace import SignalSpace, signal_space
from planting import plant, sums_of

CPU = torch.device("cpu")


def space_of(sums: Tensor, rank: int, cohorts: Tensor | None = None) -> SignalSpace:
    return signal_space(sums, expected_rank=rank, cohort_sizes=cohorts, device=CPU, seed=0)


def analytics_of(windows: Tensor, counts: Tensor, tolerance: int = 0) -> Analytics:
    return read_analytics(windows, counts, None, torch.zeros(windows.shape[1], dtype=torch.bool), tolerance)


def all_columns(rounds: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=rounds)))


# --- probabilities in a window ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "tolerance"), [(0, 0), (1, 0), (3, 0), (6, 0), (2, 1), (float("nan"), 0)])
def test_marginals_agree_with_enumeration(count: float, tolerance: int) -> None:
    windows = torch.ones(1, 6, dtype=torch.long)
    known = analytics_of(windows, torch.tensor([[count], [2.0]]), tolerance)
    readings = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    variance = torch.tensor([[0.4], [0.1]], dtype=torch.float64)
    columns = all_columns(6).double()
    ones = columns.sum(1)
    for user in range(2):
        weight = torch.exp(-(readings[user] - columns).square().sum(1) / (2 * variance[user]))
        allowed = (ones >= known.least[user, 0]) & (ones <= known.most[user, 0])
        if known.least[user, 0] != known.most[user, 0]:
            rate = known.rate[user]
            weight = weight * (rate / (1 - rate)) ** ones
        weight = weight * allowed
        expected = (weight[:, None] * columns).sum(0) / weight.sum()
        assert torch.allclose(marginals(readings, variance, known)[user], expected, atol=1e-9)


def test_long_windows_come_close_to_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = LONG
    windows = torch.ones(1, rounds, dtype=torch.long)
    known = analytics_of(windows, torch.tensor([[9.0], [40.0]]))
    readings = torch.rand(2, rounds, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    variance = torch.full((2, 1), 0.3, dtype=torch.float64)
    exact = marginals(readings, variance, known)
    monkeypatch.setattr("fedprism.solvers.participation.marginals.LONG", 1)
    limit = marginals(readings, variance, known)
    assert torch.allclose(limit.sum(1), torch.tensor([9.0, 40.0], dtype=torch.float64), atol=1e-3)
    assert float((limit - exact).abs().max()) < 0.01


def test_sharp_evidence_does_not_overflow() -> None:
    windows = torch.ones(1, 50, dtype=torch.long)
    known = analytics_of(windows, torch.tensor([[25.0]]))
    readings = torch.cat([torch.ones(1, 25), torch.zeros(1, 25)], 1).double()
    found = marginals(readings, torch.full((1, 1), 1e-8, dtype=torch.float64), known)
    assert torch.allclose(found, readings, atol=1e-6)


# --- the space of the sums -------------------------------------------------------------------------------------------


@pytest.mark.quality
@pytest.mark.parametrize("cohorts", [False, True])
@pytest.mark.parametrize(("noise", "parameters"), [(1e-4, 300), (0.3, 2000), (1.0, 4000)])
def test_noise_leaves_as_much_as_predicted(noise: float, parameters: int, cohorts: bool) -> None:
    planted = plant(60, 140, noise=noise, parameters=parameters)
    space = space_of(planted.sums, 60, planted.matrix.sum(1) if cohorts else None)
    columns = planted.matrix.T.double()
    seen = (columns @ space.sensing).square().mean(1)
    predicted = (columns @ space.spread).square().sum(1)
    assert 0.7 < float((seen / predicted).median()) < 1.5
    assert float((seen / predicted > 2).double().mean()) < 0.1  # up to two of sixty users, of whom one reached 3.7
    assert bool((Evidence(space).residual(planted.matrix.T) <= Evidence(space).allowed(planted.matrix.T)).all())


def test_quiet_rounds_count_more_than_noisy_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    planted = plant(30, 90, parameters=3000)
    loud = torch.where(torch.arange(90) % 2 == 0, 0.05, 2.0)[:, None]
    sums = planted.sums + loud * torch.randn(planted.sums.shape, generator=rng)
    sensing = space_of(sums, 30).sensing.norm(dim=1)
    assert float(sensing[0::2].median()) > 5 * float(sensing[1::2].median())


# --- proofs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_what_is_proved_about_other_columns_is_true(seed: int) -> None:
    planted = plant(5, 14, rate=0.3, window=5, seed=seed)
    space = space_of(planted.sums, 5)
    known = analytics_of(planted.windows, planted.counts)
    bound = distance_of_others(space, known, planted.matrix.T)
    everything = all_columns(14)
    for user in range(5):
        counted = (everything.long() @ planted.windows.T == planted.counts[user]).all(1)
        others = everything[counted & (everything != planted.matrix[:, user]).any(1)]
        difference = (others.double() - planted.matrix[:, user].double()) @ space.sensing
        nearest = float(difference.norm(dim=1).min()) if len(others) else float("inf")
        assert float(bound[user]) <= nearest * (1 + 1e-6)


def test_proofs_exist_where_columns_are_unique() -> None:
    planted = plant(60, 130)
    bound = distance_of_others(
        space_of(planted.sums, 60), analytics_of(planted.windows, planted.counts), planted.matrix.T
    )
    assert float((bound > 1e-4).float().mean()) > 0.9


@pytest.mark.parametrize("tolerance", [0, 1])
def test_the_best_exchange_is_the_best(tolerance: int) -> None:
    planted = plant(4, 12, rate=0.4, window=4, seed=2)
    space = space_of(planted.sums, 4)
    known = analytics_of(planted.windows, planted.counts, tolerance)
    evidence = Evidence(space)
    start = torch.rand(4, 12, generator=torch.Generator().manual_seed(3))
    columns = known.nearest_columns(start)
    exchange = evidence.best_exchange(columns, known)
    everything = all_columns(12)
    for user in range(4):
        sums = everything.long() @ planted.windows.T
        allowed = ((sums >= known.least[user]) & (sums <= known.most[user])).all(1)
        allowed &= ((known.fixed[user] < 0) | (known.fixed[user] == everything)).all(1)
        differing = everything != columns[user]
        in_tile = torch.stack([differing[:, known.tiles[t]].sum(1) for t in range(len(known.tiles))])
        one = (differing.sum(1) == 1) | ((differing.sum(1) == 2) & (in_tile.max(0).values == 2))
        balanced = (differing.sum(1) == 1) | (everything.sum(1) == columns[user].sum())
        near = everything[allowed & one & balanced]
        change = evidence.residual(near).square() - evidence.residual(columns[user : user + 1]).square()
        best = float(change.min()) if len(near) else float("inf")
        assert float(exchange.change[user]) == pytest.approx(best, abs=1e-9)


# --- every user's update ---------------------------------------------------------------------------------------------


def test_updates_come_back() -> None:
    planted = plant(40, 100)
    found = disaggregate(planted.sums, planted.matrix)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), planted.updates, atol=1e-5)
    blocks = (block for block in planted.sums.split(9, dim=1))
    assert torch.allclose(disaggregate(blocks, planted.matrix.numpy()), found, atol=1e-6)


def test_means_are_taken_apart_with_their_coefficients() -> None:
    planted = plant(40, 100)
    coefficients = planted.matrix / planted.matrix.sum(1, keepdim=True).clamp(min=1)
    found = disaggregate(coefficients.double() @ planted.updates, coefficients)
    assert torch.allclose(found, planted.updates, atol=1e-9)


def test_users_who_cannot_be_told_apart_are_named() -> None:
    matrix = plant(20, 60).matrix.clone()
    matrix[:, 1] = matrix[:, 0]
    matrix[:, 5] = False
    planted = sums_of(matrix)
    told = identifiable_users(matrix, aggregates=planted.sums)
    assert (~told.users).nonzero()[:, 0].tolist() == [0, 1, 5]
    assert told.status is IdentifiabilityStatus.SOME
    assert torch.isinf(told.error[[0, 1, 5]]).all()
    found = disaggregate(planted.sums, matrix).double()
    assert torch.allclose(found[told.users], planted.updates[told.users], atol=1e-5)
    assert torch.allclose(found[0] + found[1], planted.updates[0] + planted.updates[1], atol=1e-5)


def test_error_bars_are_as_large_as_errors() -> None:
    matrix = plant(30, 90).matrix
    rng = torch.Generator().manual_seed(1)
    clean = sums_of(matrix, parameters=3000, dtype=torch.float64)
    sums = clean.sums + 0.2 * torch.randn(clean.sums.shape, generator=rng, dtype=torch.float64)
    told = identifiable_users(matrix, aggregates=sums)
    seen = (disaggregate(sums, matrix) - clean.updates).square().mean(1).sqrt()
    assert torch.allclose(seen / told.error, torch.ones(30, dtype=torch.float64), atol=0.1)
    assert told.status is IdentifiabilityStatus.ALL


def test_a_nearly_singular_matrix_is_said_to_be_one() -> None:
    matrix = plant(20, 60).matrix.double()
    matrix[:, 1] = matrix[:, 0]
    matrix[3, 1] += 1e-3
    assert identifiable_users(matrix).status is IdentifiabilityStatus.ILL_CONDITIONED

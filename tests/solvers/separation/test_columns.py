"""Columns of the exact stage: by the units they leave silent, and by the signals that they equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedprism.solvers.separation.columns import _dual, _hangs_on_one, _is_only, _primal, signal_columns, silent_columns


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


class TestColumns:
    @settings(max_examples=25, deadline=None)
    @given(
        size=st.integers(2, 8),
        spare=st.integers(3, 16),
        corrections=st.integers(0, 6),
        seed=st.integers(0, 10_000),
    )
    def test_both_ways_to_solve_give_one_answer(self, size: int, spare: int, corrections: int, seed: int) -> None:
        units, samples = size + spare, 3
        both = torch.linalg.qr(normal(units, units, seed=seed)).Q
        basis, complement = both[:, :size], both[:, size:]
        signals = normal(samples, size, seed=seed + 1) @ basis.T
        signals[:, :2] += normal(samples, 2, seed=seed + 2)  # two mistakes
        directions = normal(samples, units, corrections, seed=seed + 3)
        weights = torch.rand(samples, units, generator=seeded(seed + 4), dtype=torch.float64).clamp(min=0.1)
        answers = [solve(basis, complement, weights, signals, directions) for solve in (_primal, _dual)]
        for first, second in zip(*answers, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)

    def planted(self, units: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """A mixing (h, n) with silent units, an orthonormal basis of it, and which units are silent (n, h)."""
        silent = torch.rand(size, units, generator=seeded(seed)) < 0.5
        mixing = torch.where(silent, 0, normal(size, units, seed=seed)).T
        return mixing, torch.linalg.qr(mixing).Q, silent

    @pytest.mark.parametrize("mistakes", [0, 2, 4])
    def test_wrong_beliefs_about_silence_are_outvoted(self, mistakes: int) -> None:
        mixing, basis, silent = self.planted(80, 10, seed=0)
        believed = silent.clone()
        for row in believed:  # units that are not silent and are taken for it
            loud = (~row).nonzero().flatten()
            row[loud[torch.randperm(len(loud), generator=seeded(1))[:mistakes]]] = True
        truth = (mixing.T @ basis) / mixing.T.norm(dim=1, keepdim=True)
        start = truth + 0.05 * normal(10, 10, seed=2)
        answer = silent_columns(basis, believed.double(), start / start.norm(dim=1, keepdim=True))
        assert cosine_similarity(answer.columns, truth).min() > 1 - 1e-6
        assert answer.residuals.max() < 1e-3

    def test_a_column_that_silence_does_not_determine_is_not_claimed(self) -> None:
        # The second sample is silent wherever the first one is: any blend of both is silent there, too.
        mixing, _, silent = self.planted(80, 10, seed=0)
        silent[1] |= silent[0]
        mixing[silent[1], 1] = 0
        basis = torch.linalg.qr(mixing).Q
        truth = (mixing.T @ basis) / mixing.T.norm(dim=1, keepdim=True)
        start = truth[:1] + 0.2 * truth[1:2]
        answer = silent_columns(basis, silent[:1].double(), start / start.norm())
        assert answer.residuals.item() == torch.inf

    def test_units_that_are_silent_for_everyone_are_no_evidence(self) -> None:
        mixing, _, silent = self.planted(60, 10, seed=0)
        dead = torch.arange(60) >= 30
        # Of the others every sample leaves 15 silent: not enough for 10 unknowns, however many more the dead ones are.
        silent = torch.stack([torch.randperm(30, generator=seeded(row)) < 15 for row in range(10)])
        silent = torch.cat([silent, torch.ones(10, 30, dtype=torch.bool)], dim=1)
        mixing = torch.where(silent, 0, normal(10, 60, seed=1)).T
        assert not mixing[dead].any()
        basis = torch.linalg.qr(mixing).Q
        answer = silent_columns(basis, silent.double(), torch.eye(10, dtype=torch.float64))
        assert answer.residuals.isinf().all()

    def test_a_blend_that_one_unit_decides_on_is_told_from_a_column(self) -> None:
        # Any two columns have a blend that vanishes where both do and at one unit more, which then pins it down.
        mixing, _, silent = self.planted(120, 10, seed=0)
        silent[1], mixing[silent[0], 1] = silent[1] | silent[0], 0
        basis = torch.linalg.qr(mixing).Q
        loud = mixing[:, 1].abs().argmax()
        blend = mixing[:, 0] - mixing[loud, 0] / mixing[loud, 1] * mixing[:, 1]
        columns = torch.stack([mixing[:, 2], blend]) @ basis
        columns = columns / columns.norm(dim=1, keepdim=True)
        pinned = silent[0] & silent[1]
        pinned[loud] = True
        fitting = torch.stack([silent[2], pinned])
        assert _is_only(basis, fitting, columns).tolist() == [True, True]
        assert _hangs_on_one(basis, fitting, columns).tolist() == [False, True]

    def test_signals_with_mistakes_and_corrections(self) -> None:
        mixing, basis, silent = self.planted(80, 10, seed=3)
        complement = torch.linalg.qr(basis, mode="complete").Q[:, 10:]
        directions = torch.where(silent.unsqueeze(2), 0, normal(10, 80, 3, seed=4))
        signals = mixing.T - (directions @ (0.1 * normal(10, 3, 1, seed=5))).squeeze(2)
        signals[:, :3] += 1.0
        answer = signal_columns(basis, complement, torch.ones(10, 80, dtype=torch.float64), signals, directions)
        truth = (mixing.T @ basis) / mixing.T.norm(dim=1, keepdim=True)
        assert cosine_similarity(answer.columns, truth).min() > 1 - 1e-6
        assert answer.residuals.max() < 1e-3

    def test_noise_is_not_taken_for_a_column(self) -> None:
        _, basis, _ = self.planted(80, 10, seed=3)
        complement = torch.linalg.qr(basis, mode="complete").Q[:, 10:]
        no_directions = torch.zeros(10, 80, 0, dtype=torch.float64)
        ones = torch.ones(10, 80, dtype=torch.float64)
        answer = signal_columns(basis, complement, ones, normal(10, 80, seed=6), no_directions)
        assert answer.residuals.min() > 0.1

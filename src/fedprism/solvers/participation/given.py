"""What a caller gives beside the sums, as tensors on one device, checked for what needs no look at the sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Given(NamedTuple):
    """`windows` and `counts` are both there or both None."""

    windows: Tensor | None
    counts: Tensor | None
    known: Tensor | None
    cohort_sizes: Tensor | None

    def over(self, rounds: int, users: int) -> Given:
        """The same, with no windows in place of None."""
        if self.windows is not None:
            return self
        count = users if self.known is None or self.known.dim() != 2 else self.known.shape[1]
        nothing = torch.zeros(0, dtype=torch.float64, device=self._device)
        given = self._replace(windows=nothing.reshape(0, rounds), counts=nothing.reshape(count, 0))
        if self.cohort_sizes is None or len(self.cohort_sizes) != rounds:
            return given
        return given._replace(known=_with_empty_rounds(self.known, self.cohort_sizes, (rounds, count)))

    @property
    def _device(self) -> torch.device:
        return next(
            (value.device for value in (self.known, self.cohort_sizes) if value is not None), torch.device("cpu")
        )


def read_given(
    windows: Any,
    counts: Any,
    known: Any,
    cohort_sizes: Any,
    *,
    users: int | None,
    count_tolerance: int,
    device: torch.device,
) -> Given:
    """Everything in double precision. Rounds of a cohort of nobody become known: nobody took part."""
    windows, counts, known, cohort_sizes = (
        None if value is None else torch.as_tensor(value).to(device, torch.float64)
        for value in (windows, counts, known, cohort_sizes)
    )
    if (windows is None) != (counts is None):
        raise ValueError(
            f"windows and counts belong together, but only {'windows' if counts is None else 'counts'} are given. "
            "Give both, or leave both out."
        )
    if windows is not None and counts is not None and (windows.dim() != 2 or counts.dim() != 2 or not len(counts)):
        raise ValueError(
            "windows must be a matrix (windows, rounds), and counts a matrix (users, windows) of at least one user, "
            f"but their shapes are {tuple(windows.shape)} and {tuple(counts.shape)}. Give one row per window, and one "
            "row per user."
        )
    if users is not None and users < 1:
        raise ValueError(f"users must be at least 1, not {users}. Leave it out to have it read off the sums.")
    if count_tolerance < 0 or count_tolerance != int(count_tolerance):
        raise ValueError(
            f"count_tolerance must be a whole number of at least 0, not {count_tolerance}. 0 is for exact counts."
        )
    if cohort_sizes is not None:
        _check_cohorts(cohort_sizes, windows.shape[1] if windows is not None else cohort_sizes.numel())
        if windows is not None and counts is not None:
            known = _with_empty_rounds(known, cohort_sizes, (windows.shape[1], len(counts)))
    return Given(windows, counts, known, cohort_sizes)


def _check_cohorts(sizes: Tensor, rounds: int) -> None:
    if sizes.shape != (rounds,):
        raise ValueError(
            f"cohort_sizes must hold one size per round, but it has shape {tuple(sizes.shape)} for {rounds} rounds."
        )
    wrong = ~((sizes >= 0) & (sizes == sizes.round()) & torch.isfinite(sizes))
    if bool(wrong.any()):
        broken = int(wrong.nonzero()[0])
        raise ValueError(
            f"each cohort size must be a whole number of at least 0, not {float(sizes[broken]):g} in round {broken}. "
            "Correct it, or leave them all out."
        )


def _with_empty_rounds(known: Tensor | None, cohort_sizes: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """What is known of participation (rounds, users), with zeros where the cohort is known to be empty."""
    empty = cohort_sizes == 0
    if known is None:
        known = cohort_sizes.new_full(shape, -1)
    if known.shape != shape:
        return known  # what is wrong with it is said where it is read
    present = (known == 1).sum(1)
    if bool((present > cohort_sizes).any()):
        broken = int((present > cohort_sizes).nonzero()[0])
        raise ValueError(
            f"more users are known to have taken part in round {broken} than its cohort holds: "
            f"{int(present[broken])} of {int(cohort_sizes[broken])}. Correct known or cohort_sizes."
        )
    return torch.where(empty[:, None], 0.0, known) if bool(empty.any()) else known

"""Disaggregation that hands on the first few users only, where attacking all of them would take too long."""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.attacks.base import Reduced
from fedprism.attacks.disaggregation import Disaggregation
from fedprism.types import Observation


@dataclass(frozen=True, kw_only=True, repr=False)
class FirstUsers(Disaggregation):
    """Only `users` of them."""

    users: int

    def explained(self, observation: Observation) -> Reduced:
        reduced = super().explained(observation)
        wanted = {f"client-{user}" for user in range(self.users)}
        return reduced._replace(parts=tuple(part for part in reduced.parts if part.subject in wanted))

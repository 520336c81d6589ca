"""Secure-aggregation sums taken apart: who took part when, and what each user sent."""

from fedprism.solvers.participation.answers import Participation, ParticipationStatus, UserStatus
from fedprism.solvers.participation.recovery import recover_participation
from fedprism.solvers.participation.user_updates import (
    Identifiability,
    IdentifiabilityStatus,
    disaggregate,
    identifiable_users,
)

__all__ = [
    "Identifiability",
    "IdentifiabilityStatus",
    "Participation",
    "ParticipationStatus",
    "UserStatus",
    "disaggregate",
    "identifiable_users",
    "recover_participation",
]

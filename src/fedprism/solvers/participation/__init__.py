"""Secure-aggregation sums taken apart: who took part when, and what each user sent."""

from fedprism.solvers.participation.answers import Participation as Participation
from fedprism.solvers.participation.answers import ParticipationStatus as ParticipationStatus
from fedprism.solvers.participation.answers import UserStatus as UserStatus
from fedprism.solvers.participation.recovery import recover_participation as recover_participation
from fedprism.solvers.participation.user_updates import Identifiability as Identifiability
from fedprism.solvers.participation.user_updates import IdentifiabilityStatus as IdentifiabilityStatus
from fedprism.solvers.participation.user_updates import disaggregate as disaggregate
from fedprism.solvers.participation.user_updates import identifiable_users as identifiable_users

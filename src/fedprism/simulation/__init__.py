"""Simulated federations: a scenario becomes what an attacker sees and, apart from it, the truth."""

from fedprism.simulation.federation import simulate
from fedprism.simulation.scenario import Scenario

__all__ = ["Scenario", "simulate"]

"""Evaluating Gradient Inversion Attacks and Defenses (Huang et al., 2021)."""

from fedprism_papers.gradattack.cost import PAIRED_ENCODINGS, AttackCost, attack_cost

__all__ = ["PAIRED_ENCODINGS", "AttackCost", "attack_cost"]

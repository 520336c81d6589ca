"""What a defense costs: test accuracy and time a step of a network that is trained under it, and what an attack costs.

def network(seed: int) -> nn.Module:
    return fp.models.build("resnet18", classes=10, seed=seed)

print(utility.measure(network, train, test))
print(utility.measure(network, train, test, fp.defenses.Prune(0.99)))
"""

from __future__ import annotations

from fedprism.utility.cost import PAIRED_ENCODINGS, AttackCost, attack_cost
from fedprism.utility.measuring import CONFIDENCE, Interval, Utility, measure, t_interval, time_factor
from fedprism.utility.privacy import Guarantee, guarantee
from fedprism.utility.training import Augmentation, Factory, Schedule, fit

__all__ = [
    "CONFIDENCE",
    "PAIRED_ENCODINGS",
    "AttackCost",
    "Augmentation",
    "Factory",
    "Guarantee",
    "Interval",
    "Schedule",
    "Utility",
    "attack_cost",
    "fit",
    "guarantee",
    "measure",
    "t_interval",
    "time_factor",
]

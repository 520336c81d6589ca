"""What a defense costs: test accuracy and time per step of a network that is trained under it.

def network(seed: int) -> nn.Module:
    return fp.models.build("resnet18", classes=10, seed=seed)

print(utility.measure(network, train, test))
print(utility.measure(network, train, test, fp.defenses.Prune(0.99)))
"""

from __future__ import annotations

from fedprism.utility.measuring import CONFIDENCE, Interval, Utility, measure, seed_interval, t_interval, time_factor
from fedprism.utility.privacy import Guarantee, guarantee
from fedprism.utility.training import Augmentation, Factory, Schedule, fit

__all__ = [
    "CONFIDENCE",
    "Augmentation",
    "Factory",
    "Guarantee",
    "Interval",
    "Schedule",
    "Utility",
    "fit",
    "guarantee",
    "measure",
    "seed_interval",
    "t_interval",
    "time_factor",
]

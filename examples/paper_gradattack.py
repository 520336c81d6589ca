"""Evaluating gradient inversion (Huang et al. 2021): how much of an attack rests on what the attacker is given?

A client trains a network with batch norm on four photographs. The attacker knows the statistics of that very batch, or
only the running ones, as a real server does; and it knows the labels or has to infer them.
"""

from dataclasses import replace

import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import Labels

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Conv2d(24, 24, 3, stride=2, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(24 * 64, 10),
)
photos = fp.data.load("photos", size=16)
batch = photos.draw(4, seed=0, unique_labels=True)


def quality(attack: fp.attacks.GradientMatching, *granted: str, defense: fp.defenses.Defense | None = None) -> float:
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense or fp.chain())
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious.granting(*granted), seed=0)
    short = replace(attack, iterations=120, starts=fp.attacks.Starts(), labels=Labels.KNOWN)
    return fp.score(fp.run(short, observation, seed=0), truth, metrics=("psnr",)).mean("psnr")


print("the attacker knows                 PSNR of four photographs")
print(f"the batch's own statistics         {quality(fp.attacks.bn_exact(), 'labels', 'batchnorm_exact'):.1f} dB")
print(f"running statistics, as a prior     {quality(fp.attacks.bn_infer(), 'labels', 'batchnorm_running'):.1f} dB")
print(f"running statistics, in their place {quality(fp.attacks.bn_proxy(), 'labels', 'batchnorm_running'):.1f} dB")
for defense in (fp.defenses.Prune(0.99), fp.defenses.MixUp(k=4)):
    value = quality(fp.attacks.bn_exact(), "labels", "batchnorm_exact", defense=defense)
    print(f"the batch's own, under {defense}: {value:.1f} dB")

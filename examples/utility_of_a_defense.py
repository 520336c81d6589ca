"""What a defense costs: train a small network under each, and see its accuracy and its time beside what leaks."""

import torch
from torch import nn

import fedprism as fp
from fedprism import utility

digits = fp.data.load("digits", size=16)
shuffled = digits.batch(torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)))
train, test = shuffled[:1000], shuffled[1000:]


def network(seed: int) -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=digits.classes, seed=seed)


def leak(defense: fp.defenses.Defense) -> float:
    """The mean PSNR of what a server that does not know the defense recovers from a batch of four."""
    scenario = fp.Scenario(model=network(0), clients=[train[:4]], defense=defense)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    return fp.score(fp.run(fp.attacks.cocktail_party(), observation, seed=0), truth).mean("psnr")


for defense in (fp.chain(), fp.defenses.Prune(0.9), fp.defenses.Prune(0.999), fp.defenses.GaussianNoise(0.1)):
    cost = utility.measure(network, train, test, defense, epochs=8, batch_size=50, lr=0.1, seeds=(0, 1, 2))
    print(f"{cost}; an attack comes to {leak(defense):.0f} dB")

"""A model of your own under a chain of defenses, attacked by one who does not know the defenses and one who does.

Each photograph is a scenario of its own. Knowing the defenses helps on some and misleads the search on others, so an
audit runs both attackers: what a defense buys is what the better of them leaves.
"""

import torch
from torch import nn

import fedprism as fp


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * 16 * 16, 32)
        self.output = nn.Linear(32, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(images.flatten(1))))


torch.manual_seed(0)
model = TwoLayers()
photos = fp.data.load("photos", size=16)
defense = fp.chain(fp.defenses.GaussianNoise(1e-4), fp.defenses.Prune(0.7))
naive = fp.threats.honest_but_curious
adaptive = naive.granting("defense")
attack = fp.attacks.GradientMatching(priors=(fp.attacks.TotalVariation(1e-3),), iterations=300)

print(f"{defense!r}\n{'photograph':12} {'naive':>9} {'adaptive':>9}   (PSNR in dB)")
for number in range(4):
    batch = photos.batch([number])
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    reached = []
    for threat in (naive, adaptive):
        observation, truth = fp.simulate(scenario, threat, seed=0)
        scores = fp.score(fp.run(attack, observation, seed=0), truth, metrics=("psnr",))
        reached.append(scores.mean("psnr"))
    print(f"{photos.class_names[number]:12} {reached[0]:9.1f} {reached[1]:9.1f}")

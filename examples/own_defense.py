"""A defense of your own: send only the sign of every entry, scaled to the tensor's mean magnitude."""

from dataclasses import dataclass

import torch

import fedprism as fp
from fedprism.defenses import Context, Defense
from fedprism.types import Update


@dataclass(frozen=True)
class SignOnly(Defense):
    """Replaces each entry by its sign times `scale` times the tensor's mean magnitude."""

    scale: float = 1.0

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: self.scale * tensor.abs().mean() * tensor.sign() for name, tensor in update.items()}

    def deterministic(self, observed: Update | None = None) -> Defense:
        # Nothing here is random, but a sign has no slope to follow: an attacker compares without it.
        return fp.chain()


photos = fp.data.load("photos", size=32)
model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=photos.classes, seed=0)
batch = photos.draw(1, seed=0)
threat = fp.threats.honest_but_curious.granting("defense")
for defense in (fp.chain(), SignOnly(), fp.chain(fp.defenses.Prune(0.5), SignOnly())):
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    observation, truth = fp.simulate(scenario, threat, seed=0)
    scores = fp.score(fp.run(fp.attacks.dense_inversion(), observation, seed=0), truth)
    print(f"{defense!r}: PSNR {scores.mean('psnr'):.1f} dB, SSIM {scores.mean('ssim'):.2f}")

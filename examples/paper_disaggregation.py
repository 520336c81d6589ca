"""Gradient disaggregation (Lam et al. 2021): counts of who took part how often undo secure aggregation.

The server sees sums only. How many rounds does it take to tell 24 users apart, what does an image in a sum look like
before and after, and what does it change when counts are kept for longer windows?
"""

import torch

import fedprism as fp

photos = fp.data.load("photos", size=16)
model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=32, classes=photos.classes, seed=0)
rng = torch.Generator().manual_seed(0)
clients = [photos.draw(1, rng) for _ in range(24)]


def federation(rounds: int, window: int) -> fp.Scenario:
    return fp.Scenario(
        model=model, clients=clients, aggregation="sum", rounds=rounds, participation=0.2, frozen=True, window=window
    )


print("rounds  window  users found  proved to be unique")
for rounds, window in ((24, 8), (48, 8), (96, 8), (96, 24), (96, 96)):
    observation, truth = fp.simulate(federation(rounds, window), fp.threats.secure_aggregation, seed=0)
    split = fp.run(fp.attacks.Disaggregation(time_limit=2.0), observation, seed=0)
    right = (split.diagnostics["participation"] == truth.participation).all(0)
    certified = split.diagnostics["recovery"].certified
    print(f"{rounds:>6}  {window:>6}  {int(right.sum()):>5} of 24  {int(certified.sum()):>9} of 24")

observation, truth = fp.simulate(federation(96, 8), fp.threats.secure_aggregation, seed=0)
attack = fp.then(fp.attacks.Disaggregation(), fp.attacks.dense_inversion())
images = fp.run(attack, observation, seed=0)
print(f"\nimages after disaggregation: {fp.score(images, truth, metrics=('psnr',)).mean('psnr'):.0f} dB on average")

"""Mixing gradients (Eloul et al. 2022): does the loss, or the labels of a batch, hide single images?

Rows of a dense layer's gradient divided by its bias gradient give images away under cross-entropy. The paper mixes them
by a squared error and by batches of one class. Which of these stops the division, and which stops separation?
"""

import torch

import fedprism as fp

photos = fp.data.load("photos", size=32, crops=12)
# 64 outputs: separation needs at least as many as the batch has images.
model = fp.models.build("dense", input_shape=(3, 32, 32), classes=64, seed=0)
rng = torch.Generator().manual_seed(0)
client = photos.draw(96, rng)
distinct = photos.draw(6, rng, unique_labels=True)

cases = {
    "cross-entropy, distinct labels": (distinct, fp.chain()),
    "softmax and squared error, distinct labels": (distinct, fp.defenses.MseLoss(softmax=True)),
    "squared error, distinct labels": (distinct, fp.defenses.MseLoss(softmax=False)),
    "cross-entropy, one class": (client, fp.defenses.EqualLabels(6)),
    "squared error, one class": (client, fp.chain(fp.defenses.EqualLabels(6), fp.defenses.MseLoss(softmax=False))),
}
attacks = {"division": fp.attacks.dense_inversion(), "separation": fp.attacks.cocktail_party()}

print(f"{'images over 25 dB':<44}{'division':>12}{'separation':>12}")
for name, (batch, defense) in cases.items():
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    line = f"{name:<44}"
    for attack in attacks.values():
        found = fp.run(attack, observation, seed=0)
        values = fp.score(found, truth, metrics=("psnr",)).values["psnr"]
        recovered = sum(value is not None and value > 25 for value in values)
        line += f"{recovered:>7} of {len(values)}"
    print(line)

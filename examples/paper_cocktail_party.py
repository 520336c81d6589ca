"""Cocktail party attack (Kariyappa et al. 2023): a dense layer's gradient is a mixture of the batch, and is un-mixed.

The published objective (here 400 of its 25,000 steps), separation alone, and separation with the exact stage, on the
same gradient of sixteen photographs; then what noise on the gradient changes.
"""

import fedprism as fp
from fedprism.attacks import CocktailParty
from fedprism_papers.cocktail_party.published_objective import CocktailObjective

photos = fp.data.load("photos", size=32)
batch = photos.draw(16, seed=0)
model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=256, classes=100, seed=0)


def attacked(attack: CocktailParty, noise: float = 0.0) -> tuple[float, str]:
    """The mean PSNR of what comes back, and the attack's own word on how far it can be trusted."""
    defense = fp.chain(fp.defenses.GaussianNoise(noise)) if noise else fp.chain()
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    found = fp.run(attack, observation, seed=0)
    return fp.score(found, truth, metrics=("psnr",)).mean("psnr"), str(found.status)


published = CocktailParty(objective=CocktailObjective(iterations=400, lr=0.01), exact=False, bias_scale=False)
for name, attack in {
    "the published objective": published,
    "separation alone": CocktailParty(exact=False),
    "with the exact stage": CocktailParty(),
}.items():
    quality, status = attacked(attack)
    print(f"{name}: {quality:.1f} dB ({status})")

print("\nnoise on every entry of the update:")
for noise in (1e-5, 1e-4, 1e-3):
    quality, status = attacked(CocktailParty(), noise)
    print(f"  {noise:g}: {quality:.1f} dB ({status})")

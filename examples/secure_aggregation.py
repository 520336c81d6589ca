"""Takes secure-aggregation sums apart: who took part when, every user's update, and the images behind them."""

import torch

import fedprism as fp

photos = fp.data.load("photos", size=32)
model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=32, classes=photos.classes, seed=0)
rng = torch.Generator().manual_seed(0)
clients = [photos.draw(2, rng, unique_labels=True) for _ in range(24)]

# The server sees sums of updates only. It sends the same model for 120 rounds, and device analytics tell it how often
# each of the 24 users took part in every 10 rounds, but not when.
scenario = fp.Scenario(
    model=model, clients=clients, aggregation="sum", rounds=120, participation=0.2, frozen=True, window=10
)
observation, truth = fp.simulate(scenario, fp.threats.secure_aggregation, seed=0)
sizes = observation.knowledge.cohort_sizes.tolist()
print(f"the server sees {len(sizes)} sums over {min(sizes)} to {max(sizes)} users each")
print("how often client-0 took part in every ten rounds:", observation.knowledge.counts[0].tolist())

disaggregation = fp.attacks.Disaggregation()
split = fp.run(disaggregation, observation, seed=0)
right = split.diagnostics["participation"] == truth.participation
print("\nstatus:", split.status)
print(f"participation recovered: {right.double().mean():.1%}")

# A sum over several users hides their images well; each user's own update does not.
attack = fp.attacks.then(disaggregation, fp.attacks.dense_inversion())
images = fp.run(attack, observation, seed=0)
print("\nfirst image and its owner:", tuple(images.inputs[0].shape), images.owners[0])
print(fp.score(images, truth, metrics=("psnr", "ssim")))

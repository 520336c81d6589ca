"""Attacks a client that trained for several local steps, with and without repeating those steps."""

import dataclasses

import fedprism as fp

digits = fp.data.load("digits", size=16)
model = fp.models.build("lenet", input_shape=(1, 16, 16), classes=10, seed=0)
fp.models.uniform_(model, seed=0)
batch = digits.draw(2, seed=2, unique_labels=True)

# Two epochs on the whole batch. The server knows the settings and sees after minus before.
protocol = fp.FedAvg(lr=0.1, epochs=2)
scenario = fp.Scenario(model=model, clients=[batch], protocol=protocol)
observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
print("the server sees a", observation.rounds[0].kind, "over", observation.knowledge.local_epochs, "epochs")

unrolled = fp.attacks.GradientMatching(
    distance=fp.attacks.squared_error,
    optimizer=fp.attacks.LBFGS(line_search=True),
    lr=1.0,
    iterations=15,
)
for attack in (unrolled, dataclasses.replace(unrolled, unroll=False)):
    reconstruction = fp.run(attack, observation, seed=0)
    print()
    print(attack)
    print("residual:", fp.residual(observation, reconstruction))
    print(fp.score(reconstruction, truth, metrics=("mse", "psnr")))

"""Reads a batch of four photographs off the gradient that a client sent, and scores what came out."""

import fedprism as fp

photos = fp.data.load("photos", size=32)
model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=photos.classes, seed=0)
batch = photos.draw(4, seed=0, unique_labels=True)

scenario = fp.Scenario(model=model, clients=[batch])
observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
reconstruction = fp.run(fp.attacks.dense_inversion(), observation, seed=0)

print("status:", reconstruction.status)
print("knowledge used:", ", ".join(sorted(reconstruction.knowledge_used)))
print("residual:", fp.residual(observation, reconstruction))
print(fp.score(reconstruction, truth))

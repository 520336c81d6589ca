"""Exact photographs out of a trained convolutional network's gradient of two of them: under a minute on one core."""

import torch
from torch import nn

import fedprism as fp

photos = fp.data.load("photos", size=12)

# The network that the server sends out. Its last layers are applied at fewer places than they have channels.
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 32, 3, stride=1, padding=1), nn.ReLU()),
    *(nn.Conv2d(32, 96, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Conv2d(96, 128, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(128 * 9, photos.classes)),
)

# It was trained on other photographs before: random weights would be the easier case.
descent = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(30):
    public = photos.batch(range(64 + 16 * (step % 8), 80 + 16 * (step % 8)))
    descent.zero_grad()
    nn.functional.cross_entropy(model(public.inputs), public.labels).backward()
    descent.step()

# A client sends the gradient of two photographs, of which the server knows how many they are and nothing else.
scenario = fp.Scenario(model=model, clients=[photos.batch([0, 5])])
observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
reconstruction = fp.run(fp.attacks.span_inversion(iterations=400), observation, seed=0)

print("status:", reconstruction.status)
for layer, says in reconstruction.diagnostics["layers"].items():
    print(f"  {layer}: {says}")
print("residual:", fp.residual(observation, reconstruction))
print(fp.score(reconstruction, truth))

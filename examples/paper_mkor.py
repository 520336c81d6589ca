"""MKOR (Wang, Velipasalar, Gursoy 2024): a server's own parameters turn a batch's gradient into images, one a class.

What the same client gives away to a server that sends an honest model and to one that tampers; what repeated labels
change; and what the client sees if it looks before it trains.
"""

import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import Mkor, Smoothest
from fedprism.inspection import inspect

torch.manual_seed(0)
layers = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 48, 3, padding=1), nn.ReLU()]
head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48 * 64, 64), nn.ReLU(), nn.Linear(64, 10)]
model = nn.Sequential(*layers, *head)
photos = fp.data.load("photos", size=32, crops=8)
distinct = photos.draw(6, seed=0, unique_labels=True)
repeated = photos.draw(9, seed=0)


def attacked(server: Mkor, batch: fp.Batch) -> str:
    scenario = fp.Scenario(model=model, clients=[batch])
    observation, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=server)
    found = fp.run(server, observation, seed=0)
    scores = fp.score(found, truth, metrics=("psnr", "ssim"))
    blends = len(found.diagnostics["blended_classes"])
    return f"{scores.mean('psnr'):.1f} dB, SSIM {scores.mean('ssim'):.2f}, {blends} classes blended"


print("distinct labels, middle of the bounds:", attacked(Mkor(), distinct))
print("distinct labels, smoothest image:     ", attacked(Mkor(decoder=Smoothest()), distinct))
print("repeated labels, middle of the bounds:", attacked(Mkor(), repeated))
print("repeated labels, six nodes a class:   ", attacked(Mkor(nodes=6), repeated))

honest = {name: tensor.detach() for name, tensor in model.named_parameters()}
for name, server in {"naive": fp.attacks.mkor(), "inconspicuous": fp.attacks.mkor_inconspicuous()}.items():
    sent, _ = server.tamper(model, honest, torch.Generator().manual_seed(0))
    serious = inspect(sent).serious
    print(f"\n{name} form, seen by the client before training: {len(serious)} serious findings, such as")
    print(f"  {serious[0].tensor}: {serious[0].sentence}")
print(f"\nthe honest model: {len(inspect(honest).serious)} serious findings")

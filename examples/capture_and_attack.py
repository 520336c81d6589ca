"""Writes one observation as a capture twice, with fedprism and by hand, and attacks what is read back."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import fedprism as fp

digits = fp.data.load("digits", size=16)
model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=32, classes=10, seed=0)
batch = digits.draw(2, seed=0, unique_labels=True)
scenario = fp.Scenario(model=model, clients=[batch])
observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)


def write_by_hand(folder: Path, params: dict[str, torch.Tensor], update: dict[str, torch.Tensor]) -> Path:
    """What other software does: two tensor files and a JSON file, without fedprism."""
    folder.mkdir()
    save_file(params, folder / "params-0.safetensors")
    save_file(update, folder / "update-0.safetensors")
    manifest = {
        "format": "fedprism-capture/1",
        "model": {"name": "fc2", "kwargs": {"input_shape": [1, 16, 16], "hidden": 32, "classes": 10}},
        "knowledge": {"input_shape": [1, 16, 16], "bounds": [0.0, 1.0], "batch_size": 2, "loss": "cross_entropy"},
        "rounds": [{"kind": "gradient", "params": "params-0.safetensors", "update": "update-0.safetensors"}],
        "source": "written by hand",
    }
    (folder / "capture.json").write_text(json.dumps(manifest))
    return folder


with tempfile.TemporaryDirectory() as root:
    seen = observation.rounds[0]
    saved = fp.captures.save(observation, Path(root) / "saved")
    by_hand = write_by_hand(Path(root) / "by-hand", dict(seen.params), dict(seen.update))
    for folder in (saved, by_hand):
        captured = fp.captures.load(folder)
        reconstruction = fp.run(fp.attacks.dense_inversion(), captured, seed=0)
        print(f"{captured.source}: {reconstruction.status}")
        # A capture holds no truth, so there is no score: only how much of the update stays unexplained.
        print("  labels", sorted(reconstruction.labels.tolist()), "residual", fp.residual(captured, reconstruction))

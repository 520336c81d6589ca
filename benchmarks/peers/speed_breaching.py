"""The peer `breaching`, unmodified, on updates of matching_speed.py, one after the other.

    BREACHING=FOLDER python speed_breaching.py GIVEN ANSWER SETTINGS [GIVEN ANSWER SETTINGS ...]

Only the network's definition comes from fedprism. `breaching` is taken from the environment, or from the folder that
the variable names (put last, so that it supplies only what is missing).
"""

import gc
import json
import os
import sys
import time
import types
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))
if os.environ.get("BREACHING"):
    sys.path.append(os.environ["BREACHING"])
warnings.filterwarnings("ignore")  # its own deprecations
import breaching  # noqa: E402

from fedprism.models import build  # noqa: E402

torch.backends.cudnn.allow_tf32 = False


def carry_out(file: str, answer: str, settings: dict[str, object]) -> None:
    given = torch.load(file, weights_only=True)
    device = torch.device(settings["device"])
    model = build(settings["network"], **settings["kwargs"]).to(device).eval()
    model.load_state_dict(given["state"])
    shape = tuple(given["start"].shape[1:])
    metadata = types.SimpleNamespace(shape=shape, mean=settings["mean"], std=settings["std"], modality="vision")
    payload = {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": [b.detach() for b in model.buffers()],
        "metadata": metadata,
    }
    labels = given["labels"].to(device)
    shared = {
        "gradients": [given["update"][name].to(device) for name, _ in model.named_parameters()],
        "buffers": None,
        "metadata": {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None},
    }

    def attack(iterations: int) -> torch.Tensor:
        overrides = [f"optim.max_iterations={iterations}", f"regularization.total_variation.scale={settings['tv']}"]
        config = breaching.get_attack_config("invertinggradients", overrides=overrides)
        setup = {"device": device, "dtype": torch.float}
        attacker = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), config, setup)
        start = given["start"].to(device)
        result, _ = attacker.reconstruct([payload], [shared], {}, initial_data=start, dryrun=False)
        return result["data"].detach().float().cpu()

    attack(settings["warm_up"])
    gc.collect()
    clock, processor = time.perf_counter(), time.process_time()
    inputs = attack(settings["iterations"])
    times = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
    torch.save({"inputs": inputs, **times}, answer)


for given, answer, settings in zip(*(iter(sys.argv[1:]),) * 3, strict=True):
    carry_out(given, answer, json.loads(settings))

"""DLG on the sigmoid LeNet with U(-0.5, 0.5) weights: how many of ten real photographs come back to 30 dB or better.

    python benchmarks/dlg.py [--images 10] [--restarts 4]

Each photograph has a network of its own and at most `restarts` starts. The attacker stops at a start whose objective
says that the gradient is explained; it never sees the photograph. Writes benchmarks/results/dlg.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import fedprism as fp

EXPLAINED = 1e-4
"""An objective below this is a gradient explained; starts that fail end orders of magnitude above it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "dlg.json")
    args = parser.parse_args()
    photos, rows = fp.data.load("photos", size=32), []
    for number in range(args.images):
        batch = photos.draw(1, torch.Generator().manual_seed(number))
        model = fp.models.uniform_(fp.models.build("lenet", input_shape=(3, 32, 32), classes=100), seed=number)
        observation, truth = fp.simulate(fp.Scenario(model=model, clients=[batch]), fp.threats.honest_but_curious)
        start = time.perf_counter()
        runs = []
        for restart in range(args.restarts):
            runs.append(fp.run(fp.attacks.dlg(), observation, seed=restart))
            if runs[-1].diagnostics["objective"] < EXPLAINED:
                break
        best = min(runs, key=lambda run: run.diagnostics["objective"])
        scores = fp.score(best, truth)
        rows.append(
            {
                "photo": number,
                "psnr": scores.mean("psnr"),
                "ssim": scores.mean("ssim"),
                "label": scores.labels_match,
                "objective": best.diagnostics["objective"],
                "starts": len(runs),
                "seconds": time.perf_counter() - start,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    reached = sum(row["psnr"] > 30 for row in rows)
    print(f"{reached} of {len(rows)} photographs came back to 30 dB or better")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"reached 30 dB": reached, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The report of an audit of a thousand cells, beside reading its records alone: what any report has to do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from fedprism import audit, report
from workloads.base import Comparison, Conditions, best_of

PLAN = """
[model]
name = "fc2"
kwargs = { hidden = 16 }
[data]
name = "photos"
options = { size = 16 }
[grid]
batch_sizes = [1, 2]
threats = ["honest_but_curious"]
attacks = ["dense-inversion"]
defenses = [
  "none",
  { name = "prune", ratio = [0.5, 0.9, 0.99, 0.999] },
  { name = "gaussian-noise", std = [0.0001, 0.001, 0.01, 0.03, 0.1] },
]
seeds = SEEDS
[scores]
metrics = ["psnr", "ssim"]
"""
SEEDS = 50
"""Twenty configurations, so that this makes a thousand records."""


def reporting(_: Conditions) -> Iterator[Comparison]:
    processor = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        plan = audit.parse_plan(PLAN.replace("SEEDS", str(list(range(SEEDS)))))
        audit.run_audit(audit.prepare(plan), folder, device="cpu")  # a GPU would wait for most of it
        count = len(audit.load_audit(folder))
        ours, page = best_of(2, processor, lambda: report.write(folder))
        records = sorted(Path(folder, "records").glob("*.json"))
        theirs, _read = best_of(2, processor, lambda: [json.loads(path.read_bytes()) for path in records])
        yield Comparison(
            workload="report",
            size=f"{count:,} records",
            ours=ours,
            quality=f"a page of {page.stat().st_size / 1e6:.1f} MB",
            other="reading the records alone",
            theirs=theirs,
            their_quality="no page",
        )

"""Audit folders with planted numbers: what a report must say of them is known beforehand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedprism.audit import Audit, load_audit
from fedprism.files import json_text

VERSIONS = {"fedprism": "0.0", "torch": "2.6", "python": "3.11"}
NAMED: dict[str, Any] = {
    "title": "Planted",
    "model": {"name": "fc2", "weights": None},
    "data": {"name": "photos"},
    "captures": None,
    "scores": {"metrics": ["psnr", "ssim"]},
}
CAPTURED: dict[str, Any] = {**NAMED, "data": None, "captures": {"folders": ["run-1"], "truths": []}}
OWN: dict[str, Any] = {**NAMED, "data": {"name": None, "folder": "faces"}}


def figure(mean: float, *, off: float | None = 0.5, closest: float | None = None, null: float | None = 10.0) -> Any:
    """A metric; `off` is half of the interval."""
    low, high = (None, None) if off is None else (mean - off, mean + off)
    return {"mean": mean, "low": low, "high": high, "closest": mean if closest is None else closest, "baseline": null}


def attack(psnr: float = 12.0, ssim: float = 0.1, **changes: Any) -> dict[str, Any]:
    """An entry of the summary; keys of the cell may be changed as well."""
    cell = {
        "kind": "attack",
        "attack": "dense-inversion",
        "settings": "DenseInversion()",
        "threat": "honest_but_curious",
        "defense": "none",
        "defense_settings": "chain()",
        "clients": 1,
        "batch_size": 1,
        "protocol": "FedSGD()",
        "loss": "cross_entropy",
    }
    entry = {
        "outcomes": {"done": 2},
        "reasons": [],
        "statuses": ["done as it should be"],
        "knowledge_used": ["loss", "model"],
        "metrics": {"psnr": figure(psnr, null=13.0), "ssim": figure(ssim, off=0.05, null=0.1)},
        "baselines": {"psnr": {"blank": 12.0, "mean": 13.0, "noise": 8.0, "other": 9.0}, "ssim": {"mean": 0.1}},
        "by_column": {},
        "samples": 2,
        "recovered": 2 if psnr >= 30.0 or ssim >= 0.5 else 0,
        "returned": 2,
        "labels_leaked": None,
        "residual": 0.25,
        "accuracy": None,
        "interval": None,
        "epsilon": None,
        "ceiling": None,
    }
    for key, value in changes.items():
        (entry if key in entry else cell)[key] = value
    return {"configuration": cell, **entry}


def captured(**changes: Any) -> dict[str, Any]:
    """A capture without truth: no score, a residual."""
    entry = attack(metrics={}, baselines={}, samples=0, recovered=0, returned=0, residual=1.5e-5)
    entry["configuration"] = {"kind": "capture", "capture": "1: run-1", "attack": "idlg", "settings": "Idlg()"}
    return {**entry, **changes}


def utility(defense: str, accuracy: float, epsilon: float | None = None) -> dict[str, Any]:
    entry = attack(
        metrics={},
        baselines={},
        samples=0,
        recovered=0,
        returned=0,
        residual=None,
        knowledge_used=[],
        outcomes={"done": 1},
    )
    entry["configuration"] = {
        "kind": "utility",
        "defense": defense,
        "defense_settings": defense,
        "loss": "cross_entropy",
    }
    return {**entry, "accuracy": accuracy, "interval": [accuracy - 0.01, accuracy + 0.01], "epsilon": epsilon}


def ceiling(value: float, metric: str = "psnr") -> dict[str, Any]:
    """A bound on every attacker, as results.json states it."""
    return {"metric": metric, "value": value, "confidence": 0.95, "prior": "a picture known up to noise", "status": ""}


def gate(**changes: Any) -> dict[str, Any]:
    """A failed gate, as results.json states it."""
    about = {"flag": "--fail-above psnr=15", "metric": "psnr", "limit": 15.0, "single": False, "kind": "above"}
    result = {"passed": False, "worst": "dense-inversion, no defense", "value": 41.25, "why": ["It is beyond."]}
    return {**about, **result, **changes}


def plant(
    folder: Path,
    entries: Sequence[Mapping[str, Any]],
    *,
    plan: Mapping[str, Any] = NAMED,
    skipped: Sequence[Mapping[str, str]] = (),
    pictures: torch.Tensor | None = None,
    seeds: Sequence[int] = (0, 1),
    gates: Sequence[Mapping[str, Any]] = (),
    verdict: str = "inconclusive",
    weights: str = "random weights",
) -> Audit:
    """An audit of these configurations; `pictures` (count, channels, height, width) come back turned upside down."""
    for name in ("records", "samples", "clock"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    records = []
    for entry in entries:
        for seed in seeds[:1] if entry["configuration"]["kind"] == "utility" else seeds:
            cell = {**entry["configuration"], "seed": seed}
            record = _record(cell, entry, 0 if pictures is None else len(pictures))
            records.append(record)
            (folder / "records" / f"{record['id']}.json").write_bytes(json_text.as_json(record))
            if pictures is not None:
                kept = {"recovered": pictures.flip(2).contiguous()}
                if entry["configuration"]["kind"] != "capture":
                    count = len(pictures)
                    indices, answered = torch.arange(count), torch.ones(count, dtype=torch.bool)
                    kept |= {"originals": pictures, "answered": answered, "indices": indices}
                save_file(kept, folder / "samples" / f"{record['id']}.safetensors")
    found = {
        "format": "fedprism-audit/2",
        "plan": plan,
        "fingerprint": {},
        "versions": VERSIONS,
        "columns": None,
        "skipped": list(skipped),
        "conclusion": {"verdict": verdict, "weights": weights, "exit_code": 0, "sentences": [], "checks": list(gates)},
        "summary": list(entries),
        "records": records,
    }
    (folder / "results.json").write_bytes(json_text.as_json(found))
    return load_audit(folder)


def _record(cell: Mapping[str, Any], entry: Mapping[str, Any], pictures: int) -> dict[str, Any]:
    means = {name: each["mean"] for name, each in entry["metrics"].items()}
    values = {name: [mean - 0.1 * k for k in range(max(1, pictures))] for name, mean in means.items()}
    record = {
        "kind": "utility" if cell["kind"] == "utility" else "attack",
        "run": dict(cell),
        "knowledge_used": entry["knowledge_used"],
        "scores": {"values": values, "means": means, "samples": entry["samples"], "answered": entry["returned"]},
        **{"accuracy": None, "time_factor": None, "epsilon": None, "residual": entry["residual"]},
        "status": "done",
        "seed": cell["seed"],
        "versions": VERSIONS,
    }
    if cell["kind"] == "utility":
        record["scores"] = {"accuracy": [entry["accuracy"]], "seeds": [0], "interval": None}
        record["scores"] |= {"delta": None, "release_epsilon": None}
    outcome = next(iter(entry["outcomes"]))
    found = {
        "id": hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:16],
        "run": dict(cell),
        "outcome": outcome,
        "reason": "; ".join(entry["reasons"]),
        "record": record if outcome == "done" else None,
        "baselines": {},
    }
    plain = json.loads(json_text.as_json(found))
    return {**plain, "digest": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]}

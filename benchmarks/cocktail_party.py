"""Cocktail party on FC-2 of width 256, trained: how exactly whole batches come back, and how fast.

    python benchmarks/cocktail_party.py --data-dir DATA [--sizes 8,16,32,64,128,192,256] [--batches 5] [--threads 1]
    python benchmarks/cocktail_party.py --data-dir DATA --resume [--only "Tiny-ImageNet, FedAvg"]
    python benchmarks/cocktail_party.py --data-dir DATA --reduced --device cuda

For CIFAR-10 and Tiny-ImageNet: separation alone and with the exact stage, on gradients and on FedAvg updates;
noise on the unit-norm gradient at 8 samples; and the published optimisation (25,000 Adam steps) on one batch of 64,
timed in the same run: with automatic differentiation, multiplied up from a hundred steps, and to the end with its
slopes written out, which is faster. `--reduced`: batches of 64 only, two of each, and the published optimisation.
`--resume` keeps the rows that are stored and runs the others, of these only the ones whose name begins as `--only`
says. `--processor`: processor seconds, where others use the machine. Prints what is expected to hold and whether it
does, and writes benchmarks/results/cocktail_party.json. Memory and features before a dense layer:
benchmarks/cocktail_party_memory.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from workloads.base import Clock, best_of, timed
from workloads.published_separation import OBJECTIVE, SAMPLE, published_seconds

import fedprism as fp
from fedprism.attacks import CocktailParty
from fedprism.evaluation.scoring import match
from fedprism.metrics import lpips, psnr
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.victims import Victim, fc2_cifar10, fc2_tiny_imagenet

EXACT, SEPARATED = CocktailParty(), CocktailParty(exact=False)
PUBLISHED = CocktailParty(objective=OBJECTIVE, exact=False, bias_scale=False)
Case: TypeAlias = tuple[str, str]
VICTIMS = {"CIFAR-10": fc2_cifar10, "Tiny-ImageNet": fc2_tiny_imagenet}
NOISY, PUBLISHED_ROW = "unit-norm gradient, noise 1e-4, 8", "published objective, 64"
LEAST_SEPARATED = {"CIFAR-10": 29.0, "Tiny-ImageNet": 36.0}
MOST_LPIPS_AT_WIDTH = {"CIFAR-10": 0.15, "Tiny-ImageNet": 0.11}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], default=None)
    parser.add_argument("--batches", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--gradients-only", action="store_true", help="leave out FedAvg, noise and the published method"
    )
    parser.add_argument("--reduced", action="store_true", help="batches of 64 and the published method only")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are stored")
    parser.add_argument("--only", default="", help='rows to run, by how they begin: "CIFAR-10, gradient, 256"')
    parser.add_argument("--device", default=None)
    parser.add_argument("--processor", action="store_true", help="processor seconds, where others use the machine")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cocktail_party.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Clock.processor = args.processor
    sizes = args.sizes or ((64,) if args.reduced else (8, 16, 32, 64, 128, 192, 256))
    batches = range(args.batches or (2 if args.reduced else 5))
    settings = Settings(data_dir=args.data_dir, device=args.device)
    device = "GPU" if torch.cuda.is_available() and args.device != "cpu" else f"CPU, {args.threads} thread(s)"
    cases = _cases(sizes, gradients_only=args.gradients_only, reduced=args.reduced)
    stored = json.loads(args.output.read_text())["rows"] if args.resume and args.output.exists() else []
    rows: dict[Case, dict[str, object]] = {(row["data"], row["what"]): row for row in stored}
    victims: dict[str, Victim] = {}
    for data, what in cases:
        if (data, what) in rows or not f"{data}, {what}".startswith(args.only):
            continue
        if data not in victims:
            victims[data] = VICTIMS[data](settings)
            print(victims[data].note, flush=True)
        rows[data, what] = _row(victims[data], what, settings, batches)
        print(json.dumps(rows[data, what]), flush=True)
        _store(args.output, device, rows, cases)  # a run that is broken off leaves what it has
    for sentence, held in _expectations(_in_order(rows, cases)):
        print("holds" if held else "DOES NOT HOLD", "-", sentence)


def _cases(sizes: Sequence[int], *, gradients_only: bool, reduced: bool) -> list[Case]:
    """Every row of a run, in order: the data and what is attacked."""
    cases: list[Case] = []
    for data in VICTIMS:
        cases += [(data, f"gradient, {size}") for size in sizes]
        if gradients_only:
            continue
        if not reduced:
            cases += [(data, f"FedAvg, {size}") for size in (32, 64, 128, 256)]
            cases += [(data, NOISY)] if data == "Tiny-ImageNet" else []
        cases.append((data, PUBLISHED_ROW))
    return cases


def _in_order(rows: Mapping[Case, dict[str, object]], cases: Sequence[Case]) -> list[dict[str, object]]:
    """The rows in the order of the cases; those of other runs last."""
    return [rows[case] for case in [*cases, *(other for other in rows if other not in cases)] if case in rows]


def _store(path: Path, device: str, rows: Mapping[Case, dict[str, object]], cases: Sequence[Case]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = _in_order(rows, cases)
    complete = all(case in rows for case in cases)
    stored = {"device": device, "complete": complete, "expected": dict(_expectations(ordered)), "rows": ordered}
    path.write_text(json.dumps(stored, indent=1) + "\n")


def _row(victim: Victim, what: str, settings: Settings, batches: range) -> dict[str, object]:
    if what == PUBLISHED_ROW:
        return {"data": victim.name, "what": what, **_published(victim, settings)}
    scenario: dict[str, object] = {}
    if what.startswith("FedAvg"):
        scenario["protocol"] = fp.FedAvg(lr=1e-3, epochs=10, batch_size=32)
    elif what == NOISY:
        scenario["defense"] = fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-4))
    size = int(what.rpartition(", ")[2])
    return _summary(victim, what, [_measure(victim, settings, size, number, **scenario) for number in batches])


def _measure(victim: Victim, settings: Settings, size: int, number: int, **scenario: object) -> dict[str, object]:
    """Both attacks on one batch: every image's PSNR, the batch's mean LPIPS, and seconds."""
    batch = victim.draw(size, generator(0, "batch", victim.name, size, number))
    observation, truth = fp.simulate(
        fp.Scenario(model=victim.model, clients=[batch], normalization=victim.normalization, **scenario),  # type: ignore[arg-type]
        fp.threats.honest_but_curious,
        seed=number,
        device=settings.device,
    )
    place, measured = devices.pick(settings.device), dict[str, object]()
    for name, attack in (("separated", SEPARATED), ("exact", EXACT)):
        seconds, found = timed(place, lambda attack=attack: fp.run(attack, observation, device=settings.device))
        matched = match(found, truth)
        folder = None if settings.data_dir is None else settings.data_dir / "weights"
        measured[name] = {
            "psnr": psnr(matched.recovered, matched.truth).tolist(),
            "lpips": float(
                lpips(matched.recovered.float(), matched.truth.float(), net="vgg", weights_dir=folder).mean()
            ),
            _seconds(): seconds,
            "status": found.status,
            "exact": found.diagnostics["exact"],
            "certificate": found.diagnostics["certificate"],
        }
    return measured


def _published(victim: Victim, settings: Settings) -> dict[str, object]:
    """The published optimisation and ours on the same batch, one after the other."""
    batch = victim.draw(64, generator(0, "batch", victim.name, 64, 0))
    observation, truth = fp.simulate(
        fp.Scenario(model=victim.model, clients=[batch], normalization=victim.normalization),
        fp.threats.honest_but_curious,
        device=settings.device,
    )
    place = devices.pick(settings.device)
    gradient = observation.rounds[0].update[f"{victim.dense_layer}.weight"].to(place)
    ours, found = best_of(3, place, lambda: fp.run(EXACT, observation, device=settings.device))
    theirs = published_seconds(gradient, 64, truth.inputs.shape[1:])
    written_out, published = timed(place, lambda: fp.run(PUBLISHED, observation, device=settings.device))
    return {
        "our psnr": _mean_psnr(found, truth),
        "published psnr": _mean_psnr(published, truth),
        f"our {_seconds()}": ours,
        f"published {_seconds()}": theirs,
        "multiplied up from steps": SAMPLE,
        f"published {_seconds()}, slopes written out": written_out,
        "times faster": theirs / ours,
        "times faster, slopes written out": written_out / ours,
    }


def _mean_psnr(found: fp.Reconstruction, truth: fp.Truth) -> float:
    matched = match(found, truth)
    return float(psnr(matched.recovered, matched.truth).mean())


def _seconds() -> str:
    """What a row calls its seconds."""
    return "processor seconds" if Clock.processor else "seconds"


def _summary(victim: Victim, what: str, measured: list[dict[str, object]]) -> dict[str, object]:
    row: dict[str, object] = {"data": victim.name, "what": what, "batches": len(measured)}
    for name in ("separated", "exact"):
        runs = [m[name] for m in measured]
        values = torch.tensor([value for run in runs for value in run["psnr"]])  # type: ignore[index]
        row[name] = {
            "psnr": float(values.mean()),
            "worst psnr": float(values.min()),
            "over 40 dB": float((values > 40).double().mean()),
            "over 60 dB": float((values > 60).double().mean()),
            "lpips": sum(run["lpips"] for run in runs) / len(runs),  # type: ignore[index]
            "certified batches": sum(bool(run["exact"]) for run in runs),  # type: ignore[index]
            _seconds(): sum(run[_seconds()] for run in runs) / len(runs),  # type: ignore[index]
        }
        assert name == "separated" or all(
            min(e["psnr"]) > 40
            for e in runs
            if e["exact"]  # type: ignore[index]
        ), "a certified batch is wrong"
    row["never worse"] = all(
        sum(m["exact"]["psnr"]) >= sum(m["separated"]["psnr"]) - 1e-6 * len(m["exact"]["psnr"])  # type: ignore[index]
        for m in measured
    )
    return row


def _expectations(rows: list[dict[str, object]]) -> list[tuple[str, bool]]:
    """What the project promises, and whether this run bears it out."""
    found: list[tuple[str, bool]] = []
    for row in rows:
        data, what = str(row["data"]), str(row["what"])
        kind, _, size = what.rpartition(", ")
        exact, separated = (row.get(name, {}) for name in ("exact", "separated"))
        where = f"{data}, {what}"
        if kind == "gradient":
            if int(size) <= 64:
                found.append((f"{where}: every image over 60 dB", exact["over 60 dB"] == 1))  # type: ignore[index]
            if int(size) == 128:
                found.append((f"{where}: 98 % of images over 40 dB", exact["over 40 dB"] >= 0.98))  # type: ignore[index]
            if int(size) == 64:
                least = LEAST_SEPARATED[data]
                found.append((f"{where}: separation alone {least} dB", separated["psnr"] >= least))  # type: ignore[index]
            if int(size) == 256:
                most = MOST_LPIPS_AT_WIDTH[data]
                found.append((f"{where}: separation alone LPIPS {most}", separated["lpips"] <= most))  # type: ignore[index]
            found.append((f"{where}: never worse than separation alone", bool(row["never worse"])))
        elif what == "FedAvg, 128":
            found.append((f"{where}: LPIPS 0.07", exact["lpips"] <= 0.07))  # type: ignore[index]
        elif "noise" in kind:
            found.append((f"{where}: LPIPS 0.05", exact["lpips"] <= 0.05))  # type: ignore[index]
        elif "published" in kind:
            found.append((f"{where}: at least 100 times faster", float(str(row["times faster"])) >= 100))
    return found


if __name__ == "__main__":
    main()

"""How often `inspect` finds tampered models, and how often it accuses honest ones.

    python benchmarks/inspection.py --tampered-seeds 3 --vgg16 -o benchmarks/results/inspection.json
    python benchmarks/inspection.py --quick
    python benchmarks/inspection.py --only mkor --vgg16

Models are looked at as a client without model code sees them: their parameters alone. Honest ones are fresh, trained on
the embedded digits, pruned, quantised or half dead, a ResNet-18 on the embedded photographs, networks for far more
classes than were trained on, and such with fused batch norm; those of the data folder, if there is one, are listed
apart. So are those whose training diverged; they are honest, and count as false alarms in the total.
Tampered ones come from MKOR, class fishing and imprint layers, plain and by servers that hide: noise on every weight,
in standard deviations of the layer's honest weights, and units in random order. `reads` is what such a server then
recovers of a batch of eight photographs, in dB, where the attack has a closed form; `untampered` is what the same
decoder gets from honest weights, below which a trap adds nothing. Thresholds were set while looking at seeds 0 and 1
and at the data folder; `held out` are models of a seed that played no part in that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
from inspected_models import (
    ATTACKS,
    CHAINS,
    EVERY,
    FISHING_NOISES,
    NETWORKS,
    NOISES,
    TOO_FAST,
    TRAININGS,
    Cell,
    Hiding,
    digits,
    equation_20,
    honest,
    tampered,
    tampered_by,
    tensors,
    trained,
)
from other_kinds import other_kinds

import fedprism as fp
from fedprism.files.tensors import TensorFile, write_tensors
from fedprism.inspection import changed_shares, inspect
from fedprism.inspection.jumps import jumps
from fedprism.randomness import generator
from fedprism.types import Update

PLAIN = ("noise 0", "of few", "trained before", "units in random order", "dump class")
HELD_OUT = 100
ROUND = 20
"""Steps between two models that a client is sent."""


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, scale = hits / of, 1 + z * z / of
    middle = (share + z * z / (2 * of)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def rate(hits: int, of: int) -> dict[str, Any]:
    low, high = wilson(hits, of)
    return {"flagged": hits, "of": of, "rate": round(hits / of, 4), "interval": [round(low, 4), round(high, 4)]}


def counted(cells: Iterator[Cell], seeds: int, first: int = 0) -> list[dict[str, Any]]:
    """One row a family and variant; honest variants of one family are counted together, with the accused ones named."""
    rows: dict[tuple[str, str], list[tuple[str, tuple[str, ...]]]] = {}
    for family, variant, make in cells:
        group = (family, variant if family in ATTACKS else "")
        for seed in range(first, first + seeds):
            checks = tuple(sorted({finding.check for finding in inspect(make(seed)).serious}))
            rows.setdefault(group, []).append((f"{variant}, seed {seed}", checks))
    table = []
    for (family, variant), results in rows.items():
        found = [(label, checks) for label, checks in results if checks]
        names = sorted({check for _, checks in found for check in checks})
        by_check = {name: sum(name in checks for _, checks in found) for name in names}
        row = {"family": family, "variant": variant, **rate(len(found), len(results)), "by_check": by_check}
        if family not in ATTACKS:
            row["accused"] = [f"{label}: {', '.join(checks)}" for label, checks in found]
        table.append(row)
        print(f"{family:20} {variant:24} {len(found):4} of {len(results)}", by_check, flush=True)
    return table


def reading(attack: Any, name: str, noise: float | None, seeds: int) -> dict[str, Any]:
    """What the hiding server recovers of eight photographs: how many, how many well, and their median PSNR."""
    photos = fp.data.load("photos", size=32)
    answered, values = 0, list[float]()
    for seed in range(seeds):
        batch = photos.draw(8, generator(seed, "batch"), unique_labels=True)
        scenario = fp.Scenario(model=EVERY[name](seed), clients=[batch])
        server = Hiding(attack, noise)
        observation, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=seed, server=server)
        scores = fp.score(fp.run(attack, observation, seed=seed), truth, metrics=("psnr",))
        kept = [value for value in scores.values["psnr"] if value is not None]
        answered, values = answered + len(kept), values + kept
    middle = min(statistics.median(values), 150.0) if values else None  # 150 dB is exact; infinity is no JSON
    return {
        "noise": "untampered" if noise is None else noise,
        "answered": answered,
        "above_20_db": sum(value > 20 for value in values),
        "of": 8 * seeds,
        "median_psnr": None if middle is None else round(middle, 1),
    }


def readings(seeds: int) -> dict[str, Any]:
    """Every closed-form attack at every noise, and class fishing where its marks are small. It fishes one of eight."""
    rows = {
        f"{family}, {networks[-1]}": [reading(make(), networks[-1], noise, seeds) for noise in (*NOISES, None)]
        for family, (make, networks) in ATTACKS.items()
        if family != "class-fishing"
    }
    for bias in (1000.0, 5.0, 2.0, 1.0):
        attack = fp.attacks.ClassFishing(target=4, bias=bias, matching=fp.attacks.dense_inversion())
        key = f"class-fishing, bias {bias:g}, fc2"
        rows[key] = [reading(attack, "fc2", noise, seeds) for noise in (*FISHING_NOISES, 0.7, 1.0)]
    for name in ("fc2, 100 classes", "fc2, 1000 classes"):
        attack = fp.attacks.ClassFishing(target=4, bias=0.01, matching=fp.attacks.dense_inversion())
        rows[f"class-fishing, {name}"] = [reading(attack, name, noise, seeds) for noise in (*FISHING_NOISES, 0.7, 1.0)]
    return rows


def with_reference(seeds: int, steps: int) -> list[dict[str, Any]]:
    """What the comparison with the round before finds, alone: a round of training, and traps that hide."""
    pairs: dict[str, list[tuple[Update, Update]]] = {}
    for name, how, seed in product(NETWORKS, TRAININGS, range(seeds)):
        if how != TOO_FAST:
            fresh, later = trained(name, how, seed, 0), trained(name, how, seed, steps)
            pairs.setdefault("honest, first round", []).append((trained(name, how, seed, ROUND), fresh))
            pairs.setdefault("honest, later round", []).append((trained(name, how, seed, steps + ROUND), later))
    hiding = {
        "class-fishing, bias 5, noise 0.3": (fp.attacks.ClassFishing(bias=5.0, target=4), 0.3, "fc2"),
        "class-fishing, bias 2, noise 0.1": (fp.attacks.ClassFishing(bias=2.0, target=4), 0.1, "fc2"),
        "imprint, noise 1": (fp.attacks.imprint(), 1.0, "fc2"),
        "mkor, noise 3": (fp.attacks.mkor(), 3.0, "chain"),
    }
    for label, (attack, noise, name) in hiding.items():
        for seed in range(seeds + 3):
            before = tensors(NETWORKS[name](seed))
            pairs.setdefault(label, []).append(({**before, **tampered_by(attack, name, noise=noise)(seed)}, before))
    return [
        {"models": label, **rate(sum(bool(jumps(new, old)) for new, old in own), len(own))}
        for label, own in pairs.items()
    ]


def with_code(seeds: int, steps: int) -> list[dict[str, Any]]:
    """The checks that need the model's code, alone: on 16 digits, of trained networks and of traps set in them."""
    traps = {"class-fishing": fp.attacks.class_fishing(), "mkor": fp.attacks.mkor()}
    results: dict[str, list[tuple[str, set[str]]]] = {}
    for name, how, seed in product(NETWORKS, TRAININGS, range(seeds)):
        sent = {how: trained(name, how, seed, steps)}
        if how == "Adam":
            sent |= {
                trap: {**sent[how], **tampered_by(attack, name, steps=steps)(seed)}
                for trap, attack in traps.items()
                if trap == "class-fishing" or name in CHAINS
            }
        for label, params in sent.items():
            found = inspect(params, model=NETWORKS[name](0), batch=digits()[-16:])
            checks = {finding.check for finding in found.serious if not finding.tensor}
            results.setdefault(label, []).append((f"{name}, seed {seed}", checks))
    return [
        {
            "models": label,
            **rate(sum(bool(checks) for _, checks in found), len(found)),
            "found": [f"{where}: {', '.join(sorted(checks))}" for where, checks in found if checks],
        }
        for label, found in results.items()
    ]


def real_models() -> list[dict[str, Any]]:
    """The pretrained networks of the data folder, as files that a client would be sent."""
    folder = Path(os.environ.get("FEDPRISM_DATA", "")) / "weights"
    rows = []
    for path in sorted(folder.glob("*.safetensors")) if os.environ.get("FEDPRISM_DATA") else []:
        start = time.perf_counter()
        checks = sorted({finding.check for finding in inspect(TensorFile(path)).serious})
        rows.append({"file": path.name, "serious": checks, "seconds": round(time.perf_counter() - start, 2)})
    return rows


def train_vgg16(model: torch.nn.Module, steps: int = 12) -> None:
    """From the data folder's pretrained convolutions, where there is one, on the embedded photographs at 64 pixels."""
    path = Path(os.environ.get("FEDPRISM_DATA", "")) / "weights" / "vgg16_features_fp16.safetensors"
    if path.is_file():
        pretrained = {name: tensor.float() for name, tensor in TensorFile(path).items()}
        model.load_state_dict(pretrained, strict=False)
    photos, rng = fp.data.load("photos", size=64, crops=8), generator(0, "vgg16")
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(steps):
        batch = photos.draw(16, rng)
        loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def large(folder: Path) -> list[dict[str, Any]]:
    """VGG-16 with its 134 million parameters, as files: what is found, and how long that takes."""
    rows = []
    traps: dict[str, Any] = {
        "mkor": fp.attacks.mkor(),
        "mkor, spare channels": fp.attacks.Mkor(blurred=True),
        "mkor-inconspicuous": fp.attacks.mkor_inconspicuous(),
        "mkor, equation 20": equation_20(),
    }
    for name, attack in {"honest, fresh": None, "honest, trained": None, **traps}.items():
        model = fp.models.build("vgg16", classes=100, seed=0)
        if name == "honest, trained":
            train_vgg16(model)
        params = tensors(model)
        path = folder / "vgg16.safetensors"
        sent = params if attack is None else attack.tamper(model, params, generator(0))[0]
        write_tensors(path, sent)
        changed = {weight: share for weight, share in changed_shares(sent, params).items() if params[weight].dim() > 1}
        start = time.perf_counter()
        checks = sorted({finding.check for finding in inspect(TensorFile(path)).serious})
        seconds = round(time.perf_counter() - start, 1)
        shares = {weight: round(share, 4) for weight, share in changed.items() if attack is not None}
        rows.append({"model": name, "serious": checks, "seconds": seconds, "changed": shares})
        path.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=2, help="of honest models")
    parser.add_argument("--tampered-seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--quick", action="store_true", help="one seed, little training, some of the cells")
    parser.add_argument(
        "--only", choices=[*ATTACKS], default=None, help="the rows of one attack, without honest models"
    )
    parser.add_argument("--vgg16", action="store_true", help="also VGG-16 itself, fresh and trained: 3 GB of memory")
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    result = dict[str, Any]()
    for name, part in parts(options):
        result[name] = part
        if options.output is not None:  # after each part: what a stopped run has is not lost
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["totals"], indent=1))


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What the result consists of, each part when it is done."""
    if options.only is not None:
        yield from only(options.only, options)
    else:
        yield from quick() if options.quick else measure(options.seeds, options.tampered_seeds, options.steps)
    if options.vgg16:
        with tempfile.TemporaryDirectory() as folder:
            yield "vgg16", large(Path(folder))


def innocent(steps: int) -> Iterator[Cell]:
    return chain(honest(steps), other_kinds(steps))


def quick() -> Iterator[tuple[str, Any]]:
    """Every eighth cell: under ten seconds."""
    clean = counted(islice(innocent(2), 0, None, 8), 1)
    yield "totals", totals(clean, counted(islice(tampered(2), 0, None, 8), 1))


def only(family: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The rows of one attack: how often it is found, and what it reads."""
    cells = [cell for cell in tampered(options.steps) if cell[0] == family]
    yield "tampered", (traps := counted(iter(cells), options.tampered_seeds))
    yield "totals", totals([], traps)
    yield "held out", counted(iter(cells), 1, HELD_OUT)
    make, networks = ATTACKS[family]
    readable = [reading(make(), networks[-1], noise, options.tampered_seeds) for noise in (*NOISES, None)]
    yield "reads", {f"{family}, {networks[-1]}": readable}


def measure(seeds: int, tampered_seeds: int, steps: int) -> Iterator[tuple[str, Any]]:
    yield "torch", torch.__version__
    yield "machine", platform.machine()
    yield "seeds", {"honest": seeds, "tampered": tampered_seeds}
    yield "steps", steps
    yield "honest", (clean := counted(innocent(steps), seeds))
    yield "tampered", (traps := counted(tampered(steps), tampered_seeds))
    yield "totals", totals(clean, traps)
    clean, traps = counted(innocent(steps), 1, HELD_OUT), counted(tampered(steps), 1, HELD_OUT)
    yield "held out", {"seed": HELD_OUT, "totals": totals(clean, traps), "honest": clean, "tampered": traps}
    yield "reads", readings(tampered_seeds)
    yield "with code", with_code(seeds, steps)
    yield "with reference", with_reference(seeds, steps)
    yield "data folder", real_models()


def totals(clean: list[dict[str, Any]], traps: list[dict[str, Any]]) -> dict[str, Any]:
    """Plain traps are those of servers that do not add noise."""

    def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return rate(sum(row["flagged"] for row in rows), sum(row["of"] for row in rows)) if rows else {}

    plain = [row for row in traps if row["variant"] in PLAIN]
    usable = [row for row in clean if row["family"] != "diverged"]
    return {
        "false alarms": total(clean),
        "false alarms, none diverged": total(usable),
        "tampered, plain": total(plain),
        "tampered, all": total(traps),
    }


if __name__ == "__main__":
    main()

"""How far rounding and seeds move what attacks reach: the embedded photographs, as several kinds of CPU compute.

    make rounding

Every CPU adds numbers up in an order of its own. Closed forms hardly notice; an optimisation can end elsewhere. `make
rounding` runs this once for each kind of CPU that the Makefile knows how to imitate. Each run adds its numbers to
benchmarks/results/rounding.json and prints the table of all, as on research/results.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

import fedprism as fp

RESULTS = Path(__file__).parent / "results" / "rounding.json"
SEEDS = range(5)
NOISES = (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3)


def small_networks(seed: int) -> Iterator[tuple[str, float]]:
    """One attack with one budget on an update without and with defenses, on three small networks."""
    photos = fp.data.load("photos", size=32, crops=1)
    shape = {"input_shape": (3, 32, 32), "classes": 10}
    dense = fp.models.build("fc2", seed=seed, hidden=256, **shape)
    single = fp.models.uniform_(fp.models.build("lenet", **shape), seed=seed)
    wide = fp.models.build("lenet", seed=seed, width=32, activation="relu", **shape)
    inversion, matching = fp.attacks.dense_inversion(), dataclasses.replace(fp.attacks.idlg(), iterations=150)
    smooth = dataclasses.replace(
        fp.attacks.inverting_gradients(), iterations=600, priors=(fp.attacks.TotalVariation(0.01),)
    )
    prune, noise = fp.defenses.Prune, fp.defenses.GaussianNoise
    cases = (
        ("8 photos, no defense", dense, range(8), inversion, fp.chain(), ()),
        ("8 photos, pruning 90%", dense, range(8), inversion, prune(0.9), ()),
        ("8 photos, noise 0.03", dense, range(8), inversion, noise(0.03), ()),
        ("1 photo, no defense", single, [1], matching, fp.chain(), ()),
        ("1 photo, noise 0.003", single, [1], matching, noise(0.003), ()),
        ("1 photo, wide, no defense", wide, [1], smooth, fp.chain(), ()),
        ("1 photo, wide, pruning 97%", wide, [1], smooth, prune(0.97), ()),
        ("1 photo, wide, pruning 97%, attacker knows it", wide, [1], smooth, prune(0.97), ("defense",)),
    )
    for title, model, images, attack, defense, grants in cases:
        scenario = fp.Scenario(model=model, clients=[photos.batch(images)], defense=defense)
        yield f"small networks: {title}", psnr(attack, scenario, seed, *grants)


def dense_inversion_under_noise(seed: int) -> Iterator[tuple[str, float]]:
    photos = fp.data.load("photos", size=32)
    batch = photos.draw(8, torch.Generator().manual_seed(seed), unique_labels=True)
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=256, classes=10, seed=seed)
    for noise in NOISES:
        scenario = fp.Scenario(model=model, clients=[batch], defense=fp.chain(fp.defenses.GaussianNoise(noise)))
        yield f"dense inversion, noise {noise:g}", psnr(fp.attacks.dense_inversion(), scenario, seed)


def gradient_matching(seed: int) -> Iterator[tuple[str, float]]:
    """The photograph, the network and the start all follow the seed."""
    model = fp.models.build("lenet", input_shape=(3, 32, 32), classes=10, width=32, activation="relu", seed=seed)
    batch = fp.data.load("photos", size=32, crops=1).batch([seed])
    attack = dataclasses.replace(
        fp.attacks.inverting_gradients(), iterations=400, priors=(fp.attacks.TotalVariation(0.01),)
    )
    for ratio in (0.0, 0.9, 0.97):
        scenario = fp.Scenario(model=model, clients=[batch], defense=fp.chain(fp.defenses.Prune(ratio)))
        for known in ("labels",), ("labels", "defense"):
            if ratio or "defense" not in known:
                told = ", defense known" if "defense" in known else ""
                yield f"inverting gradients, pruning {ratio:.0%}{told}", psnr(attack, scenario, seed, *known)


STUDIES = {"dense": dense_inversion_under_noise, "matching": gradient_matching, "small": small_networks}


def psnr(attack: fp.attacks.Attack, scenario: fp.Scenario, seed: int, *grants: str) -> float:
    threat = fp.threats.honest_but_curious.granting(*grants)
    observation, truth = fp.simulate(scenario, threat, seed=seed, device="cpu")
    return fp.score(fp.run(attack, observation, seed=seed, device="cpu"), truth).mean("psnr")


def table(stored: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """Of each study the range over everything, and the largest range over CPUs for one seed."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for studies in stored.values():
        for study, seeds in studies.items():
            for seed, value in seeds.items():
                values[study][seed].append(value)
    yield "| attack | PSNR over seeds and CPUs, dB | largest change by rounding alone, dB |"
    yield "|---|---|---|"
    for study, seeds in values.items():
        every = [value for those in seeds.values() for value in those]
        change = max(max(those) - min(those) for those in seeds.values())
        yield f"| {study} | {min(every):.0f} to {max(every):.0f} | {change:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cpu", help="what this CPU computes as: this, avx2 or sse41")
    parser.add_argument("studies", nargs="*", default=list(STUDIES), metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    studies: dict[str, dict[str, float]] = defaultdict(dict)
    for seed in SEEDS:
        for study in args.studies:
            for name, value in STUDIES[study](seed):
                studies[name][str(seed)] = round(value, 2)
                print(f"{args.cpu}, seed {seed}, {name}: {value:.1f} dB", flush=True)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stored.setdefault(args.cpu, {}).update(studies)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    print("\n".join(table(stored)))


if __name__ == "__main__":
    main()

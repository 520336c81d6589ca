"""How often `inspect` finds tampered models, and how often it accuses honest ones.

    python benchmarks/inspection.py -o benchmarks/results/inspection.json          about four minutes on one core
    python benchmarks/inspection.py --quick

Models are looked at as a client without model code sees them: their parameters alone. Honest ones are fresh, trained on
the embedded digits, pruned, quantised or half dead; those of the data folder, if there is one, are listed apart. So are
those whose training diverged; they are honest, and count as false alarms in the total.
Tampered ones come from MKOR, class fishing and imprint layers, plain and by servers that hide: noise on every weight,
in standard deviations of the layer's honest weights, and units in random order. `reads` is what such a server then
recovers of a batch of eight photographs, in dB, where the attack has a closed form; `untampered` is what the same
decoder gets from honest weights, below which a trap adds nothing. Thresholds were set while looking at seeds 0 and 1
and at the data folder: `--first-seed 100` looks at models that played no part in that.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.inspection import inspect
from fedprism.randomness import generator
from fedprism.tensors import TensorFile, write_tensors
from fedprism.types import Update

CLASSES = 10
PLAIN = ("noise 0", "trained before", "units in random order", "dump class")
NOISES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Cell(NamedTuple):
    """One group of models: what was done to them, and a function from a seed to such a model."""

    family: str
    variant: str
    make: Callable[[int], Update]


# --- networks --------------------------------------------------------------------------------------------------------


def chain(seed: int, widths: tuple[int, ...] = (16, 32, 64), *, norm: bool = False, bias: bool = True) -> nn.Module:
    """A narrow VGG for 3x32x32: convolutions with pools, and three dense layers."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=bias)]
            layers += [nn.BatchNorm2d(after)] if norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        side = 32 // 2 ** len(widths)
        layers += [nn.Flatten(), nn.Linear(widths[-1] * side * side, 128), nn.ReLU()]
        layers += [nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers)


def built(name: str, **settings: Any) -> Callable[[int], nn.Module]:
    return lambda seed: fp.models.build(name, seed=seed, **settings)


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "fc2": built("fc2", input_shape=(3, 32, 32), hidden=256, classes=CLASSES),
    "lenet": built("lenet", input_shape=(3, 32, 32), classes=CLASSES),
    "lenet relu": built("lenet", input_shape=(3, 32, 32), classes=CLASSES, activation="relu", width=16),
    "lenet pool": built("lenet", input_shape=(3, 32, 32), classes=CLASSES, downsample="pool", width=16),
    "lenet5": built("lenet5", input_shape=(3, 32, 32), classes=CLASSES),
    "chain": chain,
    "chain with batch norm": lambda seed: chain(seed, norm=True),
}
CHAINS = ("lenet pool", "lenet5", "chain")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# --- honest models ---------------------------------------------------------------------------------------------------


def initialised(name: str, how: Callable[[Tensor], Any]) -> Callable[[int], Update]:
    def make(seed: int) -> Update:
        model = NETWORKS[name](seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    how(parameter)
        return tensors(model)

    return make


def zero_head(seed: int) -> Update:
    params = tensors(chain(seed))
    last = [name for name, tensor in params.items() if tensor.dim() == 2][-1]
    return {name: torch.zeros_like(tensor) if name.startswith(last[:-6]) else tensor for name, tensor in params.items()}


def zero_scale(seed: int) -> Update:
    """The last batch norm of every block starts at zero, as residual networks often do."""
    params = tensors(fp.models.build("resnet18", classes=CLASSES, seed=seed))
    return {name: torch.zeros_like(t) if name.endswith("bn2.weight") else t for name, t in params.items()}


INITIALISATIONS: dict[str, Callable[[Tensor], Any]] = {
    "default": lambda p: None,
    "Kaiming normal": lambda p: nn.init.kaiming_normal_(p, mode="fan_out"),
    "Kaiming uniform": lambda p: nn.init.kaiming_uniform_(p, nonlinearity="relu"),
    "Xavier uniform": nn.init.xavier_uniform_,
    "Xavier normal": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "normal 0.02": lambda p: nn.init.normal_(p, std=0.02),
    "truncated normal": lambda p: nn.init.trunc_normal_(p, std=0.05),
    "uniform 0.5": lambda p: nn.init.uniform_(p, -0.5, 0.5),
}

TOO_FAST = "SGD, too fast"
TRAININGS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=2e-3),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3, weight_decay=0.1),
    "Adam, weight decay": lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, weight_decay=1e-3),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    TOO_FAST: lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9),
}
_TRAINED: dict[tuple[str, str, int], Update] = {}


@functools.cache
def digits() -> fp.Batch:
    """The embedded digits, in colour at 32x32 and in random order."""
    found = fp.data.load("digits", size=32)
    data = found.batch(torch.randperm(len(found), generator=generator(0, "digits")).tolist())
    return fp.Batch(data.inputs.expand(-1, 3, -1, -1), data.labels)


def trained(name: str, how: str, seed: int, steps: int) -> Update:
    """Trained on the embedded digits, in colour at 32x32."""
    key = (name, how, seed)
    if key not in _TRAINED:
        data = digits()
        model, rng = NETWORKS[name](seed).train(), torch.Generator().manual_seed(seed)
        optimizer = TRAININGS[how](model)
        for _ in range(steps):
            chosen = torch.randint(len(data), (32,), generator=rng)
            loss = F.cross_entropy(model(data.inputs[chosen]), data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _TRAINED[key] = tensors(model)
    return _TRAINED[key]


def pruned(params: Update, share: float, *, globally: bool) -> Update:
    """The smallest weights set to zero, of each layer or of all layers together."""
    weights = {name: t for name, t in params.items() if t.dim() > 1}
    together = torch.cat([t.abs().flatten() for t in weights.values()]).sort().values

    def cut(t: Tensor) -> Tensor:
        ranked = together if globally else t.abs().flatten().sort().values
        return torch.where(t.abs() > ranked[int(share * (len(ranked) - 1))], t, 0.0)

    return {name: cut(t) if name in weights else t for name, t in params.items()}


def without_units(params: Update, share: float, seed: int) -> Update:
    """Structured pruning: a share of the outputs of every layer but the last, with their biases."""
    weights = [name for name, t in params.items() if t.dim() > 1][:-1]
    out = dict(params)
    for name in weights:
        gone = torch.rand(len(params[name]), generator=generator(seed, name)) < share
        for part in (name, f"{name[:-6]}bias"):
            if part in params:
                kept = (~gone).view(-1, *[1] * (params[part].dim() - 1))
                out[part] = params[part] * kept
    return out


def quantised(params: Update, bits: int, *, by_row: bool) -> Update:
    """Weights rounded to 2**bits levels; one bit keeps signs."""

    def rounded(t: Tensor) -> Tensor:
        size = t.abs().flatten(1).amax(1) if by_row else t.abs().amax().expand(len(t))
        size = size.view(-1, *[1] * (t.dim() - 1)).clamp(min=1e-12)
        most = 2 ** (bits - 1) - 1
        return torch.where(t >= 0, size, -size) if bits == 1 else (t / size * most).round() / most * size

    return {name: rounded(t) if t.dim() > 1 else t for name, t in params.items()}


def with_dead_units(params: Update, share: float, seed: int) -> Update:
    """Units that no input reaches: their weights have decayed to almost nothing and their biases are negative."""
    out = dict(params)
    for name in [name for name, t in params.items() if t.dim() > 1][:-1]:
        dead = torch.rand(len(params[name]), generator=generator(seed, name)) < share
        out[name] = torch.where(dead.view(-1, *[1] * (params[name].dim() - 1)), 1e-6 * params[name], params[name])
        if f"{name[:-6]}bias" in params:
            bias = params[f"{name[:-6]}bias"]
            out[f"{name[:-6]}bias"] = torch.where(dead, -bias.abs() - 0.5, bias)
    return out


def honest(steps: int) -> Iterator[Cell]:
    for name in NETWORKS:
        for kind, how in INITIALISATIONS.items():
            yield Cell("fresh", f"{kind}, {name}", initialised(name, how))
    yield Cell("fresh", "head of zeros", zero_head)
    yield Cell("fresh", "without biases", lambda seed: tensors(chain(seed, bias=False)))
    for name in NETWORKS:
        for how in TRAININGS:
            family = "diverged" if how == TOO_FAST else "trained"
            yield Cell(family, f"{how}, {name}", lambda seed, n=name, h=how: trained(n, h, seed, steps))
    for name in ("fc2", "lenet relu", "lenet5", "chain"):
        base = lambda seed, n=name: trained(n, "Adam", seed, steps)  # noqa: E731
        for share in (0.5, 0.8, 0.9, 0.95):
            for where in (False, True):
                label = f"{share:.0%} {'of all' if where else 'of each layer'}, {name}"
                yield Cell("pruned", label, lambda s, b=base, p=share, g=where: pruned(b(s), p, globally=g))
        yield Cell("pruned", f"half of the units, {name}", lambda s, b=base: without_units(b(s), 0.5, s))
        for bits in (8, 4, 2, 1):
            for rows in (False, True):
                label = f"{bits} bits {'a row' if rows else 'a layer'}, {name}"
                yield Cell("quantised", label, lambda s, b=base, n=bits, r=rows: quantised(b(s), n, by_row=r))
        yield Cell("dead units", name, lambda s, b=base: with_dead_units(b(s), 0.3, s))


# --- tampered models -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hiding:
    """A server that adds noise to what its method sends, relative to the spread of each layer's honest weights."""

    attack: Any
    noise: float | None = 0.0
    """None sends the honest weights, for comparison; the trapdoor is kept all the same."""

    def tamper(self, model: nn.Module, params: Update, rng: torch.Generator) -> tuple[Update, dict[str, Tensor]]:
        sent, trapdoor = self.attack.tamper(model, params, rng)
        if self.noise is None:
            return params, trapdoor
        if self.noise:
            sent = {
                name: t + self.noise * params[name].std() * torch.randn(t.shape, generator=rng) if t.dim() > 1 else t
                for name, t in sent.items()
            }
        return sent, trapdoor


def permuted(params: Update, seed: int) -> Update:
    """The outputs of every layer but the last in random order; the inputs of the next go along where they fit."""
    out = dict(params)
    weights = [name for name, t in params.items() if t.dim() > 1]
    for name, following in pairwise(weights):
        order = torch.randperm(len(out[name]), generator=generator(seed, name))
        for part in (name, f"{name[:-6]}bias"):
            if part in out:
                out[part] = out[part][order]
        columns = out[following].unflatten(1, (len(order), -1))
        out[following] = columns[:, order].flatten(1, 2)
    return out


def tampered_by(attack: Any, name: str, *, noise: float = 0.0, steps: int = 0) -> Callable[[int], Update]:
    def make(seed: int) -> Update:
        model = NETWORKS[name](seed)
        if steps:
            model.load_state_dict(trained(name, "Adam", seed, steps))
        params = dict(model.named_parameters())
        sent, _ = Hiding(attack, noise).tamper(model, {n: p.detach() for n, p in params.items()}, generator(seed))
        return sent

    return make


ATTACKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "mkor": (fp.attacks.mkor, CHAINS),
    "mkor-inconspicuous": (fp.attacks.mkor_inconspicuous, CHAINS),
    "imprint": (fp.attacks.imprint, ("fc2",)),
    "class-fishing": (fp.attacks.class_fishing, ("fc2", "lenet", "lenet5", "chain with batch norm")),
}


def tampered(steps: int) -> Iterator[Cell]:
    for family, (make, networks) in ATTACKS.items():
        for noise in NOISES:
            for name in networks:
                yield Cell(family, f"noise {noise:g}", tampered_by(make(), name, noise=noise))
        for name in networks:
            yield Cell(family, "trained before", tampered_by(make(), name, steps=steps))
            if family != "class-fishing":
                plain = tampered_by(make(), name)
                yield Cell(family, "units in random order", lambda seed, p=plain: permuted(p(seed), seed))
    for bias in (30.0, 10.0, 5.0, 2.0):
        for noise in (0.0, 0.1, 0.3):
            for name in ("lenet5", "fc2"):
                attack = dataclasses.replace(fp.attacks.class_fishing(), bias=bias, target=4)
                label = f"bias {bias:g}, noise {noise:g}"
                yield Cell("class-fishing", label, tampered_by(attack, name, noise=noise))
    dump = dataclasses.replace(fp.attacks.mkor(), reference=fp.attacks.Reference.DUMP_CLASS)
    for name in CHAINS:
        yield Cell("mkor", "dump class", tampered_by(dump, name))


# --- counting --------------------------------------------------------------------------------------------------------


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
        scenario = fp.Scenario(model=NETWORKS[name](seed), clients=[batch])
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
    for bias in (1000.0, 5.0, 2.0):
        attack = fp.attacks.ClassFishing(target=4, bias=bias, matching=fp.attacks.dense_inversion())
        rows[f"class-fishing, bias {bias:g}, fc2"] = [reading(attack, "fc2", noise, seeds) for noise in (0.0, 0.1, 0.3)]
    return rows


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


def large(folder: Path) -> list[dict[str, Any]]:
    """VGG-16 with its 138 million parameters, as files: what is found, and how long that takes."""
    rows = []
    for name, attack in {"honest": None, "mkor": fp.attacks.mkor(), "hidden": fp.attacks.mkor_inconspicuous()}.items():
        model = fp.models.build("vgg16", classes=100, seed=0)
        params = tensors(model)
        path = folder / "vgg16.safetensors"
        write_tensors(path, params if attack is None else attack.tamper(model, params, generator(0))[0])
        start = time.perf_counter()
        checks = sorted({finding.check for finding in inspect(TensorFile(path)).serious})
        rows.append({"model": name, "serious": checks, "seconds": round(time.perf_counter() - start, 1)})
        path.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=2, help="of honest models")
    parser.add_argument("--tampered-seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--honest-only", action="store_true")
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--quick", action="store_true", help="one seed, little training, some of the cells")
    parser.add_argument("--vgg16", action="store_true", help="also VGG-16 itself: 2 GB of memory")
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    if options.honest_only:
        rows = counted(honest(options.steps), options.seeds, options.first_seed)
        result: dict[str, Any] = {"first_seed": options.first_seed, "totals": totals(rows, []), "honest": rows}
    else:
        result = quick() if options.quick else measure(options.seeds, options.tampered_seeds, options.steps)
    if options.vgg16:
        with tempfile.TemporaryDirectory() as folder:
            result["vgg16"] = large(Path(folder))
    print(json.dumps(result["totals"], indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def quick() -> dict[str, Any]:
    """Every eighth cell: under ten seconds."""
    clean = counted(islice(honest(2), 0, None, 8), 1)
    return {"totals": totals(clean, counted(islice(tampered(2), 0, None, 8), 1))}


def measure(seeds: int, tampered_seeds: int, steps: int) -> dict[str, Any]:
    clean, traps = counted(honest(steps), seeds), counted(tampered(steps), tampered_seeds)
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "seeds": {"honest": seeds, "tampered": tampered_seeds},
        "steps": steps,
        "totals": totals(clean, traps),
        "honest": clean,
        "tampered": traps,
        "reads": readings(tampered_seeds),
        "with code": with_code(seeds, steps),
        "data folder": real_models(),
    }


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

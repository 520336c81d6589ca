"""What `inspection.py` looks at: honest models of many kinds, and those of servers that set traps and hide them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.randomness import generator
from fedprism.types import Update

CLASSES = 10
NOISES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BIASES, FISHING_NOISES = (30.0, 10.0, 5.0, 2.0, 1.0), (0.0, 0.1, 0.3, 0.5)
FEW_BIASES = (1000.0, 30.0, 5.0, 1.0)
"""Of class fishing that hides: small biases, and damped rows instead of empty ones."""


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
MANY: dict[str, Callable[[int], nn.Module]] = {
    f"{name}, {classes} classes": built(name, input_shape=(3, 32, 32), classes=classes, **settings)
    for name, settings in (("fc2", {"hidden": 256}), ("lenet5", {}))
    for classes in (100, 1000)
}
"""Networks for many more classes than there are digits."""
FEW = {
    f"fc2, {classes} classes": built("fc2", input_shape=(3, 32, 32), hidden=256, classes=classes) for classes in (2, 3)
}
GREY = "fc2, 28 x 28"
OTHERS = {
    "wide chain": lambda seed: chain(seed, (16, 32, 128)),
    "resnet18": built("resnet18", classes=CLASSES),
    GREY: built("fc2", input_shape=(1, 28, 28), hidden=128, classes=CLASSES),
}
EVERY = NETWORKS | MANY | FEW | OTHERS


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


@functools.cache
def digits() -> fp.Batch:
    """The embedded digits, in colour at 32x32 and in random order."""
    found = fp.data.load("digits", size=32)
    data = found.batch(torch.randperm(len(found), generator=generator(0, "digits")).tolist())
    return fp.Batch(data.inputs.expand(-1, 3, -1, -1), data.labels)


@functools.cache
def trained(name: str, how: str, seed: int, steps: int) -> Update:
    """Trained on the embedded digits, in colour at 32x32. More steps go on from where fewer end."""
    data = digits()
    model, rng = NETWORKS[name](seed).train(), torch.Generator().manual_seed(seed)
    train(model, how, steps, lambda: data[torch.randint(len(data), (32,), generator=rng)])
    return tensors(model)


def train(model: nn.Module, how: str, steps: int, draw: Callable[[], fp.Batch]) -> None:
    optimizer = TRAININGS[how](model)
    for _ in range(steps):
        batch = draw()
        loss = F.cross_entropy(model(batch.inputs), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def resnet18(seed: int, *, steps: int = 20) -> Update:
    """ResNet-18, trained on the embedded photographs, 16 at a time, for as long as a benchmark can wait."""
    photos, rng = fp.data.load("photos", size=32, crops=16), generator(seed, "resnet18")
    model = OTHERS["resnet18"](seed).train()
    train(model, "SGD", steps, lambda: photos.draw(16, rng))
    return tensors(model)


LABELS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "ten classes of all": lambda labels, classes, rng: labels,
    "all classes": lambda labels, classes, rng: (
        labels * (classes // 10) + torch.randint(classes // 10, labels.shape, generator=rng)
    ),
    "one class in nine of ten": lambda labels, classes, rng: labels * (torch.rand(labels.shape, generator=rng) > 0.9),
}


def of_many(name: str, how: str, which: str, seed: int, steps: int) -> Update:
    """Trained on digits that are given some of many classes' labels."""
    data, model, rng = digits(), MANY[name](seed).train(), generator(seed, which)
    with torch.no_grad():
        classes = model(data.inputs[:2]).shape[1]

    def draw() -> fp.Batch:
        batch = data[torch.randint(len(data), (32,), generator=rng)]
        return fp.Batch(batch.inputs, LABELS[which](batch.labels, classes, rng))

    train(model, how, steps, draw)
    return tensors(model)


def fused(seed: int, *, steps: int, dense: bool) -> Update:
    """Batch norm, trained and then made part of the layer before it: biases that no training sets by itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = chain(seed, norm=True)
        if dense:
            hidden = [nn.Linear(3072, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128)]
            model = nn.Sequential(nn.Flatten(), *hidden, nn.ReLU(), nn.Linear(128, CLASSES))
    data, rng = digits(), generator(seed, "fused")
    train(model.train(), "SGD", steps, lambda: data[torch.randint(len(data), (32,), generator=rng)])
    layers = list(model)
    kept: dict[str, Tensor] = {}
    for number, (layer, norm) in enumerate(pairwise([*layers, nn.Identity()])):
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        weight, bias = layer.weight.detach(), layer.bias.detach()
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            gain = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
            weight = weight * gain.view(-1, *[1] * (weight.dim() - 1))
            bias = (bias - norm.running_mean) * gain + norm.bias.detach()
        kept |= {f"{number}.weight": weight, f"{number}.bias": bias}
    return kept


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
    for name, make in (MANY | FEW | OTHERS).items():
        yield Cell("fresh", f"default, {name}", lambda seed, m=make: tensors(m(seed)))
    yield Cell("fresh", "last norms of zeros, resnet18", zero_scale)
    yield Cell("trained", "SGD, resnet18", resnet18)
    for name, how, which in product(MANY, ("Adam", "SGD"), LABELS):
        make = lambda seed, n=name, h=how, w=which: of_many(n, h, w, seed, steps)  # noqa: E731
        yield Cell("of many classes", f"{how}, {name}, {which}", make)
    for dense in (False, True):
        label = "dense layers" if dense else "convolutions"
        yield Cell("fused batch norm", label, lambda seed, d=dense: fused(seed, steps=steps, dense=d))
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
        model = EVERY[name](seed)
        if steps:
            model.load_state_dict(trained(name, "Adam", seed, steps))
        params = dict(model.named_parameters())
        sent, _ = Hiding(attack, noise).tamper(model, {n: p.detach() for n, p in params.items()}, generator(seed))
        return sent

    return make


def equation_20() -> fp.attacks.Mkor:
    """MKOR's convolutions by the paper's equation 20 to the letter, which needs a dump class."""
    disguise = fp.attacks.Disguise(beta=3.0, untouched=True)
    return fp.attacks.Mkor(reference=fp.attacks.Reference.DUMP_CLASS, disguise=disguise)


ATTACKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "mkor": (fp.attacks.mkor, CHAINS),
    "mkor-inconspicuous": (fp.attacks.mkor_inconspicuous, CHAINS),
    "mkor, equation 20": (equation_20, CHAINS),
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
    for bias, noise, name in product(BIASES, FISHING_NOISES, ("lenet5", "fc2")):
        attack = fp.attacks.ClassFishing(bias=bias, target=4)
        yield Cell("class-fishing", f"bias {bias:g}, noise {noise:g}", tampered_by(attack, name, noise=noise))
    for noise, name in product(FISHING_NOISES, MANY):
        attack = fp.attacks.ClassFishing(bias=0.01, target=4)
        yield Cell("class-fishing", f"of many, noise {noise:g}", tampered_by(attack, name, noise=noise))
    for bias, name in product(FEW_BIASES, FEW):
        yield Cell("class-fishing", "of few", tampered_by(fp.attacks.ClassFishing(bias=bias, target=1), name))
    for noise in NOISES:
        yield Cell("imprint", f"28 x 28, noise {noise:g}", tampered_by(fp.attacks.imprint(), GREY, noise=noise))
    blurred = fp.attacks.Mkor(blurred=True)
    for noise in NOISES:
        yield Cell("mkor", f"spare channels, noise {noise:g}", tampered_by(blurred, "wide chain", noise=noise))
    dump = fp.attacks.Mkor(reference=fp.attacks.Reference.DUMP_CLASS)
    for name in CHAINS:
        yield Cell("mkor", "dump class", tampered_by(dump, name))

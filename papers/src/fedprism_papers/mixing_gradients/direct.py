"""Direct inversion of a dense layer: what the loss, the labels of a batch and noise on the gradient leave to read off.

Eloul et al., "Enhancing Privacy against Inversion Attacks in Federated Learning by using Mixing Gradients Strategies",
2022, figures 1 to 3. Beside the paper's division of each row by its bias gradient stands the one that first subtracts
the row of a class that is absent from the batch.

Differs from the paper in: the layer is also attacked with the weights that PyTorch gives it. The paper's, uniform on
[-0.5, 0.5], make outputs so large that the softmax of a photograph is nearly 0 or 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.defenses import GaussianNoise
from fedprism.metrics import psnr
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism.solvers.closed_form.dense import absent_class, invert_dense
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings
from fedprism_papers.shared.cells import by_metric
from fedprism_papers.shared.charts import histograms, page

LOSSES = {"cross-entropy": "cross_entropy", "softmax + MSE": "softmax_mse", "raw MSE": "mse"}
UNIQUE, RANDOM, EQUAL = "unique", "random", "equal"
PUBLISHED, COMMON = "uniform to 0.5", "PyTorch's"
SIZES, QUICK_SIZES = (1, 2, 4, 8, 16, 32, 64), (2, 8)  # images per batch
NOISES, TYPICAL_SIZE = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1), 8
"""Standard deviations of the noise, and the size of the batches that get it and whose errors are drawn."""
DRAWN_NOISE = 1e-2
"""What the paper says noise has to exceed; a quick run has no other."""
BATCHES, QUICK_BATCHES = 10, 2  # per cell
ERROR, GOOD, ANSWERED = "error", "over 25 dB", "answered"
GOOD_PSNR = 25.0  # decibels above which an image is plainly recognised
SIDE, QUICK_SIDE = 32, 16  # pixels
LEAST, MOST, BINS = -8, 2, 20
"""Powers of ten that the histogram of errors spans, and its bars."""
HISTOGRAM = "pixels by power of ten of their error"
DIVIDED, REFERRED, MEAN = "divided", "less an absent row", "mean of the batch"
READING = (
    f"{ERROR}: the median over a batch's images of their mean absolute pixel error, pixels from 0 to 1, estimates cut "
    f"to that range; {GOOD}: the fraction of images with a PSNR above that. Both are means over the batches. {MEAN}: "
    "the error of answering with the batch's mean image, which no mixing hides."
)
ROWS = (
    "Every image is answered with the row of its class: the attacker is told the labels. Images of a class that occurs "
    f"several times share a row. Batches in which no class is absent do not count towards '{REFERRED}'."
)
SETTING = (
    f"weights: {PUBLISHED} as in the paper, or {COMMON} own, which are smaller, the more pixels there are. noise: "
    "standard deviation of what is added to every entry of the gradient. Squared errors are means over classes, so "
    "that their gradients are smaller and the same noise hurts them more."
)
DATA = (
    "Ten classes: MNIST, a hundred: CIFAR-100, 5,749: faces of LFW and, since ten faces a person do not fill larger "
    "batches of equal labels, CIFAR-100 too; a quick run: photographs. Data sets with fewer classes than outputs are "
    "spread over all outputs at random. A batch that the data has not enough images for is left out. The paper shows "
    f"histograms without numbers; those of all rows are in results.json, those of batches of {TYPICAL_SIZE}, without "
    f"noise and with {DRAWN_NOISE}, in the figure."
)


def uniform_(model: nn.Module, rng: torch.Generator) -> nn.Module:
    """The paper's weights, uniform on [-0.5, 0.5]."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng) - 0.5)
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """What is attacked: one dense layer of `classes` outputs on the images of a data set."""

    data: fp.data.ImageSet
    classes: int

    def model(self, weights: str, seed: int) -> nn.Module:
        model = fp.models.build("dense", input_shape=self.data.images.shape[1:], classes=self.classes, seed=seed)
        if weights == PUBLISHED:
            uniform_(model, generator(seed, "uniform weights", self.classes))
        return model

    def draw(self, size: int, labels: str, rng: torch.Generator) -> fp.Batch | None:
        """A batch with such labels, or None where the data set has none. Its classes are spread over all outputs."""
        counts = torch.bincount(self.data.labels, minlength=self.data.classes)
        if labels == EQUAL:
            enough = (counts >= size).nonzero().flatten()
            if not len(enough):
                return None
            chosen = enough[torch.randint(len(enough), (), generator=rng)]
            members = (self.data.labels == chosen).nonzero().flatten()
            batch = self.data.batch(members[torch.randperm(len(members), generator=rng)[:size]])
        elif labels == UNIQUE and size > int((counts > 0).sum()):
            return None
        else:
            batch = self.data.draw(size, rng, unique_labels=labels == UNIQUE)
        outputs = torch.randperm(self.classes, generator=rng)[: self.data.classes]
        return fp.Batch(batch.inputs, outputs[batch.labels])


@dataclass(frozen=True, kw_only=True)
class Case:
    weights: str
    size: int
    labels: str
    noise: float = 0.0


def layers(settings: Settings) -> Iterator[Layer]:
    """Ten classes of digits, a hundred of photographs, and as many as there are people in Labeled Faces in the Wild."""
    if settings.quick:
        photos = fp.data.load("photos", size=QUICK_SIDE)
        yield from (Layer(data=photos, classes=classes) for classes in (10, 100))
        return
    folder = settings.data_dir
    yield Layer(data=fp.data.load("mnist", split="test", data_dir=folder), classes=10)
    photographs = fp.data.load("cifar100", split="test", data_dir=folder)
    yield Layer(data=photographs, classes=100)
    yield Layer(data=fp.data.load("lfw", size=SIDE, data_dir=folder), classes=5749)
    yield Layer(data=photographs, classes=5749)


def cases(settings: Settings) -> Iterator[Case]:
    sizes = settings.sizes_or(SIZES, QUICK_SIZES)
    typical = TYPICAL_SIZE if TYPICAL_SIZE in sizes else sizes[-1]
    noises = (DRAWN_NOISE,) if settings.quick else NOISES
    for weights in (PUBLISHED, COMMON):
        for labels in (UNIQUE, RANDOM, EQUAL):
            yield from (Case(weights=weights, size=size, labels=labels) for size in sizes)
            yield from (Case(weights=weights, size=typical, labels=labels, noise=noise) for noise in noises)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for layer in layers(settings):
        for case in cases(settings):
            yield from play(layer, case, settings, announce)


def play(layer: Layer, case: Case, settings: Settings, announce: Announce) -> list[Row]:
    """One line for each loss, all on the same batches; none where the data set has no such batch."""
    cell: dict[str, str | int | float] = {
        "data": layer.data.name,
        "classes": layer.classes,
        "weights": case.weights,
        "labels": case.labels,
        "batch": case.size,
        "noise": case.noise or "none",
    }
    if not settings.wants_any({**cell, "loss": loss} for loss in LOSSES):
        return []
    trials = settings.batches_or(BATCHES, QUICK_BATCHES)
    means: list[float] = []
    read: dict[str, dict[str, list[Reading]]] = {loss: {DIVIDED: [], REFERRED: []} for loss in LOSSES}
    for number in range(trials):
        rng = generator(settings.seed, "direct", layer.classes, case.size, case.labels, number)
        batch = layer.draw(case.size, case.labels, rng)
        if batch is None:
            return []
        announce(f"{layer.classes} classes, {case.labels} labels, batch of {case.size}, {number + 1} of {trials}")
        means.append(_score(batch.tensor.mean(0, keepdim=True).expand_as(batch.tensor), batch.tensor)[ERROR])
        model = layer.model(case.weights, settings.seed + number)
        for name, loss in LOSSES.items():
            weight_grad, bias_grad = _gradient(model, batch, loss, case.noise, settings, number)
            read[name][DIVIDED].append(reading(weight_grad, bias_grad, batch, None))
            reference = absent_class(bias_grad, batch.labels)
            if reference is not None:
                read[name][REFERRED].append(reading(weight_grad, bias_grad, batch, reference))
    mean = sum(means) / len(means)
    return [
        Row(
            cell={**cell, "loss": name},
            entries={MEAN: mean, **{way: _outcome(readings) if readings else None for way, readings in ways.items()}},
        )
        for name, ways in read.items()
    ]


def _gradient(
    model: nn.Module, batch: fp.Batch, loss: str, noise: float, settings: Settings, number: int
) -> tuple[Tensor, Tensor]:
    """What the server sees of the layer: the gradients of its weight and of its bias."""
    scenario = fp.Scenario(
        model=model, clients=[batch], loss=loss, defense=GaussianNoise(noise) if noise else fp.chain()
    )
    observed, _ = fp.simulate(
        scenario, fp.threats.honest_but_curious, seed=settings.seed + number, device=settings.device
    )
    weight_grad, bias_grad = observed.rounds[0].update.values()
    place = devices.pick(settings.device)
    return weight_grad.to(place), bias_grad.to(place)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one inversion of one batch gave. counts (BINS,): how many pixels have an error of each size."""

    values: dict[str, float]
    counts: Tensor
    seconds: float


def reading(weight_grad: Tensor, bias_grad: Tensor, batch: fp.Batch, reference: int | None) -> Reading:
    """Every sample is answered with the row of its class; that of a class not invertible is no answer."""
    present = torch.unique(batch.labels).to(bias_grad.device)
    start = time.perf_counter()
    rows = present if reference is None else torch.cat([present, present.new_tensor([reference])])
    inversion = invert_dense(weight_grad[rows], bias_grad[rows], reference=None if reference is None else len(rows) - 1)
    inputs, classes = inversion.inputs.cpu(), rows[inversion.rows].cpu()
    seconds = time.perf_counter() - start
    of_class = batch.labels.unsqueeze(1) == classes
    answered = of_class.any(1)
    estimates = inputs[of_class[answered].int().argmax(1)].view(-1, *batch.tensor.shape[1:])
    originals = batch.tensor[answered].double()
    exponents = (estimates - originals).abs().clamp(10.0**LEAST, 10.0**MOST).log10()
    values = _score(estimates, originals)
    values[GOOD] *= float(answered.double().mean())
    return Reading(
        values={**values, ANSWERED: float(answered.double().mean())},
        counts=torch.histc(exponents, bins=BINS, min=LEAST, max=MOST).long(),
        seconds=seconds,
    )


def _score(estimates: Tensor, originals: Tensor) -> dict[str, float]:
    """Of estimates in the range of pixels: the median of the images' mean absolute errors, and the fraction of good."""
    if not len(estimates):
        return {ERROR: math.nan, GOOD: 0.0}
    shown = estimates.clamp(0, 1)
    error = (shown - originals).abs().flatten(1).mean(1).quantile(0.5)
    return {ERROR: float(error), GOOD: float((psnr(shown, originals) > GOOD_PSNR).double().mean())}


def _outcome(readings: Sequence[Reading]) -> Measured:
    values = by_metric([reading.values for reading in readings])
    counts = torch.stack([reading.counts for reading in readings]).sum(0)
    return Measured(
        values={**values, ERROR: tuple(error for error in values[ERROR] if not math.isnan(error))},
        seconds=tuple(reading.seconds for reading in readings),
        details={HISTOGRAM: counts.tolist(), "from": LEAST, "to": MOST},
    )


def figure(rows: Sequence[Row]) -> str:
    """Figures 1 to 3: how far pixels are off, by loss, for batches of one size, without noise and with some."""
    sizes = {int(row.cell["batch"]) for row in rows}
    typical = TYPICAL_SIZE if TYPICAL_SIZE in sizes else max(sizes, default=0)
    drawn = []
    for noise, words in (("none", ""), (DRAWN_NOISE, f", noise of {DRAWN_NOISE}")):
        for weights in (COMMON, PUBLISHED):
            panels: dict[str, dict[str, list[float]]] = {}
            for row in rows:
                if (row.cell["weights"], row.cell["batch"], row.cell["noise"]) != (weights, typical, noise):
                    continue
                name = f"{row.cell['data']}, {row.cell['classes']} classes, {row.cell['labels']}"
                for way in (DIVIDED, REFERRED):
                    entry = row.entries[way]
                    if isinstance(entry, Measured):
                        panels.setdefault(name, {})[f"{row.cell['loss']}, {way}"] = _shares(entry)
            title = f"Errors of pixels, batches of {typical}, weights: {weights}{words}"
            axis = "power of ten of a pixel's error; upwards: fraction of the pixels"
            drawn.append(histograms(title, panels, ends=(LEAST, MOST), x=axis, columns=3))
    return page(drawn)


def _shares(entry: Measured) -> list[float]:
    counts = entry.details[HISTOGRAM]
    assert isinstance(counts, list)
    return [count / max(1, sum(counts)) for count in counts]


RECIPE = Recipe(
    name="mixing-direct",
    summary="Direct inversion of one dense layer: three losses, unique, random and equal labels, noise on the gradient",
    citation="Eloul et al., Mixing Gradients Strategies, 2022, figures 1 to 3",
    shown=(ERROR, GOOD),
    run=run,
    options=("sizes", "batches", "only"),
    figure=figure,
    notes=(READING, ROWS, SETTING, DATA),
)

"""Who is attacked: a network, the images whose owners train on them, and how pixels become the network's inputs.

`quick` victims need no data folder: crops of the embedded photographs and small networks that train within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import fedprism as fp
from fedprism.data.ondisk import ENVIRONMENT
from fedprism.errors import BadInput
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices
from fedprism.utility import Augmentation
from fedprism_papers.shared import training
from fedprism_papers.shared.base import Settings

CIFAR: Normalization = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))  # mean and std of each colour
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of each colour, torchvision's

WIDTH = 256
"""Units of FC-2's hidden layer."""
HELD_OUT = 5
"""Images of each Tiny-ImageNet class that are attacked; the network is trained on the others."""
CLIENT_IMAGES = 128
"""The most images of 224 x 224 that one client puts through VGG-16 at once: more need more memory than a GPU has."""
VGG_FILE = "vgg16_features_fp16.safetensors"
CHANNELS, QUICK_CHANNELS = 512, 32  # behind the last convolution
QUICK_EPOCHS = 2  # of a quick victim's training
QUICK_CROPS = 48  # per photograph
QUICK_HELD_OUT = 16  # crops per photograph that are attacked
MOST_MEASURED = 200_000  # outputs of a channel that decide its threshold
QUICK_ACTIVE = 0.15  # part of the outputs that get through the ReLU of a quick victim


@dataclass(frozen=True, kw_only=True, eq=False)
class Victim:
    """A network, the images to draw batches from, and how many one client holds at most."""

    name: str
    model: nn.Module
    images: fp.data.ImageSet
    normalization: Normalization
    note: str
    client_images: int | None = None
    maker: Maker | None = None
    """Of a large victim, which is made anew, once, in every process that works on it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return super().__reduce_ex__(protocol) if self.maker is None else (_made, (self.maker,))

    def __repr__(self) -> str:
        """Says which victim it is."""
        if self.maker is None:
            return f"Victim(name={self.name!r}, note={self.note!r})"
        make, _, further = self.maker
        return f"{make.__name__}({', '.join(f'{name}={value}' for name, value in further)})"

    def draw(self, size: int, rng: torch.Generator) -> fp.Batch:
        """A batch of different images; where there are too few, the rest are mirror images of the first ones."""
        most = len(self.images)
        if size > 2 * most:
            raise BadInput(
                f"batches can hold at most {2 * most} images of {self.name}, not {size}. Ask for smaller ones."
            )
        batch = self.images.draw(min(size, most), rng)
        more = batch[: size - len(batch)]
        inputs = torch.cat([batch.tensor, more.tensor.flip(3)])
        return fp.Batch(to_inputs(inputs, self.normalization), torch.cat([batch.labels, more.labels]))

    def drawn(self, size: int, rng: torch.Generator) -> Tensor:
        """Numbers of the images in the batch that `draw` makes of the same size and generator."""
        return torch.randperm(len(self.images), generator=rng)[:size]

    @property
    def dense_layer(self) -> str:
        """Name of the first dense layer."""
        name: str = next(name for name, module in self.model.named_modules() if isinstance(module, nn.Linear))
        return name

    @property
    def features(self) -> int:
        """How many numbers the first dense layer is fed."""
        layer = self.model.get_submodule(self.dense_layer)
        assert isinstance(layer, nn.Linear)
        return layer.in_features

    def embed(self, inputs: Tensor, device: str | None = None) -> Tensor:
        """What the network's first dense layer is fed for these inputs, (batch, features)."""
        place, fed = devices.pick(device), list[Tensor]()
        model = self.model.to(place).eval()
        first = model.get_submodule(self.dense_layer)
        hook = first.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].detach().cpu()))
        try:
            with torch.no_grad():
                for part in torch.split(inputs, CLIENT_IMAGES):
                    model(part.to(place))
        finally:
            hook.remove()
            self.model.cpu().train()
        return torch.cat(fed)


def equal_parts(batch: fp.Batch, most: int | None) -> list[fp.Batch]:
    """As few equal parts as have at most so many images each: the mean of their gradients is the batch's gradient."""
    parts = -(-len(batch) // (most or len(batch)))
    while len(batch) % parts:
        parts += 1
    return [batch[chosen] for chosen in torch.arange(len(batch)).chunk(parts)]


Maker: TypeAlias = "tuple[Callable[..., Victim], Settings, tuple[tuple[str, object], ...]]"


@lru_cache(maxsize=4)
def _made(maker: Maker) -> Victim:
    make, settings, further = maker
    return make(settings, **dict(further))


def fc2_cifar10(settings: Settings) -> Victim:
    """FC-2 trained on CIFAR-10's training images; test images are attacked."""
    train, test, normalization = _cifar10(settings)
    return _trained_fc2(settings, "CIFAR-10", train, test, training.shifted, normalization)


def fc2_tiny_imagenet(settings: Settings) -> Victim:
    """FC-2 trained on Tiny-ImageNet's validation images but the last five of each class, which are attacked."""
    images = fp.data.load("tiny-imagenet", split="test", data_dir=settings.data_dir)
    train, held_out = _held_out(images, HELD_OUT)
    return _trained_fc2(settings, "Tiny-ImageNet", train, held_out, training.zoomed, IMAGENET)


def fc2_photos(settings: Settings) -> Victim:
    """The quick stand-in: FC-2 trained for a moment on crops of the embedded photographs."""
    train, held_out, normalization = _held_out_photos()
    return _trained_fc2(settings, "photos", train, held_out, training.shifted, normalization, epochs=QUICK_EPOCHS)


def vgg16_imagenet(settings: Settings, *, pool: int = 7, frozen: bool = False) -> Victim:
    """VGG-16 with ImageNet's convolutions, averaged to `pool` x `pool` (7 as published), and untrained dense layers."""
    images = fp.data.load("imagenet", split="test", data_dir=settings.data_dir)
    model = fp.models.build("vgg16", classes=1000, dropout=0.0, seed=settings.seed)
    convolutions = model.get_submodule("features")
    _load_vgg(convolutions, settings)
    if pool != 7:
        model = _repooled(model, pool, settings.seed)
    if frozen:
        convolutions.requires_grad_(False)
    note = (
        f"VGG-16: convolutions trained on ImageNet{', frozen' if frozen else ''}, dense layers fresh (seeded), no "
        f"dropout, {CHANNELS * pool * pool:,} features; {len(images):,} photographs of ImageNet."
    )
    return Victim(
        name="ImageNet",
        model=model,
        images=images,
        normalization=IMAGENET,
        note=note,
        client_images=CLIENT_IMAGES,
        maker=(vgg16_imagenet, settings, (("pool", pool), ("frozen", frozen))),
    )


def cnn_photos(settings: Settings, *, pool: int = 8, frozen: bool = False) -> Victim:
    """The quick stand-in for VGG-16: two convolutions and two dense layers, untrained, on the embedded photographs."""
    images = fp.data.load("photos", size=32, crops=QUICK_HELD_OUT)
    model = _small_cnn(_everything(images), IMAGENET, settings, pool, WIDTH, QUICK_ACTIVE)
    if frozen:
        model[0].requires_grad_(False)
    note = (
        f"Quick: a small untrained convolutional network{', convolutions frozen,' if frozen else ''} with "
        f"{QUICK_CHANNELS * pool * pool:,} features, its thresholds set so that {QUICK_ACTIVE:.0%} of the outputs are "
        f"above zero as in VGG-16; {len(images)} crops of the embedded photographs."
    )
    return Victim(
        name="photos",
        model=model,
        images=images,
        normalization=IMAGENET,
        note=note,
        maker=(cnn_photos, settings, (("pool", pool), ("frozen", frozen))),
    )


def trained_cnn(settings: Settings, *, width: int, active: float, pool: int) -> Victim:
    """Two convolutions and two dense layers, all trained; before, thresholds let so many of the features through."""
    train, attacked, normalization = _held_out_photos() if settings.quick else _cifar10(settings)
    everything = _everything(train)
    epochs = QUICK_EPOCHS if settings.quick else training.EPOCHS
    model = training.train(
        _small_cnn(everything, normalization, settings, pool, width, active),
        everything,
        augment=training.shifted,
        normalization=normalization,
        epochs=epochs,
        seed=settings.seed,
        device=settings.device,
    )
    note = (
        f"{train.name}: networks of two convolutions and two dense layers, trained for {epochs} epochs on "
        f"{len(train):,} images; batches are drawn from {len(attacked):,} others."
    )
    return Victim(name=train.name, model=model, images=attacked, normalization=normalization, note=note)


def _small_cnn(
    data: fp.Batch, normalization: Normalization, settings: Settings, pool: int, width: int, active: float
) -> nn.Sequential:
    """A network of two convolutions, of which so many outputs are above zero on these images, and a dense head."""
    with seeded_layers(generator(settings.seed, "network")):
        convolutions = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, QUICK_CHANNELS, 3, stride=2, padding=1), nn.ReLU()),
        )
        classes = int(data.labels.max()) + 1
        dense = nn.Sequential(
            nn.Flatten(), nn.Linear(QUICK_CHANNELS * pool * pool, width), nn.ReLU(), nn.Linear(width, classes)
        )
    _make_sparse(convolutions, to_inputs(data.tensor, normalization), active)
    return nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(pool), dense)


def _cifar10(settings: Settings) -> tuple[fp.data.ImageSet, fp.data.ImageSet, Normalization]:
    train, test = (fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("train", "test"))
    return train, test, CIFAR


def _held_out_photos() -> tuple[fp.data.ImageSet, fp.data.ImageSet, Normalization]:
    return *_held_out(fp.data.load("photos", size=32, crops=QUICK_CROPS), QUICK_HELD_OUT), IMAGENET


def _trained_fc2(
    settings: Settings,
    name: str,
    train: fp.data.ImageSet,
    attacked: fp.data.ImageSet,
    augment: Augmentation,
    normalization: Normalization,
    *,
    epochs: int = training.EPOCHS,
) -> Victim:
    shape = tuple(train.images.shape[1:])
    model = fp.models.build("fc2", input_shape=shape, hidden=WIDTH, classes=train.classes, seed=settings.seed)
    model = training.train(
        model,
        _everything(train),
        augment=augment,
        normalization=normalization,
        epochs=epochs,
        seed=settings.seed,
        device=settings.device,
    )
    right = training.accuracy(model, _everything(attacked), normalization, settings.device)
    note = (
        f"{'Quick, ' if settings.quick else ''}{name}: FC-2 of width {WIDTH}, trained for {epochs} epochs on "
        f"{len(train):,} images; batches are drawn from {len(attacked):,} others, of which it gets {right:.0%} right."
    )
    return Victim(name=name, model=model, images=attacked, normalization=normalization, note=note)


def _everything(images: fp.data.ImageSet) -> fp.Batch:
    return images.batch(torch.arange(len(images)))


def part(images: fp.data.ImageSet, chosen: Tensor) -> fp.data.ImageSet:
    """Some of the images: `chosen` are their numbers, or a mask."""
    return replace(images, images=images.images[chosen], labels=images.labels[chosen])


def _held_out(images: fp.data.ImageSet, count: int) -> tuple[fp.data.ImageSet, fp.data.ImageSet]:
    """All images but the last `count` of each class, and those."""
    by_class = torch.argsort(images.labels, stable=True)
    ordered = images.labels[by_class]
    left = torch.searchsorted(ordered, ordered, right=True) - torch.arange(len(ordered))  # of the class, from here on
    last = torch.zeros(len(images), dtype=torch.bool)
    last[by_class[left <= count]] = True
    return part(images, ~last), part(images, last)


def _make_sparse(layers: nn.Sequential, inputs: Tensor, active: float) -> None:
    """Scale convolutions and shift their biases in place until so many of each channel's outputs pass the ReLU."""
    shown = inputs
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                outputs = layer(shown).transpose(0, 1).flatten(1)
                scale = outputs.std(1)
                threshold = torch.quantile(outputs[:, :MOST_MEASURED], 1 - active, dim=1) - layer.bias
                layer.weight.div_(scale.view(-1, 1, 1, 1))
                layer.bias.copy_(-threshold / scale)
            shown = layer(shown)


def _repooled(model: nn.Module, pool: int, seed: int) -> nn.Module:
    """The same network with its features averaged to pool x pool, and a first dense layer to fit."""
    dense = list(model.get_submodule("classifier").children())
    first = nn.Linear(CHANNELS * pool * pool, 4096)
    with torch.no_grad():
        first.weight.normal_(0, 0.01, generator=generator(seed, "pooled layer"))  # as torchvision initialises it
        first.bias.zero_()
    return nn.Sequential(model.get_submodule("features"), nn.AdaptiveAvgPool2d(pool), nn.Flatten(), first, *dense[1:])


def _load_vgg(convolutions: nn.Module, settings: Settings) -> None:
    """Fill VGG-16's convolutions with the weights in the data folder, which exists: its images were read."""
    folder, prefix = Path(settings.data_dir or os.environ[ENVIRONMENT], "weights"), "features."
    try:
        tensors = load_file(folder / VGG_FILE)
        convolutions.load_state_dict({name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BadInput(
            f"{folder} has no readable file {VGG_FILE} with the convolutions of torchvision's VGG-16 "
            f"({type(error).__name__}). Put the file there."
        ) from error

"""The LeNet of DLG (Zhu et al., 2019) and iDLG (Zhao et al., 2020), and LeNet-5 as Lam et al. (2021) train it.

`lenet` differs from the published code in: any input size, width and activation; `downsample="pool"` halves the image
with average pools, as LeCun's network did, where DLG uses strides. `lenet5` has ReLU and maximum pools unless told
to have the sigmoids and averages of LeCun et al. (1998); it takes any input size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fedprism.checks import choice, shape, whole
from fedprism.errors import BadInput
from fedprism.models.dense import MOST_UNITS

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def lenet(
    input_shape: Sequence[int],
    classes: int = 10,
    width: int = 12,
    activation: str = "sigmoid",
    downsample: str = "stride",
) -> nn.Module:
    """Three 5x5 convolutions of `width` channels, the first two halving the image, and one linear layer."""
    channels, height, length = shape(input_shape, "input_shape", lengths=[3])
    whole(classes, "classes", MOST_UNITS)
    whole(width, "width", MOST_UNITS)
    activate = ACTIVATIONS[choice(activation, "activation", ACTIVATIONS)]
    pooled = choice(downsample, "downsample", ("stride", "pool")) == "pool"
    features = width * _quartered(height, pooled) * _quartered(length, pooled)
    if not features:
        raise BadInput(
            f"a lenet with pools needs images of at least 4x4, not {height}x{length}. Use larger images "
            "or downsample='stride'."
        )
    stride = 1 if pooled else 2
    pool = [nn.AvgPool2d(2)] if pooled else []
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, stride=stride, padding=2),
        activate(),
        *pool,
        nn.Conv2d(width, width, 5, stride=stride, padding=2),
        activate(),
        *pool,
        nn.Conv2d(width, width, 5, padding=2),
        activate(),
        nn.Flatten(),
        nn.Linear(features, classes),
    )


def lenet5(
    input_shape: Sequence[int], classes: int = 10, activation: str = "relu", pool: str = "max", padding: int = 0
) -> nn.Module:
    """Two 5x5 convolutions of 6 and 16 channels, each with a pool, and linear layers of 120 and 84 units."""
    channels, height, length = shape(input_shape, "input_shape", lengths=[3])
    whole(classes, "classes", MOST_UNITS)
    whole(padding, "padding", 2, 0)
    activate = ACTIVATIONS[choice(activation, "activation", ACTIVATIONS)]
    reduce = nn.MaxPool2d if choice(pool, "pool", ("max", "average")) == "max" else nn.AvgPool2d
    if min(height, length) < 16:
        raise BadInput(f"lenet5 needs images of at least 16x16, not {height}x{length}. Use larger images.")
    # Each unpadded convolution takes 4 pixels off, each pool halves.
    rows, columns = (((size + 2 * padding - 4) // 2 - 4) // 2 for size in (height, length))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        activate(),
        reduce(2),
        nn.Conv2d(6, 16, 5),
        activate(),
        reduce(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        activate(),
        nn.Linear(120, 84),
        activate(),
        nn.Linear(84, classes),
    )


def _quartered(size: int, pooled: bool) -> int:
    """A side after two halvings: a pool drops the odd pixel, a padded strided convolution keeps it."""
    return size // 4 if pooled else -(-size // 4)

"""ResNet-18 (He et al., 2016) for 32x32 images, with the layer names of kuangliu/pytorch-cifar."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedprism.checks import MOST_LENGTH, whole
from fedprism.models.dense import MOST_UNITS


def resnet18(classes: int = 10, input_channels: int = 3, width: int = 64) -> nn.Module:
    """A 3x3 stem of `width` channels without max-pool, four stages of two blocks, each but the first twice as wide."""
    return ResNet18(
        whole(classes, "classes", MOST_UNITS),
        whole(input_channels, "input_channels", MOST_LENGTH),
        whole(width, "width", MOST_LENGTH),
    )


class ResNet18(nn.Module):
    """See `resnet18`."""

    def __init__(self, classes: int, input_channels: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, input_channels, height, width)."""
        features = F.relu(self.bn1(self.conv1(images)))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.linear(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Features (batch, outputs, height / stride, width / stride)."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(features)))))
        return F.relu(residual + self.shortcut(features))

"""VGG-16 (Simonyan & Zisserman, 2015), torchvision's, as the MKOR paper attacks it."""

from __future__ import annotations

from torch import nn

from fedprism.checks import probability, whole
from fedprism.models.dense import MOST_UNITS


def vgg16(classes: int = 1000, dropout: float = 0.0) -> nn.Module:
    """Thirteen convolutions and three linear layers. Dropout is off unless asked for: it blurs what an update shows."""
    # Imported here because torchvision takes longer to import than all of fedprism.
    from torchvision.models import vgg16 as torchvision_vgg16

    model: nn.Module = torchvision_vgg16(
        weights=None, num_classes=whole(classes, "classes", MOST_UNITS), dropout=probability(dropout, "dropout")
    )
    return model

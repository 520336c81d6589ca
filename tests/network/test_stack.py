"""Convolutional networks as the chains they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.network.stack import Pool, Stack, stack_of


class Functions(nn.Module):
    """A chain whose activations, pools and dropout are functions."""

    def __init__(self, joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.hidden, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(16, 6), nn.Linear(6, 2)

    def forward(self, images: Tensor) -> Tensor:
        once = F.max_pool2d(F.relu(self.norm(self.first(images))), 2)
        twice = F.avg_pool2d(torch.sigmoid(self.second(once)), (2, 2))
        twice = twice + once[:, :, ::2, ::2] if self.joined else twice
        hidden = F.relu(self.hidden(twice.reshape(len(twice), -1)), inplace=True)
        return self.head(F.dropout(hidden, 0.3, self.training))


def stack(model: nn.Module) -> Stack:
    return stack_of(model, dict(model.named_parameters()), shape=(3, 8, 8))


def test_functions_are_read_like_modules() -> None:
    chain = stack(Functions())
    first, second = chain.convolutions
    assert (first.name, first.norm, first.activation, first.pools) == ("first", "norm", "relu", (Pool(False, 2, 2, 0),))
    assert (second.name, second.norm, second.activation) == ("second", None, "sigmoid")
    assert second.pools == (Pool(True, 2, 2, 0),)
    assert [(layer.name, layer.activation, layer.dropout) for layer in chain.dense] == [
        ("hidden", "relu", 0.3),
        ("head", "none", 0.0),
    ]
    assert chain.features == (4, 2, 2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Functions(joined=True), "branches that 'add' joins"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(36, 2)), "square pools"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.MaxPool2d(2, ceil_mode=True)), "another kind"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(72, 2)), "'gelu'"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2, bias=False)), "with biases"),
    ],
)
def test_other_networks_are_refused_by_what_is_in_the_way(model: nn.Module, reason: str) -> None:
    with pytest.raises(fp.NotApplicable, match=reason):
        stack(model)

"""Maps of networks whose inputs nobody described."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.network.probing import probed_map
from patch_models import small_vit


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.cells = nn.Linear(12, 5), nn.GRU(6, 12, batch_first=True)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.cells(steps)[0][:, -1])


MODELS = {
    "dense": (nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)), "3.weight"),
    "words": (nn.Sequential(nn.EmbeddingBag(40, 8), nn.Linear(8, 3)), "1.weight"),
    "steps": (Recurrent(), "head.weight"),
    "sound": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)), "3.weight"),
    "pictures": (fp.models.build("lenet", input_shape=(3, 8, 8), classes=10, seed=0), None),
    "patches behind a class token": (small_vit(), "head.weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_output_layer_is_found(name: str) -> None:
    model, weight = MODELS[name]
    network = probed_map(model, dict(model.named_parameters()))
    assert network is not None
    last = network.output_layer()
    assert last is not None
    assert weight in (None, last.weight)


def test_a_model_that_takes_nothing_usual_has_no_map() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs.view(-1, 7, 4)[:, 0])

    model = Picky()
    before = torch.random.get_rng_state()
    assert probed_map(model, dict(model.named_parameters())) is None
    assert torch.equal(before, torch.random.get_rng_state())

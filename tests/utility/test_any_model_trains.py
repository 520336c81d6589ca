"""Utility of defenses for models that are not fed one image: accuracy where there are classes, a refusal elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import utility
from fedprism.utility.training import Schedule, fit
from planted_inputs import KINDS, build

NAMED = {kind.name: kind for kind in KINDS}


@pytest.mark.parametrize("name", ["text", "dict in, dict out"])
def test_classifiers_of_text_and_tables_are_trained_and_tested(name: str) -> None:
    kind = NAMED[name]
    inputs = kind.inputs(40)
    told = (inputs == 3).any(1) if isinstance(inputs, Tensor) else dict(inputs)["numbers"][:, 0] > 0
    data = fp.Batch(inputs, told.long())
    measured = utility.measure(
        lambda seed: build(kind), data, data, epochs=60, batch_size=8, lr=1.0, seeds=(0,), device="cpu", timed_steps=0
    )
    assert measured.accuracies[0] >= 0.9, "what is asked can be read off one word, or one number"


def test_a_model_of_tuples_is_trained_with_a_loss_of_ones_own() -> None:
    kind = NAMED["tuple in, own loss"]
    data, model = fp.Batch(kind.inputs(16), kind.labels(16)), build(kind)

    def value(network: nn.Module) -> float:
        assert isinstance(data.inputs, tuple)
        with torch.no_grad():
            return float(kind.loss(network(*data.inputs), data.labels))

    before = value(model)
    fit(model, data, schedule=Schedule(epochs=5, batch_size=8, lr=0.1, loss=kind.loss), device="cpu")
    assert value(model) < before


@pytest.mark.parametrize("name", ["per token", "one logit", "multi-label", "per pixel"])
def test_answers_of_every_kind_are_counted_one_by_one(name: str) -> None:
    kind = NAMED[name]
    inputs, model = kind.inputs(4), build(kind)
    assert isinstance(inputs, Tensor)
    with torch.no_grad():
        outputs = model(inputs)
    if kind.loss == "binary_cross_entropy":
        labels = (outputs > 0).to(kind.labels(1).dtype).reshape(kind.labels(4).shape)
        wrong = 1 - labels
    else:
        at = 2 if name == "per token" else 1
        labels = outputs.argmax(at)
        wrong = (labels + 1) % outputs.shape[at]
    half = torch.cat([labels[:2], wrong[2:]])
    for answers, share in ((labels, 1.0), (wrong, 0.0), (half, 0.5)):
        data = fp.Batch(inputs, answers)
        still = {"epochs": 1, "batch_size": 4, "lr": 1e-12, "seeds": (0,), "device": "cpu", "timed_steps": 0}
        measured = utility.measure(lambda seed: build(kind), data, data, loss=kind.loss, **still)
        assert measured.accuracies == (share,)


def test_accuracy_of_a_model_without_classes_is_refused() -> None:
    kind = NAMED["squared error"]
    data = fp.Batch(kind.inputs(16), kind.labels(16))
    with pytest.raises(fp.errors.NotApplicable, match="one score per class"):
        utility.measure(lambda seed: build(kind), data, data, epochs=1, batch_size=8, seeds=(0,), loss="mse")

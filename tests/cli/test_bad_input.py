"""What a person gets wrong about defenses: one sentence that says what was expected, what was found and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import fedprism as fp
from fedprism import utility
from fedprism.defenses import Context, EqualLabels, InstaHide, MixUp, Prune, Soteria

SERVER = fp.threats.honest_but_curious


def some_data(samples: int = 3, *, labels: bool = True) -> fp.Batch:
    inputs = torch.rand(samples, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return fp.Batch(inputs, torch.arange(samples) % 5 if labels else None)  # type: ignore[arg-type]


def network(seed: int = 0) -> torch.nn.Module:
    return fp.models.build("fc2", input_shape=(1, 4, 4), hidden=6, classes=5, seed=seed)


def simulated(data: fp.Batch, defense: fp.defenses.Defense) -> object:
    return fp.simulate(fp.Scenario(model=network(), clients=[data], defense=defense), SERVER, device="cpu")


def trained(data: fp.Batch, defense: fp.defenses.Defense) -> object:
    return utility.measure(network, data, some_data(), defense, epochs=1, seeds=(0,), device="cpu", timed_steps=0)


def normalised_by_exact_statistics() -> object:
    knowing = SERVER.granting("batchnorm_exact")
    observation, _ = fp.simulate(fp.Scenario(model=network(), clients=[some_data()]), knowing, device="cpu")
    return fp.run(fp.attacks.bn_exact(), observation)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "pruning all": (lambda: Prune(1.0), "not 1.0"),
    "pruning less than nothing": (lambda: Prune(-0.1), "not -0.1"),
    "all features": (lambda: Soteria(1.0), "not 1.0"),
    "features, not a number": (lambda: Soteria(float("nan")), "not nan"),
    "more mixed than a client holds": (lambda: simulated(some_data(3), MixUp(4)), "3 samples are fewer than k = 4"),
    "more hidden than a client holds": (
        lambda: simulated(some_data(3), InstaHide(4)),
        "3 samples are fewer than k = 4",
    ),
    "more mixed than there is to train on": (lambda: trained(some_data(3), MixUp(4)), "3 samples are fewer than k = 4"),
    "no labels, mixing": (lambda: simulated(some_data(labels=False), MixUp(2)), "client 0 has no labels, but None"),
    "no labels, equal": (
        lambda: simulated(some_data(labels=False), EqualLabels(1)),
        "client 0 has no labels, but None",
    ),
    "no labels, training": (lambda: trained(some_data(labels=False), fp.chain()), "train has no labels, but None"),
    "no labels, a batch alone": (
        lambda: MixUp(2).on_batch(some_data(labels=False), Context(), torch.Generator()),
        "needs labels to mix along with the samples, not None",
    ),
    "a defense by its name": (lambda: simulated(some_data(), "prune"), "not 'prune'"),  # type: ignore[arg-type]
    "no batch norm": (normalised_by_exact_statistics, "a model with batch-norm layers, but .* has none"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_one_clear_sentence(mistake: str) -> None:
    wrong, words = WRONG[mistake]
    with pytest.raises(fp.FedprismError, match=words) as caught:
        wrong()
    sentence = str(caught.value)
    assert re.fullmatch(r"[^\n]*[.]", sentence), sentence
    assert len(sentence) < 300

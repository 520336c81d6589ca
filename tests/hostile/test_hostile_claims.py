"""Claims of a capture that are possible and break attacks: a result or a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedprism as fp
from hostility import (
    CLASSES,
    Mutation,
    assert_harmless,
    bounded_memory,
    capture,
    starts,
)
from mutations import (
    KNOWLEDGE,
    PARAMS,
    UPDATE,
    both,
    first_round,
    known,
    model,
    put,
    tensor,
)


def scaled(factor: float) -> Mutation:
    return tensor(UPDATE, lambda found: [found.update({name: t.double() * factor}) for name, t in list(found.items())])


def one_step(**fields: object) -> Mutation:
    """A delta of one local step, with these settings."""

    def mutate(folder: Path) -> None:
        first_round(kind="delta")(folder)
        known(**{"local_lr": 0.1, "local_epochs": 1, "local_batch_size": 2, **fields})(folder)

    return mutate


def of_size(batch_size: int) -> Mutation:
    def mutate(folder: Path) -> None:
        known(batch_size=batch_size, local_batch_size=batch_size)(folder)
        tensor(KNOWLEDGE, put(labels=torch.arange(batch_size) % CLASSES))(folder)

    return mutate


def rebuilt(name: str, **kwargs: Any) -> Mutation:
    """Another model, with an update that its parameters fit."""

    def mutate(folder: Path) -> None:
        built = fp.models.build(name, seed=0, **kwargs)
        params = {key: p.detach().clone() for key, p in built.named_parameters()}
        model(name, **kwargs)(folder)
        known(input_shape=list(kwargs["input_shape"]))(folder)
        save_file(params, folder / PARAMS)
        save_file({key: p * 0.1 for key, p in params.items()}, folder / UPDATE)

    return mutate


POSSIBLE: dict[str, Mutation] = {
    "update of zeros": scaled(0.0),
    "update of zeros, one sample": both(scaled(0.0), of_size(1)),
    "zeros in the first layer": tensor(UPDATE, lambda t: [t[name].zero_() for name in ("1.weight", "1.bias")]),
    "zeros in the last layer": tensor(UPDATE, lambda t: [t[name].zero_() for name in ("3.weight", "3.bias")]),
    "tiny update": scaled(1e-30),
    "update below single precision": scaled(1e-300),
    "huge update": scaled(1e8),
    "huger update": scaled(1e30),
    "update above single precision": scaled(1e300),
    "huge parameters": tensor(PARAMS, lambda t: [value.mul_(1e30) for value in t.values()]),
    "parameters of zeros": tensor(PARAMS, lambda t: [value.zero_() for value in t.values()]),
    "more samples than classes": of_size(40),
    "batch of thousands": of_size(2**14),
    "one sample": of_size(1),
    "batch size unknown": known(batch_size=None),
    "only a bias": tensor(UPDATE, lambda t: [t.pop(name) for name in ("1.weight", "3.weight", "1.bias")]),
    "only weights": tensor(UPDATE, lambda t: [t.pop(name) for name in ("1.bias", "3.bias")]),
    "only the last layer": tensor(UPDATE, lambda t: [t.pop(name) for name in ("1.weight", "1.bias")]),
    "clients of a delta": both(one_step(), first_round(clients=3, participants=None)),
    "sum of two billion clients": first_round(clients=2**31, reduction="sum", participants=None),
    "delta without settings": first_round(kind="delta"),
    "smallest rate": one_step(local_lr=1e-9),
    "smallest rate, huge update": both(one_step(local_lr=1e-9), scaled(1e30)),
    "quotients beyond single precision": both(
        known(loss="mse"), tensor(UPDATE, lambda t: (t["1.weight"].mul_(1e30), t["1.bias"].mul_(1e-30)))
    ),
    "largest rate": one_step(local_lr=1e9),
    "steps smaller than the batch": one_step(local_batch_size=1, local_epochs=3, local_momentum=0.99),
    "an endless decay": one_step(local_optimizer={"name": "adamw", "kwargs": {"weight_decay": 1e9}}, local_lr=1e9),
    "another shape of as many values": known(input_shape=[16], normalization=None),
    "widest bounds": known(bounds=[-1e9, 1e9], normalization=[[1e9], [1e-9]]),
    "another loss": known(loss="mse"),
    "another pruning": known(defense={"name": "prune", "kwargs": {"ratio": 0.999}}),
    "one class": rebuilt("fc2", input_shape=[16], hidden=3, classes=1),
    "half precision": tensor(UPDATE, lambda t: t.update({name: value.half() for name, value in t.items()})),
    "double precision": tensor(PARAMS, lambda t: t.update({name: value.double() for name, value in t.items()})),
}


@pytest.mark.parametrize("mutate", POSSIBLE.values(), ids=POSSIBLE)
def test_possible_claims_get_a_result_or_a_sentence(mutate: Mutation, capture: Path) -> None:
    mutate(capture)
    assert_harmless(capture)


def test_a_million_classes_fit_into_memory(capture: Path) -> None:
    rebuilt("dense", input_shape=[1], classes=2**20)(capture)
    known(normalization=None)(capture)
    observation = fp.captures.load(capture)
    assert fp.run(fp.attacks.dense_inversion(), observation).status


def test_a_million_hidden_units_fit_into_memory(capture: Path) -> None:
    rebuilt("fc2", input_shape=[1], hidden=2**20, classes=CLASSES)(capture)
    known(normalization=None, loss="mse")(capture)
    observation = fp.captures.load(capture)
    assert fp.run(fp.attacks.dense_inversion(), observation).status


def test_a_batch_too_small_for_batch_norm_is_a_sentence(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
    tensors = {name: p.detach().clone() for name, p in network.named_parameters()}
    observation = fp.Observation(
        model=network,
        rounds=(fp.Round(params=tensors, update=tensors),),
        knowledge=fp.Knowledge(input_shape=(16,), batch_size=1, loss="cross_entropy"),
    )
    fp.captures.save(observation, tmp_path / "capture")
    assert_harmless(tmp_path / "capture", network)

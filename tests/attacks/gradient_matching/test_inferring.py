"""Labels inferred from updates of crowded batches: counted where signs tell nothing, by signs where counting is off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedprism as fp
from fedprism.attacks import Labels
from fedprism.attacks.gradient_matching import inferring
from fedprism.attacks.gradient_matching.inferring import inferred_labels
from fedprism.network.network_map import network_map
from fedprism.solvers import LabelRecovery, LabelStatus, label_counts

CLASSES = 8
LOCAL = fp.FedAvg(lr=1e-2, epochs=4, batch_size=8)


def federation(
    clients: int,
    protocol: fp.FedAvg | fp.FedSGD = LOCAL,
    threat: fp.ThreatModel = fp.threats.secure_aggregation,
    dropout: float = 0.0,
) -> tuple[fp.Observation, fp.Truth]:
    """Clients with 32 images each, of eight classes."""
    photos = fp.data.load("photos", size=16, crops=24)
    model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=64, classes=CLASSES, seed=0)
    drawn = photos.draw(32 * clients, torch.Generator().manual_seed(0))
    held = fp.Batch((drawn.inputs - 0.5) / 0.5, drawn.labels)
    scenario = fp.Scenario(
        model=torch.nn.Sequential(torch.nn.Dropout(dropout), model),
        clients=[held[32 * number : 32 * (number + 1)] for number in range(clients)],
        protocol=protocol,
        normalization=((0.5,) * 3, (0.5,) * 3),
        aggregation="sum",
    )
    return fp.simulate(scenario, threat, seed=0, device="cpu")


def inferred(observation: fp.Observation, samples: int) -> LabelRecovery:
    return inferred_labels(observation, observation.rounds[0], samples, network_map(observation))


def wrong(labels: torch.Tensor, truth: fp.Truth) -> int:
    found, true = (torch.bincount(values, minlength=CLASSES) for values in (labels, truth.labels))
    return int((found - true).abs().sum()) // 2


@pytest.mark.parametrize("protocol", [LOCAL, fp.FedSGD()], ids=["local steps", "one gradient"])
@pytest.mark.parametrize("clients", [1, 3])
def test_crowded_batches_are_counted_where_signs_tell_nothing(clients: int, protocol: fp.FedAvg | fp.FedSGD) -> None:
    observation, truth = federation(clients, protocol)
    (seen,) = observation.rounds
    found = inferred(observation, 32 * clients)
    assert found.status is LabelStatus.ESTIMATED
    assert len(found.labels) == 32 * clients
    assert wrong(found.labels, truth) <= 4 * clients
    bias = list(seen.update.values())[-1]
    by_signs = label_counts(-bias if seen.kind == "delta" else bias, 32 * clients).labels
    assert wrong(by_signs, truth) > 4 * clients


def test_a_batch_of_one_class_is_not_mistaken_for_several_by_a_network_that_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    photos = fp.data.load("photos", size=16, crops=24)
    everything = photos.batch(torch.arange(len(photos)))
    model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=64, classes=CLASSES, seed=0)
    steps = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(everything.inputs), everything.labels).backward()
        steps.step()
    held = everything[(everything.labels == 5).nonzero().flatten()[:12]]
    observation, _ = fp.simulate(fp.Scenario(model=model, clients=[held]), fp.threats.honest_but_curious, device="cpu")
    assert inferred(observation, 12).labels.tolist() == [5] * 12
    monkeypatch.setattr(inferring, "sole_label", lambda _: None)
    assert inferred(observation, 12).labels.tolist() != [5] * 12, "made-up images do not tell what it knows"


def test_an_attack_that_infers_labels_says_how() -> None:
    observation, truth = federation(1)
    attack = replace(fp.attacks.inverting_gradients(), labels=Labels.INFERRED, iterations=3, unroll=False)
    found = fp.run(attack, observation)
    assert found.labels is not None
    assert wrong(found.labels, truth) <= 2
    assert f"labels inferred ({LabelStatus.ESTIMATED})" in found.status
    assert "labels" not in found.knowledge_used, "nobody granted them"


def test_signs_are_left_where_it_is_not_known_what_inputs_are_like() -> None:
    observation, _ = federation(1, threat=fp.threats.secure_aggregation.withholding("bounds"))
    assert inferred(observation, 32).status in {LabelStatus.CROWDED, LabelStatus.INCONSISTENT}


@pytest.mark.parametrize("field", ["local_lr", "local_batch_size"])
def test_counting_needs_not_know_how_far_the_client_went(field: str) -> None:
    (known, _), (unknown, truth) = (
        federation(1, threat=threat)
        for threat in (fp.threats.secure_aggregation, fp.threats.secure_aggregation.withholding(field))
    )
    assert torch.equal(inferred(known, 32).labels, inferred(unknown, 32).labels)
    assert wrong(inferred(unknown, 32).labels, truth) <= 4


@pytest.mark.parametrize("factor", [1e-6, 0.3, 1e6])
@pytest.mark.parametrize("protocol", [LOCAL, fp.FedSGD()], ids=["local steps", "one gradient"])
def test_counts_are_the_same_at_every_scale(protocol: fp.FedAvg | fp.FedSGD, factor: float) -> None:
    observation, _ = federation(1, protocol)
    (seen,) = observation.rounds
    scaled = replace(seen, update={name: factor * tensor for name, tensor in seen.update.items()})
    labels = inferred(replace(observation, rounds=(scaled,)), 32).labels
    assert torch.equal(labels, inferred(observation, 32).labels)


def test_dropout_neither_changes_the_answer_from_time_to_time_nor_draws_from_others() -> None:
    observation, _ = federation(1, fp.FedSGD(), dropout=0.5)
    before = torch.random.get_rng_state()
    first, second = (inferred(observation, 32).labels for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())

"""Labels counted from the update of many local steps: right where signs tell nothing, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedprism as fp
from fedprism.recipes import Settings
from fedprism.recipes import disaggregation_table_3 as table_3
from fedprism.recipes.counted_labels import CountedLabels, counted
from fedprism.solvers import label_counts

LOCAL = fp.FedAvg(lr=1e-2, epochs=4, batch_size=8)


def federation(
    clients: int, protocol: fp.FedAvg | fp.FedSGD = LOCAL, threat: fp.ThreatModel = fp.threats.secure_aggregation
) -> tuple[fp.Observation, fp.Truth]:
    """Clients with 32 images each, of eight classes."""
    photos = fp.data.load("photos", size=16, crops=24)
    model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=64, classes=photos.classes, seed=0)
    drawn = photos.draw(32 * clients, torch.Generator().manual_seed(0))
    held = fp.Batch((drawn.inputs - 0.5) / 0.5, drawn.labels)
    scenario = fp.Scenario(
        model=model,
        clients=[held[32 * number : 32 * (number + 1)] for number in range(clients)],
        protocol=protocol,
        normalization=((0.5,) * 3, (0.5,) * 3),
        aggregation="sum",
    )
    return fp.simulate(scenario, threat, seed=0, device="cpu")


def wrong(labels: torch.Tensor, truth: fp.Truth) -> int:
    found, true = (torch.bincount(values, minlength=8) for values in (labels, truth.labels))
    return int((found - true).abs().sum()) // 2


@pytest.mark.parametrize("clients", [1, 3])
def test_crowded_batches_are_counted_where_signs_tell_nothing(clients: int) -> None:
    observation, truth = federation(clients)
    (seen,) = observation.rounds
    labels = counted(observation, seen)
    assert len(labels) == 32 * clients
    assert wrong(labels, truth) <= 2 * clients
    by_signs = label_counts(-list(seen.update.values())[-1], 32 * clients).labels
    assert wrong(by_signs, truth) > 4 * clients


def test_the_inner_attack_is_given_the_labels_and_the_status_says_where_from() -> None:
    observation, truth = federation(1)
    attack = table_3.methods(Settings(quick=True, iterations=3))[table_3.MATCHING]
    assert isinstance(attack, CountedLabels)
    found = fp.run(attack, observation)
    assert found.labels is not None
    assert wrong(found.labels, truth) <= 2
    assert found.status.startswith("labels counted from the update and taken as known")
    assert "labels" not in found.knowledge_used, "nobody granted them"


def test_what_cannot_be_counted_is_refused() -> None:
    attack = table_3.methods(Settings(quick=True, iterations=1))[table_3.MATCHING]
    for protocol in (fp.FedSGD(), replace(LOCAL, momentum=0.9)):
        with pytest.raises(fp.NotApplicable, match="local SGD without momentum"):
            fp.run(attack, federation(1, protocol)[0])
    for field in ("local_lr", "local_batch_size", "bounds"):
        with pytest.raises(fp.MissingKnowledge, match=f"'{field}'"):
            fp.run(attack, federation(1, threat=fp.threats.secure_aggregation.withholding(field))[0])

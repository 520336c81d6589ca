"""What a client makes of two global models: the other's batch with one other, a mixture of several with more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import OtherClients, OthersStatus, cocktail_party, dense_inversion

CURIOUS = fp.threats.curious_client


def played(
    photos: fp.data.ImageSet,
    *sizes: int,
    chosen: list[int] | None = None,
    threat: fp.ThreatModel = CURIOUS,
    **changes: Any,
) -> tuple[fp.Observation, fp.Truth]:
    """Clients with photographs, as many as `sizes` says, and a small dense network."""
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=photos.classes, seed=0).double()
    drawn = photos.batch(chosen) if chosen else photos.draw(sum(sizes), torch.Generator().manual_seed(0))
    inputs, labels = drawn.inputs.double().split(sizes), drawn.labels.split(sizes)
    held = [fp.Batch(x, y) for x, y in zip(inputs, labels, strict=True)]
    return fp.simulate(fp.Scenario(model=model, clients=held, **changes), threat, seed=0, device="cpu")


def decibels(found: fp.Reconstruction, truth: fp.Truth) -> list[float | None]:
    return list(fp.score(found, truth, metrics=("psnr",)).values["psnr"])


def far(update: Any, expected: Any) -> float:
    """The largest distance between two updates, relative to the length of the expected one."""
    return max(float((update[name] - t).norm() / t.norm()) for name, t in expected.items())


@pytest.mark.quality
@pytest.mark.parametrize("protocol", [fp.FedSGD(lr=0.1), fp.FedAvg(lr=0.1)], ids=repr)
def test_with_one_other_client_its_batch_comes_back(protocol: Any, photos: fp.data.ImageSet) -> None:
    observation, truth = played(photos, 3, 1, protocol=protocol)
    assert set(truth.owners) == {"client-1"}
    found = fp.run(fp.then(OtherClients(), dense_inversion()), observation)
    assert all(value is not None and value > 100 for value in decibels(found, truth))
    assert found.owners == ("client-1",)
    assert found.status.startswith(OthersStatus.ONE)
    assert "public_data" in found.knowledge_used


@pytest.mark.quality
@pytest.mark.parametrize("others", [4, 8])
def test_with_more_clients_what_is_left_is_a_mixture(others: int, photos: fp.data.ImageSet) -> None:
    images = [0, 1, 2, 2 + photos.classes, *range(3, 1 + others)]  # two of the others have one class
    observation, truth = played(photos, 2, *[1] * others, chosen=images)
    read_off, separated = (
        fp.run(fp.then(OtherClients(), attack), observation) for attack in (dense_inversion(), cocktail_party())
    )
    for found in (read_off, separated):
        assert found.status.startswith(OthersStatus.SEVERAL)
        assert set(found.owners or ()) == {"unknown"}
        assert found.diagnostics["other_clients"] == [others]
    assert None in decibels(read_off, truth)
    assert all(value is not None and value > 100 for value in decibels(separated, truth))


@pytest.mark.parametrize("aggregation", ["mean", "weighted_mean", "sum"])
def test_what_is_left_is_the_mean_of_the_others_updates(aggregation: Any, photos: fp.data.ImageSet) -> None:
    """Also over several local epochs, where it stays a delta, and weighted by examples."""
    protocol = fp.FedAvg(lr=0.05, epochs=3)
    threat = CURIOUS.granting("examples")
    observation, truth = played(photos, 2, 3, 1, protocol=protocol, aggregation=aggregation, threat=threat)
    assert truth.updates is not None
    (part,) = OtherClients().reduce(observation)
    (seen,) = part.rounds
    shares = (0.75, 0.25) if aggregation == "weighted_mean" else (0.5, 0.5)
    first, second = truth.updates[1] or {}, truth.updates[2] or {}
    expected = {name: shares[0] * first[name] + shares[1] * second[name] for name in first}
    assert (seen.kind, seen.clients) == ("delta", 2)
    assert far(seen.update, expected) < 1e-9


@pytest.mark.parametrize("protocol", [fp.FedSGD(lr=0.1), fp.FedAvg(lr=0.1)], ids=repr)
def test_its_own_share_is_clipped_as_it_was_sent(protocol: Any, photos: fp.data.ImageSet) -> None:
    """A client of FedSGD clips its gradient, one of FedAvg its step: the rate of 0.1 lies between them."""
    threat = CURIOUS.granting("defense")
    observation, truth = played(photos, 3, 1, protocol=protocol, defense=fp.defenses.Clip(0.1), threat=threat)
    assert truth.updates is not None
    (part,) = OtherClients().reduce(observation)
    (seen,) = part.rounds
    sent = truth.updates[1] or {}
    scale = -1 / protocol.lr if isinstance(protocol, fp.FedAvg) else 1.0  # a step along a gradient, or the gradient
    assert far(seen.update, {name: scale * tensor for name, tensor in sent.items()}) < 1e-9


@pytest.mark.parametrize("defense", [fp.defenses.Soteria(0.5), fp.defenses.Prune(0.9)], ids=repr)
def test_its_own_share_leaves_out_what_was_not_sent(defense: fp.defenses.Defense, photos: fp.data.ImageSet) -> None:
    """What a client removed by looking at its own data it can remove again."""
    observation, truth = played(photos, 3, 1, defense=defense, threat=CURIOUS.granting("defense"))
    assert truth.updates is not None
    reduced = OtherClients().explained(observation)
    assert far(reduced.parts[0].rounds[0].update, truth.updates[1]) < 1e-9
    assert reduced.status == OthersStatus.ONE


def test_rounds_that_it_sat_out_and_rounds_without_others(photos: fp.data.ImageSet) -> None:
    there = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]], dtype=torch.bool)
    threat = CURIOUS.granting("participation")
    observation, _ = played(photos, 2, 1, 1, threat=threat, participation=there, rounds=3)
    reduced = OtherClients().explained(observation)
    assert reduced.diagnostics["other_clients"] == [1, 2]
    assert reduced.status == f"{OthersStatus.ONE}; {OthersStatus.SEVERAL}"
    plain = fp.simulate(
        fp.Scenario(model=observation.model, clients=[_second(photos)]), fp.threats.eavesdropper, device="cpu"
    )[0]
    assert far(reduced.parts[0].rounds[0].update, plain.rounds[0].update) < 1e-9


def _second(photos: fp.data.ImageSet) -> fp.Batch:
    drawn = photos.draw(4, torch.Generator().manual_seed(0))
    return fp.Batch(drawn.inputs[2:3].double(), drawn.labels[2:3])


def test_knowledge_about_the_others_leaves_its_own_out(photos: fp.data.ImageSet) -> None:
    observation, truth = played(photos, 2, 3, threat=CURIOUS.granting("labels", "batch_size"))
    (part,) = OtherClients().reduce(observation)
    assert part.knowledge.batch_size == 3
    assert torch.equal(part.knowledge.labels, truth.labels)
    assert part.subject == "client-1"


def test_chance_in_its_own_training_is_said(photos: fp.data.ImageSet) -> None:
    shuffled = played(photos, 4, 4, protocol=fp.FedAvg(batch_size=2))[0]
    assert "up to chance" in OtherClients().explained(shuffled).status
    noisy = played(photos, 2, 2, defense=fp.defenses.GaussianNoise(0.1), threat=CURIOUS.granting("defense"))[0]
    assert "up to chance" in OtherClients().explained(noisy).status
    assert "up to chance" not in OtherClients().explained(played(photos, 2, 2)[0]).status


def test_batch_norm_takes_its_own_batch_into_account(photos: fp.data.ImageSet) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 5, 4, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(196, 10))
    drawn = photos.draw(6, torch.Generator().manual_seed(0))
    scenario = fp.Scenario(model=model.double(), clients=[_double(drawn[:3]), _double(drawn[3:])])
    observation, truth = fp.simulate(scenario, CURIOUS, device="cpu")
    alone = fp.simulate(replace(scenario, clients=scenario.clients[1:]), fp.threats.eavesdropper, device="cpu")[0]
    (part,) = OtherClients().reduce(observation)
    assert len(truth.inputs) == 3
    assert far(part.rounds[0].update, alone.rounds[0].update) < 1e-9


def _double(batch: fp.Batch) -> fp.Batch:
    return fp.Batch(batch.inputs.double(), batch.labels)


def test_refusals(photos: fp.data.ImageSet) -> None:
    attack = fp.then(OtherClients(), dense_inversion())
    for field in ("public_data", "loss", "local_lr", "model"):
        with pytest.raises(fp.MissingKnowledge, match=f"'{field}'"):
            fp.run(attack, played(photos, 2, 1, threat=CURIOUS.withholding(field))[0])
    weighted = played(photos, 2, 1, aggregation="weighted_mean")[0]
    with pytest.raises(fp.MissingKnowledge, match="'examples'"):
        fp.run(attack, weighted)
    alone = replace(weighted, rounds=(replace(weighted.rounds[0], clients=1, reduction="mean"),))
    with pytest.raises(fp.NotApplicable, match="a round in which others took part, but there is none; add"):
        fp.run(attack, alone)
    with pytest.raises(fp.NotApplicable, match="a global model that moves, but it did not"):
        fp.run(attack, played(photos, 2, 1, frozen=True)[0])
    other = replace(weighted, knowledge=replace(weighted.knowledge, participation=torch.ones(3, 2)))
    with pytest.raises(fp.errors.BadInput, match="participation must have the shape 1 rounds x clients"):
        fp.run(attack, other)

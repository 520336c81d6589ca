"""What only someone inside a client knows: what was mixed, per-update batch-norm statistics, buffers that are sent."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import local_update
from fedprism.defenses import InstaHide, MixUp, Prune
from fedprism.errors import BadCapture, BadInput
from fedprism.randomness import generator, seeded_layers

TOLD = fp.threats.honest_but_curious.granting("mixing", "labels")


def some_data(samples: int, seed: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    return fp.Batch(torch.randn(samples, 1, 4, 4, generator=rng), torch.randint(5, (samples,), generator=rng))


def small_net() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 4, 4), hidden=6, classes=5, seed=0)


def normalising(dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Dropout(dropout), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)
        )


def observed(threat: fp.ThreatModel, *clients: fp.Batch, model: nn.Module | None = None, **changes: Any) -> Any:
    settings = {"model": model or small_net(), "clients": clients, **changes}
    return fp.simulate(fp.Scenario(**settings), threat, seed=3, device="cpu")


def gradient_of(model: nn.Module, params: Any, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """By plain autograd, without any code of the client."""
    network = copy.deepcopy(model).train()
    network.load_state_dict(dict(params), strict=False)
    nn.functional.cross_entropy(network(inputs), labels).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def matrix_of(mixing: Any, rows: Tensor, samples: int) -> Tensor:
    empty = torch.zeros(len(rows), samples, dtype=torch.float64)
    return empty.scatter_(1, mixing["mapping"][rows], mixing["coefficients"][rows])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.7])
def test_what_is_told_explains_every_update(frozen: bool, fraction: float) -> None:
    """Mixing the truth as told, and differentiating by hand, gives what each of two clients sent in each round."""
    clients = some_data(7), some_data(9, seed=1)
    settings = {"defense": MixUp(3), "rounds": 3, "frozen": frozen, "fraction": fraction}
    observation, truth = observed(TOLD, *clients, **settings)
    mixing, samples = observation.knowledge.mixing, len(truth.inputs)
    assert samples <= 16, "each sample is listed once"
    for number, seen in enumerate(observation.rounds):
        rows = (mixing["updates"] == number).nonzero().flatten()
        assert len(rows) == observation.knowledge.batch_size[number]
        mixed = (matrix_of(mixing, rows, samples) @ truth.inputs.flatten(1).double()).float().view(-1, 1, 4, 4)
        expected = gradient_of(observation.model, seen.params, mixed, observation.knowledge.labels[number])
        for name, tensor in expected.items():
            torch.testing.assert_close(seen.update[name], tensor, rtol=1e-4, atol=1e-6)
        soft = matrix_of(mixing, rows, samples) @ nn.functional.one_hot(truth.labels, 5).double()
        torch.testing.assert_close(observation.knowledge.labels[number].double(), soft, rtol=0, atol=1e-6)


def test_local_steps_of_federated_averaging_are_told_one_by_one() -> None:
    protocol = fp.FedAvg(lr=0.1, epochs=2, batch_size=4)
    observation, truth = observed(TOLD, some_data(6), defense=InstaHide(2), protocol=protocol)
    mixing = observation.knowledge.mixing
    assert mixing["mapping"].shape == (12, 2)
    assert mixing["mapping"][:6, 0].sort().values.tolist() == list(range(6)), "an epoch has each sample once"
    assert mixing["updates"].tolist() == [0] * 12
    assert torch.equal(observation.knowledge.labels, truth.labels), "twice as many mixtures as samples"


def test_knowing_changes_nothing_of_what_is_sent() -> None:
    for changes in ({}, {"protocol": fp.FedAvg(epochs=2, batch_size=3)}, {"rounds": 2, "frozen": True}):
        settings = {"defense": fp.chain(MixUp(3), Prune(0.5)), **changes}
        blind, told = (
            observed(t, some_data(6), some_data(8, 1), **settings)[0] for t in (fp.threats.eavesdropper, TOLD)
        )
        for one, other in zip(blind.rounds, told.rounds, strict=True):
            assert all(torch.equal(one.update[name], other.update[name]) for name in one.update)


def test_the_mapping_alone() -> None:
    threat = fp.threats.honest_but_curious
    observation = observed(threat.granting("mapping"), some_data(6), defense=MixUp(3))[0]
    assert set(observation.knowledge.mixing) == {"mapping", "updates"}
    assert observed(threat, some_data(6), defense=MixUp(3))[0].knowledge.mixing is None
    assert observed(threat.granting("mixing"), some_data(6), defense=Prune(0.5))[0].knowledge.mixing is None


@pytest.mark.parametrize("told", ["mixing", "mapping"])
def test_captures_carry_it(told: str, tmp_path: Path) -> None:
    threat = fp.threats.honest_but_curious.granting(told, "labels")
    observation = observed(threat, some_data(6), defense=MixUp(3), rounds=2)[0]
    loaded = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"))
    assert set(loaded.knowledge.mixing or ()) == set(observation.knowledge.mixing)
    for name, tensor in observation.knowledge.mixing.items():
        assert torch.equal((loaded.knowledge.mixing or {})[name], tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mapping": torch.full((6, 3), 10**12)}, "mapping must be int64"),
        ({"mapping": torch.full((6, 3), -1)}, "mapping must be int64"),
        ({"mapping": torch.zeros(6, 3)}, "mapping must be int64"),
        ({"updates": torch.full((6,), 1)}, "one of 1 rounds"),
        ({"updates": torch.zeros(5, dtype=torch.int64)}, "one of 1 rounds"),
        ({"coefficients": torch.full((6, 3), 2.0)}, "coefficients must be from 0 to 1"),
        ({"coefficients": torch.ones(6, 2)}, "coefficients must be from 0 to 1"),
        ({"other": torch.ones(1)}, "'mapping', 'updates' and perhaps"),
    ],
)
def test_captures_with_another_table_are_refused(change: dict[str, Tensor], words: str, tmp_path: Path) -> None:
    observation = observed(TOLD, some_data(6), defense=MixUp(3))[0]
    knowledge = dataclasses.replace(observation.knowledge, mixing={**observation.knowledge.mixing, **change})
    folder = fp.captures.save(dataclasses.replace(observation, knowledge=knowledge), tmp_path / "capture")
    with pytest.raises(BadCapture, match=words):
        fp.captures.load(folder)


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        (fp.chain(MixUp(2), InstaHide(2)), "2 defenses that change batches"),
        (InstaHide(3, cross=some_data(5)), "public samples"),
    ],
)
def test_mixtures_that_no_table_tells_are_refused(defense: fp.defenses.Defense, words: str) -> None:
    with pytest.raises(BadInput, match=f"needs one MixUp or InstaHide.*there is {words}.*[.]$"):
        observed(TOLD, some_data(6), defense=defense)


class TestStatistics:
    EXACT = fp.threats.honest_but_curious.granting("batchnorm_exact", "mixing")

    def test_each_update_has_its_own(self, tmp_path: Path) -> None:
        clients, model = (some_data(4), some_data(5, seed=1)), normalising()
        observation = observed(self.EXACT, *clients, model=model)[0]
        for own, data in zip(observation.knowledge.batchnorm_exact, clients, strict=True):
            fed = model[1](data.inputs).detach().transpose(0, 1).flatten(1)
            torch.testing.assert_close(own["2.mean"], fed.mean(1))
            torch.testing.assert_close(own["2.var"], fed.var(1, correction=0))
        loaded = fp.captures.load(
            fp.captures.save(observation, tmp_path / "capture"), model=model
        ).knowledge.batchnorm_exact
        assert isinstance(loaded, tuple)
        for own, back in zip(observation.knowledge.batchnorm_exact, loaded, strict=True):
            assert all(torch.equal(own[name], back[name]) for name in own)

    def test_of_mixtures_they_are_those_of_what_was_fed(self) -> None:
        model = normalising()
        observation, truth = observed(self.EXACT, some_data(6), model=model, defense=MixUp(3))
        matrix = matrix_of(observation.knowledge.mixing, torch.arange(6), 6).float()
        fed = model[1]((matrix @ truth.inputs.flatten(1)).view(-1, 1, 4, 4)).detach().transpose(0, 1).flatten(1)
        torch.testing.assert_close(observation.knowledge.batchnorm_exact["2.mean"], fed.mean(1))

    def test_an_attack_on_each_update_is_handed_its_own(self) -> None:
        observation = observed(self.EXACT, some_data(4), some_data(4, seed=1), model=normalising())[0]
        parts = fp.attacks.split_updates(observation)
        for part, own in zip(parts, observation.knowledge.batchnorm_exact, strict=True):
            assert part.knowledge.batchnorm_exact is own

    @pytest.mark.parametrize(
        ("threat", "changes", "words"),
        [
            (fp.threats.secure_aggregation, {}, "aggregates of 2 updates have no statistics of one batch"),
            (
                fp.threats.honest_but_curious,
                {"defense": MixUp(2), "protocol": fp.FedAvg(batch_size=2)},
                "2 steps with MixUp.* have statistics of their own",
            ),
        ],
    )
    def test_where_there_are_none_it_says_why(
        self, threat: fp.ThreatModel, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(BadInput, match=f"{words}.*[.]$"):
            observed(threat.granting("batchnorm_exact"), some_data(4), some_data(4, 1), model=normalising(), **changes)


class TestBuffers:
    @pytest.mark.parametrize("protocol", [fp.FedSGD(), fp.FedAvg(epochs=2, batch_size=2)], ids=repr)
    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_they_are_those_of_the_clients_own_training(self, protocol: Any, dropout: float) -> None:
        """The forward model returns the buffers it trained with: these, also where layers are random."""
        model, data = normalising(dropout), some_data(6)
        settings = {"protocol": protocol, "sends_buffers": True, "model": model, "defense": MixUp(2)}
        (seen,) = observed(fp.threats.eavesdropper, data, **settings)[0].rounds
        rng = generator(3, "client", "client-0", "round", 0)
        with seeded_layers(rng):
            params = dict(model.named_parameters())
            expected = local_update(
                model, params, data, loss=fp.losses.cross_entropy, protocol=protocol, rng=rng, defense=MixUp(2)
            )
        for name, tensor in expected.buffers.items():
            torch.testing.assert_close(seen.buffers_after[name], tensor)
            assert not torch.equal(seen.buffers_after[name], seen.buffers_before[name])

    def test_the_server_averages_them(self) -> None:
        clients = some_data(2), some_data(6, seed=1)
        settings = {"model": normalising(), "sends_buffers": True, "rounds": 2, "aggregation": "weighted_mean"}
        first, second, third, _ = observed(fp.threats.eavesdropper, *clients, **settings)[0].rounds
        name = "2.running_mean"
        mean = 0.25 * first.buffers_after[name] + 0.75 * second.buffers_after[name]
        torch.testing.assert_close(third.buffers_before[name], mean)
        aggregate = observed(fp.threats.secure_aggregation, *clients, **settings)[0].rounds[0]
        torch.testing.assert_close(aggregate.buffers_after[name], mean)
        assert int(third.buffers_before["2.num_batches_tracked"]) == 1

    def test_without_being_sent_they_stay(self) -> None:
        first, second = observed(fp.threats.eavesdropper, some_data(4), model=normalising(), rounds=2)[0].rounds
        assert first.buffers_after is None
        assert torch.equal(first.buffers_before["2.running_mean"], second.buffers_before["2.running_mean"])

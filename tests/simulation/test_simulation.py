"""What each threat model sees and knows, and nothing beyond it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.gradient_matching.attack import Labels
from fedprism.solvers import FeatureInversion
from fedprism.types import Update


@pytest.fixture
def scenario(digits: fp.data.ImageSet, rng: torch.Generator) -> fp.Scenario:
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=12, classes=10, seed=0)
    return fp.Scenario(model=model, clients=[digits.draw(size, rng) for size in (2, 3)])


GRANTED = {
    "eavesdropper": {"model", "input_shape", "loss"},
    "honest_but_curious": {
        *("model", "input_shape", "loss", "bounds", "batch_size"),
        *("local_lr", "local_epochs", "local_batch_size", "local_momentum", "local_optimizer"),
    },
}


@pytest.mark.parametrize("name", GRANTED)
def test_knowledge_is_what_the_threat_model_grants(name: str, scenario: fp.Scenario) -> None:
    observation, _ = fp.simulate(scenario, fp.threats.THREATS[name])
    assert observation.granted() == GRANTED[name]


def test_granting_and_withholding(scenario: fp.Scenario) -> None:
    threat = fp.threats.eavesdropper.granting("labels").withholding("model")
    observation, _ = fp.simulate(scenario, threat)
    assert observation.model is None
    assert observation.granted() == {"input_shape", "loss", "labels"}
    assert threat.name == "eavesdropper +labels -model"
    with pytest.raises(fp.errors.BadInput, match="did you mean labels"):
        fp.threats.eavesdropper.granting("lables")


def test_client_view_is_one_round_a_client(scenario: fp.Scenario) -> None:
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"))
    assert [seen.participants for seen in observation.rounds] == [("client-0",), ("client-1",)]
    assert {seen.index for seen in observation.rounds} == {0}
    assert observation.knowledge.batch_size == (2, 3)
    assert truth.owners == ("client-0",) * 2 + ("client-1",) * 3
    parts = fp.attacks.split_updates(observation)
    assert [part.subject for part in parts] == ["client-0", "client-1"]
    assert [part.knowledge.batch_size for part in parts] == [2, 3]
    assert all(isinstance(part.knowledge.labels, Tensor) for part in parts)


@pytest.mark.parametrize(
    ("reduction", "weights"), [("sum", (1, 1)), ("mean", (0.5, 0.5)), ("weighted_mean", (0.4, 0.6))]
)
def test_aggregates_are_weighted_sums(scenario: fp.Scenario, reduction: str, weights: tuple[float, float]) -> None:
    scenario = dataclasses.replace(scenario, aggregation=reduction)
    seen = fp.simulate(scenario, fp.threats.secure_aggregation)[0].rounds
    each = fp.simulate(scenario, fp.threats.honest_but_curious)[0].rounds
    assert len(seen) == 1
    assert seen[0].clients == 2
    assert seen[0].participants is None
    for name, tensor in seen[0].update.items():
        expected = sum(w * r.update[name] for w, r in zip(weights, each, strict=True))
        torch.testing.assert_close(tensor, expected)


def test_a_participant_sees_the_global_model_move(scenario: fp.Scenario) -> None:
    scenario = dataclasses.replace(scenario, rounds=2, protocol=fp.FedSGD(lr=0.5))
    observation, truth = fp.simulate(scenario, fp.threats.curious_client)
    first, second = observation.rounds
    assert first.kind == "delta"
    for name, before in first.params.items():
        torch.testing.assert_close(second.params[name] - before, first.update[name])
    assert observation.knowledge.public_data is scenario.clients[0]
    assert set(truth.owners) == {"client-1"}
    with pytest.raises(fp.errors.BadInput, match="second client"):
        fp.simulate(dataclasses.replace(scenario, clients=scenario.clients[:1]), fp.threats.curious_client)


def test_public_data_is_nobodys(scenario: fp.Scenario, digits: fp.data.ImageSet, rng: torch.Generator) -> None:
    threat = fp.threats.honest_but_curious.granting("public_data")
    assert fp.simulate(scenario, threat)[0].knowledge.public_data is None
    given = dataclasses.replace(scenario, public_data=digits.draw(3, rng))
    assert fp.simulate(given, threat)[0].knowledge.public_data is given.public_data


def test_rounds_train_the_global_model(scenario: fp.Scenario) -> None:
    scenario = dataclasses.replace(scenario, rounds=3, protocol=fp.FedAvg(lr=0.1))
    rounds = fp.simulate(scenario, fp.threats.honest_but_curious)[0].rounds
    assert [seen.index for seen in rounds] == [0, 0, 1, 1, 2, 2]
    for name, before in rounds[0].params.items():
        moved = (rounds[0].update[name] + rounds[1].update[name]) / 2
        torch.testing.assert_close(rounds[2].params[name], before + moved)


def test_same_seed_same_world_and_the_model_is_left_alone(digits: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.BatchNorm1d(10), nn.Dropout(0.5))
    state, mode = copy.deepcopy(model.state_dict()), model.training
    scenario = fp.Scenario(
        model=model,
        clients=[digits.draw(4, rng)],
        protocol=fp.FedAvg(batch_size=2),
        defense=fp.defenses.GaussianNoise(0.1),
    )

    def update(seed: int) -> Update:
        return fp.simulate(scenario, fp.threats.eavesdropper, seed=seed)[0].rounds[0].update

    assert all(torch.equal(a, b) for a, b in zip(update(3).values(), update(3).values(), strict=True))
    assert not torch.equal(update(3)["1.weight"], update(4)["1.weight"])
    assert model.training == mode
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_clients_train_in_train_mode_unless_told(scenario: fp.Scenario) -> None:
    assert fp.simulate(scenario, fp.threats.eavesdropper)[0].model.training
    evaluated = dataclasses.replace(scenario, training=False)
    assert not fp.simulate(evaluated, fp.threats.eavesdropper)[0].model.training


def test_a_tampering_server_chooses_the_parameters(scenario: fp.Scenario) -> None:
    class Zeros:
        def tamper(
            self, model: nn.Module, params: Update, rng: torch.Generator
        ) -> tuple[Update, dict[str, Tensor] | None]:
            return {name: torch.zeros_like(p) for name, p in params.items()}, {"key": torch.ones(1)}

    observation, _ = fp.simulate(scenario, fp.threats.malicious_server, server=Zeros())
    assert all(not p.any() for p in observation.rounds[0].params.values())
    assert observation.trapdoor is not None
    with pytest.raises(fp.errors.BadInput, match="malicious_server"):
        fp.simulate(scenario, fp.threats.honest_but_curious, server=Zeros())


def test_drawing_chooses_the_batch(scenario: fp.Scenario) -> None:
    class FirstOnly(fp.defenses.Defense):
        def on_draw(self, dataset: fp.Batch, context: fp.defenses.Context, rng: torch.Generator) -> Tensor:
            return torch.tensor([0])

    _, truth = fp.simulate(dataclasses.replace(scenario, defense=FirstOnly()), fp.threats.eavesdropper)
    assert torch.equal(truth.inputs, torch.stack([client.inputs[0] for client in scenario.clients]))


# --- frozen parameters -----------------------------------------------------------------------------------------------

CONVOLUTION, DENSE = {"0.weight", "0.bias"}, {"3.weight", "3.bias", "5.weight", "5.bias"}
STEPS = fp.FedAvg(lr=0.1, epochs=2, batch_size=2, shuffle=False)


@pytest.fixture
def half_frozen(digits: fp.data.ImageSet, rng: torch.Generator) -> fp.Scenario:
    """Clients who train the dense layers behind a convolution that stays as it is."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 96), nn.ReLU(), nn.Linear(96, 10)]
    model = nn.Sequential(*layers)
    nn.init.constant_(layers[0].bias, 0.02)  # type: ignore[arg-type]  # so that no channel is silent everywhere
    model[0].requires_grad_(False)
    return fp.Scenario(model=model, clients=[digits.draw(4, rng, unique_labels=True) for _ in range(2)])


def of_one_client(scenario: fp.Scenario, threat: fp.ThreatModel) -> fp.Observation:
    return fp.simulate(dataclasses.replace(scenario, clients=scenario.clients[:1]), threat, device="cpu")[0]


def unexplained(observation: fp.Observation, found: fp.Reconstruction) -> float:
    residual = fp.residual(observation, found)
    assert residual is not None
    return residual


@pytest.mark.parametrize("threat", ["honest_but_curious", "secure_aggregation", "curious_client"])
@pytest.mark.parametrize("protocol", [fp.FedSGD(), STEPS])
def test_frozen_parameters_are_neither_changed_nor_sent(
    half_frozen: fp.Scenario, protocol: fp.FedSGD | fp.FedAvg, threat: str
) -> None:
    scenario = dataclasses.replace(half_frozen, rounds=3, protocol=protocol)
    rounds = fp.simulate(scenario, fp.threats.THREATS[threat], device="cpu")[0].rounds
    before = dict(half_frozen.model.named_parameters())
    for seen in rounds:
        assert set(seen.update) == DENSE
        assert set(seen.params) == DENSE | CONVOLUTION
        assert all(torch.equal(seen.params[name], before[name]) for name in CONVOLUTION)
    assert all(not torch.equal(rounds[-1].params[name], before[name]) for name in DENSE)


def test_what_is_sent_does_not_change_when_other_layers_are_frozen(half_frozen: fp.Scenario) -> None:
    free = copy.deepcopy(half_frozen.model).requires_grad_(True)
    whole = of_one_client(dataclasses.replace(half_frozen, model=free), fp.threats.honest_but_curious).rounds[0].update
    for name, tensor in of_one_client(half_frozen, fp.threats.honest_but_curious).rounds[0].update.items():
        torch.testing.assert_close(tensor, whole[name])


def test_a_model_that_is_frozen_altogether_is_refused(half_frozen: fp.Scenario) -> None:
    half_frozen.model.requires_grad_(False)
    with pytest.raises(fp.errors.BadInput, match="all are frozen"):
        fp.simulate(half_frozen, fp.threats.eavesdropper)


@pytest.mark.parametrize("protocol", [fp.FedSGD(), STEPS])
@pytest.mark.parametrize("through_a_capture", [False, True])
def test_the_true_batch_explains_all_of_such_an_update(
    half_frozen: fp.Scenario, protocol: fp.FedSGD | fp.FedAvg, through_a_capture: bool, tmp_path: Path
) -> None:
    scenario = dataclasses.replace(half_frozen, protocol=protocol)
    observation, batch = of_one_client(scenario, fp.threats.honest_but_curious), scenario.clients[0]
    if through_a_capture:
        fp.captures.save(observation, tmp_path / "capture")
        # Whoever loads the capture has the model, but was not told what is frozen.
        free = copy.deepcopy(half_frozen.model).requires_grad_(True)
        observation = fp.captures.load(tmp_path / "capture", model=free)
        assert set(observation.rounds[0].update) == DENSE
        assert set(observation.rounds[0].params) == DENSE | CONVOLUTION
    private = fp.Reconstruction(inputs=batch.inputs, labels=batch.labels)
    assert unexplained(observation, private) < 1e-5
    wrong = dataclasses.replace(private, inputs=batch.inputs.flip(3))
    assert unexplained(observation, wrong) > 0.1


@pytest.mark.quality
@pytest.mark.parametrize("protocol", [fp.FedSGD(), STEPS])
def test_gradient_matching_works_on_such_an_update(half_frozen: fp.Scenario, protocol: fp.FedSGD | fp.FedAvg) -> None:
    scenario = dataclasses.replace(half_frozen, protocol=protocol)
    observation = of_one_client(scenario, fp.threats.honest_but_curious.granting("labels"))
    attack = dataclasses.replace(
        fp.attacks.inverting_gradients(), labels=Labels.KNOWN, starts=fp.attacks.Starts(race=0.1)
    )
    residuals = []
    for iterations in (1, 60):
        found = fp.run(dataclasses.replace(attack, iterations=iterations), observation, device="cpu")
        residuals.append(unexplained(observation, found))
    assert residuals[1] < residuals[0] / 2


@pytest.mark.quality
def test_the_cocktail_party_works_on_such_an_update(half_frozen: fp.Scenario) -> None:
    observation = of_one_client(half_frozen, fp.threats.honest_but_curious)
    attack = fp.attacks.CocktailParty(inversion=FeatureInversion(iterations=60), matching=1.0)
    found = fp.run(attack, observation, device="cpu")
    batch = half_frozen.clients[0]
    with torch.no_grad():
        truth = half_frozen.model[:3](batch.inputs)
    assert found.features is not None
    similar = nn.functional.cosine_similarity(truth.unsqueeze(1), found.features.unsqueeze(0), dim=2)
    assert similar.max(1).values.min() > 0.999
    assert sorted(similar.argmax(1).tolist()) == list(range(len(batch)))
    assert min(found.diagnostics["feature_cosines"]) > 0.9


@pytest.mark.parametrize(
    ("inputs", "labels", "words"),
    [
        (torch.rand(2, 1, 16, 16), torch.zeros(3, dtype=torch.long), "2 inputs and 3 labels"),
        (torch.rand(0, 1, 16, 16), torch.zeros(0, dtype=torch.long), "at least one"),
        (torch.full((1, 1, 16, 16), torch.nan), torch.zeros(1, dtype=torch.long), "finite"),
        (torch.zeros(1, 1, 16, 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.long), "floating-point"),
        (torch.rand(1, 1, 16, 16), torch.zeros(1), "does not accept the model's outputs and the labels"),
        (torch.rand(1, 1, 16, 16), torch.tensor([10]), "10 classes"),
        (torch.rand(1, 1, 16, 17), torch.tensor([1]), "accept"),
    ],
)
def test_bad_batches_are_refused(scenario: fp.Scenario, inputs: Tensor, labels: Tensor, words: str) -> None:
    def simulated() -> None:
        broken = fp.Scenario(model=scenario.model, clients=[fp.Batch(inputs, labels)])
        fp.simulate(broken, fp.threats.eavesdropper)

    with pytest.raises(fp.errors.BadInput, match=words):
        simulated()


def test_a_scenario_needs_clients(scenario: fp.Scenario) -> None:
    with pytest.raises(fp.errors.BadInput, match="at least one client"):
        fp.Scenario(model=scenario.model, clients=[])

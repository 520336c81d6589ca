"""Property inference: features by hand, planted properties found in updates, in sums and after disaggregation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedprism as fp
from fedprism.attacks import Disaggregation, HoldsClass, Negative, PropertyInference, then
from fedprism.attacks.property_inference import Property
from fedprism.client.update import Protocol
from fedprism.solvers.properties import PropertyStatus, infer_property, telling_tensors, update_features

SHADOWS = 80


def test_features_are_absolute_weights_with_the_largest_of_each_kernel() -> None:
    updates = {
        "dense": torch.tensor([[[3.0, 0.0], [0.0, 0.0]], [[0.0, -1.0], [0.0, 0.0]]]),
        "conv": torch.zeros(2, 1, 2, 3, 3),
    }
    updates["conv"][0, 0, 1, 2, 0] = -4.0
    updates["conv"][0, 0, 1, 0, 0] = 2.0
    expected = torch.tensor([[0.6, 0, 0, 0, 0, 0.8], [0, 1.0, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(update_features(updates), expected)


def test_wide_tensors_and_biases_are_left_out() -> None:
    update = {"a": torch.zeros(4, 3, 5, 5), "b": torch.zeros(4), "c": torch.zeros(10, 12), "d": torch.zeros(11, 12)}
    assert telling_tensors(update, widest=120) == ("a", "c")
    with pytest.raises(ValueError, match=r"at most 5 connections.*Raise widest"):
        telling_tensors(update, widest=5)


def planted(difference: float) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    marks = torch.arange(160) % 2 == 0
    features = torch.randn(160, 12, generator=rng, dtype=torch.float64)
    features[marks, 5] += difference
    return features[:100], marks[:100], features[100:]


def test_a_feature_that_tells_is_found_and_a_constant_one_does_no_harm() -> None:
    examples, marks, observed = planted(6.0)
    examples, observed = (torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in (examples, observed))
    found = infer_property(examples, marks, observed)
    assert ((found.probabilities > 0.5) == (torch.arange(100, 160) % 2 == 0)).double().mean() > 0.95
    assert found.separation > 0.95
    assert found.status is PropertyStatus.CLEAR


def test_where_nothing_tells_the_status_says_so() -> None:
    found = infer_property(*planted(0.0))
    assert 0.3 < found.separation < 0.7
    assert found.status is PropertyStatus.FAINT


def test_examples_of_one_kind_are_refused() -> None:
    examples, _, observed = planted(1.0)
    with pytest.raises(ValueError, match="one kind"):
        infer_property(examples, torch.ones(100, dtype=torch.bool), observed)


def test_a_negative_is_the_mirror_image_of_the_pixel_range() -> None:
    data = fp.Batch(torch.tensor([[[[0.25]]], [[[1.0]]]]), torch.tensor([0, 1]))
    holding, plain = Negative().split(data, (torch.tensor(0.0), torch.tensor(1.0)))
    assert holding.inputs.flatten().tolist() == [0.75, 0.0]
    assert plain is data
    holding, plain = HoldsClass(1).split(data, None)
    assert (holding.labels.tolist(), plain.labels.tolist()) == ([1], [0])


@pytest.fixture(scope="module")
def halves(digits: fp.data.ImageSet) -> tuple[fp.Batch, fp.Batch]:
    """The attacker's digits and everybody else's."""
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    return digits.batch(order[:600]), digits.batch(order[600:])


def clients(data: fp.Batch, sought: Property, marks: list[bool], size: int = 12) -> list[fp.Batch]:
    """Clients of whom the marked ones have the property in half of their samples, the others in none."""
    rng = torch.Generator().manual_seed(1)
    holding, plain = sought.split(data, (torch.tensor(0.0), torch.tensor(1.0)))

    def some(batch: fp.Batch, count: int) -> fp.Batch:
        return batch[torch.randperm(len(batch), generator=rng)[:count]]

    made = []
    for mark in marks:
        first, second = some(holding, size // 2 if mark else 0), some(plain, size // 2 if mark else size)
        made.append(fp.Batch(torch.cat([first.inputs, second.inputs]), torch.cat([first.labels, second.labels])))
    return made


def scenario(halves: tuple[fp.Batch, fp.Batch], sought: Property, marks: list[bool], protocol: Protocol) -> fp.Scenario:
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=16, classes=10, seed=0)
    public, private = halves
    return fp.Scenario(
        model=model, clients=clients(private, sought, marks), protocol=protocol, public_data=public, aggregation="sum"
    )


HALF = [number % 2 == 0 for number in range(20)]
FEDAVG = fp.FedAvg(lr=0.05, epochs=2, batch_size=4)
SEES_CLIENTS = fp.threats.honest_but_curious.granting("public_data")
SEES_SUMS = fp.threats.secure_aggregation.granting("public_data")


@pytest.mark.parametrize("protocol", [fp.FedSGD(), FEDAVG], ids=["gradient", "delta"])
@pytest.mark.parametrize("sought", [HoldsClass(3), Negative()], ids=repr)
def test_clients_with_the_property_are_told_from_the_others(
    halves: tuple[fp.Batch, fp.Batch], sought: Property, protocol: Protocol
) -> None:
    observation, _ = fp.simulate(scenario(halves, sought, HALF, protocol), SEES_CLIENTS)
    found = fp.run(PropertyInference(sought=sought, shadows=SHADOWS), observation)
    assert found.properties is not None
    assert found.owners == tuple(f"client-{number}" for number in range(len(HALF)))
    assert roc_auc_score(HALF, found.properties) > 0.95
    assert found.status == PropertyStatus.CLEAR
    assert found.knowledge_used >= {"public_data", "batch_size", "model"}


def test_noise_on_the_updates_hides_the_property_and_the_status_says_so(halves: tuple[fp.Batch, fp.Batch]) -> None:
    plain = scenario(halves, Negative(), HALF, fp.FedSGD())
    noisy = dataclasses.replace(plain, defense=fp.defenses.GaussianNoise(10.0))
    observation, _ = fp.simulate(noisy, SEES_CLIENTS.granting("defense"))
    found = fp.run(PropertyInference(sought=Negative(), shadows=SHADOWS), observation)
    assert 0.2 < roc_auc_score(HALF, found.properties) < 0.8
    assert found.status == PropertyStatus.FAINT


def federation(halves: tuple[fp.Batch, fp.Batch], participation: Tensor, protocol: Protocol) -> fp.Scenario:
    """One user of all has the property."""
    marks = [user == 2 for user in range(participation.shape[1])]
    return dataclasses.replace(
        scenario(halves, Negative(), marks, protocol),
        rounds=len(participation),
        participation=participation,
        frozen=True,
        window=10,
    )


def test_sums_tell_that_someone_has_the_property_and_disaggregation_tells_who(
    halves: tuple[fp.Batch, fp.Batch], rng: torch.Generator
) -> None:
    participation = torch.rand(60, 24, generator=rng).argsort(dim=1) < 12
    observation, _ = fp.simulate(federation(halves, participation, fp.FedSGD()), SEES_SUMS)
    attack = PropertyInference(sought=Negative(), shadows=SHADOWS)
    alone, together = (fp.run(method, observation) for method in (then(Disaggregation(certify=False), attack), attack))
    assert alone.properties is not None
    assert together.properties is not None
    assert alone.owners is not None
    assert alone.owners[int(alone.properties.argmax())] == "client-2"
    assert len(alone.owners) == len(alone.properties) == 24
    assert together.owners == tuple(f"round {number}" for number in range(60))
    assert roc_auc_score(participation[:, 2], together.properties) > 0.9
    assert [entry["clients"] for entry in alone.diagnostics["parts"][0]["separation"]] == [1]
    assert [entry["clients"] for entry in together.diagnostics["separation"]] == [12]


def test_small_sums_are_compared_with_sums_of_as_many_clients(
    halves: tuple[fp.Batch, fp.Batch], rng: torch.Generator
) -> None:
    participation = torch.rand(40, 3, generator=rng) < 0.5
    participation[0] = False
    observation, _ = fp.simulate(federation(halves, participation, FEDAVG), SEES_SUMS)
    found = fp.run(PropertyInference(sought=Negative(), shadows=SHADOWS), observation)
    assert found.properties is not None
    assert found.properties[0] == 0  # nobody took part, so nobody had it
    assert roc_auc_score(participation[:, 2], found.properties) > 0.9
    sizes = {int(row.sum()) for row in participation} - {0}
    assert {entry["clients"] for entry in found.diagnostics["separation"]} == sizes


def test_same_seed_same_answer(halves: tuple[fp.Batch, fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(halves, Negative(), HALF[:4], FEDAVG), SEES_CLIENTS)
    attack = PropertyInference(sought=Negative(), shadows=20)
    first, second, other = (fp.run(attack, observation, seed=seed).properties for seed in (1, 1, 2))
    assert first is not None
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_data_without_the_property_and_missing_knowledge_are_refused(halves: tuple[fp.Batch, fp.Batch]) -> None:
    plain = scenario(halves, Negative(), HALF[:2], fp.FedSGD())
    attack = PropertyInference(sought=HoldsClass(10), shadows=20)
    with pytest.raises(fp.errors.BadInput, match=r"HoldsClass\(label=10\).*not 0 and 600"):
        fp.run(attack, fp.simulate(plain, SEES_CLIENTS)[0])
    for field in ("public_data", "batch_size", "model", "loss"):
        with pytest.raises(fp.MissingKnowledge, match=f"'{field}'"):
            fp.run(attack, fp.simulate(plain, SEES_CLIENTS.withholding(field))[0])
    with pytest.raises(fp.NotApplicable, match="at most 3 connections"):
        fp.run(PropertyInference(widest=3), fp.simulate(plain, SEES_CLIENTS)[0])
    delta, _ = fp.simulate(dataclasses.replace(plain, protocol=FEDAVG), SEES_CLIENTS.withholding("local_epochs"))
    with pytest.raises(fp.MissingKnowledge, match="'local_epochs'"):
        fp.run(PropertyInference(), delta)


@pytest.mark.parametrize("change", [{"fraction": 0.0}, {"fraction": 1.5}, {"shadows": 5}, {"widest": 0}])
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(fp.errors.BadInput, match="out of range"):
        PropertyInference(**change)  # type: ignore[arg-type]

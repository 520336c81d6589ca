"""One contract over every row of the tables. A new method joins by its table line and a row here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
import text_models
from fedprism.attacks import (
    ATTACKS,
    Attack,
    ClassFishing,
    Encodings,
    GradientMatching,
    MixedSamples,
    PropertyInference,
    RowSpaceInversion,
    SpanInversion,
)
from fedprism.defenses import DEFENSES, Context, Defense
from fedprism.types import Update, detached
from patch_models import small_vit

DEFENSE_ROWS: dict[str, Callable[[], Defense]] = {
    "prune": lambda: fp.defenses.Prune(0.5),
    "gaussian-noise": lambda: fp.defenses.GaussianNoise(0.1),
    "laplace-noise": lambda: fp.defenses.LaplaceNoise(0.1),
    "clip": lambda: fp.defenses.Clip(0.1),
    "quantize": lambda: fp.defenses.Quantize(4),
    "cast": lambda: fp.defenses.Cast("bfloat16"),
    "dp-sgd": lambda: fp.defenses.DpSgd(0.1),
    "secure-aggregation": lambda: fp.defenses.SecureAggregation(bits=16),
    "equal-labels": lambda: fp.defenses.EqualLabels(1),
    "mse-loss": lambda: fp.defenses.MseLoss(softmax=False),
    "mixup": lambda: fp.defenses.MixUp(k=2),
    "instahide": lambda: fp.defenses.InstaHide(k=2),
    "soteria": lambda: fp.defenses.Soteria(0.5),
    "sign-compression": lambda: fp.defenses.SignCompression(),
    "random-weights": lambda: fp.defenses.RandomWeights(0.5),
}


STATISTICS = frozenset({"batchnorm_exact", "batchnorm_running"})


def quick(name: str) -> Attack:
    """The attack of a table row, with little effort."""
    attack = ATTACKS[name]()
    if isinstance(attack, PropertyInference):
        return dataclasses.replace(attack, shadows=20)
    if isinstance(attack, ClassFishing | MixedSamples):
        return dataclasses.replace(attack, matching=dataclasses.replace(attack.matching, iterations=2))  # type: ignore[type-var]
    if isinstance(attack, RowSpaceInversion):
        return dataclasses.replace(attack, starts=1, steps=2)
    if isinstance(attack, SpanInversion):
        return dataclasses.replace(attack, iterations=2, steps=1, restarts=1)
    if isinstance(attack, Encodings):
        return dataclasses.replace(attack, inner=dataclasses.replace(attack.inner, iterations=2))  # type: ignore[type-var]
    return dataclasses.replace(attack, iterations=2) if isinstance(attack, GradientMatching) else attack


@pytest.fixture(scope="module")
def scenario(photos: fp.data.ImageSet) -> fp.Scenario:
    batch = photos.draw(2, torch.Generator().manual_seed(1), unique_labels=True)
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=16, classes=10, seed=3)
    public = photos.draw(32, torch.Generator().manual_seed(2))
    return fp.Scenario(model=model, clients=[batch], defense=fp.defenses.Prune(0.3), public_data=public)


@pytest.fixture
def name() -> str:
    """The row that is tested, where a test is not about all of them."""
    return "gradient-matching"


@pytest.fixture
def attacked(name: str, scenario: fp.Scenario) -> fp.Scenario:
    """The scenario, with batch norm where the attack needs to know its statistics, convolutions for mkor."""
    needs = ATTACKS[name]().needs
    if name == "patch-inversion":
        return dataclasses.replace(scenario, model=small_vit(), clients=[scenario.clients[0][:1]])
    if name == "embedding-inversion":
        tokens = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(1))
        clients = [fp.Batch(tokens, torch.tensor([0, 1]))]
        return dataclasses.replace(scenario, model=bag_of_words(), clients=clients, public_data=None)
    if name == "token-inversion":
        clients = [fp.Batch(*text_models.texts([6, 4]))]
        return fp.Scenario(model=text_models.decoder(), clients=clients)
    if name.startswith("mkor"):
        return dataclasses.replace(scenario, model=chain_of_layers())
    if "mixing" in needs:
        return dataclasses.replace(scenario, defense=fp.chain(fp.defenses.MixUp(2), fp.defenses.Prune(0.3)))
    if not needs & STATISTICS:
        return scenario
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        convolution = nn.Conv2d(3, 4, 5, stride=2, bias=False)
        model = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 10))
    return dataclasses.replace(scenario, model=model)


def bag_of_words() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.EmbeddingBag(40, 8), nn.Linear(8, 10))


def chain_of_layers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = nn.Conv2d(3, 8, 3, padding=1)
        return nn.Sequential(
            first, nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * 64, 40), nn.ReLU(), nn.Linear(40, 10)
        )


@pytest.fixture
def observation(name: str, attacked: fp.Scenario) -> fp.Observation:
    attack = ATTACKS[name]()
    tampers = "trapdoor" in attack.needs
    threat = fp.threats.malicious_server if tampers else fp.threats.honest_but_curious
    threat = threat.granting("labels", "defense", "public_data", "mixing", *STATISTICS)
    return fp.simulate(attacked, threat, seed=5, server=attack if tampers else None)[0]  # type: ignore[arg-type]


def answers(found: fp.Reconstruction) -> dict[str, Tensor]:
    """Everything that an attack found out, by name."""
    tensors = {"inputs": found.inputs, "labels": found.labels, "properties": found.properties}
    for number, update in enumerate(found.updates or ()):
        tensors |= {f"{number}: {name}": tensor for name, tensor in update.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def same(first: fp.Reconstruction, second: fp.Reconstruction) -> bool:
    one, other = answers(first), answers(second)
    tensors = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return tensors and first.status == second.status and first.knowledge_used == second.knowledge_used


@pytest.mark.parametrize("name", ATTACKS)
class TestAttack:
    def test_refuses_when_a_need_is_withheld(self, name: str, attacked: fp.Scenario) -> None:
        attack = quick(name)
        for field in attack.needs:
            granting = fp.threats.honest_but_curious.granting("labels", "public_data", "mixing", *STATISTICS)
            withheld, _ = fp.simulate(attacked, granting.withholding(field))
            with pytest.raises(fp.MissingKnowledge, match=f"'{field}'.*use") as caught:
                fp.run(attack, withheld)
            assert caught.value.field == field

    def test_same_seed_same_answer(self, name: str, observation: fp.Observation) -> None:
        first, second = (fp.run(quick(name), observation, seed=7) for _ in range(2))
        assert answers(first)
        assert same(first, second)

    def test_global_randomness_plays_no_part(self, name: str, observation: fp.Observation) -> None:
        torch.manual_seed(1)
        first = fp.run(quick(name), observation, seed=7)
        torch.manual_seed(2)
        before = torch.random.get_rng_state()
        second = fp.run(quick(name), observation, seed=7)
        assert same(first, second)
        assert torch.equal(before, torch.random.get_rng_state())

    def test_same_answer_from_a_capture(self, name: str, observation: fp.Observation, tmp_path: Path) -> None:
        assert observation.model is not None
        unnamed = None if fp.models.spec_of(observation.model) else observation.model
        loaded = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"), model=unnamed)
        assert same(fp.run(quick(name), observation, seed=7), fp.run(quick(name), loaded, seed=7))

    def test_observation_is_not_changed(self, name: str, observation: fp.Observation) -> None:
        assert observation.model is not None
        seen = observation.rounds[0]
        parts: list[Update] = [seen.params, seen.update, dict(observation.model.state_dict())]
        before = [detached(part) for part in parts]
        training = observation.model.training
        fp.run(quick(name), observation)
        for old, new in zip(before, parts, strict=True):
            assert all(torch.equal(old[key], new[key]) for key in old)
        assert observation.model.training == training

    def test_repr_evaluates_back(self, name: str) -> None:
        attack = ATTACKS[name]()
        assert eval(repr(attack), vars(fp.attacks)) == attack

    def test_is_described(self, name: str) -> None:
        attack = ATTACKS[name]()
        assert any(year in attack.citation for year in map(str, range(1990, 2030)))
        assert ATTACKS[name].__doc__
        assert attack.needs | attack.uses <= fp.threats.GRANTABLE

    def test_is_frozen(self, name: str) -> None:
        attack = ATTACKS[name]()
        with pytest.raises(dataclasses.FrozenInstanceError):
            attack.anything = 1  # type: ignore[attr-defined]

    def test_reports_the_knowledge_it_used(self, name: str, observation: fp.Observation) -> None:
        attack = quick(name)
        used = fp.run(attack, observation).knowledge_used
        assert attack.needs <= used <= attack.needs | attack.uses

    def test_refuses_an_update_that_is_not_finite(self, name: str, observation: fp.Observation) -> None:
        seen = observation.rounds[0]
        broken = {key: torch.full_like(value, torch.nan) for key, value in seen.update.items()}
        hurt = dataclasses.replace(observation, rounds=(dataclasses.replace(seen, update=broken),))
        with pytest.raises(fp.errors.BadInput, match="NaN or infinity"):
            fp.run(quick(name), hurt)


def test_an_attack_is_handed_only_what_it_declares(observation: fp.Observation) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Spy(Attack):
        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"batch_size"})

        @property
        def uses(self) -> frozenset[str]:
            return frozenset({"labels", "windows"})

        def run(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
            assert observation.granted() == {"batch_size", "labels"}
            assert observation.model is None
            return fp.Reconstruction(status="looked around")

    assert fp.run(Spy(), observation).knowledge_used == {"batch_size", "labels"}


def test_every_defense_has_a_row() -> None:
    assert set(DEFENSE_ROWS) == set(DEFENSES)


@pytest.mark.parametrize("name", DEFENSES)
class TestDefense:
    def test_repr_evaluates_back(self, name: str) -> None:
        defense = DEFENSE_ROWS[name]()
        assert eval(repr(defense), vars(fp.defenses)) == defense
        assert type(defense).__doc__

    def test_leaves_its_arguments_alone(self, name: str, scenario: fp.Scenario, rng: torch.Generator) -> None:
        defense, batch = DEFENSE_ROWS[name](), copy.deepcopy(scenario.clients[0])
        update = detached(dict(scenario.model.named_parameters()))
        before, context = detached(update), Context(model=scenario.model, params=update, batch=batch)
        defense.on_draw(batch, context, rng)
        defense.on_batch(batch, context, rng)
        defense.on_examples({name: tensor.expand(2, *tensor.shape) for name, tensor in update.items()}, context, rng)
        defense.on_update(update, context, rng)
        defense.on_aggregate([update], context, rng)
        assert torch.equal(batch.inputs, scenario.clients[0].inputs)
        assert all(torch.equal(before[key], update[key]) for key in update)

    def test_changes_what_leaves_the_client(self, name: str, scenario: fp.Scenario) -> None:
        model = copy.deepcopy(scenario.model)
        # All units pass: Soteria takes those first that no sample passes, whose columns are zero anyway.
        nn.init.ones_(model.get_parameter("1.bias"))
        defended = dataclasses.replace(scenario, model=model, defense=DEFENSE_ROWS[name]())
        plain = dataclasses.replace(scenario, model=model, defense=fp.chain())
        threat = fp.threats.honest_but_curious
        updates = [fp.simulate(s, threat)[0].rounds[0].update for s in (defended, plain)]
        assert any(not torch.equal(updates[0][key], updates[1][key]) for key in updates[0])

    def test_knows_what_can_be_repeated(self, name: str, scenario: fp.Scenario, rng: torch.Generator) -> None:
        defense, update = DEFENSE_ROWS[name]().deterministic(), detached(dict(scenario.model.named_parameters()))
        here = Context(model=scenario.model, params=update, batch=scenario.clients[0])
        first, second = (defense.on_update(update, here, rng) for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in update)

"""Laws of every analytic attack: scale, order and rounding of an update change no answer, and EXACT is borne out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.base import READ_AS_SGD
from fedprism.attacks.certificate import rounding_error
from fedprism.attacks.imprint import ImprintStatus
from fedprism.attacks.patch_inversion import EXACT as PATCHES_EXACT
from fedprism.attacks.row_space_inversion import RowSpaceStatus
from fedprism.solvers import DenseStatus, ExactStatus, FeatureInversion
from patch_models import small_vit

EXACT = (
    str(DenseStatus.EXACT),
    str(ExactStatus.EXACT),
    str(ImprintStatus.EXACT),
    str(RowSpaceStatus.EXACT),
    PATCHES_EXACT,
)
"""What attacks say of answers that explain the whole update."""
DIGITS = fp.data.load("digits", size=16)
PARTY = fp.attacks.CocktailParty(inversion=FeatureInversion(iterations=10))
SCALES = (1e-6, 1e6)


class Case(NamedTuple):
    attack: Callable[[], fp.Attack]
    model: Callable[[], nn.Module]
    numbers: tuple[int, ...]
    """Of the digits."""


def fc2() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=10, seed=0)


def chain() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = nn.Conv2d(1, 8, 3, padding=1)
        last = (nn.Flatten(), nn.Linear(8 * 16, 40), nn.ReLU(), nn.Linear(40, 10))
        return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(4), *last)


def fishing() -> fp.Attack:
    return fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())


CASES = {
    "dense-inversion of one sample": Case(fp.attacks.dense_inversion, fc2, (0,)),
    "dense-inversion of five": Case(fp.attacks.dense_inversion, fc2, (0, 1, 2, 4, 5)),
    "dense-inversion through one layer": Case(
        fp.attacks.dense_inversion,
        lambda: fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=1),
        (0, 1, 2, 4, 5),
    ),
    "cocktail-party": Case(fp.attacks.cocktail_party, fc2, (0, 1, 2, 4)),
    "patch-inversion": Case(fp.attacks.patch_inversion, lambda: small_vit(0, (1, 16, 16), patch=4), (0,)),
    "row-space-inversion": Case(fp.attacks.row_space_inversion, fc2, (0, 1)),
    "imprint": Case(fp.attacks.imprint, fc2, (0, 1, 5)),
    "mkor": Case(fp.attacks.mkor, chain, (0, 1, 1, 4, 5)),
    "mkor without an absent class": Case(fp.attacks.mkor, chain, (*range(10), 10)),
    "mkor-inconspicuous": Case(fp.attacks.mkor_inconspicuous, chain, (0, 1, 1, 4, 5)),
    "mkor by a dump class": Case(
        lambda: fp.attacks.Mkor(reference=fp.attacks.Reference.DUMP_CLASS), chain, (0, 1, 1, 4, 5)
    ),
    "class-fishing": Case(fishing, fc2, (0, 1, 2, 3, 4, 5)),
}


def observed(case: Case, protocol: fp.FedAvg | fp.FedSGD | None = None, **options: object) -> fp.Observation:
    attack = case.attack()
    tampers = "trapdoor" in attack.needs
    scenario = fp.Scenario(
        model=case.model(),
        clients=[DIGITS.batch(list(case.numbers))],
        protocol=protocol or fp.FedSGD(),
        **options,  # type: ignore[arg-type]
    )
    threat = fp.threats.malicious_server if tampers else fp.threats.honest_but_curious
    return fp.simulate(scenario, threat, seed=0, device="cpu", server=attack if tampers else None)[0]  # type: ignore[arg-type]


def changed(observation: fp.Observation, change: Callable[[Tensor], Tensor]) -> fp.Observation:
    update = {name: change(tensor) for name, tensor in observation.round.update.items()}
    return dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))


def assert_same(first: fp.Reconstruction, second: fp.Reconstruction, tolerance: float) -> None:
    assert first.status == second.status
    assert first.inputs is not None
    assert second.inputs is not None
    torch.testing.assert_close(in_order(first), in_order(second), atol=tolerance, rtol=0)
    if first.labels is not None or second.labels is not None:
        assert sorted(first.labels.tolist()) == sorted(second.labels.tolist())  # type: ignore[union-attr]


def in_order(answer: fp.Reconstruction) -> Tensor:
    """The inputs by their mean values, as their order is no part of the answer."""
    assert answer.inputs is not None
    return answer.inputs[answer.inputs.flatten(1).mean(1).argsort()]


@pytest.mark.parametrize("name", CASES)
class TestLaws:
    @pytest.mark.parametrize("factor", SCALES)
    def test_any_positive_factor_leaves_the_answer(self, name: str, factor: float) -> None:
        observation, attack = observed(CASES[name]), CASES[name].attack()
        plain = fp.run(attack, observation)
        assert_same(plain, fp.run(attack, changed(observation, lambda tensor: factor * tensor)), 2e-3)

    def test_the_sign_of_a_difference_leaves_the_answer(self, name: str) -> None:
        observation, attack = observed(CASES[name], fp.FedAvg(lr=0.1)), CASES[name].attack()
        plain = fp.run(attack, observation)
        assert plain.inputs is not None
        assert len(plain.inputs)
        assert_same(plain, fp.run(attack, changed(observation, lambda tensor: -tensor)), 2e-3)

    def test_the_order_of_parameters_leaves_the_answer(self, name: str) -> None:
        observation, attack = observed(CASES[name]), CASES[name].attack()
        round = observation.round
        turned = dataclasses.replace(
            round,
            params=dict(reversed(round.params.items())),
            update=dict(reversed(round.update.items())),
        )
        answer = fp.run(attack, dataclasses.replace(observation, rounds=(turned,)))
        assert_same(fp.run(attack, observation), answer, 0.0)

    @pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=str)
    def test_rounding_leaves_the_answer_up_to_rounding(self, name: str, dtype: torch.dtype, error: float) -> None:
        observation, attack = observed(CASES[name]), CASES[name].attack()
        largest = max(float(tensor.abs().max()) for tensor in observation.round.update.values())
        rounded = changed(observation, lambda tensor: (tensor / largest).to(dtype).to(tensor.dtype))
        first, second = in_order(fp.run(attack, observation)), in_order(fp.run(attack, rounded))
        assert first.shape == second.shape
        assert float((first - second).square().mean().sqrt()) < error

    def test_noise_in_place_of_an_update_is_not_called_exact(self, name: str) -> None:
        observation, attack = observed(CASES[name]), CASES[name].attack()
        rng = torch.Generator().manual_seed(0)
        answer = fp.run(attack, changed(observation, lambda tensor: torch.randn(tensor.shape, generator=rng)))
        assert not answer.status.startswith(EXACT)

    @pytest.mark.parametrize("epochs", [1, 3])
    def test_steps_of_an_unknown_optimizer_are_not_called_exact(self, name: str, epochs: int) -> None:
        protocol = fp.FedAvg(lr=1e-3, epochs=epochs, optimizer=fp.optimizers.Adam())
        known = observed(CASES[name], protocol)
        with pytest.raises(fp.NotApplicable):
            fp.run(CASES[name].attack(), known)
        unknown = dataclasses.replace(known, knowledge=dataclasses.replace(known.knowledge, local_optimizer=None))
        try:
            answer = fp.run(CASES[name].attack(), unknown)
        except fp.NotApplicable:
            return
        assert not answer.status.startswith(EXACT)
        assert answer.status.endswith(READ_AS_SGD)

    def test_signs_in_place_of_an_update_are_not_called_exact(self, name: str) -> None:
        answer = fp.run(CASES[name].attack(), changed(observed(CASES[name]), torch.sign))
        assert not answer.status.startswith(EXACT)


# --- EXACT is about what is returned ---------------------------------------------------------------------------------


class Table(nn.Module):
    """Two numbers and two categories, which the model embeds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(12, 6), nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        embedded = [self.first(x[:, 2].long().clamp(0, 11)), self.second(x[:, 3].long().clamp(0, 4))]
        return self.body(torch.cat([x[:, :2], *embedded], dim=1))  # type: ignore[no-any-return]


class TwoHeads(nn.Module):
    """Two output layers behind one hidden one: together they are the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.one, self.other = nn.Linear(64, 6), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return torch.cat([self.one(hidden), self.other(hidden)], dim=1)


class TwoEntrances(nn.Module):
    """Two dense layers that the input feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(256, 64), nn.Linear(256, 64), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        both = torch.cat([torch.relu(self.one(flat)), torch.tanh(self.other(flat))], dim=1)
        return self.last(both)  # type: ignore[no-any-return]


def table(samples: int) -> fp.Batch:
    rng = torch.Generator().manual_seed(4)
    categories = [torch.randint(high, (samples, 1), generator=rng).float() for high in (12, 5)]
    inputs = torch.cat([torch.rand(samples, 2, generator=rng), *categories], dim=1)
    return fp.Batch(inputs, torch.arange(samples) % 4)


DEFENSES = [
    fp.chain(),
    fp.defenses.Clip(0.01),
    fp.defenses.GaussianNoise(1e-3),
    fp.defenses.Prune(0.5),
    fp.defenses.Cast("bfloat16"),
]


@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
@pytest.mark.parametrize("attack", [fp.attacks.dense_inversion(), PARTY], ids=["dense-inversion", "cocktail-party"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("model", [Table, TwoHeads, TwoEntrances, fc2], ids=lambda model: model.__name__)
def test_exact_implies_a_residual_at_rounding_error(
    model: Callable[[], nn.Module], samples: int, attack: fp.Attack, defense: fp.Defense
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(samples)
        network = model()
    batch = table(samples) if model is Table else DIGITS.batch(list(range(samples)))
    scenario = fp.Scenario(model=network, clients=[batch], defense=defense)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    try:
        answer = fp.run(attack, observation)
    except fp.NotApplicable:
        return
    residual = fp.residual(observation, answer)
    if answer.status.startswith(EXACT):
        assert residual is not None
        assert residual <= rounding_error(observation.round.update)


def test_the_law_has_cases() -> None:
    """The answers that are held to the law above are exact in some of its cases, and in others are not."""
    for model, samples, exact in ((TwoHeads, 3, True), (fc2, 3, True), (Table, 3, False)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = model()
        batch = table(samples) if model is Table else DIGITS.batch(list(range(samples)))
        observation, _ = fp.simulate(fp.Scenario(model=network, clients=[batch]), fp.threats.honest_but_curious)
        answer = fp.run(PARTY, observation)
        assert answer.status.startswith(EXACT) == exact, model

"""Laws of every analytic attack: scale, order and rounding of an update change no answer, and EXACT is borne out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
import text_models
from fedprism.attacks.base import READ_AS_SGD, UpdateAttack
from fedprism.attacks.certificate import rounding_error
from fedprism.attacks.embedding_inversion.answer import LookupStatus
from fedprism.attacks.gradient_matching.labels import given_labels
from fedprism.attacks.imprint import ImprintStatus
from fedprism.attacks.patch_inversion import EXACT as PATCHES_EXACT
from fedprism.attacks.row_space_inversion import RowSpaceStatus
from fedprism.attacks.span_inversion.attack import SpanInversionStatus
from fedprism.attacks.token_inversion.attack import TokenStatus
from fedprism.solvers import DenseStatus, ExactStatus, FeatureInversion
from patch_models import small_vit

EXACT = (
    str(DenseStatus.EXACT),
    str(ExactStatus.EXACT),
    str(ImprintStatus.EXACT),
    str(LookupStatus.EXACT),
    str(RowSpaceStatus.EXACT),
    str(SpanInversionStatus.EXACT),
    PATCHES_EXACT,
    str(TokenStatus.EXACT),
)
"""What attacks say of answers that explain the whole update."""
DIGITS = fp.data.load("digits", size=16)
PARTY = fp.attacks.CocktailParty(inversion=FeatureInversion(iterations=10))
SCALES = (1e-6, 1e6)


DEFENSES = [
    fp.chain(),
    fp.defenses.Clip(0.01),
    fp.defenses.GaussianNoise(1e-3),
    fp.defenses.Prune(0.5),
    fp.defenses.Cast("bfloat16"),
]


class Case(NamedTuple):
    attack: Callable[[], UpdateAttack]
    model: Callable[[], nn.Module]
    batch: Callable[[], fp.Batch]
    loss: str = "cross_entropy"


def digits(*numbers: int) -> Callable[[], fp.Batch]:
    return lambda: DIGITS.batch(list(numbers))


def one_digit_as_yes() -> fp.Batch:
    return fp.Batch(DIGITS.batch([0]).inputs, torch.ones(1))


def texts(samples: int) -> Callable[[], fp.Batch]:
    def made() -> fp.Batch:
        rng = torch.Generator().manual_seed(samples)
        tokens = torch.randint(1, 60, (samples, 8), generator=rng)
        tokens[:, 2] = tokens[:, 5]
        tokens[:, -2:] = 0
        return fp.Batch(tokens, torch.arange(samples) % 4)

    return made


def series() -> fp.Batch:
    return fp.Batch(torch.rand(1, 3, 5, generator=torch.Generator().manual_seed(2)), torch.tensor([2]))


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def fc2() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=10, seed=0)


def yes_or_no() -> nn.Module:
    """Logistic regression: its update has one number more than its input, so that any update fits some input."""
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 1)))


def chain() -> nn.Module:
    first = nn.Conv2d(1, 8, 3, padding=1)
    last = (nn.Flatten(), nn.Linear(8 * 16, 40), nn.ReLU(), nn.Linear(40, 10))
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(4), *last)


def bag_of_words() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.EmbeddingBag(60, 12, padding_idx=0), nn.Linear(12, 4)))


class Words(nn.Module):
    """Words with positions in front of attention; the output layer is dense, or the table of the words itself."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 12, padding_idx=0)
        self.position = None if tied else nn.Parameter(0.1 * torch.randn(8, 12))
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True)
        self.head = nn.Linear(12, 60 if tied else 4, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        fed = self.table(tokens)
        if self.position is None:
            return self.head(torch.tanh(fed.mean(1)))  # type: ignore[no-any-return]
        return self.head(self.encoder(fed + self.position).mean(1))  # type: ignore[no-any-return]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.cells(steps)[0][:, -1])  # type: ignore[no-any-return]


def few_steps() -> UpdateAttack:
    return fp.attacks.RowSpaceInversion(starts=2, steps=15)


def spans() -> UpdateAttack:
    return fp.attacks.SpanInversion(iterations=150, steps=15, restarts=1)


def small_digit() -> fp.Batch:
    return fp.data.load("digits").batch([0])


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 32, 10))


def fishing() -> UpdateAttack:
    return fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())


CASES = {
    "dense-inversion of one sample": Case(fp.attacks.dense_inversion, fc2, digits(0)),
    "dense-inversion of five": Case(fp.attacks.dense_inversion, fc2, digits(0, 1, 2, 4, 5)),
    "dense-inversion through one layer": Case(
        fp.attacks.dense_inversion,
        lambda: fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=1),
        digits(0, 1, 2, 4, 5),
    ),
    "dense-inversion of one output": Case(
        fp.attacks.dense_inversion, yes_or_no, one_digit_as_yes, "binary_cross_entropy"
    ),
    "cocktail-party": Case(fp.attacks.cocktail_party, fc2, digits(0, 1, 2, 4)),
    "patch-inversion": Case(fp.attacks.patch_inversion, lambda: small_vit(0, (1, 16, 16), patch=4), digits(0)),
    "embedding-inversion of bags of words": Case(fp.attacks.embedding_inversion, bag_of_words, texts(3)),
    "embedding-inversion of words in order": Case(fp.attacks.embedding_inversion, lambda: seeded(Words), texts(1)),
    "embedding-inversion of a tied table": Case(
        fp.attacks.embedding_inversion, lambda: seeded(lambda: Words(tied=True)), texts(2)
    ),
    "embedding-inversion of rows": Case(fp.attacks.embedding_inversion, lambda: seeded(Table), lambda: table(3)),
    "token-inversion": Case(
        fp.attacks.token_inversion, text_models.decoder, lambda: fp.Batch(*text_models.texts([6, 4]))
    ),
    "token-inversion of LoRA": Case(
        fp.attacks.token_inversion,
        lambda: text_models.with_lora(text_models.decoder(), 16),
        lambda: fp.Batch(*text_models.texts([6])),
    ),
    "row-space-inversion": Case(few_steps, fc2, digits(0, 1)),
    "row-space-inversion of steps": Case(few_steps, lambda: seeded(Steps), series),
    "row-space-inversion of one output": Case(
        fp.attacks.row_space_inversion, yes_or_no, one_digit_as_yes, "binary_cross_entropy"
    ),
    "span-inversion": Case(spans, lambda: seeded(convolutions), small_digit),
    "imprint": Case(fp.attacks.imprint, fc2, digits(0, 1, 5)),
    "mkor": Case(fp.attacks.mkor, lambda: seeded(chain, 3), digits(0, 1, 1, 4, 5)),
    "mkor without an absent class": Case(fp.attacks.mkor, lambda: seeded(chain, 3), digits(*range(10), 10)),
    "mkor-inconspicuous": Case(fp.attacks.mkor_inconspicuous, lambda: seeded(chain, 3), digits(0, 1, 1, 4, 5)),
    "mkor by a dump class": Case(
        lambda: fp.attacks.Mkor(reference=fp.attacks.Reference.DUMP_CLASS),
        lambda: seeded(chain, 3),
        digits(0, 1, 1, 4, 5),
    ),
    "class-fishing": Case(fishing, fc2, digits(0, 1, 2, 3, 4, 5)),
}
REFUSED = {
    "embedding-inversion": "but more have one",
    "token-inversion": "to tell the tokens of the batch",
    "span-inversion": "there are none",
}
"""What attacks say that refuse noise."""
SEARCHES = frozenset(
    {"gradient-matching", "dlg", "idlg", "inverting-gradients", "bn-exact", "bn-infer", "bn-proxy"}
    | {"mixing-l2", "mixing-angle", "mixing-orthogonal", "mixup-at-once"}
)
"""Attacks that search by gradients: their answers depend on their effort."""
NOT_OF_ONE_UPDATE = frozenset({"disaggregation", "property-inference", "mixup-decoding", "instahide-decoding"})
"""Attacks on many rounds, on properties of a batch, or on what other attacks return."""


def test_every_analytic_attack_has_a_case() -> None:
    assert {name.split()[0] for name in CASES} == set(fp.attacks.ATTACKS) - SEARCHES - NOT_OF_ONE_UPDATE


def observed(case: Case, protocol: fp.FedAvg | fp.FedSGD | None = None, **options: object) -> fp.Observation:
    attack = case.attack()
    tampers = "trapdoor" in attack.needs
    scenario = fp.Scenario(
        model=case.model(),
        clients=[case.batch()],
        loss=case.loss,
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
    inputs = answer.tensor.double()
    return inputs[inputs.flatten(1).mean(1).argsort()]


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
        rng = torch.Generator().manual_seed(99)
        noise = changed(observation, lambda tensor: torch.randn(tensor.shape, generator=rng))
        refused = next((said for start, said in REFUSED.items() if name.startswith(start)), None)
        if refused is not None:
            with pytest.raises(fp.NotApplicable, match=refused):
                fp.run(attack, noise)
        else:
            assert not fp.run(attack, noise).status.startswith(EXACT)

    @pytest.mark.parametrize("defense", DEFENSES, ids=repr)
    def test_exact_implies_a_residual_at_rounding_error(self, name: str, defense: fp.Defense) -> None:
        observation, attack = observed(CASES[name], defense=defense), CASES[name].attack()
        try:
            answer = fp.run(attack, observation)
        except fp.NotApplicable:
            return
        assert_borne_out(observation, answer)

    @pytest.mark.parametrize("epochs", [1, 3])
    def test_steps_of_an_unknown_optimizer_are_not_called_exact(self, name: str, epochs: int) -> None:
        protocol = fp.FedAvg(lr=1e-3, epochs=epochs, optimizer=fp.optimizers.Adam())
        known, attack = observed(CASES[name], protocol), CASES[name].attack()
        if not attack.reads_scaled_updates:
            with pytest.raises(fp.NotApplicable):
                fp.run(attack, known)
        unknown = dataclasses.replace(known, knowledge=dataclasses.replace(known.knowledge, local_optimizer=None))
        try:
            answer = fp.run(attack, unknown)
        except fp.NotApplicable:
            return
        assert not answer.status.startswith(EXACT)
        assert answer.status.endswith(READ_AS_SGD)

    def test_signs_in_place_of_an_update_are_not_called_exact(self, name: str) -> None:
        try:
            answer = fp.run(CASES[name].attack(), changed(observed(CASES[name]), torch.sign))
        except fp.NotApplicable:
            return
        assert not answer.status.startswith(EXACT)


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2, 2), tuple(range(30))], ids=len)
def test_any_positive_factor_leaves_the_labels(numbers: tuple[int, ...]) -> None:
    observation = observed(Case(fp.attacks.dense_inversion, fc2, digits(*numbers)))

    def labels(factor: float) -> list[int]:
        seen = changed(observation, lambda tensor: factor * tensor)
        given = given_labels(fp.attacks.Labels.INFERRED, seen, seen.round, len(numbers)).fixed
        assert given is not None
        return given.tolist()

    assert len({tuple(labels(factor)) for factor in (1.0, *SCALES)}) == 1


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


@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
@pytest.mark.parametrize("attack", [fp.attacks.dense_inversion(), PARTY], ids=["dense-inversion", "cocktail-party"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("model", [Table, TwoHeads, TwoEntrances, fc2], ids=lambda model: model.__name__)
def test_exact_implies_a_residual_at_rounding_error(
    model: Callable[[], nn.Module], samples: int, attack: UpdateAttack, defense: fp.Defense
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
    assert_borne_out(observation, answer)


def assert_borne_out(observation: fp.Observation, answer: fp.Reconstruction) -> None:
    """EXACT implies that the answer explains the whole update to rounding error."""
    if answer.status.startswith(EXACT):
        residual = fp.residual(observation, answer)
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

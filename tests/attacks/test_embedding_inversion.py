"""Tokens and categories out of updates of real kinds of models, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.embedding_inversion.answer import LookupStatus
from fedprism.attacks.embedding_inversion.attack import CONTRADICTED, RUNNING_STATISTICS

VOCABULARY, WIDTH, LENGTH, CLASSES = 300, 24, 10, 4
CATEGORIES, NUMBERS = (7, 12, 9, 5), 4


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.table(tokens))[0][:, -1])


class Attention(nn.Module):
    """Padding, positions by number, and a mask of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position = nn.Embedding(64, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        fed = self.table(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(fed, src_key_padding_mask=tokens == 0)[:, 0])


class Table(nn.Module):
    """Categories as fractional numbers in one tensor beside numbers, as data frames give them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 3) for count in CATEGORIES)
        fed = NUMBERS + 3 * len(CATEGORIES)
        self.body = nn.Sequential(nn.Linear(fed, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, cells: Tensor) -> Tensor:
        looked_up = [table(cells[:, NUMBERS + place].long()) for place, table in enumerate(self.tables)]
        return self.body(torch.cat([cells[:, :NUMBERS], *looked_up], 1))


def built(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def texts(samples: int, seed: int = 0, padded: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=rng)
    tokens[:, 2] = tokens[:, 5]
    tokens[:, LENGTH - padded :] = 0
    return fp.Batch(tokens, torch.randint(0, CLASSES, (samples,), generator=rng))


def rows(samples: int, seed: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    categories = [torch.randint(0, count, (samples, 1), generator=rng) for count in CATEGORIES]
    cells = torch.cat([torch.randn(samples, NUMBERS, generator=rng), *categories], 1)
    return fp.Batch(cells, torch.randint(0, 2, (samples,), generator=rng))


def attacked(
    model: nn.Module, batch: fp.Batch, **settings: object
) -> tuple[fp.Reconstruction, fp.Scores, float | None]:
    scenario = fp.Scenario(model=model, clients=[batch], bounds=(-4.0, 12.0), **settings)  # type: ignore[arg-type]
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=1)
    answer = fp.run(fp.attacks.embedding_inversion(), observation)
    return answer, fp.score(answer, truth), fp.residual(observation, answer)


@pytest.mark.parametrize("kind", [Bag, Recurrent, Attention])
@pytest.mark.parametrize("samples", [1, 4, 32])
def test_every_token_comes_out(kind: type[nn.Module], samples: int) -> None:
    _, scores, _ = attacked(built(kind), texts(samples))
    assert set(scores.values["tokens"]) == {1.0}


@pytest.mark.parametrize("samples", [1, 4])
def test_a_bag_of_words_tells_which_sample_holds_what_and_how_often(samples: int) -> None:
    answer, scores, residual = attacked(built(Bag), texts(samples))
    assert answer.ambiguity == {"order", "places"}
    assert answer.status.startswith(LookupStatus.EXACT)
    assert residual is not None
    assert residual < 1e-4
    assert scores.labels_match


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("padded", [0, 3])
def test_positions_tell_the_order_of_a_text(seed: int, padded: int) -> None:
    answer, scores, residual = attacked(built(Attention, seed), texts(1, seed, padded))
    assert scores.values["tokens-in-place"] == (1.0,)
    assert answer.status == LookupStatus.EXACT
    assert residual is not None
    assert residual < 1e-4


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_cell_of_a_table_comes_out(samples: int, seed: int) -> None:
    answer, scores, residual = attacked(built(Table, seed), rows(samples, seed))
    assert answer.status == LookupStatus.EXACT
    assert min(value for value in scores.values["psnr"] if value is not None) > 60
    assert residual is not None
    assert residual < 1e-4


@pytest.mark.parametrize("defense", [fp.defenses.Clip(1e-3), fp.defenses.Cast("bfloat16")])
def test_clipping_and_rounding_change_nothing(defense: fp.defenses.Defense) -> None:
    _, scores, _ = attacked(built(Attention), texts(1), defense=defense)
    assert scores.values["tokens-in-place"] == (1.0,)


@pytest.mark.parametrize("factor", [-1.0, 1e-6, 1e6])
@pytest.mark.parametrize(("kind", "batch"), [(Attention, texts(1)), (Bag, texts(4)), (Table, rows(4))])
def test_any_factor_leaves_the_answer(kind: type[nn.Module], batch: fp.Batch, factor: float) -> None:
    scenario = fp.Scenario(model=built(kind), clients=[batch], protocol=fp.FedAvg(lr=0.1), bounds=(-4.0, 12.0))
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=1)
    update = {name: factor * tensor for name, tensor in observation.round.update.items()}
    changed = replace(observation, rounds=(replace(observation.round, update=update),))
    plain, scaled = (fp.run(fp.attacks.embedding_inversion(), each) for each in (observation, changed))
    assert plain.status == scaled.status
    assert torch.allclose(plain.tensor.sort(0).values.double(), scaled.tensor.sort(0).values.double(), atol=1e-3)


def test_an_update_that_is_scaled_number_by_number_still_tells_the_tokens() -> None:
    scenario = fp.Scenario(model=built(Recurrent), clients=[texts(4)], bounds=(0.0, 1.0))
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=1)
    signs = {name: tensor.sign() for name, tensor in observation.round.update.items()}  # Adam's first step
    changed = replace(observation, rounds=(replace(observation.round, update=signs),))
    answer = fp.run(fp.attacks.embedding_inversion(), changed)
    assert set(fp.score(answer, truth).values["tokens"]) == {1.0}
    assert LookupStatus.EXACT not in answer.status


def test_noise_in_every_row_is_refused() -> None:
    with pytest.raises(fp.NotApplicable, match="but more have one"):
        attacked(built(Recurrent), texts(4), defense=fp.defenses.GaussianNoise(0.1))


def test_models_without_tables_are_refused() -> None:
    model = nn.Sequential(nn.Linear(LENGTH, CLASSES))
    batch = fp.Batch(torch.rand(2, LENGTH), torch.tensor([0, 1]))
    with pytest.raises(fp.NotApplicable, match="needs a table"):
        attacked(model, batch)


class Short(nn.Module):
    """A bag of words whose width is a multiple of the words' number, in front of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(VOCABULARY, 2 * LENGTH), nn.Linear(2 * LENGTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Tied(nn.Module):
    """The next word from the mean of the words before, by the table that they were looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.body(self.table(tokens).mean(1))) @ self.table.weight.T


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(VOCABULARY, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Normalised(Table):
    """Batch norm on the numbers: where they lie and how far they spread leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUMBERS)

    def forward(self, cells: Tensor) -> Tensor:
        return super().forward(torch.cat([self.norm(cells[:, :NUMBERS]), cells[:, NUMBERS:]], 1))


def divided_by_their_size(observation: fp.Observation) -> fp.Observation:
    """What Adam's first step, or compression to signs, makes of an update."""
    signs = {name: tensor.sign() for name, tensor in observation.round.update.items()}
    return replace(observation, rounds=(replace(observation.round, update=signs),))


def test_a_bag_as_wide_as_several_words_is_no_row_of_a_table() -> None:
    answer, scores, _ = attacked(built(Short), texts(2))
    assert set(scores.values["tokens"]) == {1.0}
    assert answer.status.startswith(LookupStatus.EXACT)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"defense": fp.defenses.Cast("float16")},
        {"defense": fp.defenses.Cast("bfloat16")},
        {"protocol": fp.FedAvg(lr=0.1)},
        {"protocol": fp.FedAvg(lr=0.1), "defense": fp.defenses.Clip(1e-4)},
    ],
    ids=repr,
)
def test_a_tied_table_is_read_through_rounding_and_differences(samples: int, settings: dict[str, object]) -> None:
    answer, scores, _ = attacked(built(Tied), texts(samples), **settings)
    assert set(scores.values["tokens"]) == {1.0}
    assert answer.ambiguity == {"order", "places"}


@pytest.mark.parametrize("samples", [4, 8])
def test_rounding_leaves_how_often_each_sample_holds_a_word(samples: int) -> None:
    answer, _, _ = attacked(built(Bag), texts(samples), defense=fp.defenses.Cast("bfloat16"))
    assert answer.ambiguity == {"order", "places"}


def test_no_counts_are_read_off_signs() -> None:
    scenario = fp.Scenario(model=built(Padded), clients=[texts(1, padded=3)])
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=1)
    answer = fp.run(fp.attacks.embedding_inversion(), divided_by_their_size(observation))
    assert answer.status == LookupStatus.SET
    assert set(fp.score(answer, truth).values["tokens"]) == {1.0}


def test_places_that_the_rest_of_the_update_contradicts_are_said_to_be() -> None:
    scenario = fp.Scenario(model=built(Attention), clients=[texts(1)])
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=1)
    update = {**observation.round.update, "head.weight": torch.ones(CLASSES, WIDTH)}
    answer = fp.run(
        fp.attacks.embedding_inversion(),
        replace(observation, rounds=(replace(observation.round, update=update),)),
    )
    assert answer.status == f"{LookupStatus.PLACED}; {CONTRADICTED}"


def test_numbers_behind_batch_norm_are_not_called_exact() -> None:
    answer, _, _ = attacked(built(Normalised), rows(4))
    assert answer.status == f"{LookupStatus.LINKED}; {RUNNING_STATISTICS}"


@pytest.mark.parametrize("short", ["float16", "bfloat16"])
@pytest.mark.parametrize("samples", [1, 4])
def test_rounding_leaves_every_cell_of_a_table(short: str, samples: int) -> None:
    answer, scores, _ = attacked(built(Table), rows(samples), defense=fp.defenses.Cast(short))
    assert answer.status == LookupStatus.EXACT
    assert min(value for value in scores.values["psnr"] if value is not None) > 60


def test_rows_are_certified_under_a_loss_of_yes_and_no_and_never_contradicted_by_unknown_numbers() -> None:
    class Single(Table):
        def __init__(self) -> None:
            super().__init__()
            self.body[2] = nn.Linear(48, 1)

    cells = rows(4).inputs
    answers = []
    for loss, labels in (("binary_cross_entropy", torch.tensor([0.0, 1.0, 1.0, 0.0])), ("mse", torch.rand(4))):
        answer, scores, _ = attacked(built(Single), fp.Batch(cells, labels), loss=loss)
        assert min(value for value in scores.values["psnr"] if value is not None) > 60
        answers.append(answer.status)
    assert answers == [LookupStatus.EXACT, LookupStatus.LINKED]

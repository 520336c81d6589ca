"""What a defense costs: training against an independent loop, every stage in its place, and the cost of an attack."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import utility
from fedprism.defenses import (
    Clip,
    Context,
    Defense,
    DpSgd,
    EqualLabels,
    GaussianNoise,
    InstaHide,
    MixUp,
    MseLoss,
    Prune,
    Quantize,
    SecureAggregation,
    SignCompression,
    Soteria,
)
from fedprism.errors import BadInput
from fedprism.files import json_text
from fedprism.randomness import generator
from fedprism.runtime import progress
from fedprism.types import LossFn, Update


@pytest.fixture(scope="module")
def data() -> tuple[fp.Batch, fp.Batch]:
    digits = fp.data.load("digits", size=8)
    mixed = digits.batch(torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)))
    return mixed[:480], mixed[-400:]


def network(seed: int) -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=seed)


def normalising(dropout: float = 0.2) -> nn.Sequential:
    """A network with batch norm and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, 10)
        )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SHORT = utility.Schedule(epochs=2, batch_size=96, lr=0.1)


# --- training --------------------------------------------------------------------------------------------------------


def test_training_without_defense_is_plain_sgd_with_momentum(data: tuple[fp.Batch, fp.Batch]) -> None:
    train, trained, plain = data[0], network(0), network(0)
    utility.fit(trained, train, schedule=SHORT, seed=3, device="cpu")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    order = generator(3, "order")
    for _ in range(2):
        for chosen in torch.randperm(480, generator=order).split(96):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(train.inputs[chosen]), train.labels[chosen]).backward()
            optimizer.step()
            scheduler.step()
    assert not torch.equal(weights(plain), weights(network(0)))
    torch.testing.assert_close(weights(trained), weights(plain), rtol=0, atol=1e-6)


def test_two_clients_with_half_a_batch_each_are_one_client(data: tuple[fp.Batch, fp.Batch]) -> None:
    one = utility.fit(network(0), data[0], schedule=SHORT, device="cpu")
    halves = dataclasses.replace(SHORT, batch_size=48, clients=2)
    two = utility.fit(network(0), data[0], schedule=halves, device="cpu")
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-6)


def test_gradients_of_single_examples_left_alone_change_nothing(data: tuple[fp.Batch, fp.Batch]) -> None:
    plain = utility.fit(network(0), data[0], schedule=SHORT, device="cpu")
    whole = utility.fit(network(0), data[0], DpSgd(0.0, clip=1e6), SHORT, device="cpu")
    clipped = utility.fit(network(0), data[0], DpSgd(0.0, clip=0.1), SHORT, device="cpu")
    torch.testing.assert_close(weights(plain), weights(whole), rtol=0, atol=1e-5)
    assert (weights(plain) - weights(clipped)).abs().max() > 0.01


@dataclass(frozen=True)
class Spy(Defense):
    """Writes down at which stage it was called, and with what."""

    told: list[tuple[str, Context, object]] = field(default_factory=list, compare=False)

    def on_batch(self, batch: fp.Batch, context: Context, rng: torch.Generator) -> fp.Batch:
        self.told.append(("batch", context, batch))
        return batch

    def on_loss(self, loss: LossFn) -> LossFn:
        self.told.append(("loss", Context(), loss))
        return loss

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        self.told.append(("examples", context, grads))
        return grads

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        self.told.append(("update", context, update))
        return update

    def on_aggregate(self, updates: list[Update], context: Context, rng: torch.Generator) -> list[Update]:  # type: ignore[override]
        self.told.append(("aggregate", context, updates))
        return updates


def test_a_defense_meets_every_stage_of_every_client_and_step(data: tuple[fp.Batch, fp.Batch]) -> None:
    spy, train = Spy(), data[0]
    utility.fit(network(0), train, spy, utility.Schedule(epochs=1, batch_size=100, clients=2), device="cpu")
    a_client = ["batch", "examples", "update"]
    assert [stage for stage, _, _ in spy.told] == ["loss", *(2 * (2 * a_client + ["aggregate"]))]
    assert [context.round for _, context, _ in spy.told[1:]] == [0] * 7 + [1] * 7
    used = []
    for stage, context, value in spy.told[1:]:
        if stage == "batch":
            assert isinstance(value, fp.Batch)
            assert torch.equal(value.inputs, train.inputs[context.indices])
            assert context.client == f"client-{len(used) % 2}"
            assert context.batch is not None
            assert len(context.batch) == 480, "the data that the indices are of"
            used.append(context.indices)
        elif stage == "examples":
            assert isinstance(value, dict)
            assert all(len(gradients) == 100 for gradients in value.values())
        elif stage == "update":
            assert context.batch is not None
            assert len(context.batch) == 100, "what the client trained on"
    everyone = torch.cat(used)
    assert len(everyone.unique()) == len(everyone) == 400, "each sample once an epoch, 80 sit it out"


@dataclass(frozen=True)
class OneClass(Defense):
    """Each client trains on one class a round."""

    def on_draw(self, dataset: fp.Batch, context: Context, rng: torch.Generator) -> Tensor:
        assert context.client is not None
        assert context.round is not None
        turn = (int(context.client.removeprefix("client-")) + context.round) % 10
        return (dataset.labels == turn).nonzero().flatten()


def test_a_defense_that_draws_decides_who_forms_a_batch(data: tuple[fp.Batch, fp.Batch]) -> None:
    spy = Spy()
    schedule = utility.Schedule(epochs=1, batch_size=20, clients=3)
    utility.fit(network(0), data[0], fp.chain(OneClass(), spy), schedule, device="cpu")
    batches = [value for stage, _, value in spy.told if stage == "batch" and isinstance(value, fp.Batch)]
    assert [batch.labels.unique().tolist() for batch in batches] == [[(k + r) % 10] for r in range(8) for k in range(3)]
    assert {len(batch) for batch in batches} == {20}


def test_augmentation_is_drawn_anew_every_epoch(data: tuple[fp.Batch, fp.Batch]) -> None:
    levels: list[float] = []

    def brighter(inputs: Tensor, rng: torch.Generator) -> Tensor:
        levels.append(float(torch.rand((), generator=rng)))
        return inputs + levels[-1]

    spy = Spy()
    schedule = dataclasses.replace(SHORT, augment=brighter)
    utility.fit(network(0), data[0], spy, schedule, device="cpu")
    assert len(set(levels)) == len(levels) == 2
    seen = [(context, value) for stage, context, value in spy.told if stage == "batch"]
    for number, (context, value) in enumerate(seen):
        assert isinstance(value, fp.Batch)
        torch.testing.assert_close(value.inputs, data[0].inputs[context.indices] + levels[number // 5])


def test_batch_norm_and_frozen_layers_train_as_they_should(data: tuple[fp.Batch, fp.Batch]) -> None:
    model = normalising()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    utility.fit(model, data[0], Prune(0.5), SHORT, device="cpu")
    assert torch.equal(model[0].weight, before)
    assert float(model[1].num_batches_tracked) == 10
    assert bool((model[1].running_mean != 0).all())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(BadInput, match="all are frozen"):
        utility.fit(model.requires_grad_(False), data[0], schedule=SHORT, device="cpu")


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(data: tuple[fp.Batch, fp.Batch], defense: Defense | None = None, **changes: object) -> utility.Utility:
    settings: dict[str, object] = {"epochs": 6, "batch_size": 32, "lr": 0.1, "device": "cpu", "timed_steps": 0}
    return utility.measure(network, *data, defense, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.quality
def test_a_strong_defense_costs_accuracy_and_a_weak_one_little(data: tuple[fp.Batch, fp.Batch]) -> None:
    """Noise beyond all gradients leaves random hidden units, whose last layer still learns: 10 to 80 % a seed."""
    none, weak = measured(data), measured(data, Prune(0.5))
    strong, drowned = measured(data, Prune(0.999)), measured(data, GaussianNoise(100.0))
    assert none.accuracy > 0.85
    assert weak.accuracy > none.accuracy - 0.05
    assert strong.accuracy < 0.5  # 13 to 32 % a seed
    assert drowned.accuracy < none.accuracy - 0.1
    assert none.time_factor == 1.0
    assert none.steps == 6 * 15
    assert weak.time_factor is None, "it was not to be measured"


def test_same_seeds_same_accuracies_and_nothing_given_is_changed(data: tuple[fp.Batch, fp.Batch]) -> None:
    model = normalising()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies = [tensor.clone() for batch in data for tensor in (batch.inputs, batch.labels)]
    state = torch.random.get_rng_state()
    runs = [
        utility.measure(
            model, *data, GaussianNoise(0.01), epochs=1, batch_size=32, seeds=seeds, device="cpu", timed_steps=1
        )
        for seeds in ((0, 1), (0, 1), (2, 3))
    ]
    assert runs[0].accuracies == runs[1].accuracies
    assert runs[0].accuracies != runs[2].accuracies
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    given = [tensor for batch in data for tensor in (batch.inputs, batch.labels)]
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    factor = runs[0].time_factor
    assert factor is not None
    assert 0 < factor < math.inf


def test_the_interval_is_students(data: tuple[fp.Batch, fp.Batch]) -> None:
    low, high = utility.t_interval((0.90, 0.92, 0.94)) or (0, 0)
    # The 97.5 % quantile with two degrees of freedom is 4.30265.
    assert (low, high) == pytest.approx((0.92 - 4.30265 * 0.02 / 3**0.5, 0.92 + 4.30265 * 0.02 / 3**0.5), abs=1e-6)
    split = utility.Utility(defense=fp.chain(), seeds=tuple(range(5)), accuracies=(0.1, 0.9, 0.1, 0.9, 0.9), steps=1)
    assert split.interval is not None
    assert split.interval.high == 1.0, "no accuracy lies outside"
    few = utility.Utility(defense=fp.chain(), seeds=(0, 1), accuracies=(0.1, 0.9), steps=1)
    assert few.interval is None, "the values say more than an interval from two of them"
    single = measured(data, epochs=1, seeds=(5,))
    assert single.interval is None
    assert utility.t_interval((0.5, 0.5)) == (0.5, 0.5)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 4, generator=rng, dtype=torch.float64).tolist()
    intervals = [utility.t_interval(draw) or (0, 0) for draw in draws]
    covered = sum(low < 0 < high for low, high in intervals) / 2000
    assert covered == pytest.approx(0.95, abs=5 * (0.95 * 0.05 / 2000) ** 0.5)


def test_the_record_holds_what_was_measured(data: tuple[fp.Batch, fp.Batch]) -> None:
    found = measured(data, Prune(0.9), epochs=1)
    record = found.record({"data": "digits"})
    assert (record.kind, record.accuracy, record.seed) == ("utility", found.accuracy, 0)
    assert record.run == {"defense": "Prune(ratio=0.9)", "steps": 15, "data": "digits"}
    written = json.loads(json_text.as_json(dataclasses.asdict(record)))
    assert written["scores"]["accuracy"] == list(found.accuracies)
    assert written["epsilon"] is None
    assert f"{found.accuracy:.1%}" in str(found)


def test_epsilon_is_of_one_release_an_epoch(data: tuple[fp.Batch, fp.Batch]) -> None:
    private = measured(data, fp.chain(DpSgd(2.0), Prune(0.5)), epochs=4, batch_size=240, seeds=(0,))
    # Four Gaussian mechanisms with noise 2 are one with noise 1, whose epsilon at 1e-5 is 4.3771 (Balle and Wang).
    assert private.epsilon == pytest.approx(4.3771, abs=1e-3)
    assert (private.delta, private.record().epsilon) == (1e-5, private.epsilon)
    # The whole training and one release stand next to each other.
    assert private.release_epsilon == DpSgd(2.0).epsilon()
    assert "epsilon 4.38 for the whole training, 1.99 for one release, at delta 1e-05" in str(private)
    assert private.record().scores is not None
    assert private.record().scores["release_epsilon"] == private.release_epsilon
    mixed = measured(data, fp.chain(MixUp(2), DpSgd(2.0)), epochs=1, batch_size=240, seeds=(0,))
    assert (mixed.epsilon, mixed.release_epsilon, mixed.delta) == (None, None, None)


@dataclass(frozen=True)
class Peeking(Prune):
    """Prunes, and might look at anything before."""


@pytest.mark.parametrize(
    "defense",
    [
        fp.chain(),
        Prune(0.5),
        GaussianNoise(0.1),
        DpSgd(0.0),
        fp.chain(DpSgd(1.0), DpSgd(1.0)),
        fp.chain(DpSgd(1.0), Soteria(0.5)),
        fp.chain(Soteria(0.5), DpSgd(1.0)),
        fp.chain(MixUp(2), DpSgd(1.0)),
        fp.chain(InstaHide(2), DpSgd(1.0)),
        fp.chain(EqualLabels(1), DpSgd(1.0)),
        fp.chain(DpSgd(1.0), Peeking(0.5)),
    ],
    ids=repr,
)
def test_no_epsilon_is_claimed_where_no_accountant_holds(defense: Defense) -> None:
    assert utility.guarantee(defense, 5, 1e-5) is None


def test_what_works_on_the_noised_mean_leaves_the_guarantee_as_it_is() -> None:
    plain = utility.guarantee(DpSgd(1.0), 5, 1e-5)
    assert plain == (DpSgd(1.0).epsilon(steps=5), DpSgd(1.0).epsilon(), 1e-5)
    others = Prune(0.5), Clip(1.0), Quantize(8), GaussianNoise(0.1), SecureAggregation(), MseLoss(), SignCompression()
    for other in others:
        assert utility.guarantee(fp.chain(other, DpSgd(1.0)), 5, 1e-5) == plain


def test_training_that_diverges_says_so(data: tuple[fp.Batch, fp.Batch]) -> None:
    found = measured(data, lr=1e6, seeds=(7,), epochs=3, loss="mse")
    assert found.status == "training diverged with seed 7; lower lr"
    assert measured(data, seeds=(7,), epochs=1).status == ""


def test_training_that_learned_nothing_says_so(data: tuple[fp.Batch, fp.Batch]) -> None:
    train, test = data
    alike = fp.Batch(test.inputs, torch.zeros_like(test.labels))
    assert measured((train, alike), seeds=(7,), epochs=1).status == utility.measuring.NOTHING_LEARNED


def test_progress_is_told_epoch_by_epoch_over_all_seeds(data: tuple[fp.Batch, fp.Batch]) -> None:
    told: list[tuple[int, int]] = []
    with progress.listening(lambda done, total: told.append((done, total))):
        measured(data, epochs=2, seeds=(0, 1, 2))
    assert told == [(done, 6) for done in range(1, 7)]


def test_rounding_for_secure_sums_costs_next_to_nothing(data: tuple[fp.Batch, fp.Batch]) -> None:
    few = {"epochs": 2, "batch_size": 16, "clients": 4, "seeds": (0,)}
    none, rounded = measured(data, **few), measured(data, SecureAggregation(clip=8.0, bits=22), **few)
    assert abs(none.accuracy - rounded.accuracy) <= 0.02


def bad(batch: fp.Batch) -> Iterator[tuple[dict[str, object], str]]:
    yield {"epochs": 0}, "epochs"
    yield {"batch_size": 0}, "batch_size"
    yield {"clients": 0}, "clients"
    yield {"clients": 481}, "481 clients need a sample each"
    yield {"lr": 0.0}, "lr must be above 0"
    yield {"momentum": 1.0}, "momentum"
    yield {"seeds": ()}, "at least one seed"
    yield {"delta": 0.0}, "delta"
    yield {"timed_steps": -1}, "timed_steps"
    yield {"loss": "hinge"}, "no loss is called"
    yield {"defense": "prune"}, "takes defenses such as Prune"
    yield {"device": "nowhere"}, "no device 'nowhere'"
    yield {"test": batch[:0]}, "test has 0 inputs"
    yield {"train": fp.Batch(batch.inputs, batch.labels + 5)}, "labels of train go from 5 to 14"
    yield {"train": fp.Batch(batch.inputs, batch.labels.float())}, "int64"
    yield {"test": fp.Batch(batch.inputs[:, :, :4], batch.labels)}, "does not accept the inputs of test"


@pytest.mark.parametrize("number", range(16))
def test_bad_input_is_one_sentence(number: int, data: tuple[fp.Batch, fp.Batch]) -> None:
    changes, words = list(bad(data[0]))[number]
    settings = {"train": data[0], "test": data[1], "epochs": 1, "device": "cpu", **changes}
    with pytest.raises(BadInput, match=words):
        utility.measure(network, **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_the_same_network(data: tuple[fp.Batch, fp.Batch]) -> None:
    models = [utility.fit(normalising(0.0), data[0], Prune(0.5), SHORT, device=place) for place in ("cpu", "cuda")]
    torch.testing.assert_close(weights(models[0]), weights(models[1]).cpu(), rtol=0, atol=1e-2)

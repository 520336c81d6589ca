"""EqualLabels: one class a batch, all classes in the end, and refusals where a class is too small."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fedprism as fp
from fedprism import utility
from fedprism.audit import parse_plan, prepare
from fedprism.audit.grid import lay_out
from fedprism.audit.trials import trial_of
from fedprism.defenses import Context, EqualLabels
from fedprism.errors import BadInput
from fedprism.experiments import Outcome, run_trial


def holding(*labels: int) -> fp.Batch:
    """Samples with these labels; the inputs number them."""
    return fp.Batch(torch.arange(float(len(labels))).view(-1, 1), torch.tensor(labels))


def drawn(defense: EqualLabels, data: fp.Batch, seed: int = 0, **where: object) -> torch.Tensor:
    return defense.on_draw(data, Context(**where), torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


MIXED = holding(*(sample % 3 for sample in range(15)))


def test_all_samples_of_the_class_or_as_many_as_asked_for() -> None:
    assert drawn(EqualLabels(), MIXED, client="client-0", round=1).tolist() == [1, 4, 7, 10, 13]
    chosen = drawn(EqualLabels(3), MIXED, client="client-0", round=1).tolist()
    assert len(set(chosen)) == 3
    assert set(chosen) < {1, 4, 7, 10, 13}


def test_draws_differ_from_round_to_round_and_repeat_with_the_seed() -> None:
    first, again, *others = (
        drawn(EqualLabels(2), MIXED, seed, client="client-0", round=0).tolist() for seed in (0, 0, *range(1, 30))
    )
    assert first == again
    assert any(first != other for other in others)  # one of ten pairs


@pytest.mark.parametrize("client", ["client-0", "client-7", "hospital", None])
def test_a_client_goes_through_all_its_classes(client: str | None) -> None:
    data = holding(2, 2, 5, 5, 9, 9, 9)
    seen = Counter(int(data.labels[drawn(EqualLabels(2), data, client=client, round=index)[0]]) for index in range(6))
    assert seen == {2: 2, 5: 2, 9: 2}


def test_clients_of_one_round_cover_the_classes() -> None:
    data = holding(*(sample % 10 for sample in range(40)))
    labels = {int(data.labels[drawn(EqualLabels(4), data, client=f"client-{k}", round=3)[0]]) for k in range(10)}
    assert labels == set(range(10))


@pytest.mark.parametrize("period", [2, 5, 9, 10, 11])
def test_clients_who_take_part_now_and_then_cover_the_classes_too(period: int) -> None:
    data = holding(*(sample % 10 for sample in range(40)))
    for first in range(2):
        rounds = range(first, first + 200 * period, period)  # a tenth of the classes at a time, in the worst case
        chosen = (drawn(EqualLabels(4), data, client=f"client-{first}", round=index)[0] for index in rounds)
        assert {int(data.labels[sample]) for sample in chosen} == set(range(10))


def test_clients_who_take_turns_in_the_simulator_cover_the_classes(digits: fp.data.ImageSet) -> None:
    clients = [digits.batch(range(start, start + 150)) for start in (0, 150)]
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0)
    # In the same places of every turn, so half of the classes each time: by chance all in 20 turns.
    turns = torch.eye(2, dtype=torch.bool).repeat(100, 1)
    scenario = fp.Scenario(model=model, clients=clients, defense=EqualLabels(4), rounds=200, participation=turns)
    _, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    assert set(truth.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("client", ["client-0", None])
def test_where_the_round_is_not_known_the_class_is_drawn_at_random(client: str | None) -> None:
    classes = {int(MIXED.labels[drawn(EqualLabels(2), MIXED, seed, client=client)[0]]) for seed in range(60)}
    assert classes == {0, 1, 2}


def test_in_the_simulator_every_round_has_one_class(digits: fp.data.ImageSet) -> None:
    clients = [digits.batch(range(start, start + 150)) for start in (0, 150, 300)]
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=clients, defense=EqualLabels(4), rounds=4)
    seen, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), seed=0)
    assert isinstance(seen.knowledge.labels, tuple)
    assert [len(labels) for labels in seen.knowledge.labels] == [4] * 12
    assert all(len(set(labels.tolist())) == 1 for labels in seen.knowledge.labels)
    # Three clients that start at classes 0, 1 and 2 and take four turns.
    assert {int(labels[0]) for labels in seen.knowledge.labels} == set(range(6))
    assert seen.knowledge.batch_size == (4,) * 12


def test_composes_with_other_defenses(digits: fp.data.ImageSet) -> None:
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0)
    defense = fp.chain(EqualLabels(3), fp.defenses.MseLoss(softmax=False), fp.defenses.Prune(0.5))
    scenario = fp.Scenario(model=model, clients=[digits.batch(range(100))], defense=defense)
    seen, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    assert len(truth.labels) == 3
    assert len(set(truth.labels.tolist())) == 1
    weight_grad = seen.rounds[0].update["1.weight"]
    assert int((weight_grad == 0).sum()) >= weight_grad.numel() // 2


@pytest.mark.quality
def test_hides_a_batch_from_direct_inversion_but_not_its_mean(digits: fp.data.ImageSet) -> None:
    """The row of the one class is the weighted mean of the batch: sample by sample wrong, the average nearly right."""
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=[digits.batch(range(200))], defense=EqualLabels(6))
    seen, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    update, label = seen.rounds[0].update, int(truth.labels[0])
    row = (update["1.weight"][label] / update["1.bias"][label]).view(1, 1, 16, 16)
    assert fp.metrics.psnr(row, truth.inputs.mean(0, keepdim=True)) > 40  # 61 to 77 over seven draws
    assert fp.metrics.psnr(row.expand_as(truth.inputs), truth.inputs).max() < 30  # 19 to 22


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two"])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(BadInput, match="EqualLabels' size must be a whole number from 1"):
        EqualLabels(size)  # type: ignore[arg-type]


def test_a_class_of_too_few_samples_is_refused_before_its_turn() -> None:
    data = holding(0, 0, 0, 4)
    with pytest.raises(BadInput, match=r"needs 2 samples of each class of client-1, and class 4 has 1\. Lower"):
        drawn(EqualLabels(2), data, client="client-1", round=1)


def test_soft_labels_are_refused() -> None:
    with pytest.raises(BadInput, match="needs whole labels"):
        drawn(EqualLabels(), fp.Batch(torch.zeros(2, 1), torch.full((2, 3), 1 / 3)))


@pytest.mark.quality
@pytest.mark.parametrize(("clients", "epochs"), [(1, 2), (10, 8)])
def test_training_on_one_class_at_a_time_learns_all(digits: fp.data.ImageSet, clients: int, epochs: int) -> None:
    measured = utility.measure(
        fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0),
        digits.batch(range(400)),
        digits.batch(range(400, 600)),
        EqualLabels(4),
        epochs=epochs,
        batch_size=4,
        clients=clients,
        seeds=(0,),
        timed_steps=0,
    )
    assert measured.accuracy > 0.6  # 0.74 to 0.84


def audited(defense: str, size: int = 6, clients: int = 1) -> Outcome:
    """The one cell of an audit of a dense layer on digits under a defense."""
    setup = prepare(
        parse_plan(
            f'[model]\nname = "dense"\n[data]\nname = "digits"\n[grid]\nclients = [{clients}]\nbatch_sizes = [{size}]\n'
            f'defenses = [{defense}]\nattacks = ["dense-inversion"]\nthreats = ["honest_but_curious"]\nseeds = [0]\n'
        )
    )
    return run_trial(trial_of(setup, lay_out(setup).cells[0]))


@pytest.mark.parametrize("words", ['"equal-labels"', '[{ name = "equal-labels", size = 6 }, "mse-loss"]'])
def test_a_plan_has_batches_of_one_class(words: str) -> None:
    found = audited(words, clients=3)
    assert found.state == "done", found.reason
    assert found.record is not None
    assert found.record.scores is not None
    assert found.record.scores["samples"] == 18


def test_a_plan_that_the_data_is_not_enough_for_is_refused() -> None:
    found = audited('"equal-labels"', size=150, clients=11)
    assert found.state == "failed"
    assert "equal-labels needs 150 samples of one class for each of 11 clients" in found.reason

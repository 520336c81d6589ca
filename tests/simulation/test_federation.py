"""Federations of many clients: who takes part, what is summed, and what each threat model is told about it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from federations import (
    PARTICIPATION,
    SHUFFLED,
    answer,
    assert_close,
    batch,
    federation,
    flat,
    seen,
    total,
)
from fedprism.client.update import Protocol
from fedprism.defenses import Defense
from fedprism.evaluation import scoring
from fedprism.losses import cross_entropy
from fedprism.simulation.rounds import participation
from fedprism.types import Update

# --- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [fp.FedSGD(), SHUFFLED])
def test_sums_are_those_of_the_clients_who_took_part(protocol: Protocol) -> None:
    scenario = federation(protocol=protocol)
    observation, truth = seen(scenario, fp.threats.secure_aggregation)
    assert [part.clients for part in observation.rounds] == [2, 2, 0, 3, 2]
    assert truth.updates is not None
    for index, part in enumerate(observation.rounds):
        cohort = PARTICIPATION[index].nonzero().flatten().tolist()
        if cohort:
            assert_close(part.update, total([answer(scenario, client, index) for client in cohort]))
        else:
            assert not flat(part.update).any()
            assert set(part.update) == set(observation.rounds[0].update)
    for client in range(3):
        own = [answer(scenario, client, index) for index in PARTICIPATION[:, client].nonzero().flatten().tolist()]
        assert truth.updates[client] is not None
        assert_close(truth.updates[client], {name: t / len(own) for name, t in total(own).items()})  # type: ignore[arg-type]
    assert truth.updates[3] is None


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted_mean"])
def test_granted_knowledge_takes_the_sums_apart(reduction: str) -> None:
    taking_part = PARTICIPATION[[0, 1, 3, 4]]
    scenario = federation(participation=taking_part, rounds=4, aggregation=reduction)
    observation, truth = seen(scenario, fp.threats.secure_aggregation.granting("participation"))
    known = observation.knowledge
    assert known.participation is not None
    weights = known.participation.float()
    if reduction == "mean":
        assert known.cohort_sizes is not None
        weights = weights / known.cohort_sizes.unsqueeze(1)
    elif reduction == "weighted_mean":
        assert known.examples == (3, 4, 5, 6)
        weights = weights * torch.tensor(known.examples)
        weights = weights / weights.sum(1, keepdim=True)
    sums = torch.stack([flat(part.update) for part in observation.rounds])
    found = torch.linalg.lstsq(weights[:, :3], sums).solution
    assert truth.updates is not None
    for client in range(3):
        assert truth.updates[client] is not None
        torch.testing.assert_close(found[client], flat(truth.updates[client]), rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_a_frozen_model_is_sent_every_round_and_another_moves() -> None:
    frozen = seen(federation(), fp.threats.secure_aggregation)[0].rounds
    assert all(part.params is frozen[0].params for part in frozen)
    scenario = federation(frozen=False, protocol=fp.FedAvg(lr=0.1))
    moving = seen(scenario, fp.threats.secure_aggregation)[0].rounds
    for before, after in itertools.pairwise(moving):
        for name, parameter in before.params.items():
            moved = before.update[name] / max(before.clients, 1)
            torch.testing.assert_close(after.params[name], parameter + moved)
    assert not torch.equal(flat(moving[-1].params), flat(moving[0].params))


def test_clients_seen_one_by_one_are_those_who_took_part() -> None:
    scenario = federation(protocol=SHUFFLED)
    observation, truth = seen(scenario, fp.threats.honest_but_curious)
    pairs = [(index, client) for index, client in PARTICIPATION.nonzero().tolist()]
    assert [(part.index, part.participants) for part in observation.rounds] == [
        (index, (f"client-{client}",)) for index, client in pairs
    ]
    assert observation.knowledge.batch_size == tuple(3 + client for _, client in pairs)
    for part, (index, client) in zip(observation.rounds, pairs, strict=True):
        assert_close(part.update, answer(scenario, client, index))
    assert truth.updates is None
    assert torch.equal(truth.participation, PARTICIPATION)


def test_a_probability_draws_who_takes_part() -> None:
    clients = [batch(1, seed) for seed in range(40)]
    scenario = federation(clients=clients, rounds=50, participation=0.1, window=10)
    drawn = [seen(scenario, fp.threats.secure_aggregation, seed)[1].participation for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    # 2000 draws of probability .1 stay within five standard deviations of 200.
    assert abs(int(drawn[0].sum()) - 200) < 5 * math.sqrt(2000 * 0.1 * 0.9)


def test_a_round_of_nobody_is_a_sum_of_zeros_but_not_a_mean() -> None:
    few = {"clients": [batch(2, 1), batch(2, 2)], "rounds": 40, "participation": 0.2, "window": None}
    sums, truth = seen(federation(**few), fp.threats.secure_aggregation)
    empty = (truth.participation.sum(1) == 0).tolist()
    assert any(empty)
    assert [part.clients == 0 for part in sums.rounds] == empty
    assert all(bool(flat(part.update).any()) != nobody for part, nobody in zip(sums.rounds, empty, strict=True))
    means, truth = seen(federation(**few, aggregation="mean"), fp.threats.secure_aggregation)
    assert bool(truth.participation.any(1).all())
    assert min(part.clients for part in means.rounds) == 1
    rare = seen(federation(**{**few, "participation": 1e-9}, aggregation="mean"), fp.threats.secure_aggregation)[1]
    assert rare.participation.sum(1).tolist() == [1] * 40
    assert 0 < int(rare.participation[:, 0].sum()) < 40


def test_rounds_drawn_again_are_as_if_those_of_nobody_were_left_out() -> None:
    clients = [batch(1, seed) for seed in range(3)]
    scenario = federation(clients=clients, rounds=4000, participation=0.4, aggregation="mean", window=None)
    patterns = participation(scenario, 0).long() @ torch.tensor([1, 2, 4])
    frequencies = torch.bincount(patterns, minlength=8) / 4000
    expected = torch.tensor([0.4 ** n.bit_count() * 0.6 ** (3 - n.bit_count()) for n in range(8)])
    expected[0] = 0
    expected /= expected.sum()
    # Five standard deviations of a frequency out of 4000.
    assert bool(((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all())


def test_a_participant_sees_the_model_move_whoever_takes_part() -> None:
    scenario = federation(frozen=False, protocol=fp.FedSGD(lr=0.5))
    observation, truth = seen(scenario, fp.threats.curious_client)
    assert [part.clients for part in observation.rounds] == [4] * 5, "it is not told how many took part"
    for before, after in itertools.pairwise(observation.rounds):
        assert_close(before.update, {name: after.params[name] - p for name, p in before.params.items()})
    assert set(truth.owners) == {"client-1", "client-2"}
    alone = torch.zeros(5, 4)
    alone[:, 0] = 1
    with pytest.raises(fp.errors.BadInput, match="to attack"):
        seen(dataclasses.replace(scenario, participation=alone), fp.threats.curious_client)


# --- knowledge -------------------------------------------------------------------------------------------------------


def test_counts_are_how_often_each_client_took_part_in_each_window() -> None:
    known = seen(federation(), fp.threats.secure_aggregation)[0].knowledge
    assert known.windows is not None
    assert known.windows.int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert known.counts is not None
    assert known.counts.tolist() == [[1, 1, 1], [2, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert known.cohort_sizes is not None
    assert known.cohort_sizes.tolist() == [2, 2, 0, 3, 2]
    assert known.examples == (3, 4, 5, 6)
    assert known.batch_size == (7, 9, 0, 12, 8)
    assert known.participation is None
    assert seen(federation(window=None), fp.threats.secure_aggregation)[0].knowledge.counts is None


def test_counts_are_reported_as_the_scenario_says_and_attackers_know_how() -> None:
    known = seen(federation(counts=fp.defenses.RoundedCounts(2)), fp.threats.secure_aggregation)[0].knowledge
    assert known.counts is not None
    assert known.counts.tolist() == [[0, 0, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert known.count_release == fp.defenses.RoundedCounts(2)
    withheld = seen(federation(counts=fp.defenses.WithheldCounts(1.0)), fp.threats.secure_aggregation)[0].knowledge
    assert withheld.counts is not None
    assert bool(withheld.counts.isnan().all())
    assert withheld.count_release is None  # what is reported is exact


def test_with_drift_half_of_an_update_is_new_after_as_many_rounds() -> None:
    clients = [batch(4, number) for number in range(40)]
    plain = {"clients": clients, "rounds": 11, "participation": None, "frozen": True, "window": None}
    frozen, drifting = (
        torch.stack(
            [
                torch.cat([tensor.flatten() for tensor in round.update.values()])
                for round in seen(federation(**plain, drift=drift), fp.threats.honest_but_curious)[0].rounds
            ]
        )
        .double()
        .view(11, 40, -1)
        for drift in (None, 10.0)
    )
    assert torch.equal(frozen[0], frozen[10])
    assert torch.equal(frozen[0], drifting[0])
    kept = (drifting[10] * frozen[0]).sum(1) / frozen[0].square().sum(1)  # by how much each update is still the first
    assert float(kept.mean()) == pytest.approx(0.5, abs=0.15)
    lengths = drifting[10].square().sum() / frozen[0].square().sum()
    assert float(lengths) == pytest.approx(1.0, abs=0.2)


def test_who_took_part_shows_only_where_it_is_granted() -> None:
    hidden = seen(federation(), fp.threats.secure_aggregation)[0].rounds
    assert all(part.participants is None and part.examples is None for part in hidden)
    open_ = seen(federation(), fp.threats.secure_aggregation.granting("participation"))[0]
    assert open_.rounds[1].participants == ("client-1", "client-2")
    assert open_.rounds[1].examples == (4, 5)
    assert open_.rounds[2].participants == ()
    assert torch.equal(open_.knowledge.participation, PARTICIPATION)


def test_how_many_took_part_shows_only_where_it_is_granted() -> None:
    threat = fp.threats.secure_aggregation.withholding("cohort_sizes")
    observation = seen(federation(), threat)[0]
    assert observation.knowledge.cohort_sizes is None
    assert observation.knowledge.batch_size is None
    assert [part.clients for part in observation.rounds] == [4] * 5
    everyone = seen(federation(participation=None), threat)[0]
    assert everyone.knowledge.batch_size == 18
    assert everyone.rounds[0].clients == 4


def test_labels_are_each_clients_where_several_aggregates_are_seen() -> None:
    threat = fp.threats.secure_aggregation.granting("labels")
    scenario = federation()
    labels = seen(scenario, threat)[0].knowledge.labels
    assert isinstance(labels, tuple)
    assert all(torch.equal(a, b.labels) for a, b in zip(labels, scenario.clients, strict=True))
    one_round = federation(rounds=1, participation=PARTICIPATION[:1], window=None)
    labels = seen(one_round, threat)[0].knowledge.labels
    assert torch.equal(labels, torch.cat([client.labels for client in scenario.clients[:2]]))


# --- fractions and the truth -----------------------------------------------------------------------------------------


def test_each_sample_of_whoever_took_part_is_true_once() -> None:
    for threat in (fp.threats.secure_aggregation, fp.threats.honest_but_curious):
        scenario = federation()
        truth = seen(scenario, threat)[1]
        assert truth.owners == ("client-0",) * 3 + ("client-1",) * 4 + ("client-2",) * 5
        assert torch.equal(truth.inputs, torch.cat([client.inputs for client in scenario.clients[:3]]))
        assert torch.equal(truth.labels, torch.cat([client.labels for client in scenario.clients[:3]]))


def test_a_fraction_of_the_data_is_drawn_afresh_every_round() -> None:
    clients = [batch(8, 1), batch(1, 2)]
    scenario = federation(clients=clients, participation=None, rounds=6, fraction=0.5, window=None)
    observation, _ = seen(scenario, fp.threats.honest_but_curious.granting("labels", "examples"))
    assert observation.knowledge.examples == (4, 1)
    assert observation.knowledge.batch_size == (4, 1) * 6
    first = observation.rounds[0::2]
    assert len({tuple(flat(part.update).tolist()) for part in first}) > 3, "two of six may be alike"
    labels = observation.knowledge.labels
    assert isinstance(labels, tuple)
    # Each update is the gradient of some four of the eight samples, those with the labels that are reported.
    for part, own in zip(first, labels[0::2], strict=True):
        possible = [
            subset
            for subset in torch.combinations(torch.arange(8), 4)
            if torch.equal(clients[0].labels[subset], own)
            and torch.allclose(flat(part.update), flat(gradient(scenario.model, clients[0][subset])), atol=1e-6)
        ]
        assert len(possible) == 1
    truth = seen(scenario, fp.threats.secure_aggregation)[1]
    assert truth.owners.count("client-0") <= 8
    assert len(torch.unique(truth.inputs.flatten(1), dim=0)) == len(truth.inputs)


def gradient(model: nn.Module, data: fp.Batch) -> Update:
    loss = cross_entropy(model(data.inputs), data.labels)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_what_comes_out_the_same_is_trained_once() -> None:
    calls = 0

    def counting(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(outputs, labels)

    scenario = federation(loss=counting, participation=None, rounds=5)
    observation, truth = seen(scenario, fp.threats.secure_aggregation)
    assert calls == 1 + 1 + 4, "once to see that it fits, once that clients can be trained together, once a client"
    assert truth.updates is not None
    own = [answer(scenario, client, 0) for client in range(4)]
    for found, expected in zip(truth.updates, own, strict=True):
        assert found is not None
        assert torch.equal(flat(found), flat(expected))
    assert all(torch.equal(flat(part.update), flat(observation.rounds[0].update)) for part in observation.rounds)


@pytest.mark.parametrize("defense", [fp.defenses.GaussianNoise(0.1), fp.defenses.DpSgd(0.1, 1.0)])
def test_random_defenses_are_drawn_afresh_every_round(defense: Defense) -> None:
    scenario = federation(defense=defense)
    observation, _ = seen(scenario, fp.threats.honest_but_curious)
    pairs = [(index, client) for index, client in PARTICIPATION.nonzero().tolist()]
    for part, (index, client) in zip(observation.rounds, pairs, strict=True):
        assert_close(part.update, answer(scenario, client, index))
    assert len({tuple(flat(part.update).tolist()) for part in observation.rounds}) == len(pairs)


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_two_hundred_rounds_come_back_from_a_capture(tmp_path: Path) -> None:
    scenario = federation(clients=[batch(2 + n % 3, n) for n in range(20)], rounds=200, participation=0.1, window=10)
    threat = fp.threats.secure_aggregation.granting("participation", "labels")
    observation, truth = seen(scenario, threat)
    assert any(part.clients == 0 for part in observation.rounds)
    folder = fp.captures.save(observation, tmp_path / "capture")
    assert len(list(folder.glob("params-*"))) == 1
    loaded = fp.captures.load(folder)
    for name in ("windows", "counts", "cohort_sizes", "participation"):
        ours, theirs = getattr(observation.knowledge, name), getattr(loaded.knowledge, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert loaded.knowledge.examples == observation.knowledge.examples
    assert loaded.knowledge.batch_size == observation.knowledge.batch_size
    assert isinstance(loaded.knowledge.labels, tuple)
    assert all(map(torch.equal, loaded.knowledge.labels, observation.knowledge.labels))  # type: ignore[arg-type]
    for ours, theirs in zip(observation.rounds, loaded.rounds, strict=True):
        assert torch.equal(flat(ours.update), torch.cat([theirs.update[name].flatten() for name in ours.update]))
        assert (ours.clients, ours.participants, ours.examples) == (
            theirs.clients,
            theirs.participants,
            theirs.examples,
        )

    saved = fp.load_truth(fp.save_truth(truth, tmp_path / "truth"))
    assert torch.equal(saved.participation, truth.participation)
    assert saved.updates is not None
    assert truth.updates is not None
    for ours, theirs in zip(truth.updates, saved.updates, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"participation": value}, "participation must be a number above 0") for value in (0.0, 1.5, -0.1, True)),
        ({"participation": math.nan}, "participation must be a number above 0"),
        ({"participation": PARTICIPATION.T}, r"\(5, 4\), not \(4, 5\)"),
        ({"participation": PARTICIPATION[:4]}, r"\(5, 4\), not \(4, 4\)"),
        ({"participation": PARTICIPATION.float() / 2}, "True and False"),
        ({"participation": torch.zeros(5, 4)}, "nobody takes part in any round"),
        ({"aggregation": "mean"}, "nobody takes part in round 2"),
        ({"window": 0}, "window must be a whole number from 1 to 5"),
        ({"window": 6}, "window must be a whole number from 1 to 5"),
        ({"window": 2.0}, "window must be a whole number"),
        *(({"fraction": value}, "fraction must be a number above 0") for value in (0.0, 1.1, math.nan, "1")),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(fp.errors.BadInput, match=words) as refusal:
        federation(**changes)
    assert "\n" not in str(refusal.value)


def test_a_probability_that_leaves_every_round_empty_is_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match=r"nobody takes part in .* with participation"):
        seen(federation(participation=1e-9), fp.threats.secure_aggregation)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_participation_is_scored_client_by_client() -> None:
    truth = seen(federation(), fp.threats.secure_aggregation)[1]
    scores = scoring.score_participation(PARTICIPATION, truth)
    assert (scores.entries, scores.exact) == (1.0, 1.0)
    wrong = PARTICIPATION.clone()
    wrong[0, 1] = False
    scores = scoring.score_participation(wrong, truth)
    assert scores.entries == pytest.approx(19 / 20)
    assert scores.columns == (True, False, True, True)
    assert scores.exact == 0.75
    with pytest.raises(fp.errors.BadInput, match="shape"):
        scoring.score_participation(wrong.T, truth)


def test_updates_are_scored_by_name() -> None:
    truth = seen(federation(), fp.threats.secure_aggregation)[1]
    assert truth.updates is not None
    first, second, _, _ = truth.updates
    assert first is not None
    assert second is not None
    off = {name: 1.1 * tensor for name, tensor in second.items()}
    found = fp.Reconstruction(updates=(off, first), owners=("client-1", "client-0"))
    errors = scoring.score_updates(found, truth)
    assert list(errors) == ["client-0", "client-1", "client-2"], "the fourth never took part"
    assert errors["client-0"] == 0
    assert errors["client-1"] == pytest.approx(0.1, rel=1e-4)
    assert errors["client-2"] is None
    swapped = fp.Reconstruction(updates=(first, second), owners=("client-1", "client-0"))
    assert min(e for e in scoring.score_updates(swapped, truth).values() if e is not None) > 0.1
    with pytest.raises(fp.errors.BadInput, match="one update per client"):
        scoring.score_updates(found, seen(federation(), fp.threats.honest_but_curious)[1])
    with pytest.raises(fp.errors.BadInput, match="other tensors than the clients sent"):
        scoring.score_updates(fp.Reconstruction(updates=({},), owners=("client-0",)), truth)

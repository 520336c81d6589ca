"""Disaggregation as a reduction and as an attack: planted federations, what it refuses, and whom it leaves out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.attacks import Disaggregation, dense_inversion, split_updates, then
from fedprism.attacks.disaggregation import _touched
from fedprism.solvers.participation import Participation, ParticipationStatus, UserStatus
from fedprism.types import Reduction, Update

USERS, ROUNDS = 12, 60
THREAT = fp.threats.secure_aggregation
KNOWS_WHO = THREAT.granting("participation").withholding("counts", "windows")


@pytest.fixture(scope="module")
def clients(digits: fp.data.ImageSet) -> list[fp.Batch]:
    return [digits.batch([2 * user, 2 * user + 1]) for user in range(USERS)]


def scenario(clients: list[fp.Batch], **changes: Any) -> fp.Scenario:
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=16, classes=10, seed=0)
    made = fp.Scenario(
        model=model, clients=clients, aggregation="sum", rounds=ROUNDS, participation=0.3, frozen=True, window=10
    )
    return dataclasses.replace(made, **changes)


def flat(update: Update) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in update.values()]).double()


def errors(found: fp.Reconstruction, truth: fp.Truth) -> dict[str, float]:
    """Relative error of each update that was found with a name."""
    assert found.updates is not None
    assert truth.updates is not None
    true = {f"client-{user}": flat(update) for user, update in enumerate(truth.updates) if update is not None}
    return {
        name: float((flat(update) - true[name]).norm() / true[name].norm())
        for name, update in zip(found.owners or (), found.updates, strict=True)
        if name in true
    }


@pytest.mark.parametrize("aggregation", ["sum", "mean", "weighted_mean"])
@pytest.mark.parametrize("threat", [THREAT, KNOWS_WHO], ids=["counts", "participation"])
def test_every_users_update_comes_out(clients: list[fp.Batch], aggregation: Reduction, threat: fp.ThreatModel) -> None:
    observation, truth = fp.simulate(scenario(clients, aggregation=aggregation), threat, seed=1)
    found = fp.run(Disaggregation(), observation)
    assert found.owners == tuple(f"client-{user}" for user in range(USERS))
    assert max(errors(found, truth).values()) < 1e-5
    assert torch.equal(found.diagnostics["participation"], truth.participation)
    assert found.status.startswith("12 of 12 users' updates were taken out of the sums")
    assert ("participation was known" in found.status) == (threat is KNOWS_WHO)
    assert found.knowledge_used >= ({"participation"} if threat is KNOWS_WHO else {"counts", "windows"})


def test_each_users_images_are_found_with_their_owner(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients), THREAT, seed=1)
    found = fp.run(then(Disaggregation(), dense_inversion()), observation)
    assert found.inputs is not None
    assert found.owners is not None
    for user, batch in enumerate(clients):
        rows = [row for row, owner in enumerate(found.owners) if owner == f"client-{user}"]
        distances = (found.inputs[rows].flatten(1)[:, None] - batch.inputs.flatten(1)).abs().amax(2)
        assert float(distances.min(0).values.max()) < 1e-2
    assert "taken out of the sums" in found.status
    assert "the update recomputed from the inputs" in found.status
    assert len(found.diagnostics["parts"]) == USERS
    assert found.diagnostics["recovery"].statuses


def test_a_part_is_what_one_user_alone_would_have_shown(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients, aggregation="mean"), THREAT.granting("labels"), seed=1)
    parts = Disaggregation().reduce(observation)
    for user, part in enumerate(parts):
        (seen,) = part.rounds
        assert part.subject == f"client-{user}"
        assert (seen.kind, seen.reduction, seen.clients) == ("gradient", "mean", 1)
        assert (seen.participants, seen.examples) == ((f"client-{user}",), (2,))
        assert part.knowledge.batch_size == 2
        assert isinstance(part.knowledge.labels, Tensor)
        assert torch.equal(part.knowledge.labels, clients[user].labels)
        assert {"counts", "windows", "cohort_sizes", "participation"}.isdisjoint(part.granted())
        assert {"bounds", "local_lr", "input_shape"} <= part.granted()
    without = THREAT.withholding("examples")
    (first, *_) = Disaggregation().reduce(fp.simulate(scenario(clients), without, seed=1)[0])
    assert first.knowledge.batch_size is None  # that of the whole cohort says nothing about one user


def test_weighted_means_of_unequal_clients_need_the_samples_behind_each_round(digits: fp.data.ImageSet) -> None:
    unequal = [digits.batch(list(range(4 * user, 4 * user + 1 + user % 3))) for user in range(USERS)]
    weighted = scenario(unequal, aggregation="weighted_mean")
    for threat in (KNOWS_WHO.granting("examples"), THREAT):
        observation, truth = fp.simulate(weighted, threat, seed=1)
        found = fp.run(Disaggregation(), observation)
        assert len(found.owners or ()) == USERS
        assert max(errors(found, truth).values()) < 1e-5
    assert isinstance(observation.knowledge.batch_size, tuple)
    short = dataclasses.replace(observation.knowledge, batch_size=observation.knowledge.batch_size[:-1])
    with pytest.raises(fp.errors.BadInput, match="one number for each of 60 rounds, not 59"):
        fp.run(Disaggregation(), dataclasses.replace(observation, knowledge=short))
    with pytest.raises(fp.NotApplicable, match="grant batch_size or the participation"):
        fp.run(Disaggregation(), fp.simulate(weighted, THREAT.withholding("batch_size"), seed=1)[0])


def test_equal_clients_are_weighed_by_their_cohorts(clients: list[fp.Batch]) -> None:
    weighted = scenario(clients, aggregation="weighted_mean")
    observation, truth = fp.simulate(weighted, THREAT.withholding("batch_size"), seed=1)
    assert max(errors(fp.run(Disaggregation(), observation), truth).values()) < 1e-5
    with pytest.raises(fp.MissingKnowledge, match="'cohort_sizes'"):
        fp.run(Disaggregation(), fp.simulate(weighted, THREAT.withholding("batch_size", "cohort_sizes"), seed=1)[0])


@pytest.mark.parametrize(
    ("aggregation", "field"),
    [("mean", "cohort_sizes"), ("weighted_mean", "examples")],
)
def test_missing_knowledge_is_named(clients: list[fp.Batch], aggregation: Reduction, field: str) -> None:
    observation, _ = fp.simulate(scenario(clients, aggregation=aggregation), THREAT.withholding(field), seed=1)
    with pytest.raises(fp.MissingKnowledge) as caught:
        fp.run(Disaggregation(), observation)
    assert caught.value.field == field


@pytest.mark.parametrize("aggregation", ["sum", "mean", "weighted_mean"])
def test_every_users_update_comes_out_without_counts_and_without_a_name(
    clients: list[fp.Batch], aggregation: Reduction
) -> None:
    made = scenario(clients, aggregation=aggregation, rounds=120)
    observation, truth = fp.simulate(made, THREAT.withholding("counts", "windows"), seed=1)
    found = fp.run(Disaggregation(), observation)
    assert set(found.owners or ()) == {f"unnamed-{number}" for number in range(USERS)}
    assert found.ambiguity == {"order"}
    assert f"whose {USERS} of these are, nothing that is known tells" in (found.status or "")
    distances = list(fp.score_updates(found, truth).values())
    assert max(distance for distance in distances if distance is not None) < 1e-5
    assert None not in distances
    matrix = found.diagnostics["participation"]
    assert fp.score_participation(matrix, truth, order_known=False).columns == (True,) * USERS


def test_counts_under_noise_name_updates(clients: list[fp.Batch]) -> None:
    made = scenario(clients, rounds=200, counts=fp.defenses.LaplaceCounts(1.0))
    observation, truth = fp.simulate(made, THREAT, seed=1)
    found = fp.run(Disaggregation(), observation)
    assert len(found.owners or ()) == USERS
    named = errors(found, truth)
    assert len(named) >= USERS // 2
    assert max(named.values()) < 1e-5


def test_unnamed_updates_of_unequal_clients_are_left_out_of_weighted_means(digits: fp.data.ImageSet) -> None:
    unequal = [digits.batch(list(range(8 * user, 8 * user + 2 + 2 * (user % 2)))) for user in range(USERS)]
    made = scenario(unequal, aggregation="weighted_mean", rounds=120)
    observation, _ = fp.simulate(made, THREAT.withholding("counts"), seed=1)
    found = fp.run(Disaggregation(), observation)
    assert found.updates == ()
    assert "not known without its name" in found.status


def test_a_model_that_moves_is_refused(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients, frozen=False), THREAT, seed=1)
    with pytest.raises(fp.NotApplicable, match=r"same model in every round.*round 1"):
        fp.run(Disaggregation(), observation)


def test_rounds_that_do_not_fit_together_are_refused(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients), KNOWS_WHO, seed=1)
    first, *rest = observation.rounds
    for other, message in (
        (dataclasses.replace(first, kind="delta"), "one kind of update"),
        (dataclasses.replace(first, update=dict(list(first.update.items())[1:])), "same tensors"),
    ):
        with pytest.raises(fp.errors.BadInput, match=message):
            Disaggregation().reduce(dataclasses.replace(observation, rounds=(*rest, other)))
    short = dataclasses.replace(observation, rounds=tuple(rest))
    with pytest.raises(fp.errors.BadInput, match="59 rounds x users"):
        Disaggregation().reduce(short)


def test_counts_that_cannot_be_are_refused_in_one_sentence(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients), THREAT, seed=1)
    assert observation.knowledge.counts is not None
    wrong = dataclasses.replace(observation.knowledge, counts=observation.knowledge.counts + 20)
    with pytest.raises(fp.errors.BadInput, match="user 0 counted 24 times in window 0 of 10 rounds"):
        fp.run(Disaggregation(), dataclasses.replace(observation, knowledge=wrong))


def planted(users: int = USERS, rounds: int = ROUNDS) -> Tensor:
    return torch.rand(rounds, users, generator=torch.Generator().manual_seed(3)) < 0.3


@pytest.mark.parametrize("threat", [THREAT, KNOWS_WHO], ids=["counts", "participation"])
def test_silent_users_and_twins_are_named_and_left_out(clients: list[fp.Batch], threat: fp.ThreatModel) -> None:
    matrix = planted()
    matrix[:, 4] = False
    matrix[:, 7] = matrix[:, 2]
    observation, truth = fp.simulate(scenario(clients, participation=matrix), threat, seed=1)
    found = fp.run(Disaggregation(), observation)
    assert found.owners == tuple(f"client-{user}" for user in range(USERS) if user not in (2, 4, 7))
    assert max(errors(found, truth).values()) < 1e-5
    assert "never took part): client-4" in found.status
    assert "client-2, client-7" in found.status


def test_without_any_redundancy_nobody_is_found_and_nothing_breaks(clients: list[fp.Batch]) -> None:
    # Rounds that do not depend on each other, and users of whom none is silent and none has a twin.
    alone = torch.eye(8, dtype=torch.bool)
    few = scenario(clients, rounds=8, participation=torch.cat([alone, alone[:, :4] | alone[:, 4:]], 1), window=4)
    observation, _ = fp.simulate(few, THREAT, seed=1)
    found = fp.run(then(Disaggregation(), dense_inversion()), observation)
    assert found.inputs is None
    assert found.labels is None
    assert found.owners == ()
    assert "0 of 12 users' updates" in found.status
    assert "and 2 more" in found.status


def test_updates_that_hold_parts_of_uncounted_users_say_so_and_have_error_bars(clients: list[fp.Batch]) -> None:
    observation, truth = fp.simulate(scenario(clients), THREAT.withholding("cohort_sizes", "examples"), seed=1)
    assert observation.knowledge.counts is not None
    fewer = dataclasses.replace(observation.knowledge, counts=observation.knowledge.counts[:-2])
    found = fp.run(Disaggregation(), dataclasses.replace(observation, knowledge=fewer))
    assert "2 more users whose rounds are not known" in found.status
    assert found.updates is not None
    assert truth.updates is not None
    for user, (name, update) in enumerate(zip(found.owners or (), found.updates, strict=True)):
        true = truth.updates[user]
        assert true is not None
        away = float((flat(update) - flat(true)).square().mean().sqrt())
        assert away < 6 * found.diagnostics["errors"][name]


def test_as_many_rounds_as_users_leave_no_error_bars(clients: list[fp.Batch]) -> None:
    matrix = torch.eye(USERS, dtype=torch.bool) | planted(rounds=USERS).tril(-1)
    few = scenario(clients, rounds=USERS, participation=matrix, window=4)
    observation, truth = fp.simulate(few, KNOWS_WHO, seed=1)
    found = fp.run(Disaggregation(), observation)
    assert max(errors(found, truth).values()) < 1e-3
    assert found.diagnostics["errors"] == {}
    assert "errors cannot be told" in found.status


def test_participation_of_other_numbers_is_refused(clients: list[fp.Batch]) -> None:
    observation, _ = fp.simulate(scenario(clients), KNOWS_WHO, seed=1)
    for wrong in (torch.full((ROUNDS, USERS), 0.5), torch.full((ROUNDS, USERS), 257)):
        knowledge = dataclasses.replace(observation.knowledge, participation=wrong)
        with pytest.raises(fp.errors.BadInput, match="0 or 1, and NaN or -1"):
            fp.run(Disaggregation(), dataclasses.replace(observation, knowledge=knowledge))


def test_users_are_named_as_the_rounds_name_them(clients: list[fp.Batch]) -> None:
    observation, truth = fp.simulate(scenario(clients), KNOWS_WHO.granting("examples"), seed=1)
    named = tuple(
        dataclasses.replace(seen, participants=tuple(f"phone {name}" for name in seen.participants or ()))
        for seen in observation.rounds
    )
    knowledge = dataclasses.replace(observation.knowledge, participation=None)
    parts = Disaggregation().reduce(dataclasses.replace(observation, rounds=named, knowledge=knowledge))
    assert {part.subject for part in parts} == {f"phone client-{user}" for user in range(USERS)}
    assert truth.updates is not None
    for part in parts:
        true = truth.updates[int((part.subject or "").removeprefix("phone client-"))]
        assert true is not None
        torch.testing.assert_close(flat(part.rounds[0].update), flat(true), rtol=1e-4, atol=1e-7)
        assert part.knowledge.batch_size == 2


def test_participation_known_in_part_goes_along_with_the_counts(clients: list[fp.Batch]) -> None:
    observation, truth = fp.simulate(scenario(clients), THREAT.granting("participation"), seed=1)
    assert observation.knowledge.participation is not None
    partly = observation.knowledge.participation.to(torch.int64)
    partly[:, ::2] = -1
    knowledge = dataclasses.replace(observation.knowledge, participation=partly)
    found = fp.run(Disaggregation(), dataclasses.replace(observation, knowledge=knowledge))
    assert len(found.owners or ()) == USERS
    assert max(errors(found, truth).values()) < 1e-5
    statuses = found.diagnostics["recovery"].statuses
    assert all(status is UserStatus.GIVEN for status in statuses[1::2])


def test_updates_that_vary_come_out_as_their_mean_within_the_stated_error(digits: fp.data.ImageSet) -> None:
    many = [digits.batch(list(range(8 * user, 8 * user + 8))) for user in range(USERS)]
    varying = scenario(many, protocol=fp.FedAvg(lr=0.01, epochs=2, batch_size=4))
    observation, truth = fp.simulate(varying, KNOWS_WHO, seed=1)
    found = fp.run(Disaggregation(), observation)
    assert found.updates is not None
    assert truth.updates is not None
    assert 1e-4 < max(errors(found, truth).values()) < 0.2
    for name, update, true in zip(found.owners or (), found.updates, truth.updates, strict=True):
        assert true is not None
        away = float((flat(update) - flat(true)).square().mean().sqrt())
        assert away < 2 * found.diagnostics["errors"][name]


def test_a_capture_gives_the_same_answer(clients: list[fp.Batch], tmp_path: Path) -> None:
    observation, _ = fp.simulate(scenario(clients), THREAT, seed=1)
    loaded = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"))
    first, second = (fp.run(Disaggregation(), seen) for seen in (observation, loaded))
    assert first.updates is not None
    assert second.updates is not None
    assert first.status == second.status
    for one, other in zip(first.updates, second.updates, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_users_whose_update_hangs_on_an_ambiguous_column_are_found() -> None:
    matrix = torch.tensor(
        [[1, 1, 1, 0, 1], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [0, 1, 1, 1, 0]]
    ).bool()
    other = (matrix[:, 0].long() + matrix[:, 1].long() - matrix[:, 2].long()).bool()  # entries stay zeros and ones
    found = Participation(
        matrix=matrix,
        certified=torch.zeros(5, dtype=torch.bool),
        residual=torch.zeros(5),
        statuses=(UserStatus.AMBIGUOUS, *[UserStatus.SOLVED] * 4),
        status=ParticipationStatus.COMPLETE,
        alternatives={0: torch.stack([other])},
        rank=5,
        noise=0.0,
    )
    everyone = torch.ones(5, dtype=torch.bool)
    assert _touched(found, everyone).tolist() == [False, True, True, False, False]
    swapped = found._replace(alternatives={0: matrix[:, 3].unsqueeze(0), 3: matrix[:, 0].unsqueeze(0)})
    assert not _touched(swapped, everyone).any()  # whose is whose is open, the updates are not


def test_the_clients_of_a_sum_are_not_taken_for_one(clients: list[fp.Batch]) -> None:
    matrix = planted(rounds=3)
    matrix[1] = False
    few = scenario(clients, rounds=3, participation=matrix, window=None)
    observation, _ = fp.simulate(few, THREAT.granting("labels", "participation"), seed=1)
    parts = split_updates(observation)
    assert [part.rounds[0].index for part in parts] == [0, 2]  # nobody took part in round 1
    assert all(part.subject is None and part.knowledge.labels is None for part in parts)
    assert [part.knowledge.batch_size for part in parts] == [2 * int(row.sum()) for row in matrix[::2]]


@pytest.mark.parametrize("change", [{"count_tolerance": -1}, {"time_limit": 0.0}])
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(fp.errors.BadInput, match="out of range"):
        Disaggregation(**change)  # type: ignore[arg-type]


def test_repr_evaluates_back() -> None:
    attack = then(Disaggregation(certify=False, executor=fp.attacks.Processes(workers=2)), dense_inversion())
    assert eval(repr(attack), vars(fp.attacks)) == attack

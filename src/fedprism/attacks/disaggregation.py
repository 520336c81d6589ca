"""Takes sums over changing cohorts apart into every user's own update.

Lam, Wei, Brooks, Reddi, Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", ICML 2021.

Differs from the paper in: who took part when is found for all users at once, with a proof where there is one
(`solvers.recover_participation`); where participation is known only least squares remains; users whose update the sums
do not determine are named and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism import progress
from fedprism.attacks.base import Attack, Reduced, Reduction
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.executing import Executor
from fedprism.solvers.participation import (
    Identifiability,
    Participation,
    UserStatus,
    disaggregate,
    identifiable_users,
    recover_participation,
)
from fedprism.types import Knowledge, Observation, Reconstruction, Round, Update

SOLVED = frozenset({UserStatus.CERTIFIED, UserStatus.SOLVED, UserStatus.GIVEN})
"""Statuses of users whose rounds are taken as known."""
GUESSED = frozenset({UserStatus.AMBIGUOUS, UserStatus.UNCERTAIN})
"""Statuses of users whose column is one of several; without any column the other users' updates would be worse."""
TOUCHED = 1e-6
"""Smallest share of another user's update that counts."""
MOST_NAMED = 10
"""Users that a status names before it goes over to counting."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Disaggregation(Reduction, Attack):
    """Every user's update out of sums over cohorts, while the server sends the same model in every round.

    It works from the participation, where that is known, or from how often each user took part in windows of rounds
    (`windows`, `counts`). count_tolerance: by how much a count may be off. certify: prove that the answer is the only
    one. time_limit: seconds for what is left to integer programs. executor: where these run, `Processes()` for several
    at a time.

    As a reduction it hands each user's update on; as an attack it returns the updates themselves. Where a client's
    update varies from round to round, what comes out is its mean over the rounds. Means are turned back into sums with
    `cohort_sizes`, weighted means with the samples behind each round (`batch_size`) and each user's (`examples`).
    """

    count_tolerance: int = 0
    certify: bool = True
    time_limit: float = 60.0
    executor: Executor | None = None

    citation: ClassVar[str] = "Lam et al. 2021 (Gradient Disaggregation)"

    def __post_init__(self) -> None:
        if self.count_tolerance < 0 or not self.time_limit > 0:
            raise BadInput(
                f"expected a count_tolerance of at least 0 and a time_limit above 0, found {self.count_tolerance} and "
                f"{self.time_limit}; change the one that is out of range."
            )

    @property
    def uses(self) -> frozenset[str]:
        """Participation or counts in windows, whichever is granted: none of them is a need on its own."""
        return frozenset({"participation", "windows", "counts", "cohort_sizes", "examples", "batch_size", "labels"})

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        apart = self._apart(observation)
        return Reconstruction(
            updates=tuple(apart.update_of(user) for user in apart.updates),
            owners=tuple(apart.names[user] for user in apart.updates),
            status=apart.status,
            diagnostics=apart.diagnostics,
        )

    def reduce(self, observation: Observation) -> tuple[Observation, ...]:
        return self.explained(observation).parts

    def explained(self, observation: Observation) -> Reduced:
        apart = self._apart(observation)
        parts = tuple(_alone(observation, apart, user) for user in apart.updates)
        return Reduced(parts, apart.status, apart.diagnostics)

    def _apart(self, observation: Observation) -> _Apart:
        _check_rounds(observation.rounds)
        federation = _federation(observation)
        sums = _sums(observation.rounds, _factors(self.name, observation, federation))
        try:
            rounds = self._rounds(observation, federation, sums)
            columns = rounds.solved.nonzero().flatten()
            matrix = rounds.matrix[:, columns]
            identified = identifiable_users(matrix, aggregates=sums) if len(columns) else None
            updates = disaggregate(sums, matrix) if len(columns) else sums[:0]
        except ValueError as error:
            raise BadInput(str(error)) from error
        determined = identified.users.tolist() if identified is not None else []
        rows = {
            user: row
            for row, user in enumerate(columns.tolist())
            if determined[row] and not bool(rounds.doubtful[user])
        }
        names = federation.named(rounds.matrix.shape[1])
        weights = federation.weights(observation.rounds[0])
        measured = identified is not None and identified.noise is not None
        errors = identified.error.tolist() if identified is not None and measured else []
        return _Apart(
            names=names,
            examples=federation.examples,
            updates={user: updates[row] / weights.get(user, 1) for user, row in rows.items()},
            like=observation.rounds[0].update,
            status=_status(names, rows, rounds, identified),
            diagnostics={
                "participation": rounds.matrix.cpu(),
                "recovery": rounds.recovery,
                "identifiability": identified,
                "errors": {names[user]: errors[row] / weights.get(user, 1) for user, row in rows.items() if measured},
            },
        )

    def _rounds(self, observation: Observation, federation: _Federation, sums: Tensor) -> _Rounds:
        """Who took part when: as it is known, or recovered from the sums and the counts."""
        matrix = federation.matrix
        if matrix is not None:
            return _Rounds(matrix, matrix.any(0), torch.zeros_like(matrix[0]), None)
        found = self._recover(observation, sums, federation.known)
        taken = found.matrix.any(0)
        solved = torch.tensor([status in SOLVED for status in found.statuses], device=taken.device)
        guessed = torch.tensor([status in GUESSED for status in found.statuses], device=taken.device)
        candidates = taken & (solved | guessed)
        return _Rounds(found.matrix, candidates, guessed | _touched(found, candidates), found)

    def _recover(self, observation: Observation, sums: Tensor, known: Tensor | None) -> Participation:
        knowledge = observation.knowledge
        for field in ("counts", "windows"):
            if getattr(knowledge, field) is None:
                raise MissingKnowledge(self.name, field)
        return recover_participation(
            sums,
            knowledge.windows,
            knowledge.counts,
            known=known,
            cohort_sizes=knowledge.cohort_sizes,
            count_tolerance=self.count_tolerance,
            certify=self.certify,
            time_limit=self.time_limit,
            executor=self.executor,
            progress=progress.report,
        )


def disaggregation() -> Disaggregation:
    """Every user's update out of secure-aggregation sums."""
    return Disaggregation()


class _Apart(NamedTuple):
    names: tuple[str, ...]
    examples: tuple[int, ...] | None
    """How many samples each user trains on."""
    updates: Mapping[int, Tensor]
    """(parameters,) for each user whose update is determined."""
    like: Update
    """Names and shapes of the tensors that an update is made of."""
    status: str
    diagnostics: Mapping[str, Any]

    def update_of(self, user: int) -> Update:
        names = sorted(self.like)
        parts = torch.split(self.updates[user], [self.like[name].numel() for name in names])
        own = dict(zip(names, parts, strict=True))
        return {name: own[name].view(tensor.shape).to(tensor) for name, tensor in self.like.items()}


class _Rounds(NamedTuple):
    matrix: Tensor
    """(rounds, users), who took part when."""
    solved: Tensor
    """(users,) who has a column that goes into the least squares."""
    doubtful: Tensor
    """(users,) whose update hangs on which of several possible columns is right."""
    recovery: Participation | None
    """Where the matrix comes from; None: it was known."""


def _sums(rounds: Sequence[Round], factors: Tensor | None) -> Tensor:
    """(rounds, parameters); `factors` (rounds,) turn means back into sums."""
    # In the order of their names: a capture may list tensors in another order, and sums depend on it in the last digit.
    names = sorted(rounds[0].update)
    rows = torch.stack([torch.cat([seen.update[name].flatten() for name in names]) for seen in rounds])
    return rows if factors is None else rows.mul_(factors.to(rows)[:, None])


def _check_rounds(rounds: Sequence[Round]) -> None:
    """Refuse rounds whose updates are not sums of one set of vectors."""
    first = rounds[0]
    if len({(seen.kind, seen.reduction) for seen in rounds}) > 1:
        raise BadInput(
            "expected one kind of update and one reduction in all rounds, found several; attack those that agree."
        )
    for seen in rounds:
        if {name: t.shape for name, t in seen.update.items()} != {name: t.shape for name, t in first.update.items()}:
            raise BadInput(
                f"expected the same tensors in every round's update, found others in round {seen.index}; "
                "leave that round out."
            )
        if not _same(seen.params, first.params):
            raise NotApplicable(
                f"disaggregation expects the same model in every round, found another one sent in round {seen.index}; "
                "attack the rounds that share a model."
            )


def _same(first: Update, second: Update) -> bool:
    """Whether two updates hold the same numbers; the same object does without a look at them."""
    return first is second or (
        first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    )


class _Federation(NamedTuple):
    names: tuple[str, ...] | None
    """Users by column; None: the columns have numbers only."""
    known: Tensor | None
    """(rounds, users) 1 took part, 0 did not, -1 unknown; None where nothing is known."""
    examples: tuple[int, ...] | None
    """How many samples each user trains on."""

    @property
    def matrix(self) -> Tensor | None:
        """(rounds, users) bool where all of it is known."""
        return self.known.bool() if self.known is not None and bool((self.known >= 0).all()) else None

    def named(self, users: int) -> tuple[str, ...]:
        """The users' names, once it is known how many there are."""
        if self.examples is not None and len(self.examples) != users:
            raise BadInput(
                f"expected the number of examples of each of {users} users, found {len(self.examples)} numbers; "
                "correct or withhold them."
            )
        return self.names or tuple(f"client-{user}" for user in range(users))

    def weights(self, seen: Round) -> dict[int, int]:
        """What the sums count each user's update for, where that is not once."""
        weighted = seen.reduction == "weighted_mean" and self.examples is not None
        return dict(enumerate(self.examples or ())) if weighted else {}


def _federation(observation: Observation) -> _Federation:
    """Who took part when, as far as it is known: from a matrix, or from the participants that the rounds list."""
    rounds, given = observation.rounds, observation.knowledge.participation
    if given is not None:
        if given.dim() != 2 or len(given) != len(rounds):
            raise BadInput(
                f"expected participation as {len(rounds)} rounds x users, found shape {tuple(given.shape)}; correct it."
            )
        known = given.nan_to_num(-1) if given.dtype.is_floating_point else given
        if not bool(((known == 0) | (known == 1) | (known == -1)).all()):
            raise BadInput("expected participation of 0, 1, and NaN or -1 where unknown, found others; correct it.")
        return _Federation(None, known.to(torch.int8), observation.knowledge.examples)
    listed = [seen.participants for seen in rounds if seen.participants is not None]
    if len(listed) < len(rounds):
        return _Federation(None, None, observation.knowledge.examples)
    # The order of the columns is our own, so sizes can only come from what the rounds list beside the names.
    sizes = {
        name: size for seen in rounds for name, size in zip(seen.participants or (), seen.examples or (), strict=False)
    }
    names = tuple(dict.fromkeys(name for participants in listed for name in participants))
    matrix = torch.tensor([[name in participants for name in names] for participants in listed])
    complete = all(name in sizes for name in names)
    return _Federation(names, matrix.to(torch.int8), tuple(sizes[name] for name in names) if complete else None)


def _factors(name: str, observation: Observation, federation: _Federation) -> Tensor | None:
    """(rounds,) what each update must be multiplied by to be a sum; None where it is one."""
    reduction, matrix, examples = observation.rounds[0].reduction, federation.matrix, federation.examples
    if reduction == "sum":
        return None
    cohorts = matrix.sum(1) if matrix is not None else observation.knowledge.cohort_sizes
    if reduction == "mean":
        if cohorts is None:
            raise MissingKnowledge(name, "cohort_sizes")
        return cohorts
    if examples is None:
        raise MissingKnowledge(name, "examples")
    if matrix is not None:
        return matrix.double() @ torch.tensor(examples).to(matrix.device, torch.float64)
    totals = observation.knowledge.batch_size
    if totals is not None:
        return _one_each(totals, len(observation.rounds))
    if len(set(examples)) > 1:
        raise NotApplicable(
            "disaggregation of weighted means expects to know how many examples were trained on in each round, found "
            "users with different numbers of them and an unknown participation; grant batch_size or the participation."
        )
    if cohorts is None:
        raise MissingKnowledge(name, "cohort_sizes")
    return cohorts * examples[0]


def _one_each(totals: int | tuple[int, ...], rounds: int) -> Tensor:
    """(rounds,) how many samples are behind each."""
    given = totals if isinstance(totals, tuple) else (totals,) * rounds
    if len(given) != rounds:
        raise BadInput(
            f"expected batch_size as one number or one for each of {rounds} rounds, found {len(given)}; correct it."
        )
    return torch.tensor(given)


def _touched(found: Participation, candidates: Tensor) -> Tensor:
    """(users,) whose update would be another one if an ambiguous user's column were one of its alternatives.

    With p_i replaced by a = P x, the same sums are explained by g_j - (x_j / x_i) g_i in place of g_j.
    """
    users = candidates.nonzero().flatten()
    touched = torch.zeros_like(candidates)
    inverse = torch.linalg.pinv(found.matrix[:, users].double())
    for user, others in found.alternatives.items():
        shares = others.to(inverse) @ inverse.T  # (alternatives, users)
        valid = shares[:, users == user].abs().flatten() > TOUCHED  # else the user would have no update of its own
        touched[users] |= (shares[valid].abs() > TOUCHED).any(0) & (users != user)
    return touched


def _alone(observation: Observation, apart: _Apart, user: int) -> Observation:
    """What an eavesdropper on this one user would have seen, with what is known about it."""
    first, knowledge, name = observation.rounds[0], observation.knowledge, apart.names[user]
    size = apart.examples[user] if apart.examples is not None else None
    return dataclasses.replace(
        observation,
        rounds=(
            Round(
                params=first.params,
                update=apart.update_of(user),
                kind=first.kind,
                participants=(name,),
                examples=(size,) if size is not None else None,
                buffers_before=first.buffers_before,
            ),
        ),
        knowledge=_knowledge_about(knowledge, user, size),
        subject=name,
    )


def _knowledge_about(knowledge: Knowledge, user: int, size: int | None) -> Knowledge:
    """The part of the knowledge that concerns one user; that about the federation has done its work."""
    labels = knowledge.labels[user] if isinstance(knowledge.labels, tuple) else None
    return dataclasses.replace(
        knowledge,
        # Labels are those of all its data, of which a user may train on a part in each round: the mean is over all.
        batch_size=size if labels is None or size is None else len(labels),
        labels=labels,
        examples=(size,) if size is not None else None,
        participation=None,
        windows=None,
        counts=None,
        cohort_sizes=None,
    )


def _status(names: Sequence[str], kept: Collection[int], rounds: _Rounds, identified: Identifiability | None) -> str:
    """What was found, how far it is proved, and who is left out for which reason."""
    proof = "participation was known"
    if rounds.recovery is not None:
        proved = sum(bool(rounds.recovery.certified[user]) for user in kept)
        proof = f"the rounds of {proved} of these are proved to be the only ones possible"
    said = [f"{len(kept)} of {len(names)} users' updates were taken out of the sums", proof]
    reasons: dict[str, list[int]] = {}
    for user in sorted(set(range(len(names))) - set(kept)):
        reasons.setdefault(_reason(user, rounds), []).append(user)
    said += [f"left out ({reason}): {_listed(names, users)}" for reason, users in reasons.items()]
    hidden = rounds.recovery.rank - int(rounds.solved.sum()) if rounds.recovery is not None else 0
    if hidden > 0 and kept:
        said.append(
            f"the sums hold the updates of {hidden} more users whose rounds are not known, parts of which are in the "
            "updates found: see errors"
        )
    if identified is not None and identified.noise is None:
        said.append("no more rounds than users, so that errors cannot be told")
    return "; ".join([*said, *([str(identified.status.value)] if identified is not None else [])])


def _reason(user: int, rounds: _Rounds) -> str:
    """Why a user is left out."""
    if rounds.recovery is not None and rounds.recovery.statuses[user] not in SOLVED:
        return str(rounds.recovery.statuses[user].value)
    if not bool(rounds.matrix[:, user].any()):
        return "never took part"
    return "the sums do not determine the update"


def _listed(names: Sequence[str], users: Sequence[int]) -> str:
    more = f" and {len(users) - MOST_NAMED} more" if len(users) > MOST_NAMED else ""
    return ", ".join(names[user] for user in users[:MOST_NAMED]) + more

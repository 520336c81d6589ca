"""Takes sums over changing cohorts apart into every user's own update.

Lam, Wei, Brooks, Reddi, Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", ICML 2021.

Differs from the paper in: who took part when is recovered for all users at once, with a proof where there is one
(`solvers.recover_participation`), with or without counts; where participation is known only least squares remains;
users whose update the sums do not determine are named and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Attack, Circumstances
from fedprism.attacks.choices import OneOf
from fedprism.attacks.reduction import Reduced, Reduction
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.naming import preset
from fedprism.runtime import progress
from fedprism.runtime.executors import Executor, Processes, Serial
from fedprism.solvers.participation import (
    Identifiability,
    Participation,
    UserStatus,
    disaggregate,
    identifiable_users,
    recover_participation,
)
from fedprism.types import Observation, Reconstruction, Round, Update, same_tensors

SOLVED = frozenset({UserStatus.CERTIFIED, UserStatus.SOLVED, UserStatus.GIVEN, UserStatus.UNNAMED})
"""Statuses of columns that count as known, whosever they are."""
UNNAMED = "unnamed-"
"""What owners of updates are called of whom no name is known: unnamed-0, unnamed-1, ..."""
GUESSED = frozenset({UserStatus.AMBIGUOUS, UserStatus.UNCERTAIN})
"""Statuses of users whose column is one of several; without any column the other users' updates would be worse."""
TOUCHED = 1e-6
"""Smallest coefficient of another user's update that is more than rounding error."""
MOST_NAMED = 10
"""Users that a status names before it goes over to counting."""
OF_THE_FEDERATION = ("participation", "windows", "counts", "count_release", "cohort_sizes")
"""Knowledge that says nothing about one user alone."""
EXECUTORS = {"none": None, "serial": Serial(), "processes": Processes()}
"""What plans and the command line can name. No cluster: files from others must not say what is connected to."""
NO_SUMS = (
    "it takes apart sums of several rounds of one model, of which there are none: several grid.clients, several "
    "federation.rounds and frozen make some"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Disaggregation(Reduction, Attack):
    """Every user's update out of sums over cohorts, while the server sends the same model in every round.

    It works from the participation, from how often each user took part in windows of rounds (`windows`, `counts`, and
    `count_release` if they were reported under noise), or from the sums alone: then updates come out without names. A
    user's update is the mean over the rounds. Means become sums again with `cohort_sizes`, weighted means with the
    samples behind each round (`batch_size`) and each user's (`examples`). count_tolerance: by how much a count may be
    off. certify: prove the answer. time_limit: seconds for integer programs, which run on `executor`.
    """

    count_tolerance: int = 0
    certify: bool = True
    time_limit: float = 60.0
    executor: Annotated[Executor | None, OneOf(EXECUTORS)] = None

    citation: ClassVar[str] = "Lam et al. 2021 (Gradient Disaggregation)"

    def __post_init__(self) -> None:
        if self.count_tolerance < 0 or not self.time_limit > 0:
            raise BadInput(
                f"count_tolerance must be at least 0 and time_limit above 0, not {self.count_tolerance} and "
                f"{self.time_limit}; change the one that is out of range."
            )

    @property
    def uses(self) -> frozenset[str]:
        """Whatever says who took part when; nothing of it is needed."""
        return frozenset({*OF_THE_FEDERATION, "examples", "batch_size", "labels"})

    @property
    def reads_any_inputs(self) -> bool:
        return True

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.sums_of_rounds else NO_SUMS

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        reduced = self.explained(observation)
        return Reconstruction(
            updates=tuple(part.round.update for part in reduced.parts),
            owners=tuple(str(part.subject) for part in reduced.parts),
            ambiguity=frozenset({"order"}) if any(is_unnamed(part.subject) for part in reduced.parts) else frozenset(),
            status=reduced.status,
            diagnostics=reduced.diagnostics,
        )

    def reduce(self, observation: Observation) -> tuple[Observation, ...]:
        return self.explained(observation).parts

    def explained(self, observation: Observation) -> Reduced:
        _check_rounds(observation.rounds)
        first, federation = observation.rounds[0], _federation(observation)
        sums = _sums(observation.rounds, _factors(self.name, observation, federation))
        try:
            columns = self._columns(observation, federation, sums)
            users = columns.usable.nonzero().flatten()
            matrix = columns.matrix[:, users]
            identified = identifiable_users(matrix, aggregates=sums) if len(users) else None
            updates = disaggregate(sums, matrix) if len(users) else sums[:0]
        except ValueError as error:
            raise BadInput(str(error)) from error
        names, weights = federation.named(columns, first.reduction)
        rows: dict[int, int] = {}
        errors: dict[str, float] = {}
        if identified is not None:
            clear = identified.users & ~columns.doubtful[users]
            clear &= torch.tensor([weights[user] > 0 for user in users.tolist()], device=clear.device)
            rows = {int(users[row]): row for row in clear.nonzero().flatten().tolist()}
            if identified.noise is not None:
                errors = {names[user]: float(identified.error[row]) / weights[user] for user, row in rows.items()}
        parts = tuple(
            _alone(observation, user, names[user], _as_update(updates[row] / weights[user], first.update), federation)
            for user, row in rows.items()
        )
        diagnostics = {
            "participation": columns.matrix.cpu(),
            "recovery": columns.recovery,
            "identifiability": identified,
            "errors": errors,
        }
        return Reduced(parts, _status(names, rows, columns, identified), diagnostics)

    def _columns(self, observation: Observation, federation: _Federation, sums: Tensor) -> _Columns:
        """Who took part when: as it is known, or recovered from the sums and the counts."""
        matrix, knowledge = federation.matrix, observation.knowledge
        if matrix is not None:
            return _Columns(matrix, matrix.any(0), torch.zeros_like(matrix[0]), None)
        counted = knowledge.windows is not None and knowledge.counts is not None
        release = knowledge.count_release
        recovery = recover_participation(
            sums,
            knowledge.windows if counted else None,
            knowledge.counts if counted else None,
            count_likelihood=None if release is None or release.exact else release.log_likelihood,
            known=federation.known,
            cohort_sizes=knowledge.cohort_sizes,
            count_tolerance=self.count_tolerance,
            certify=self.certify,
            time_limit=self.time_limit,
            executor=self.executor,
            progress=progress.report,
        )
        solved, guessed = (
            torch.tensor([status in statuses for status in recovery.statuses], device=recovery.matrix.device)
            for statuses in (SOLVED, GUESSED)
        )
        usable = recovery.matrix.any(0) & (solved | guessed)
        return _Columns(recovery.matrix, usable, guessed | _touched(recovery, usable), recovery)


@preset(Disaggregation)
def disaggregation() -> Disaggregation:
    """Every user's update out of secure-aggregation sums."""
    return Disaggregation()


def is_unnamed(owner: str | None) -> bool:
    """Whether nothing that is known tells who the owner of an update is."""
    return owner is not None and owner.startswith(UNNAMED)


class _Columns(NamedTuple):
    matrix: Tensor
    """(rounds, users), who took part when."""
    usable: Tensor
    """(users,) who has a column that goes into the least squares."""
    doubtful: Tensor
    """(users,) whose update hangs on which of several possible columns is right."""
    recovery: Participation | None
    """Where the matrix comes from; None: it was known."""

    @property
    def unnamed(self) -> list[int]:
        """Users whose column is one of several users', and columns of nobody who was counted."""
        statuses = () if self.recovery is None else self.recovery.statuses
        return [user for user, status in enumerate(statuses) if status is UserStatus.UNNAMED]


def _sums(rounds: Sequence[Round], factors: Tensor | None) -> Tensor:
    """(rounds, parameters); `factors` (rounds,) turn means back into sums."""
    # In the order of their names: a capture may list tensors in another order, and sums depend on it in the last digit.
    names = sorted(rounds[0].update)
    rows = torch.stack([torch.cat([round_.update[name].flatten() for name in names]) for round_ in rounds])
    return rows if factors is None else rows.mul_(factors.to(rows)[:, None])


def _as_update(values: Tensor, like: Update) -> Update:
    """One row of `_sums` as the tensors that an update is made of."""
    names = sorted(like)
    tensors = dict(zip(names, torch.split(values, [like[name].numel() for name in names]), strict=True))
    return {name: tensors[name].view(tensor.shape).to(tensor) for name, tensor in like.items()}


def _check_rounds(rounds: Sequence[Round]) -> None:
    """Refuse rounds whose updates are not sums of one set of vectors."""
    first = rounds[0]
    if len({(round_.kind, round_.reduction) for round_ in rounds}) > 1:
        raise BadInput(
            "rounds must have one kind of update and one reduction, not several; attack the rounds that agree."
        )
    shapes = {name: tensor.shape for name, tensor in first.update.items()}
    for round_ in rounds:
        if {name: tensor.shape for name, tensor in round_.update.items()} != shapes:
            raise BadInput(f"every update must hold the same tensors, but round {round_.index} holds others; omit it.")
        if not same_tensors(round_.params, first.params):
            raise NotApplicable(
                f"disaggregation needs the same model in every round, but round {round_.index} has another one; "
                "attack the rounds that share a model."
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

    def named(self, columns: _Columns, reduction: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Each user's name, and what the sums count its update for, once it is known how many users there are.

        0: that is not known, because the user is not.
        """
        users, unnamed = columns.matrix.shape[1], columns.unnamed
        if self.examples is not None and len(self.examples) != users and (len(self.examples) > users or not unnamed):
            raise BadInput(
                f"examples must hold one number for each of {users} users, not {len(self.examples)} numbers; "
                "correct or withhold them."
            )
        names = list(self.names or (f"client-{user}" for user in range(users)))
        weights = [1] * users
        if reduction == "weighted_mean" and self.examples is not None:
            alike = self.examples[0] if len(set(self.examples)) == 1 else 0
            weights = [*self.examples, *[alike] * users][:users]
            for user in unnamed:
                weights[user] = alike
        for number, user in enumerate(unnamed):
            names[user : user + 1] = [f"{UNNAMED}{number}"]
        return tuple(names), tuple(weights)


def _federation(observation: Observation) -> _Federation:
    """Who took part when, as far as it is known: from a matrix, or from the participants that the rounds list."""
    rounds, matrix = observation.rounds, observation.knowledge.participation
    if matrix is not None:
        if matrix.dim() != 2 or len(matrix) != len(rounds):
            raise BadInput(
                f"participation must have the shape {len(rounds)} rounds x users, not {tuple(matrix.shape)}; "
                "correct it."
            )
        known = matrix.nan_to_num(-1) if matrix.dtype.is_floating_point else matrix
        if not bool(((known == 0) | (known == 1) | (known == -1)).all()):
            raise BadInput("participation must be 0 or 1, and NaN or -1 if unknown, not another number; correct it.")
        return _Federation(None, known.to(torch.int8), observation.knowledge.examples)
    cohorts = [round_.participants for round_ in rounds if round_.participants is not None]
    if len(cohorts) < len(rounds):
        return _Federation(None, None, observation.knowledge.examples)
    # The order of the columns is our own, so sizes can only come from what the rounds list beside the names.
    sizes: dict[str, int] = {}
    for round_, cohort in zip(rounds, cohorts, strict=True):
        sizes.update(zip(cohort, round_.examples or (), strict=False))
    names = tuple(dict.fromkeys(name for cohort in cohorts for name in cohort))
    known = torch.tensor([[name in cohort for name in names] for cohort in cohorts]).to(torch.int8)
    complete = all(name in sizes for name in names)
    return _Federation(names, known, tuple(sizes[name] for name in names) if complete else None)


def _factors(name: str, observation: Observation, federation: _Federation) -> Tensor | None:
    """(rounds,) what each update must be multiplied by to be a sum; None where it is one."""
    reduction, matrix, examples = observation.rounds[0].reduction, federation.matrix, federation.examples
    if reduction == "sum":
        return None
    if reduction == "weighted_mean":
        if examples is None:
            raise MissingKnowledge(name, "examples")
        if matrix is not None:
            return matrix.double() @ torch.tensor(examples).to(matrix.device, torch.float64)
        if (sizes := observation.knowledge.batch_size) is not None:
            count = len(observation.rounds)
            sizes = sizes if isinstance(sizes, tuple) else (sizes,) * count
            if len(sizes) != count:
                raise BadInput(
                    f"batch_size must be one number for each of {count} rounds, not {len(sizes)}; correct it."
                )
            return torch.tensor(sizes)
        if len(set(examples)) > 1:
            raise NotApplicable(
                "disaggregation of weighted means needs to know how many examples were trained on in each round, "
                "but users have different numbers of them and their participation is unknown; grant batch_size or the "
                "participation."
            )
    cohorts = matrix.sum(1) if matrix is not None else observation.knowledge.cohort_sizes
    if cohorts is None:
        raise MissingKnowledge(name, "cohort_sizes")
    return cohorts if examples is None or reduction == "mean" else cohorts * examples[0]


def _touched(recovery: Participation, candidates: Tensor) -> Tensor:
    """(users,) whose update would change if an ambiguous user's column p_i were an alternative a = P x: x_j != 0."""
    users = candidates.nonzero().flatten()
    touched = torch.zeros_like(candidates)
    inverse = torch.linalg.pinv(recovery.matrix[:, users].double())
    for user, others in recovery.alternatives.items():
        coefficients = others.to(inverse) @ inverse.T  # (alternatives, users)
        valid = coefficients[:, users == user].abs().flatten() > TOUCHED  # else the user would send nothing
        touched[users] |= (coefficients[valid].abs() > TOUCHED).any(0) & (users != user)
    return touched


def _alone(observation: Observation, user: int, name: str, update: Update, federation: _Federation) -> Observation:
    """What an eavesdropper on this one user would have seen, with what is known about it."""
    first = observation.rounds[0]
    sizes = federation.examples if not is_unnamed(name) else None
    size = sizes[user] if sizes is not None else None
    examples = (size,) if size is not None else None
    round_ = Round(
        params=first.params,
        update=update,
        kind=first.kind,
        participants=(name,),
        examples=examples,
        buffers_before=first.buffers_before,
    )
    labels = observation.knowledge.labels
    labels = labels[user] if isinstance(labels, tuple) and not is_unnamed(name) else None
    knowledge = dataclasses.replace(
        observation.knowledge,
        # Labels are those of all its data, of which a user may train on a part in each round: the mean is over all.
        batch_size=size if labels is None or size is None else len(labels),
        labels=labels,
        examples=examples,
        **dict.fromkeys(OF_THE_FEDERATION),
    )
    return dataclasses.replace(observation, rounds=(round_,), knowledge=knowledge, subject=name)


def _status(names: Sequence[str], kept: Collection[int], columns: _Columns, identified: Identifiability | None) -> str:
    """How many updates came out, how far that is proved, and who is left out for which reason."""
    recovery, proof = columns.recovery, "participation was known"
    if recovery is not None:
        proved = sum(bool(recovery.certified[user]) for user in kept)
        proof = f"the rounds of {proved} of these are proved to be the only ones possible"
    sentences = [f"{len(kept)} of {len(names)} users' updates were taken out of the sums"]
    unnamed = len(set(columns.unnamed) & set(kept))
    if unnamed:
        sentences.append(f"whose {unnamed} of these are, nothing that is known tells")
    sentences.append(proof)
    reasons: dict[str, list[str]] = {}
    for user in sorted(set(range(len(names))) - set(kept)):
        reasons.setdefault(_reason(user, columns), []).append(names[user])
    for reason, users in reasons.items():
        more = f" and {len(users) - MOST_NAMED} more" if len(users) > MOST_NAMED else ""
        sentences.append(f"left out ({reason}): {', '.join(users[:MOST_NAMED])}{more}")
    hidden = recovery.rank - int(columns.usable.sum()) if recovery is not None else 0
    if hidden > 0 and kept:
        sentences.append(
            f"the sums hold the updates of {hidden} more users whose rounds are not known, parts of which are in the "
            "recovered updates: see errors"
        )
    if identified is not None:
        if identified.noise is None:
            sentences.append("no more rounds than users, so errors cannot be told")
        sentences.append(str(identified.status.value))
    return "; ".join(sentences)


def _reason(user: int, columns: _Columns) -> str:
    """Why a user is left out."""
    if columns.recovery is not None and columns.recovery.statuses[user] not in SOLVED:
        return str(columns.recovery.statuses[user].value)
    if not bool(columns.matrix[:, user].any()):
        return "never took part"
    if user in columns.unnamed:
        return "its share of the weighted means is not known without its name"
    return "the sums do not determine the update"

"""Findings about the protocol of a recorded run, derived from its facts; both are in `findings.json` of the capture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fedprism.files.tensors import write_bytes
from fedprism.inspection.base import Finding, note, serious, serious_first
from fedprism.integrations.about_recording import RULES_ABOUT_RECORDING, troubled
from fedprism.integrations.facts import FILE, FORMAT, FindingEntry, RoundFacts, read_file
from fedprism.solvers.participation import identifiable_users

MOST_CLIENTS = 1000
"""Clients of one table of cohorts that is looked at: least squares over more take long after every round."""
MOST_ENTRIES = 2**20
"""Entries (rounds x clients) of one table of cohorts that is looked at, for the same reason."""
MOST_LISTED = 5
"""Names of metrics that a sentence lists."""
MOST_LETTERS = 40
"""Letters of each name of a metric or client that a sentence shows."""
SERVER_TOLERANCE = 1e-4
"""Relative excess over the clipping norm that is rounding error where the server itself clips."""
CLIENT_TOLERANCE = 1e-3
"""Relative excess over the clipping norm that is rounding error of a client in lower precision."""
NOISE_TOLERANCE = 1e-6
"""Relative lack of noise that is rounding error in double precision."""


def findings(rounds: Sequence[RoundFacts], troubles: Sequence[str] = ()) -> tuple[Finding, ...]:
    """What holds in this run, the serious things first; `troubles` are what the recorder could not do."""
    ruled = (finding for rule in RULES for finding in rule(rounds))
    return serious_first((*ruled, *troubled(troubles)))


def save_findings(folder: Path, rounds: Sequence[RoundFacts], troubles: Sequence[str] = ()) -> None:
    """Write the facts and what follows from them beside a capture."""
    entries = [{name: getattr(f, name) for name in FindingEntry.model_fields} for f in findings(rounds, troubles)]
    facts = [round_.model_dump(mode="json", exclude_defaults=True) for round_ in rounds]
    content = {"format": FORMAT, "findings": entries, "troubles": list(troubles), "rounds": facts}
    write_bytes(folder / FILE, json.dumps(content, indent=1).encode())


def load_findings(folder: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """The findings that lie beside a capture; none where the capture has no such file."""
    read = read_file(folder)
    return () if read is None else findings(read.rounds, read.troubles)


def _serious(check: str, sentence: str, **evidence: float) -> Finding:
    return serious(check, "", sentence, evidence)


# --- the rules: each looks at all rounds and says what holds, or nothing ---------------------------------------------


def _secure(rounds: Iterable[RoundFacts]) -> list[RoundFacts]:
    return [round_ for round_ in rounds if round_.protocol == "secagg+"]


def participants_in_clear(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Secure aggregation hides what each client sent, not that it did."""
    if named := [round_ for round_ in _secure(rounds) if round_.replied]:
        clients = {name for round_ in named for name in round_.replied}
        sentence = (
            f"in {len(named)} rounds of secure aggregation the server saw which of {len(clients)} clients took part"
        )
        yield note("participants-in-clear", "", sentence, {"rounds": len(named), "clients": len(clients)})


def examples_in_clear(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Flower's SecAgg+ masks the weighting factor, and sends it beside the masked vector all the same."""
    if open_ := [round_ for round_ in _secure(rounds) if round_.examples]:
        sentence = (
            "secure aggregation is said to mask the number of examples of each client, and the server saw it in plain "
            f"text in {len(open_)} rounds"
        )
        yield _serious("examples-in-clear", sentence, rounds=len(open_))


def metrics_in_clear(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Metrics such as the training loss belong to single clients, and no mask covers them."""
    if open_ := [round_ for round_ in _secure(rounds) if any(round_.metrics.values())]:
        names = sorted({name for round_ in open_ for metrics in round_.metrics.values() for name in metrics})
        listed = ", ".join(name[:MOST_LETTERS] for name in names[:MOST_LISTED])
        more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
        sentence = (
            f"the server saw the metrics of each client ({listed}{more}) in plain text in {len(open_)} rounds of "
            "secure aggregation"
        )
        yield _serious("metrics-in-clear", sentence, rounds=len(open_), metrics=len(names))


def masks_from_few_seeds(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """A mask hides a vector only as long as its seed cannot be tried out."""
    if repeating := [round_ for round_ in _secure(rounds) if round_.masks_repeat]:
        sentence = (
            "the installed secure aggregation makes the same mask of different seeds, because it folds 256 bits to "
            "fewer before it draws; no mask was attacked here"
        )
        yield note("masks-from-few-seeds", "", sentence, {"rounds": len(repeating)})


def sums_come_apart(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Sums over known cohorts of one model are linear equations in the clients' updates."""
    groups: dict[str, list[frozenset[str]]] = {}
    for round_ in _secure(rounds):
        if round_.model is not None and round_.replied:
            groups.setdefault(round_.model, []).append(frozenset(round_.replied))
    for cohorts in groups.values():
        names = sorted(frozenset().union(*cohorts))
        if len(names) > MOST_CLIENTS or len(names) * len(cohorts) > MOST_ENTRIES:
            continue
        matrix = torch.tensor([[name in cohort for name in names] for cohort in cohorts])
        if determined := int(identifiable_users(matrix).users.sum()):
            sentence = (
                f"{len(cohorts)} rounds of secure aggregation were of the same model and of cohorts that the server "
                f"knew, which determines the updates of {determined} of {len(names)} clients as far as these stay the "
                "same from round to round"
            )
            counts = {"rounds": len(cohorts), "clients": len(names), "determined": determined}
            yield _serious("sums-come-apart", sentence, **counts)


def raw_updates_seen(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Clipping and noise on the server protect what it releases, not what it receives."""
    if lengths := _lengths(rounds, clipped_by="server"):
        above = sum(length > norm * (1 + SERVER_TOLERANCE) for length, norm, _ in lengths)
        sentence = (
            f"the server clips and adds noise only after it has received the clients' raw updates: {above} of "
            f"{len(lengths)} were longer than the clipping norm"
        )
        longest, norm = max(length for length, _, _ in lengths), min(norm for _, norm, _ in lengths)
        yield _serious("raw-updates-seen", sentence, longest=longest, clipping_norm=norm, longer=above)


def clipping_left_out(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Clipping on the client is the client's to do: without its mod the noise is too small for what arrives."""
    lengths = _lengths(rounds, clipped_by="client")
    longer = [
        (length / norm, length, index)
        for length, norm, index in lengths
        if norm > 0 and length > norm * (1 + CLIENT_TOLERANCE)
    ]
    if longer:
        times, length, index = max(longer, key=lambda entry: entry[0])
        sentence = (
            f"clients were asked to clip their updates and {len(longer)} of {len(lengths)} arrived longer, in round "
            f"{index} {times:.3g} times as long: the noise is for clipped ones"
        )
        yield _serious("clipping-left-out", sentence, longer=len(longer), longest=length, times=times)


def _lengths(rounds: Sequence[RoundFacts], *, clipped_by: str) -> list[tuple[float, float, int]]:
    """Of every update that was seen under this kind of clipping: its length, the clipping norm and the round."""
    return [
        (length, round_.noise.clipping_norm, round_.index)
        for round_ in rounds
        if round_.noise is not None and round_.noise.clipped_by == clipped_by
        for length in round_.norms.values()
    ]


def noise_below_configured(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """The noise is for a mean over as many clients as configured; a larger weight in the mean leaves less privacy."""
    noised = [
        (multiplier, round_, round_.noise)
        for round_ in rounds
        if round_.noise is not None and (multiplier := effective_multiplier(round_)) is not None
    ]
    short = [entry for entry in noised if entry[0] < entry[2].noise_multiplier * (1 - NOISE_TOLERANCE)]
    if short:
        effective, worst, noise = min(short, key=lambda entry: entry[0])
        yield _serious(
            "noise-below-configured",
            f"in {len(short)} of {len(noised)} rounds the noise was below what was configured: in round "
            f"{worst.index}, with {len(worst.replied)} of {noise.clients} clients, a noise multiplier of "
            f"{effective:.3g} instead of {noise.noise_multiplier:.3g}",
            rounds=len(short),
            effective_multiplier=effective,
            configured_multiplier=noise.noise_multiplier,
            replied=len(worst.replied),
            configured_clients=noise.clients,
        )


def effective_multiplier(round_: RoundFacts) -> float | None:
    """The noise multiplier that the round's noise amounts to, for the clients that replied and their weights."""
    noise, replies = round_.noise, len(round_.replied)
    if noise is None or not replies:
        return None
    if noise.added_to == "updates":  # a mean of noises multiplier * norm / sqrt(clients) against norm / replies
        return noise.noise_multiplier * math.sqrt(replies / noise.clients)
    weights = [float(round_.examples[name]) for name in round_.replied if name in round_.examples]
    # Without stated weights the mean is taken to be a plain one.
    largest = max(weights) / sum(weights) if len(weights) == replies else 1 / replies
    return noise.noise_multiplier / (noise.clients * largest)


def leaking_rounds(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """What the checks after each round got out of it."""
    watched = [(round_.leakage, round_.index) for round_ in rounds if round_.leakage is not None]
    leaking = [(leakage.samples, index, leakage.client) for leakage, index in watched if leakage.samples]
    if leaking:
        fraction, index, client = max(leaking, key=lambda entry: entry[0])
        whose = "one update" if client is None else f"the update of {client[:MOST_LETTERS]}"
        sentence = (
            f"in {len(leaking)} of {len(watched)} rounds samples could be read from an update without any "
            f"search: in round {index} {fraction:.0%} of the samples behind {whose}"
        )
        yield _serious("samples-read-off", sentence, rounds=len(leaking), share=fraction)


RULES: tuple[Callable[[Sequence[RoundFacts]], Iterator[Finding]], ...] = (
    participants_in_clear,
    examples_in_clear,
    metrics_in_clear,
    masks_from_few_seeds,
    sums_come_apart,
    raw_updates_seen,
    clipping_left_out,
    noise_below_configured,
    leaking_rounds,
    *RULES_ABOUT_RECORDING,
)

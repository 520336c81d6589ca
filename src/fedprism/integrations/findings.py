"""What follows from the facts of a recorded run: findings about its protocol, for a report to show.

They lie in `findings.json` beside the capture together with the facts, and are derived from these again when they are
read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from fedprism.inspection.base import Finding, Severity
from fedprism.integrations.facts import FILE, FORMAT, RoundFacts, read_facts
from fedprism.solvers.participation import identifiable_users
from fedprism.tensors import write_bytes

MOST_CLIENTS = 1000
MOST_ENTRIES = 2**20
"""How large a table of rounds and clients may be that is looked at."""


def findings(rounds: Sequence[RoundFacts]) -> tuple[Finding, ...]:
    """What holds in this run, the serious things first."""
    found = [finding for check in RULES.values() for finding in check(rounds)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.SERIOUS))


def save_findings(folder: Path, rounds: Sequence[RoundFacts]) -> None:
    """Write the facts and what follows from them beside a capture."""
    found = [
        {"check": f.check, "severity": f.severity.value, "sentence": f.sentence, "evidence": dict(f.evidence)}
        for f in findings(rounds)
    ]
    facts = [seen.model_dump(mode="json", exclude_defaults=True) for seen in rounds]
    write_bytes(folder / FILE, json.dumps({"format": FORMAT, "findings": found, "rounds": facts}, indent=1).encode())


def load_findings(folder: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """The findings that lie beside a capture; none where the capture has no such file."""
    read = read_facts(folder)
    return findings(read) if read is not None else ()


# --- the rules: each looks at all rounds and says what holds, or nothing ---------------------------------------------


def _secure(rounds: Iterable[RoundFacts]) -> list[RoundFacts]:
    return [seen for seen in rounds if seen.protocol == "secagg+"]


def participants_in_clear(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Secure aggregation hides what each client sent, not that it did."""
    named = [seen for seen in _secure(rounds) if seen.replied]
    if not named:
        return []
    clients = {name for seen in named for name in seen.replied}
    return [
        Finding(
            check="participants-in-clear",
            severity=Severity.NOTE,
            sentence=(
                f"in {len(named)} rounds of secure aggregation the server saw which of {len(clients)} clients took part"
            ),
            evidence={"rounds": len(named), "clients": len(clients)},
        )
    ]


def examples_in_clear(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Flower's SecAgg+ masks the weighting factor, and sends it beside the masked vector all the same."""
    told = [seen for seen in _secure(rounds) if seen.examples]
    if not told:
        return []
    return [
        Finding(
            check="examples-in-clear",
            severity=Severity.SERIOUS,
            sentence=(
                "secure aggregation is said to mask the number of examples of each client, and the server saw it in "
                f"plain text in {len(told)} rounds"
            ),
            evidence={"rounds": len(told)},
        )
    ]


def metrics_in_clear(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Metrics such as the training loss belong to single clients, and no mask covers them."""
    told = [seen for seen in _secure(rounds) if any(seen.metrics.values())]
    if not told:
        return []
    names = sorted({name for seen in told for own in seen.metrics.values() for name in own})
    listed = ", ".join(name[:40] for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        Finding(
            check="metrics-in-clear",
            severity=Severity.SERIOUS,
            sentence=(
                f"the server saw the metrics of each client ({listed}) in plain text in {len(told)} rounds of secure "
                "aggregation"
            ),
            evidence={"rounds": len(told), "metrics": len(names)},
        )
    ]


def masks_from_few_seeds(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """A mask hides a vector only as long as its seed cannot be tried out."""
    repeating = [seen for seen in _secure(rounds) if seen.masks_repeat]
    if not repeating:
        return []
    return [
        Finding(
            check="masks-from-few-seeds",
            severity=Severity.NOTE,
            sentence=(
                "the installed secure aggregation makes the same mask of different seeds, because it folds 256 bits to "
                "fewer before it draws; no mask was attacked here"
            ),
            evidence={"rounds": len(repeating)},
        )
    ]


def sums_come_apart(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Sums over known cohorts of one model are linear equations in the clients' updates."""
    groups: dict[str, list[RoundFacts]] = {}
    for seen in _secure(rounds):
        if seen.model is not None and seen.replied:
            groups.setdefault(seen.model, []).append(seen)
    found = []
    for sharing in groups.values():
        cohorts = [frozenset(seen.replied) for seen in sharing]
        names = sorted(frozenset().union(*cohorts))
        if len(names) > MOST_CLIENTS or len(names) * len(cohorts) > MOST_ENTRIES:
            continue  # not looked at: it would take long after every round
        matrix = torch.tensor([[name in cohort for name in names] for cohort in cohorts])
        determined = int(identifiable_users(matrix).users.sum())
        if determined:
            found.append(
                Finding(
                    check="sums-come-apart",
                    severity=Severity.SERIOUS,
                    sentence=(
                        f"{len(sharing)} rounds of secure aggregation were of the same model and of cohorts that the "
                        f"server knew, which determines the updates of {determined} of {len(names)} clients as far as "
                        "these stay the same from round to round"
                    ),
                    evidence={"rounds": len(sharing), "clients": len(names), "determined": determined},
                )
            )
    return found


def raw_updates_seen(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Clipping and noise on the server protect what it releases, not what it receives."""
    clipped = [seen for seen in rounds if seen.noise is not None and seen.noise.clipped_by == "server" and seen.norms]
    if not clipped:
        return []
    longest = max(max(seen.norms.values()) for seen in clipped)
    norm = min(seen.noise.clipping_norm for seen in clipped if seen.noise is not None)
    above = sum(
        length > seen.noise.clipping_norm * (1 + 1e-4)
        for seen in clipped
        if seen.noise is not None
        for length in seen.norms.values()
    )
    return [
        Finding(
            check="raw-updates-seen",
            severity=Severity.SERIOUS,
            sentence=(
                f"the server clips and adds noise only after it has received the clients' raw updates: {above} of "
                f"{sum(len(seen.norms) for seen in clipped)} were longer than the clipping norm"
            ),
            evidence={"longest": longest, "clipping_norm": norm, "longer": above},
        )
    ]


def clipping_left_out(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """Clipping on the client is the client's to do: without its mod the noise is too small for what arrives."""
    asked = [seen for seen in rounds if seen.noise is not None and seen.noise.clipped_by == "client" and seen.norms]
    over = [
        (length / seen.noise.clipping_norm, length, seen)
        for seen in asked
        if seen.noise is not None and seen.noise.clipping_norm > 0
        for length in seen.norms.values()
        if length > seen.noise.clipping_norm * (1 + 1e-3)
    ]
    if not over:
        return []
    times, length, worst = max(over, key=lambda each: each[0])
    return [
        Finding(
            check="clipping-left-out",
            severity=Severity.SERIOUS,
            sentence=(
                f"clients were asked to clip their updates and {len(over)} of {sum(len(s.norms) for s in asked)} "
                f"arrived longer, in round {worst.index} {times:.3g} times as long: the noise is for clipped ones"
            ),
            evidence={"longer": len(over), "longest": length, "times": times},
        )
    ]


def noise_below_configured(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """The noise is for a mean over as many clients as configured: one client's part of a mean over fewer is larger.

    Noise of multiplier * norm / clients against a largest share of the mean: the multiplier that counts is
    multiplier / (clients * share). Unequal numbers of examples raise the largest share in the same way.
    """
    noised = [(seen, effective_multiplier(seen)) for seen in rounds if seen.noise is not None and seen.replied]
    short = [
        (seen, effective)
        for seen, effective in noised
        if seen.noise is not None and effective is not None and effective < seen.noise.noise_multiplier * (1 - 1e-6)
    ]
    if not short:
        return []
    worst, effective = min(short, key=lambda pair: pair[1])
    assert worst.noise is not None
    return [
        Finding(
            check="noise-below-configured",
            severity=Severity.SERIOUS,
            sentence=(
                f"in {len(short)} of {len(noised)} rounds the noise was below what was configured: in round "
                f"{worst.index}, with {len(worst.replied)} of {worst.noise.clients} clients, a noise multiplier of "
                f"{effective:.3g} instead of {worst.noise.noise_multiplier:.3g}"
            ),
            evidence={
                "rounds": len(short),
                "effective_multiplier": effective,
                "configured_multiplier": worst.noise.noise_multiplier,
                "replied": len(worst.replied),
                "configured_clients": worst.noise.clients,
            },
        )
    ]


def effective_multiplier(seen: RoundFacts) -> float | None:
    """The noise multiplier that the round's noise amounts to, for the clients that replied and their weights."""
    if seen.noise is None or not seen.replied:
        return None
    if (
        seen.noise.added_to == "updates"
    ):  # a plain mean of noises multiplier * norm / sqrt(clients) against norm / replies
        return seen.noise.noise_multiplier * math.sqrt(len(seen.replied) / seen.noise.clients)
    weights = [float(seen.examples[name]) for name in seen.replied if name in seen.examples]
    # Without stated weights the mean is taken to be a plain one.
    share = max(weights) / sum(weights) if len(weights) == len(seen.replied) else 1 / len(seen.replied)
    return seen.noise.noise_multiplier / (seen.noise.clients * share)


def leaking_rounds(rounds: Sequence[RoundFacts]) -> list[Finding]:
    """What the checks after each round got out of it."""
    watched = [(seen, seen.leakage.samples) for seen in rounds if seen.leakage is not None]
    leaking = [(seen, share) for seen, share in watched if share]
    if not leaking:
        return []
    worst, share = max(leaking, key=lambda pair: pair[1])
    return [
        Finding(
            check="samples-read-off",
            severity=Severity.SERIOUS,
            sentence=(
                f"in {len(leaking)} of {len(watched)} rounds samples could be read off an update without any search; "
                f"in round {worst.index} it was {share:.0%} of the samples behind one update"
            ),
            evidence={"rounds": len(leaking), "share": share},
        )
    ]


RULES: Mapping[str, Callable[[Sequence[RoundFacts]], list[Finding]]] = {
    "participants-in-clear": participants_in_clear,
    "examples-in-clear": examples_in_clear,
    "metrics-in-clear": metrics_in_clear,
    "masks-from-few-seeds": masks_from_few_seeds,
    "sums-come-apart": sums_come_apart,
    "raw-updates-seen": raw_updates_seen,
    "clipping-left-out": clipping_left_out,
    "noise-below-configured": noise_below_configured,
    "samples-read-off": leaking_rounds,
}

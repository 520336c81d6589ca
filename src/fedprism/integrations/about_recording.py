"""Findings about the recording itself: what it could not record, what it left out, and what clients refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from fedprism.inspection.base import Finding, note, serious
from fedprism.integrations.facts import RoundFacts

REFUSAL = "the client refuses to train on this model ({checks})"
"""What a client that inspects models answers; `checks` are the names of those that failed."""
REFUSED = re.compile(re.escape(REFUSAL).replace(r"\{checks\}", "(.*)"))
MOST_LETTERS = 150
"""Letters of a reason that a sentence shows."""
MOST_LETTERS_OF_A_TROUBLE = 600
"""Letters of the first trouble that a sentence shows."""
MOST_NAMED = 5
"""Rounds, checks, records or reasons that a sentence names."""
MOST_LETTERS_OF_A_NAME = 40
"""Letters of the name of a check or a record that a sentence shows."""


def clients_refused(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Clients that inspect what they are sent, and did not train on it."""
    answers = [
        (round_.index, match[1])
        for round_ in rounds
        for reason in round_.problems.values()
        if (match := REFUSED.search(reason))
    ]
    if answers:
        checks = dict.fromkeys(name for _, names in answers for name in names.split(", "))
        sentence = (
            f"clients refused {len(answers)} times to train on the model that they were sent, because their inspection "
            f"found {_listed(list(checks))} (rounds {_listed([str(index) for index, _ in answers])})"
        )
        yield serious("clients-refused", "", sentence, {"refusals": len(answers)})


def differences_sent(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Recognised or stated; told because everything that is recorded rests on it."""
    if several := [round_ for round_ in rounds if round_.uplink == "difference"]:
        sentence = (
            f"in {len(several)} of {len(rounds)} rounds clients sent differences of weights instead of weights, and "
            "are recorded as such"
        )
        yield note("differences-sent", "", sentence, {"rounds": len(several)})


def arrays_passed_by(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """What stands beside the model in a message, as the control variates of SCAFFOLD do, may tell more than it."""
    records: dict[str, int] = {}
    for round_ in rounds:
        records |= round_.passed_by
    if records:
        sentence = (
            f"messages carried arrays beside the model ({_listed(list(records))}), which are neither recorded nor "
            "attacked: they may give away more than the updates do"
        )
        yield note("arrays-passed-by", "", sentence, {"records": len(records), "tensors": sum(records.values())})


def parts_unsent(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Adapters, or a head: what does not travel has to come from the model that somebody hands over."""
    if several := [round_ for round_ in rounds if round_.unsent]:
        count = max(round_.unsent for round_ in several)
        sentence = (
            f"in {len(several)} of {len(rounds)} rounds {count} parameters of the model were not sent; attacks take "
            "them from the model that the recorder or the audit is given, which must have the weights that clients have"
        )
        yield note("parts-unsent", "", sentence, {"rounds": len(several), "parameters": count})


def clients_silent(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Who was asked and sent nothing that could be recorded; those who refuse have a finding of their own."""
    missing = [
        (round_.index, name)
        for round_ in rounds
        for name in round_.sampled
        if name not in round_.replied and not REFUSED.search(round_.problems.get(name, ""))
    ]
    if missing:
        asked, places = sum(len(round_.sampled) for round_ in rounds), list(dict.fromkeys(str(i) for i, _ in missing))
        sentence = (
            f"{len(missing)} of {asked} answers that the server asked for did not come (rounds {_listed(places)}): the "
            "updates of these clients are not in this recording"
        )
        yield note("clients-silent", "", sentence, {"answers": len(missing), "rounds": len(places)})


def rounds_left_out(rounds: Sequence[RoundFacts]) -> Iterator[Finding]:
    """Rounds whose facts are known and whose updates are not there."""
    reasons: dict[str, int] = {}
    for round_ in rounds:
        if round_.left_out is not None:
            reasons[round_.left_out] = reasons.get(round_.left_out, 0) + 1
    if reasons:
        told = "; ".join(
            f"{count} because {reason[:MOST_LETTERS]}" for reason, count in list(reasons.items())[:MOST_NAMED]
        )
        left = sum(reasons.values())
        sentence = f"of {len(rounds)} rounds, the updates of {left} are not in this capture ({told})"
        yield note("rounds-left-out", "", sentence, {"rounds": left})


def troubled(troubles: Sequence[str]) -> Iterator[Finding]:
    """What the recorder could not do, while the run went on."""
    if troubles:
        more = f" and {len(troubles) - 1} more" if len(troubles) > 1 else ""
        first = troubles[0][:MOST_LETTERS_OF_A_TROUBLE]
        sentence = f"this capture may be incomplete, because the recorder failed: {first}{more}"
        yield note("recorder-failed", "", sentence, {"troubles": len(troubles)})


def _listed(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
    return ", ".join(name[:MOST_LETTERS_OF_A_NAME] for name in different[:MOST_NAMED]) + more


RULES_ABOUT_RECORDING: tuple[Callable[[Sequence[RoundFacts]], Iterator[Finding]], ...] = (
    clients_refused,
    differences_sent,
    arrays_passed_by,
    parts_unsent,
    clients_silent,
    rounds_left_out,
)

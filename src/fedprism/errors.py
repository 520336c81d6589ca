"""Every error a user can cause. Each message is one sentence: what was expected, what was found, what to do."""


class FedprismError(Exception):
    """Base of all errors that are the input's fault; the command line turns it into one sentence and exit code 2."""


class NotApplicable(FedprismError):
    """The method cannot work on this model, update or protocol."""


class MissingKnowledge(FedprismError):
    """The threat model does not grant a piece of knowledge that the attack needs."""

    def __init__(self, attack: str, field: str, threat_hint: str = "") -> None:
        self.field = field
        super().__init__(
            f"{attack} needs to know '{field}', which this observation does not grant; "
            f"use a threat model that grants it{threat_hint} or an attack that does without it."
        )


class SolverFailure(FedprismError):
    """A solver was given numbers it cannot work with (not finite, empty, contradictory)."""


class BadCapture(FedprismError):
    """A capture on disk is malformed, hostile or incomplete."""


class BadInput(FedprismError):
    """Another argument, file or data set is not what was expected."""


class BadPlan(FedprismError):
    """An audit plan is malformed."""

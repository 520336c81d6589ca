"""Small groups of settings of gradient matching; those about batch norm stand in `batchnorm`."""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.errors import BadInput
from fedprism.naming import EvaluableRepr


@dataclass(frozen=True, kw_only=True, repr=False)
class Starts(EvaluableRepr):
    """How many random starts there are; the answer with the smallest objective is returned.

    race: the fraction of the iterations that each start gets; the best start gets the rest. 0: every start gets all.
    """

    restarts: int = 1
    race: float = 0.0

    def __post_init__(self) -> None:
        if self.restarts < 1 or not 0 <= self.race * self.restarts < 1:
            raise BadInput(
                f"expected at least one restart and race times restarts in [0, 1), found {self.restarts} restarts and "
                f"a race of {self.race}; leave iterations for the winner."
            )

    def heat(self, iterations: int) -> int:
        """How many iterations each start of a race gets; 0 where there is no race."""
        return int(self.race * iterations)

    def total(self, iterations: int) -> int:
        """The iterations of all runs together."""
        return iterations if self.heat(iterations) else iterations * self.restarts


@dataclass(frozen=True, kw_only=True, repr=False)
class KnownDefense(EvaluableRepr):
    """What to do with a defense that is known.

    adaptive: put every part of it that can be repeated into the forward model. Pruning is left out at first and
    followed from the answer on, for as many iterations again at `follow` times the learning rate: what was not sent
    counts nothing until it is too large, so that from noise the objective with pruning in it may hardly descend
    (trained networks with batch norm), and at the full rate the answer may be lost at once.
    """

    adaptive: bool = True
    follow: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.follow <= 1:
            raise BadInput(f"expected follow above 0 and at most 1, found {self.follow}; 0.3 is usual.")

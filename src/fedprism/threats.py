"""Who attacks, what they see and what they know. Knowledge reaches an attack only through one of these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from fedprism.errors import BadInput
from fedprism.naming import nearest
from fedprism.types import KNOWLEDGE_FIELDS

GRANTABLE = KNOWLEDGE_FIELDS | {"model", "trapdoor", "mapping"}
"""What can be granted. "mapping" is the weaker form of "mixing": which samples were mixed, not with what weights."""


@dataclass(frozen=True)
class ThreatModel:
    """`sees` one client's update or only the aggregate; `tampers`: chooses the parameters that clients receive.

    `participates`: is the scenario's first client, who sees only how the global model moves; its own data is what it
    knows, not what it attacks.
    """

    name: str
    grants: frozenset[str]
    tampers: bool = False
    sees: Literal["client", "aggregate"] = "client"
    participates: bool = False
    summary: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for granted in self.grants:
            _known(granted)

    def granting(self, *fields: str) -> ThreatModel:
        """The same attacker who also knows these, for example `granting("labels")`."""
        return self._renamed(self.grants | set(map(_known, fields)), *(f"+{field}" for field in fields))

    def withholding(self, *fields: str) -> ThreatModel:
        """The same attacker who does not know these."""
        return self._renamed(self.grants - set(map(_known, fields)), *(f"-{field}" for field in fields))

    def _renamed(self, grants: frozenset[str], *changes: str) -> ThreatModel:
        return dataclasses.replace(self, name=" ".join([self.name, *changes]), grants=grants)


def _known(field: str) -> str:
    if field not in GRANTABLE:
        raise BadInput(f"no knowledge is called '{field}'; {nearest(field, GRANTABLE)}")
    return field


_PUBLIC = frozenset({"model", "input_shape", "loss"})
_LOCAL = frozenset({"local_lr", "local_epochs", "local_batch_size", "local_momentum", "local_optimizer"})
_SERVER = _PUBLIC | _LOCAL | {"bounds", "normalization", "batch_size"}

eavesdropper = ThreatModel(
    "eavesdropper", _PUBLIC, summary="Reads one client's traffic and knows the model and its loss."
)
honest_but_curious = ThreatModel(
    "honest_but_curious",
    _SERVER,
    summary="The server: it set the training up, so it knows its settings too. It follows the protocol.",
)
curious_client = ThreatModel(
    "curious_client",
    _PUBLIC | _LOCAL | {"public_data", "bounds", "normalization"},
    sees="aggregate",
    participates=True,
    summary="A participant: sees the global model move and holds data of its own (public_data).",
)
secure_aggregation = ThreatModel(
    "secure_aggregation",
    _SERVER | {"examples", "windows", "counts", "count_release", "cohort_sizes"},
    sees="aggregate",
    summary="The server under secure aggregation: sums only, and how often each device took part in windows of rounds.",
)
malicious_server = ThreatModel(
    "malicious_server",
    _SERVER | {"trapdoor"},
    tampers=True,
    summary="The server chooses the parameters it sends and keeps a trapdoor to read the answer.",
)

THREATS: dict[str, ThreatModel] = {
    threat.name: threat
    for threat in (eavesdropper, honest_but_curious, curious_client, secure_aggregation, malicious_server)
}

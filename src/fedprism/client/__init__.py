"""The forward model of a client, which the simulator and the attacks share: what it sends for the data it holds."""

from fedprism.client.observed import direction
from fedprism.client.update import FedAvg, FedSGD, LocalUpdate, Protocol, local_update

__all__ = [
    "FedAvg",
    "FedSGD",
    "LocalUpdate",
    "Protocol",
    "direction",
    "local_update",
]

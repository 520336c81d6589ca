"""The forward model of a client, which the simulator and the attacks share: what it sends for the data it holds."""

from fedprism.client.observed import batch_gradient_factor, direction, gradient_factor
from fedprism.client.update import FedAvg, FedSGD, LocalUpdate, Protocol, local_update

__all__ = [
    "FedAvg",
    "FedSGD",
    "LocalUpdate",
    "Protocol",
    "batch_gradient_factor",
    "direction",
    "gradient_factor",
    "local_update",
]

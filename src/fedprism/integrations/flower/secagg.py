"""One round of Flower's SecAgg+ as the server sees it; masks come off with Flower's own functions and key shares."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Message
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

Arrays: TypeAlias = list[np.ndarray[Any, Any]]

__all__ = ["SecureRound", "Stage", "masks_repeat", "stage_of"]


def stage_of(message: Message) -> str | None:
    """The stage of SecAgg+ that a message to a client starts; None where it is not part of the protocol."""
    record = message.content.config_records.get(RECORD_KEY_CONFIGS)
    return str(record[Key.STAGE]) if record is not None and Key.STAGE in record else None


def masks_repeat() -> bool:
    """Whether two different seeds give the same mask: then there are fewer masks than the protocol counts on."""
    seed = bytes(range(32))
    masks = [pseudo_rand_gen(other, 2**32, [(8,)])[0] for other in (seed, seed[4:] + seed[:4])]
    return bool(np.array_equal(*masks))


class SecureRound:
    """Collects what the server sends and receives; `mean` is there once the last stage is over."""

    def __init__(self) -> None:
        self.stage = ""
        self.sampled: tuple[int, ...] = ()
        self.masked: dict[int, Message] = {}
        """Each client's answer with its masked vector, and with what stands beside it in plain text."""
        self._settings: dict[str, Any] = {}
        self._keys: dict[int, bytes] = {}
        self._dead: dict[int, set[int]] = {}
        """Which neighbours each client was told are gone."""
        self._shares: dict[int, list[bytes]] = {}

    def outgoing(self, messages: Sequence[Message]) -> None:
        self.stage = stage_of(messages[0]) or ""
        for message in messages:
            record, node = message.content.config_records[RECORD_KEY_CONFIGS], message.metadata.dst_node_id
            if self.stage == Stage.SETUP:
                self._settings = dict(record)
                self.sampled = (*self.sampled, node)
            elif self.stage == Stage.UNMASK:
                self._dead[node] = set(record[Key.DEAD_NODE_ID_LIST])

    def incoming(self, replies: Sequence[Message]) -> None:
        for reply in replies:
            if reply.has_error():
                continue
            record, node = reply.content.config_records[RECORD_KEY_CONFIGS], reply.metadata.src_node_id
            if self.stage == Stage.SETUP:
                self._keys[node] = record[Key.PUBLIC_KEY_1]
            elif self.stage == Stage.COLLECT_MASKED_VECTORS:
                self.masked[node] = reply
            elif self.stage == Stage.UNMASK:
                for owner, secret in zip(record[Key.NODE_ID_LIST], record[Key.SHARE_LIST], strict=True):
                    self._shares.setdefault(owner, []).append(secret)

    @property
    def over(self) -> bool:
        return self.stage == Stage.UNMASK

    def mean(self) -> Arrays | None:
        """The weighted mean of the clients' models; None where too many are gone for the masks to come off."""
        enough = all(len(self._shares.get(node, ())) >= self._settings[Key.THRESHOLD] for node in self.sampled)
        if not enough or not self.masked:
            return None
        total = functools.reduce(lambda summed, vector: _added(summed, vector, 1), map(_vector, self.masked.values()))
        shapes = [array.shape for array in total]
        modulus = self._settings[Key.MOD_RANGE]
        for node in self.sampled:
            secret = combine_shares(self._shares[node])
            if node in self.masked:  # the shares are of the seed of its own mask
                total = _added(total, pseudo_rand_gen(secret, modulus, shapes), -1)
                continue
            # It dropped out: the shares are of its key, for the masks that its neighbours share with it.
            for neighbour in (other for other, gone in self._dead.items() if node in gone):
                key = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(self._keys[neighbour]))
                total = _added(total, pseudo_rand_gen(key, modulus, shapes), 1 if node > neighbour else -1)
        weight, *quantized = [array % modulus for array in total]
        if not weight[0]:
            return None
        clipping, levels = self._settings[Key.CLIPPING_RANGE], self._settings[Key.TARGET_RANGE]
        summed = dequantize(quantized, clipping, levels)
        offset = -(len(self.masked) - 1) * clipping
        return [np.asarray((array + offset) * (levels / float(weight[0]))) for array in summed]


def _vector(reply: Message) -> Arrays:
    """A client's masked weight and, times that, its masked model."""
    arrays = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
    return [np.asarray(bytes_to_ndarray(array), dtype=np.int64) for array in arrays]


def _added(total: Arrays, other: Arrays, sign: int) -> Arrays:
    return [np.asarray(array + sign * addend) for array, addend in zip(total, other, strict=True)]

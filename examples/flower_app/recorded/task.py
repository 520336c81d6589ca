"""What clients train, and on what: two embedded photographs each."""

import torch

import fedprism as fp

SHAPE = (3, 16, 16)


def photographs(client: int) -> fp.Batch:
    return fp.data.load("photos", size=16).draw(2, seed=client, unique_labels=True)


def network() -> torch.nn.Module:
    classes = fp.data.load("photos", size=16).classes
    return fp.models.build("fc2", input_shape=SHAPE, hidden=64, classes=classes, seed=0)

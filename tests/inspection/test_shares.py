"""Which share of each tensor was changed."""

from __future__ import annotations

import pytest
import torch

import fedprism as fp
from fedprism.inspection import changed_shares


def test_entries_that_differ_are_counted() -> None:
    before = {"a": torch.zeros(4), "b": torch.ones(2, 2), "gone": torch.ones(1), "none": torch.zeros(0)}
    after = {
        "a": torch.tensor([0.0, 1.0, 0.0, 0.0]),
        "b": torch.ones(2, 2),
        "new": torch.ones(1),
        "none": before["none"],
    }
    assert changed_shares(after, before) == {"a": 0.25, "b": 0.0, "none": 0.0}


def test_models_of_two_architectures_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match=r"shape \(3,\), in the reference \(2,\)"):
        changed_shares({"a": torch.zeros(3)}, {"a": torch.zeros(2)})

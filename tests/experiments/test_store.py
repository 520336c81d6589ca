"""The store of outcomes: values without a record, samples that are gone or damaged, and what `clear` leaves alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedprism.errors import BadInput
from fedprism.experiments import Outcome, ResultStore
from fedprism.experiments.outcome import identity

DESCRIPTION = {"trial": "a training", "seed": 3}
KEY = identity(DESCRIPTION)


def outcome(tensors: bytes | None = None) -> Outcome:
    values = {"accuracy": 0.5, "distances": [1.0, math.inf, -math.inf], "words": ["information", "done"]}
    return Outcome(
        key=KEY, description=DESCRIPTION, state="done", values=values, tensors=tensors, seconds=2.0, attack_seconds=1.5
    )


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    store = ResultStore(tmp_path / "results")
    store.prepare()
    return store


def test_values_come_back_as_they_were_and_times_from_the_clock(store: ResultStore) -> None:
    store.put(outcome())
    stored = store.get(KEY)
    assert dict(stored.values) == dict(outcome().values)
    assert (stored.seconds, stored.attack_seconds) == (2.0, 1.5)
    assert "1.5" not in store.record_path(KEY).read_text(), "times differ from run to run"


def test_changed_values_are_no_outcome(store: ResultStore) -> None:
    store.put(outcome())
    path = store.record_path(KEY)
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert not store.finished(KEY)
    with pytest.raises(BadInput, match="is damaged"):
        store.get(KEY)


def test_an_outcome_with_neither_record_nor_values_is_none(store: ResultStore) -> None:
    store.put(Outcome(key=KEY, description=DESCRIPTION, state="done"))
    assert not store.finished(KEY)


def test_damaged_samples_are_made_again_and_deleted_ones_if_they_are_needed(store: ResultStore) -> None:
    store.put(outcome(save({"inputs": torch.arange(4.0)})))
    needing = ResultStore(store.root, samples_needed=True)
    assert store.finished(KEY)
    assert needing.finished(KEY)
    (path,) = (store.root / "samples").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert not store.finished(KEY)
    path.unlink()
    assert store.finished(KEY), "who deletes the samples of an audit keeps its results"
    assert not needing.finished(KEY)


def test_clear_forgets_outcomes_and_leaves_files_of_others(store: ResultStore) -> None:
    store.put(outcome(save({"inputs": torch.arange(4.0)})))
    (store.root / "records" / f".{KEY}.json.half").write_text("{")
    (store.root / "records" / "notes.txt").write_text("mine")
    store.clear()
    assert [path.name for path in store.root.rglob("*") if path.is_file()] == ["notes.txt"]
    (store.root / "records" / "notes.txt").unlink()
    store.clear()
    assert not store.root.exists()

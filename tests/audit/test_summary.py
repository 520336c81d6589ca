"""What a configuration comes to over its seeds: how many samples were recovered, as every page and table says it."""

from __future__ import annotations

from fedprism.audit.by_defense import by_defense
from fedprism.audit.summary import Summary
from fedprism.evaluation.verdict import leak_of


def recovering(*values: float | None, batch_size: int = 4, defense: str = "none") -> Summary:
    """An attack with these decibels; None where it returned nothing."""
    row = Summary(
        cell={
            **{"kind": "attack", "attack": "dlg", "settings": "", "threat": "eavesdropper", "defense": defense},
            **{"defense_settings": "", "clients": 1, "batch_size": batch_size, "protocol": "FedSGD()", "loss": "l1"},
        },
        outcomes={"done": 1},
        samples=len(values),
        answered=sum(value is not None for value in values),
    )
    present = [value for value in values if value is not None]
    row.by_sample = [{} if value is None else {"psnr": value} for value in values]
    row.means, row.closest = {"psnr": [sum(present) / len(present)]}, {"psnr": max(present)}
    row.baselines = {"psnr": {"mean": [13.0]}}
    return row


def test_samples_are_counted_one_by_one() -> None:
    assert recovering(40.0, 31.0, 29.0, None).recovered == 2
    assert recovering(20.0, 12.0).recovered == 0


def test_a_sample_was_recovered_exactly_if_the_configuration_leaks() -> None:
    for values in ((40.0, 10.0), (29.9, 10.0), (30.0, None), (12.0, None)):
        row = recovering(*values)
        assert (row.recovered > 0) == leak_of(row).readable


def test_a_defense_is_told_by_its_largest_share_and_then_its_largest_count() -> None:
    one, eight = recovering(40.0, batch_size=1), recovering(*[40.0] * 8, batch_size=8)
    assert [line.recovered for line in by_defense([one, eight])] == ["8 of 8"]
    half = recovering(40.0, 10.0, batch_size=2)
    assert [line.recovered for line in by_defense([half, one])] == ["1 of 1"]

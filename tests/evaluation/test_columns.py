"""Tables: rows become numbers and back, and every column is judged by itself."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import fedprism as fp
from fedprism.audit import parse_plan, prepare, run_audit
from fedprism.data.tabular import MOST_CATEGORIES, Column, encode, patients, places, read_csv
from fedprism.errors import BadInput
from fedprism.evaluation.columns import score_columns
from fedprism.metrics.columns import same_category, within_tolerance
from fedprism.types import Reconstruction

HEADER = ["age", "city", "zip", "ill"]
RECORDS = [["20", "Rome", "1", "no"], ["40", "Oslo", "2", "yes"], ["30", "Rome", "2", "no"]]


def test_numbers_are_scaled_and_words_become_blocks() -> None:
    table = encode("t", HEADER, RECORDS, "ill", categorical=["zip"])
    assert table.columns == (Column("age", (), 20.0, 40.0), Column("city", ("Oslo", "Rome")), Column("zip", ("1", "2")))
    assert table.rows.tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0.5, 0, 1, 0, 1]]
    assert table.labels.tolist() == [0, 1, 0]
    assert table.class_names == ("no", "yes")
    assert table.decoded(table.rows[2]) == {"age": 30.0, "city": "Rome", "zip": "2"}
    assert list(places(table.columns).values()) == [slice(0, 1), slice(1, 3), slice(3, 5)]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([HEADER, *RECORDS])
    read, direct = read_csv(tmp_path / "t.csv", "ill", ["zip"]), encode("t", HEADER, RECORDS, "ill", ["zip"])
    assert torch.equal(read.rows, direct.rows)
    assert read.columns == direct.columns
    assert len(read_csv(tmp_path / "t.csv", "ill", limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age,ill\n1,2,3\n", "line 2 of .* does not have 2 values"),
        ("age,sick\n1,2\n", "no column 'ill'"),
        ("ill\n1\n", "it needs two columns"),
        ("age,age,ill\n1,2,3\n", "different names"),
        ("age,ill\n", "one row"),
        ("name,ill\n" + "".join(f"n{k},1\n" for k in range(MOST_CATEGORIES + 1)), "at most 1000 different words"),
        ("age,ill\n1,\x00\n\xff", "CSV file in UTF-8|expected"),
    ],
)
def test_a_table_that_is_none_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    with pytest.raises(BadInput, match=words):
        read_csv(tmp_path / "t.csv", "ill")


def test_a_number_is_right_within_the_tolerance_and_a_category_exactly() -> None:
    source = torch.tensor([0.3, 0.3, 0.3])
    assert within_tolerance(torch.tensor([0.35, 0.36, float("nan")]), source, 0.05).tolist() == [True, False, False]
    blocks = torch.eye(3)
    guess = torch.tensor([[0.4, 0.3, 0.3], [0.5, 0.4, 0.1], [0.0, 0.0, 0.0]])
    assert same_category(guess, blocks).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="one shape"):
        same_category(guess, blocks[:2])


def test_columns_are_scored_by_themselves() -> None:
    table = patients(20)
    batch = table.batch([0, 1])
    model = fp.models.build("fc2", input_shape=list(batch.inputs.shape[1:]), hidden=16, classes=2, seed=0)
    _, truth = fp.simulate(fp.Scenario(model=model, clients=[batch]), fp.threats.eavesdropper, seed=0)
    spoilt = batch.inputs.clone()
    spoilt[0, 0] += 0.2  # age
    spoilt[1, places(table.columns)[table.columns[2]]] = torch.tensor([0.9, 0, 0, 0, 0])  # region
    right = table.batch([1]).inputs[0, places(table.columns)[table.columns[2]]].argmax() == 0
    found = score_columns(fp.match(Reconstruction(inputs=spoilt), truth), table.columns)
    assert found.by_column["age"] == 0.5
    assert found.by_column["region"] == (1.0 if right else 0.5)
    assert found.by_column["weight"] == 1.0
    assert found.by_row[0] == pytest.approx(0.9)
    one = score_columns(fp.match(Reconstruction(inputs=spoilt[:1]), truth), table.columns)
    assert one.by_row == (pytest.approx(0.9), 0.0)  # no answer is no match
    with pytest.raises(BadInput, match="features"):
        score_columns(fp.match(Reconstruction(inputs=spoilt), truth), table.columns[:2])


def test_made_up_patients_are_the_same_every_time() -> None:
    assert torch.equal(patients(50).rows, patients(50).rows)
    table = patients()
    assert sum(1 for column in table.columns if column.categories) == 4
    assert table.rows.min() == 0
    assert table.rows.max() == 1


def test_an_audit_of_a_table_tells_which_columns_leak(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "fc2"\nkwargs = { hidden = 32 }\n[data]\nname = "patients"\n'
        "[grid]\nbatch_sizes = [1]\nseeds = [0]\n"
        'threats = ["honest_but_curious"]\nattacks = ["dense-inversion"]\n'
        'defenses = ["none", {name = "gaussian-noise", std = 1.0}]\n'
        '[scores]\nmetrics = ["mse", "ssim"]\nceiling = false\n'
    )
    bare, noisy = run_audit(prepare(parse_plan(text)), tmp_path / "out")
    assert bare.record is not None
    assert bare.record.scores is not None
    assert noisy.record is not None
    assert noisy.record.scores is not None
    assert set(bare.record.scores["by_column"].values()) == {1.0}
    assert bare.record.scores["means"]["columns"] == 1.0
    assert noisy.record.scores["means"]["columns"] < 0.8
    assert max(value["columns"] or 0 for value in bare.baselines.values()) < 0.8
    assert "ssim" in bare.record.scores["unavailable"]
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "Columns recovered" in summary
    assert "cholesterol" in summary

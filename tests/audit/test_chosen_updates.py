"""Long recordings: which updates are attacked, by which rule, and that the results and the report say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedprism as fp
from fedprism import report
from fedprism.audit import lay_out, prepare, run_audit
from fedprism.audit.chosen_updates import chosen_updates
from fedprism.audit.grid import CaptureCell
from fedprism.runtime.executors import Serial
from report_pages import Page
from small_audits import written

DIGITS = fp.data.load("digits")
ROUNDS, CLIENTS = 10, 3
PLAN = '[captures]\nfolders = ["run"]\nmost_updates = 5\n[grid]\nattacks = [ATTACKS]\nseeds = [0]\n'


def model() -> torch.nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)


def recorded(folder: Path, *, sizes: dict[int, int], long: tuple[int, int] = (6, 1)) -> fp.Observation:
    """Ten rounds of three clients with two samples each, fewer in the rounds of `sizes`; one update is a large one."""
    network = model()
    recorder = fp.record(folder, model=network, loss="cross_entropy", knowledge=fp.Knowledge(input_shape=(1, 8, 8)))
    for index in range(1, ROUNDS + 1):
        received = {}
        for client in range(CLIENTS):
            batch = DIGITS.batch(range(client, client + sizes.get(index, 2)))
            own = model()
            torch.nn.functional.cross_entropy(own(batch.inputs), batch.labels).backward()
            rate = 1.0 if (index, client) == long else 0.1
            after = {name: tensor - rate * tensor.grad for name, tensor in own.named_parameters()}
            received[f"client-{client}"] = ({n: t.detach() for n, t in after.items()}, len(batch))
        recorder.round(sent=network, received=received)
    recorder.close()
    return fp.captures.load(folder)


def test_each_rule_has_its_turn(tmp_path: Path) -> None:
    observation = recorded(tmp_path / "run", sizes={4: 1})
    chosen = chosen_updates(observation, 5)
    assert [each.place for each in chosen] == sorted(each.place for each in chosen)
    rules = {
        why: [(each.round, each.client) for each in chosen if each.why == why] for each in chosen if (why := each.why)
    }
    assert {round for round, _ in rules["the first round"]} == {1}
    assert len(rules["the first round"]) == 2, "the fifth is again the first rule's turn"
    assert {round for round, _ in rules["the last round"]} == {ROUNDS}
    assert {round for round, _ in rules["the fewest clients and samples"]} == {4}
    assert rules["the longest update"] == [(6, "client-1")]


def test_what_is_equal_for_all_decides_nothing(tmp_path: Path) -> None:
    observation = recorded(tmp_path / "run", sizes={})
    assert "the fewest clients and samples" not in {each.why for each in chosen_updates(observation, 12)}
    assert len(chosen_updates(observation, 12)) == 12
    every = chosen_updates(observation, 30)
    assert [each.place for each in every] == list(range(30))


def test_some_updates_are_loaded_with_what_is_known_about_them(tmp_path: Path) -> None:
    recorded(tmp_path / "run", sizes={4: 1})
    (tmp_path / "run" / "update-0.safetensors").unlink()
    part = fp.captures.load(tmp_path / "run", updates=[3, 9])
    assert [seen.index for seen in part.rounds] == [2, 4]
    assert part.knowledge.batch_size == (2, 1)
    assert fp.captures.load(tmp_path / "run", updates=[9]).knowledge.batch_size == 1
    with pytest.raises(fp.FedprismError, match="update-0"):
        fp.captures.load(tmp_path / "run")


def test_results_and_report_say_which_and_why(tmp_path: Path) -> None:
    recorded(tmp_path / "run", sizes={4: 1})
    told = '\nknowledge = { local_lr = 0.1, local_epochs = 1, local_batch_size = 2, local_optimizer = "sgd" }\n[grid]'
    plan = PLAN.replace("ATTACKS", '"dense-inversion"').replace("\n[grid]", told)
    audit = run_audit(prepare(written(tmp_path, plan)), tmp_path / "out", executor=Serial())
    (outcome,) = list(audit)
    assert outcome.record is not None
    attacked = {(each["round"], each["client"]) for each in outcome.record.updates}
    assert len(attacked) == 5
    assert {1, 4, 6, ROUNDS} == {round for round, _ in attacked}
    (left,) = [each for each in audit.skipped if "updates of capture" in each["what"]]
    assert left["what"] == "25 of 30 updates of capture 1: run"
    assert "5 updates of 30 are attacked one by one (the first round: round 1 of client-" in left["why"]
    assert "the longest update: round 6 of client-1" in left["why"]
    page = Page(report.write(tmp_path / "out").read_text()).text
    assert left["why"] in page
    assert "1: run, 5 chosen updates" in page


def test_attacks_on_sums_need_all_rounds(tmp_path: Path) -> None:
    network, cohorts = model(), [("a", "b"), ("b", "c"), ("a", "c")] * 4
    recorder = fp.record(tmp_path / "run", model=network, knowledge=fp.Knowledge(input_shape=(1, 8, 8)))
    for number, cohort in enumerate(cohorts):
        after = {name: tensor.detach() + number for name, tensor in network.named_parameters()}
        recorder.round(sent=network, received={cohort: (after, (1, 1))})
    recorder.close()
    attacks = '"disaggregation", "inverting-gradients"'
    grid = lay_out(prepare(written(tmp_path, PLAN.replace("ATTACKS", attacks))))
    updates = {cell.attack.label: cell.updates for cell in grid.cells if isinstance(cell, CaptureCell)}
    assert updates["disaggregation"] is None
    assert len(updates["inverting-gradients"] or ()) == 5


def test_of_samples_that_nobody_assigned_to_updates_all_updates_are_attacked(tmp_path: Path) -> None:
    recorded(tmp_path / "run", sizes={})
    whole = DIGITS.batch([0])
    fp.save_truth(fp.Truth(inputs=whole.inputs, labels=whole.labels, owners=("client-0",)), tmp_path / "truth")
    plan = PLAN.replace("ATTACKS", '"dense-inversion"').replace("most_updates", 'truths = ["truth"]\nmost_updates')
    assert {
        cell.updates for cell in lay_out(prepare(written(tmp_path, plan))).cells if isinstance(cell, CaptureCell)
    } == {None}

"""Audits of captures: what is known of them, and how much of them an answer accounts for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism import cli, report
from fedprism.audit import lay_out, prepare, run_audit
from fedprism.audit.assumed import shapes
from fedprism.audit.trials import trial_of
from fedprism.errors import BadInput, BadPlan
from fedprism.evaluation.residuals import residuals
from fedprism.experiments import run_trial
from fedprism.runtime.executors import Serial
from small_audits import sentence, written


def network() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)


def three_clients() -> fp.Observation:
    """One update each of clients with one digit, with two of different classes, and with two of one class."""
    digits = fp.data.load("digits")
    clients = [digits.batch([0]), digits.batch([1, 2]), digits.batch([0, 10])]
    scenario = fp.Scenario(model=network(), clients=clients)
    return fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)[0]


def forget(observation: fp.Observation, *fields: str) -> fp.Observation:
    known = dataclasses.replace(observation.knowledge, **dict.fromkeys(fields))
    return dataclasses.replace(observation, knowledge=known)


def test_captures_are_audited_without_and_with_their_truth(tmp_path: Path) -> None:
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=[fp.data.load("digits").batch([0, 1])])
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    fp.captures.save(observation, tmp_path / "capture")
    fp.save_truth(truth, tmp_path / "truth")
    text = '[captures]\nfolders = ["capture"]\n[grid]\nattacks = ["dense-inversion", "bn-exact"]\nseeds = [0]\n'
    blind = run_audit(prepare(written(tmp_path, text)), tmp_path / "blind")
    (finished,) = list(blind)
    assert finished.record is not None
    assert finished.record.scores is None
    assert finished.record.residual is not None
    assert finished.record.residual < 1e-3
    assert blind.samples(finished.key) is None, "pictures of a capture are kept only on purpose"
    assert any("bn-exact" in each["what"] for each in blind.skipped)
    (tmp_path / "capture" / "added").write_text("x")
    with pytest.raises(BadInput, match=r"fingerprint\.captures changed"):
        run_audit(prepare(tmp_path / "plan.toml"), tmp_path / "blind", resume=True)
    (tmp_path / "capture" / "added").unlink()
    known = run_audit(
        prepare(written(tmp_path, text.replace("]\n[grid]", ']\ntruths = ["truth"]\n[grid]', 1))), tmp_path / "known"
    )
    (finished,) = list(known)
    assert finished.record is not None
    assert finished.record.scores is not None
    assert finished.record.scores["means"]["psnr"] > 60


# --- how much is accounted for ---------------------------------------------------------------------------------------


def test_the_residual_of_several_updates_is_that_of_the_one_explained_best() -> None:
    observation = three_clients()
    found = fp.run(fp.attacks.dense_inversion(), observation)
    parts = fp.attacks.split_updates(observation)
    alone = [fp.residual(part, fp.run(fp.attacks.dense_inversion(), part)) for part in parts]
    known = [value for value in alone if value is not None]
    assert max(known[:2]) < 1e-5
    assert fp.residual(observation, found) == min(known)
    assert [each.residual for each in residuals(observation, found)] == alone


def test_an_update_without_an_answer_is_unexplained() -> None:
    observation = three_clients()
    silent = tuple(
        dataclasses.replace(seen, update={name: torch.zeros_like(t) for name, t in seen.update.items()})
        if place == 1
        else seen
        for place, seen in enumerate(observation.rounds[:2])
    )
    known = dataclasses.replace(observation.knowledge, batch_size=(1, 2))
    observation = dataclasses.replace(observation, rounds=silent, knowledge=known)
    found = fp.run(fp.attacks.dense_inversion(), observation)
    answered, silent_one = residuals(observation, found)
    assert answered.recovered
    assert (silent_one.samples, silent_one.residual, silent_one.recovered) == (0, 1.0, False)


def test_an_update_that_an_attack_does_not_apply_to_leaves_the_others_their_answers() -> None:
    observation = three_clients()
    first, *others = observation.rounds
    without_bias = {name: tensor for name, tensor in first.update.items() if name != "1.bias"}
    observation = dataclasses.replace(observation, rounds=(dataclasses.replace(first, update=without_bias), *others))
    found = fp.run(fp.attacks.dense_inversion(), observation)
    assert "no bias" in found.status
    refused, read, _ = residuals(observation, found)
    assert (refused.samples, refused.recovered) == (0, False)
    assert read.recovered
    alone = fp.attacks.split_updates(observation)[0]
    with pytest.raises(fp.NotApplicable):
        fp.run(fp.attacks.dense_inversion(), alone)


def test_a_report_names_the_clients_that_were_recovered(tmp_path: Path) -> None:
    """One of three is hidden by noise: a mean over them would tell nothing."""
    observation = three_clients()
    rng = torch.Generator().manual_seed(0)
    noisy = {name: torch.randn(t.shape, generator=rng) for name, t in observation.rounds[0].update.items()}
    rounds = (dataclasses.replace(observation.rounds[0], update=noisy), *observation.rounds[1:])
    fp.captures.save(dataclasses.replace(observation, rounds=rounds), tmp_path / "run")
    plan = '[captures]\nfolders = ["run"]\n[grid]\nattacks = ["dense-inversion"]\nseeds = [0]\n'
    audit = run_audit(prepare(written(tmp_path, plan)), tmp_path / "out", executor=Serial())
    assert audit.conclusion["verdict"] == "leaks"
    (row,) = audit.summary
    recovered = [each["client"] for each in row["explained"]]
    assert recovered
    assert "client-0" not in recovered
    assert row["updates"] == 3
    page = report.render(audit)
    assert f"reproduce {len(recovered)} of 3 recorded updates" in page
    assert all(f"{client} in round 0" in page for client in recovered)


def test_a_plan_says_what_clients_stepped_with(tmp_path: Path) -> None:
    fp.captures.save(forget(three_clients(), "local_optimizer"), tmp_path / "run")
    text = '[captures]\nfolders = ["run"]\nknowledge = { local_optimizer = OPTIMIZER }\n[grid]\nseeds = [0]\n'
    for written_as, optimizer in (
        ('"sgd"', fp.optimizers.SGD()),
        ('{ name = "adamw", weight_decay = 0.1 }', fp.optimizers.AdamW(weight_decay=0.1)),
    ):
        setup = prepare(written(tmp_path, text.replace("OPTIMIZER", written_as)))
        assert setup.observation("run").knowledge.local_optimizer == optimizer
    with pytest.raises(BadPlan, match="one value"):
        prepare(written(tmp_path, text.replace("OPTIMIZER", '{ name = "adam", beta1 = [0.8, 0.9] }')))
    with pytest.raises(BadPlan, match="no local optimizer is called"):
        prepare(written(tmp_path, text.replace("OPTIMIZER", '"rmsprop"')))


def test_without_the_settings_of_training_nothing_can_be_run_again() -> None:
    observation = forget(three_clients(), "loss")
    assert fp.residual(observation, fp.run(fp.attacks.dense_inversion(), observation)) is None


# --- what is known ---------------------------------------------------------------------------------------------------


def test_a_plan_tells_what_a_capture_does_not(tmp_path: Path) -> None:
    fp.captures.save(forget(three_clients(), "input_shape", "loss"), tmp_path / "run")
    text = '[captures]\nfolders = ["run"]\n[grid]\nseeds = [0]\n'
    told = 'folders = ["run"]\nknowledge = { input_shape = [1, 8, 8], loss = "cross_entropy", batch_size = 7 }'
    setup = prepare(written(tmp_path, text.replace('folders = ["run"]', told)))
    observation = setup.observation("run")
    assert observation.knowledge.input_shape == (1, 8, 8)
    assert observation.knowledge.batch_size == (1, 2, 2), "what the capture tells is taken from there"
    cells = {cell.attack.label: cell for cell in lay_out(setup).cells}  # type: ignore[union-attr]
    finished = run_trial(trial_of(setup, cells["dense-inversion"]))
    assert finished.record is not None
    assert finished.record.residual is not None
    assert {"input_shape", "loss"} <= set(finished.record.knowledge_used)


def test_usual_values_are_tried_for_what_nobody_tells_and_are_named(tmp_path: Path) -> None:
    fp.captures.save(forget(three_clients(), "input_shape", "loss", "bounds"), tmp_path / "run")
    text = '[captures]\nfolders = ["run"]\n[grid]\nattacks = ["dense-inversion"]\nseeds = [0]\n'
    plan = written(tmp_path, text)
    audit = run_audit(prepare(plan), tmp_path / "out")
    residuals = {row["configuration"]["capture"]: row["residual"] for row in audit.summary}
    assert set(residuals) == {
        "1: run, assuming input_shape=(1, 8, 8) and loss=cross_entropy",
        "1: run, assuming input_shape=(1, 8, 8) and loss=mse",
    }
    right, wrong = residuals.values()
    assert right is not None
    assert wrong is None or right < wrong / 2  # no labels that it knows explain the wrong loss
    (told,) = [each for each in lay_out(prepare(plan)).skipped if "lacks" in each.what]
    assert told.what == "knowledge that capture 1: run lacks"
    assert told.why.startswith("input_shape and loss, which attacks need; bounds, with which they do better")
    assert 'knowledge = { input_shape = [3, 32, 32], loss = "cross_entropy", bounds = [0.0, 1.0] }' in told.why


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)), [(3, 32, 32)]),
        (nn.Sequential(nn.Linear(30, 10)), [(30,)]),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 10)), [(1, 28, 28)]),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)),
            [(3, 32, 32), (3, 28, 28)],
        ),
        (nn.Sequential(nn.Embedding(30, 10)), []),
    ],
)
def test_shapes_that_the_model_accepts_are_tried(model: nn.Module, expected: list[tuple[int, ...]]) -> None:
    params = dict(model.named_parameters())
    observation = fp.Observation(model=model, rounds=(fp.Round(params=params, update=params),))
    assert [dict(each)["input_shape"] for each in shapes(observation) if each] == expected


def test_nothing_is_assumed_of_a_loss_that_the_plan_names_as_code(tmp_path: Path) -> None:
    fp.captures.save(forget(three_clients(), "loss"), tmp_path / "run")
    (tmp_path / "own_loss.py").write_text(
        "import torch\n\n\ndef own(outputs, labels):\n    return torch.nn.functional.cross_entropy(outputs, labels)\n"
    )
    text = (
        '[captures]\nfolders = ["run"]\nknowledge = { loss = "own_loss:own" }\n'
        '[grid]\nattacks = ["dense-inversion"]\nseeds = [0]\n'
    )
    (row,) = run_audit(prepare(written(tmp_path, text)), tmp_path / "out").summary
    assert row["configuration"]["capture"] == "1: run"
    assert row["residual"] < 0.5


def test_an_attack_by_hand_says_what_the_capture_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp.captures.save(forget(three_clients(), "input_shape"), tmp_path / "run")
    arguments = ["attack", str(tmp_path / "run"), "--attack", "dense-inversion", "-o", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "dense-inversion needs to know 'input_shape', which the capture does not hold" in sentence(capsys)
    document = json.loads((tmp_path / "run" / "capture.json").read_text())
    document["knowledge"]["input_shape"] = [1, 8, 8]
    (tmp_path / "run" / "capture.json").write_text(json.dumps(document))
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "out" / "record.json").read_text())["residual"] is not None

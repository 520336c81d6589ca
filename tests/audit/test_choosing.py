"""What an audit tests where its plan does not say, what it leaves out, and that it says so."""

from __future__ import annotations

from pathlib import Path

import fedprism as fp
from fedprism.attacks import ATTACKS
from fedprism.audit import parse_plan, prepare
from fedprism.audit.grid import AttackCell, Grid, UtilityCell, lay_out
from fedprism.audit.trials import trial_of
from fedprism.experiments import run_trial
from fedprism.threats import THREATS

START = '[model]\nname = "fc2"\nkwargs = { hidden = 8 }\n[data]\nname = "digits"\n'
NORMALISED = """
from torch import nn
def network():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 10)
    )
"""

WIDE = """
from torch import nn
def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
    )
"""


def grid(lines: str) -> str:
    return f"{START}[grid]\n{lines}\n"


def reasons(laid: Grid) -> dict[str, str]:
    return {each.what: each.why for each in laid.skipped}


def combinations(laid: Grid) -> set[tuple[str, str]]:
    return {(cell.attack.label, cell.threat.method.name) for cell in laid.cells if isinstance(cell, AttackCell)}


def test_with_a_model_and_data_alone_attacks_and_threats_are_chosen() -> None:
    laid = lay_out(prepare(parse_plan(START)))
    cells = [cell for cell in laid.cells if isinstance(cell, AttackCell)]
    assert {cell.attack.name for cell in cells} >= {"dense-inversion", "cocktail-party"}
    assert {cell.threat.name for cell in cells} >= {"honest_but_curious", "eavesdropper"}
    why = {name: each.why for each in laid.skipped for name in each.what.split(", ")}
    assert "several clients" in why["curious_client"]
    assert "exact attacks" in why["inverting-gradients"]


def test_a_convolutional_model_gets_gradient_matching() -> None:
    plan = parse_plan(START.replace('name = "fc2"\nkwargs = { hidden = 8 }', 'name = "lenet"'))
    laid = lay_out(prepare(plan))
    names = {cell.attack.name for cell in laid.cells if isinstance(cell, AttackCell)}
    assert "inverting-gradients" in names
    assert "dense-inversion" not in names
    assert any("no trained dense layer" in each.why for each in laid.skipped)


def test_what_makes_no_sense_is_left_out_with_its_reason() -> None:
    text = (
        'attacks = ["dense-inversion", "idlg", "bn-exact", "disaggregation"]\nbatch_sizes = [1]\nseeds = [0]\n'
        'defenses = ["none", {name = "prune", ratio = 0.5}]\n'
        'threats = ["eavesdropper", "malicious_server", "secure_aggregation", '
        '{name = "honest_but_curious", granting = ["defense"]}]'
    )
    laid = lay_out(prepare(parse_plan(grid(text))))
    why = {each.what: each.why for each in laid.skipped}
    assert "aggregate of one client" in why["secure_aggregation with one client"]
    assert "no defense to know" in why["honest_but_curious +defense without a defense"]
    assert "does not use knowledge" in why["dense-inversion under honest_but_curious +defense"]
    assert "own update already" in why["disaggregation under eavesdropper"]
    assert "does not change" in why["idlg under malicious_server"]
    assert "needs to know" in why["bn-exact under eavesdropper"]
    tested = {(cell.attack.name, cell.threat.method.name) for cell in laid.cells if isinstance(cell, AttackCell)}
    assert ("dense-inversion", "eavesdropper") in tested
    assert ("idlg", "honest_but_curious +defense") in tested


def test_cells_are_named_by_what_they_are() -> None:
    first = lay_out(prepare(parse_plan(grid('attacks = ["dense-inversion"]\nthreats = ["eavesdropper"]\nseeds = [3]'))))
    more = lay_out(
        prepare(parse_plan(grid('attacks = ["cocktail-party", "dense-inversion", "dense-inversion"]\nseeds = [4, 3]')))
    )
    assert {cell.key for cell in first.cells} < {cell.key for cell in more.cells}
    assert len({cell.key for cell in more.cells}) == len(more.cells)


def test_utility_is_one_cell_a_defense() -> None:
    text = grid('defenses = [{name = "prune", ratio = [0.5, 0.9]}]') + "[utility]\nepochs = 1"
    laid = lay_out(prepare(parse_plan(text)))
    assert sum(isinstance(cell, UtilityCell) for cell in laid.cells) == 2


def test_every_attack_is_chosen_or_left_out_with_a_reason_of_its_own() -> None:
    for model in ("fc2", "lenet"):
        text = START.replace('"fc2"\nkwargs = { hidden = 8 }', f'"{model}"')
        laid = lay_out(prepare(parse_plan(text)))
        named = {name for each in laid.skipped for name in each.what.split(", ")}
        assert set(ATTACKS) <= named | {attack for attack, _ in combinations(laid)}
        assert not any(each.why == "not tested unless the plan names it" for each in laid.skipped)


def test_batch_norm_is_attacked_by_a_server_that_is_sent_its_statistics(tmp_path: Path) -> None:
    (tmp_path / "h8_normalised.py").write_text(NORMALISED)
    text = START.replace('name = "fc2"\nkwargs = { hidden = 8 }', 'factory = "h8_normalised:network"')
    (tmp_path / "plan.toml").write_text(text)
    laid = lay_out(prepare(tmp_path / "plan.toml"))
    assert ("bn-infer", "honest_but_curious +batchnorm_running") in combinations(laid)
    assert ("inverting-gradients", "honest_but_curious") in combinations(laid)
    again = reasons(laid)["inverting-gradients under honest_but_curious +batchnorm_running"]
    assert again == "it does not use knowledge of batchnorm_running"
    short = 'attacks = [{name = "bn-infer", iterations = 2}]\nbatch_sizes=[2]\nseeds=[0]\n[scores]\nceiling = false\n'
    (tmp_path / "plan.toml").write_text(f"{text}[grid]\n{short}")
    setup = prepare(tmp_path / "plan.toml")
    (cell,) = lay_out(setup).cells
    assert run_trial(trial_of(setup, cell)).state == "done"


def test_a_vision_transformer_gets_patch_inversion_and_no_reassurance(tmp_path: Path) -> None:
    """No attack is named, and the one that reads everything is chosen."""
    (tmp_path / "h9_patches.py").write_text(
        "from patch_models import small_vit\ndef network():\n    return small_vit(0, (1, 8, 8), patch=4, width=16)\n"
    )
    text = START.replace('name = "fc2"\nkwargs = { hidden = 8 }', 'factory = "h9_patches:network"')
    (tmp_path / "plan.toml").write_text(f"{text}[grid]\nbatch_sizes = [1]\nseeds = [0]\n")
    setup = prepare(tmp_path / "plan.toml")
    laid = lay_out(setup)
    assert {("patch-inversion", "eavesdropper"), ("patch-inversion", "honest_but_curious")} <= combinations(laid)
    cell = next(cell for cell in laid.cells if isinstance(cell, AttackCell) and cell.attack.name == "patch-inversion")
    finished = run_trial(trial_of(setup, cell))
    assert finished.record is not None
    assert finished.record.scores is not None
    assert min(finished.record.scores["values"]["psnr"]) > 60
    assert "no layer of patches" in reasons(lay_out(prepare(parse_plan(START))))["patch-inversion"]


def test_a_plan_that_names_some_says_whom_it_leaves_out() -> None:
    laid = lay_out(prepare(parse_plan(grid('attacks = ["dense-inversion"]\nthreats = ["eavesdropper"]\nseeds = [0]'))))
    left = {each.why: each.what.split(", ") for each in laid.skipped}
    assert set(left["the plan names other attackers"]) == set(THREATS) - {"eavesdropper"}
    assert set(left["the plan names other attacks"]) == set(ATTACKS) - {"dense-inversion"}


def test_recorded_sums_are_taken_apart_without_being_asked(tmp_path: Path) -> None:
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    digits = fp.data.load("digits")
    scenario = fp.Scenario(
        model=model, clients=[digits.batch([k]) for k in range(3)], rounds=8, participation=0.7, frozen=True
    )
    threat = fp.threats.secure_aggregation.granting("participation")
    fp.captures.save(fp.simulate(scenario, threat, seed=0)[0], tmp_path / "sums")
    one = fp.Scenario(model=model, clients=[digits.batch([0])])
    fp.captures.save(fp.simulate(one, fp.threats.honest_but_curious, seed=0)[0], tmp_path / "one")
    (tmp_path / "plan.toml").write_text('[captures]\nfolders = ["sums", "one"]\n[grid]\nseeds = [0]\n')
    setup = prepare(tmp_path / "plan.toml")
    laid = lay_out(setup)
    cells = {(cell.name, cell.attack.label): cell for cell in laid.cells}  # type: ignore[union-attr]
    assert ("sums", "disaggregation then dense-inversion") in cells
    assert ("one", "disaggregation") not in cells
    finished = run_trial(trial_of(setup, cells["sums", "disaggregation then dense-inversion"]))
    assert finished.record is not None
    assert "3 of 3 users" in finished.record.status
    assert any("LocalDpMod" in each.why for each in laid.skipped), "what a server cannot see is said"


def test_spans_are_tried_where_few_places_tell_an_image(tmp_path: Path) -> None:
    (tmp_path / "h10_wide.py").write_text(WIDE)
    (tmp_path / "plan.toml").write_text(
        START.replace('name = "fc2"\nkwargs = { hidden = 8 }', 'factory = "h10_wide:network"')
    )
    chosen = {attack for attack, _ in combinations(lay_out(prepare(tmp_path / "plan.toml")))}
    assert "span-inversion" in chosen
    (tmp_path / "h11_narrow.py").write_text(NORMALISED)
    (tmp_path / "plan.toml").write_text(
        START.replace('name = "fc2"\nkwargs = { hidden = 8 }', 'factory = "h11_narrow:network"')
    )
    left = lay_out(prepare(tmp_path / "plan.toml")).skipped
    why = {name: each.why for each in left for name in each.what.split(", ")}
    assert "at fewer places than they have units" in why["span-inversion"]

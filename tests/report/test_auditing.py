"""`fp.audit`: the same numbers as the audit of a plan, for objects of every kind, and a page for notebooks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import report as reports
from fedprism.audit import parse_plan, prepare, run_audit
from fedprism.evaluation.verdict import Verdict
from notebook_pages import checked, pictures

QUICK: dict[str, Any] = {
    "threats": [fp.threats.honest_but_curious],
    "batch_sizes": [2],
    "seeds": [0],
    "metrics": ["psnr"],
    "ceiling": False,
    "progress": False,
}
PLAN = """
[model]
factory = "own_code:network"
[data]
factory = "own_code:samples"
[grid]
attacks = [{name = "dense-inversion", floor = 1e-5}]
threats = ["honest_but_curious"]
batch_sizes = [2]
seeds = [0]
defenses = ["none", {name = "prune", ratio = 0.5}]
[scores]
metrics = ["psnr"]
ceiling = false
"""
CODE = """
import torch
def network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
def samples():
    rng = torch.Generator().manual_seed(7)
    return torch.rand(12, 3, 4, 4, generator=rng), torch.arange(12) % 4
"""


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(CODE, names)
    return names


class Halve(fp.defenses.Defense):
    """A defense of a user's own, which no plan can name."""

    def on_update(self, update: Mapping[str, Tensor], context: Any, rng: torch.Generator) -> dict[str, Tensor]:
        return {name: tensor / 2 for name, tensor in update.items()}


def test_it_gives_the_numbers_of_the_same_plan(own: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "plan.toml").write_text(PLAN)
    planned = run_audit(prepare(tmp_path / "plan.toml"), tmp_path / "planned")
    found = fp.audit(
        own["network"],
        fp.Batch(*own["samples"]()),
        attacks=[fp.attacks.dense_inversion(floor=1e-5)],
        defenses=[fp.defenses.Prune(0.5)],
        folder=tmp_path / "given",
        **QUICK,
    )
    assert [row["configuration"] for row in found.audit.summary] == [row["configuration"] for row in planned.summary]
    assert [row["metrics"] for row in found.audit.summary] == [row["metrics"] for row in planned.summary]
    of_weights = {"weights": "", "sentences": []}  # a factory is called twice, which tells what is random
    assert {**found.audit.conclusion, **of_weights} == {**planned.conclusion, **of_weights}
    assert found.verdict is Verdict.LEAKS
    assert found.path == tmp_path / "given" / "report.html"
    assert [outcome.state for outcome in found.outcomes] == ["done", "done"]


def test_it_takes_defenses_of_ones_own(own: dict[str, Any], tmp_path: Path) -> None:
    model = own["network"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = fp.audit(
        model,
        fp.Batch(*own["samples"]()),
        attacks=[fp.attacks.dense_inversion()],
        defenses=[Halve(), fp.chain(fp.defenses.Clip(1.0), Halve())],
        folder=tmp_path / "given",
        **QUICK,
    )
    named = [row["configuration"]["defense"] for row in found.audit.summary]
    assert named == ["none", "Halve()", "clip(norm=1.0) + Halve()"]
    assert found.verdict is Verdict.LEAKS
    assert "Halve()" in found.path.read_text()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_notebook_sees_verdict_defenses_and_only_samples_that_may_be_shown(tmp_path: Path) -> None:
    photos = fp.data.load("photos", size=16)
    model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=8, classes=photos.classes, seed=0)
    for shown in (True, False):
        found = fp.audit(
            model,
            photos,
            attacks=[fp.attacks.dense_inversion()],
            defenses=[fp.defenses.Prune(0.5)],
            folder=tmp_path / str(shown),
            show_images=shown,
            **QUICK,
        )
        page = found._repr_html_()
        checked(page)
        assert "<b>LEAKS</b>" in page
        assert "prune(ratio=0.5)" in page
        assert str(found.path) in page
        assert bool(pictures(page)) == shown
        assert ("show_images=True" in page) != shown
        assert ("data:image/png" in found.path.read_text()) == shown
        assert repr(found) == f"Report(leaks: 2 outcomes, {found.path})"


def test_the_page_escapes_what_it_is_told(own: dict[str, Any], tmp_path: Path) -> None:
    class Loud(Halve):
        def __repr__(self) -> str:
            return "<script>alert(1)</script>"

    Loud.__name__ = "<script>"
    attack = fp.attacks.dense_inversion()
    data = fp.Batch(*own["samples"]())
    found = fp.audit(own["network"](), data, attacks=[attack], defenses=[Loud()], folder=tmp_path / "a", **QUICK)
    page = found._repr_html_()
    checked(page)
    assert "&lt;script&gt;" in page


def test_attacks_are_named_as_a_plan_names_them() -> None:
    from fedprism.audit.given import attack_entry, threat_entry

    attacks = fp.attacks
    several = attacks.then(attacks.disaggregation(), attacks.dense_inversion(floor=1e-5))
    labels = {
        "idlg": attacks.idlg(),
        "inverting-gradients(iterations=3)": attacks.inverting_gradients(iterations=3),
        "disaggregation then dense-inversion(floor=1e-05)": several,
    }
    for label, attack in labels.items():
        entry = attack_entry(attack)
        assert entry.label == label
        assert entry.method is attack
    threat = fp.threats.honest_but_curious.granting("labels").withholding("bounds")
    entry = threat_entry(threat)
    assert (entry.name, entry.granting, entry.withholding) == ("honest_but_curious", ("labels",), ("bounds",))
    assert entry.method is threat


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 3}, "the model must be a torch.nn.Module .* not int"),
        ({"model": lambda: 3}, "the function must return a torch.nn.Module, not int"),
        ({"data": "photos"}, r"type str. Give fp\.Batch"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"batch_sizes": [100]}, "100 are needed"),
        ({"metrics": ["pnsr"]}, "did you mean psnr"),
        ({"loss": "cross_entropi"}, "cross_entropy"),
    ],
)
def test_what_is_wrong_is_said_before_a_folder_is_made(
    changes: dict[str, Any], words: str, own: dict[str, Any], tmp_path: Path
) -> None:
    given = {
        "model": own["network"],
        "data": fp.Batch(*own["samples"]()),
        "folder": tmp_path / "new",
        **QUICK,
        **changes,
    }
    with pytest.raises(fp.FedprismError, match=words) as caught:
        fp.audit(**given)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_an_error_of_the_model_is_a_failed_outcome(own: dict[str, Any], tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = own["network"]()

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such thing")

    with pytest.raises(fp.FedprismError, match="no such thing"):
        fp.audit(Broken(), fp.Batch(*own["samples"]()), folder=tmp_path / "new", **QUICK)


def test_the_room_is_called_as_the_function_is_written() -> None:
    from fedprism.report.auditing import audit

    assert inspect.signature(fp.audit) == inspect.signature(audit)
    assert callable(fp.audit.load_audit), "the room's own names stay"


def test_plans_and_the_given_are_told_apart(own: dict[str, Any], tmp_path: Path) -> None:
    """The report of given objects does not claim that a file names them."""
    attack = [fp.attacks.dense_inversion()]
    found = fp.audit(own["network"](), fp.Batch(*own["samples"]()), attacks=attack, folder=tmp_path / "new", **QUICK)
    assert "The given model, weights as given, simulated clients holding the given data." in reports.render(found.audit)
    plan = re.search(r"\[model\].*", reports.render(found.audit))
    assert plan is not None
    with pytest.raises(fp.errors.BadPlan, match="either name or factory"):
        parse_plan("[model]\ntraining = true\n[data]\nname = 'photos'")

"""`fedprism demo`: the audit of the plan that `fedprism init` writes, in its quick form here."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedprism import cli
from fedprism.audit import load_audit, proposing, template

QUICK = (
    ("batch_sizes = [1, 8] ", "batch_sizes = [1] "),
    ("epochs = 5 ", "epochs = 1 "),
    ("seeds = [0, 1] ", "seeds = [0] "),
    ("# timed_steps = 21", "timed_steps = 0"),
    ('lr = "search" ', "lr = 0.05 "),
)


def demo(folder: Path) -> int:
    return cli.main(["demo", "--device", "cpu", "-o", str(folder)])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> str:
    """The plan with less to do."""
    plan = template.text()
    for before, after in QUICK:
        assert before in plan
        plan = plan.replace(before, after)
    monkeypatch.setattr(proposing, "proposed", lambda *asked: plan)
    return plan


def test_the_demo_audits_the_plan_that_init_writes_and_again_gives_the_same_numbers(
    quick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, again = tmp_path / "demo", tmp_path / "again"
    assert demo(folder) == 0
    assert tomllib.loads((folder / "plan.toml").read_text()) == tomllib.loads(quick)
    bare = [
        each
        for each in load_audit(folder).summary
        if each["configuration"].get("defense") == "none" and each["metrics"]
    ]
    assert max(each["metrics"]["psnr"]["closest"] for each in bare) > 100, "a dense layer gives samples away exactly"
    assert (folder / "report.html").is_file()
    assert "report.html" in capsys.readouterr().out
    first = (folder / "results.json").read_bytes()
    assert demo(folder) == 0, "what is there is kept"
    assert demo(again) == 0
    assert (folder / "results.json").read_bytes() == first == (again / "results.json").read_bytes()


def test_a_folder_that_may_not_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "-o", str(tmp_path / "file" / "demo")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_plan_of_the_users_own_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text("# mine")
    assert cli.main(["demo", "-o", str(tmp_path)]) == 2
    assert "is a plan of your own" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
    assert (tmp_path / "plan.toml").read_text() == "# mine"

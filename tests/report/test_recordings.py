"""Reports of recorded runs: there is no truth to compare with, and still a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedprism import report
from fedprism.errors import BadInput
from fedprism.evaluation.residuals import READ_AS_SGD
from fedprism.report import protocol
from fedprism.report.comparing import Change, compare
from fedprism.solvers.closed_form.dense import DenseStatus
from planted_audits import CAPTURED, captured, figure, plant
from report_pages import Page


def test_recordings_without_truth_have_residuals_and_no_score(tmp_path: Path) -> None:
    page = Page(report.render(plant(tmp_path, [captured()], plan=CAPTURED)))
    assert (
        "The recovered samples reproduce recorded updates (attack idlg, capture 1: run-1, residual 1.5e-05" in page.text
    )
    assert "The ground truth is not known" in page.text
    assert "Residual 1.5e-05 (0 = update fully explained)" in page.text
    assert "PSNR 1" not in page.text
    assert not page.all("svg")


@pytest.mark.parametrize(
    ("entry", "said", "verdict"),
    [
        ({"residual": 0.04}, "reproduce recorded updates", "residual 0.04; 0 = update fully explained"),
        ({"residual": 0.06}, "cannot be compared", "residual 0.06; 0 = update fully explained"),
        (
            {"residual": None},
            "cannot be compared",
            "the ground truth of these captures is not known",
        ),
        (
            {"residual": None, "statuses": [f"each client by itself; {DenseStatus.EXACT}"]},
            "cannot be compared",
            "the ground truth of these captures is not known",
        ),
        (
            {
                "residual": 0.003,
                "updates": 3,
                "explained": [
                    {"client": "clinic", "round": 2, "residual": 0.004},
                    {"client": "hospital", "round": 1, "residual": 0.003},
                ],
            },
            "reproduce 2 of 3 recorded updates",
            "hospital in round 1 (residual 0.003), clinic in round 2 (residual 0.004)",
        ),
        (
            {
                "residual": None,
                "updates": 1,
                "explained": [{"client": "clinic", "round": 2, "residual": None}],
                "statuses": [f"done; {READ_AS_SGD}"],
            },
            "clinic in round 2 (confirmed by parts of the update)",
            f"This rests on an assumption: {READ_AS_SGD}.",
        ),
    ],
)
def test_an_answer_that_its_update_bears_out_is_the_verdict(
    entry: dict[str, Any], said: str, verdict: str, tmp_path: Path
) -> None:
    text = Page(report.render(plant(tmp_path, [captured(**entry), captured(residual=0.9)], plan=CAPTURED))).text
    first = text[: text.index("No recommendation")]
    assert said in first
    assert verdict in first


def test_recordings_are_compared_by_what_accounts_for_them(tmp_path: Path) -> None:
    before = plant(tmp_path / "a", [captured()], plan=CAPTURED)
    changes = []
    for number, residual in enumerate((1.5e-5, 2e-5, 0.5)):
        after = plant(tmp_path / str(number), [captured(residual=residual)], plan=CAPTURED)
        changes += [pair.change for pair in compare(before, after).pairs]
    assert changes == [Change.IDENTICAL, Change.SAME, Change.BETTER]


def test_nobody_knows_the_defense_of_a_recording(tmp_path: Path) -> None:
    scored = captured(metrics={"psnr": figure(40.0)}, samples=2, returned=2, recovered=2)
    text = Page(report.render(plant(tmp_path, [scored], plan=CAPTURED, weights="recorded weights"))).text
    assert "Whoever holds the capture recovered 2 of 2 private samples, with the attack idlg." in text
    assert "no defense" not in text.lower()
    assert "ithout a defense" not in text


def test_what_recordings_show_about_their_protocol_is_kept_and_shown(tmp_path: Path) -> None:
    from fedprism.integrations.findings import RoundFacts, save_findings

    run = tmp_path / "run-1"
    run.mkdir()
    names = ("a", "b", "c")
    save_findings(run, [RoundFacts(index=k, protocol="secagg+", sampled=names, replied=names) for k in range(3)])
    audit = plant(tmp_path / "out", [captured()], plan=CAPTURED)
    protocol.keep(audit.root, [run])
    kept = protocol.load_kept(audit.root)
    assert kept
    assert {each.capture for each in kept} == {"1: run-1"}
    text = Page(report.render(audit)).text
    assert all(each.sentence in text for each in kept)
    assert all(each.sentence not in text[: text.index("Appendix")] for each in kept), "a note is no part of the verdict"
    facts = {"sampled": names, "replied": names, "examples": dict.fromkeys(names, 3)}
    save_findings(run, [RoundFacts(index=k, protocol="secagg+", **facts) for k in range(3)])
    protocol.keep(audit.root, [run])
    text = Page(report.render(audit)).text
    said = "Secure aggregation is said to mask the number of examples of each client"
    assert said in text[: text.index("No recommendation")], "what is serious belongs to the verdict"
    assert said in text[text.index("Summary for a data-protection") :]
    (run / "findings.json").write_text("[]")
    protocol.keep(audit.root, [run])
    assert [each.check for each in protocol.load_kept(audit.root)] == ["unreadable"]
    (audit.root / "findings.json").write_text("[]")
    with pytest.raises(BadInput, match=r"findings\.json"):
        report.render(audit)


def test_pictures_that_were_not_kept_cannot_be_shown(tmp_path: Path) -> None:
    plant(tmp_path, [captured()], plan=CAPTURED)
    with pytest.raises(BadInput, match=r"Add pictures = 8 under \[scores\]"):
        report.write(tmp_path, show_images=True)
    kept = {**CAPTURED, "scores": {**CAPTURED["scores"], "pictures": 2}}
    plant(tmp_path, [captured()], plan=kept)
    assert report.write(tmp_path, show_images=True).is_file()


def test_the_assessment_counts_what_ran_and_one_run_is_one_run(tmp_path: Path) -> None:
    refused = captured(outcomes={"skipped": 2}, reasons=["it needs to know the loss"], statuses=[], residual=None)
    refused["configuration"] = {**refused["configuration"], "attack": "dlg", "settings": "Dlg()"}
    page = Page(report.render(plant(tmp_path / "two", [captured(), refused], plan=CAPTURED)))
    tested = page.text[page.text.index("Tested ", page.text.index("Summary for")) :][:300]
    assert "1 attack (idlg) in 1 configuration" in tested
    assert "dlg)" not in tested.replace("idlg)", "")
    assert "2 runs could not start" in page.text
    alone = Page(report.render(plant(tmp_path / "one", [captured(outcomes={"done": 1})], plan=CAPTURED, seeds=(0,))))
    assert "1 run with" in alone.text
    assert "1 runs" not in alone.text

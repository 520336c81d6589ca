"""The demo: a quick variant of the audit, its sentences and its page. The full one is run by `make demo`."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

import fedprism as fp
from fedprism import cli, demo, pages
from fedprism.demo import Outcome, Reading

QUICK = 3


@pytest.fixture(scope="module")
def outcomes() -> tuple[Outcome, ...]:
    return demo.audit(iterations=QUICK)


def with_scores(outcome: Outcome, psnr: float, ssim: float) -> Outcome:
    """The same outcome as if every picture had scored this."""
    count = len(outcome.names)
    values = {**outcome.scores.values, "psnr": (psnr,) * count, "ssim": (ssim,) * count, "avd": (9.0,) * count}
    return dataclasses.replace(outcome, scores=dataclasses.replace(outcome.scores, values=values))


def test_a_dense_layer_gives_a_batch_away_exactly(outcomes: tuple[Outcome, ...]) -> None:
    exact = outcomes[0]
    assert len(exact.readings) == 8
    assert set(exact.readings) == {Reading.FAITHFUL}
    assert exact.psnr > 100
    assert exact.scores.labels_match is True
    assert (exact.recovered - exact.originals).abs().max() < 1e-4


def test_heavy_pruning_stops_it_and_lighter_pruning_does_not(outcomes: tuple[Outcome, ...]) -> None:
    light, heavy = outcomes[1], outcomes[2]
    assert light.worst is not Reading.GONE
    assert heavy.worst is Reading.GONE


def test_every_case_states_the_knowledge_it_used(outcomes: tuple[Outcome, ...]) -> None:
    assert len({outcome.case.title for outcome in outcomes}) == len(outcomes)
    for outcome in outcomes:
        assert set(outcome.knowledge_used) <= outcome.case.threat.grants
        assert ("defense" in outcome.knowledge_used) == outcome.case.knows_defense


def test_cases_that_are_compared_share_attack_budget_and_target() -> None:
    cases = demo.cases()
    for target in {case.target.name: case.target for case in cases}.values():
        group = [case for case in cases if case.target == target]
        assert len({repr(case.attack) for case in group}) == 1
        assert sum(case.undefended for case in group) == 1
        assert len(group) > 1


@pytest.mark.parametrize(
    ("scores", "reading"),
    [
        ((40.0, 0.1, 0.9, 0.2), Reading.FAITHFUL),
        ((float("inf"), 1.0, 0.0, 0.2), Reading.FAITHFUL),
        ((20.0, 0.8, 0.9, 0.2), Reading.RECOGNISABLE),
        ((9.0, 0.1, 0.1, 0.2), Reading.TRACES),
        ((9.0, 0.3, 0.9, 0.2), Reading.TRACES),
        ((9.0, 0.1, 0.19, 0.2), Reading.GONE),
        ((9.0, 0.1, 0.3, 0.2), Reading.GONE),
        ((None, None, None, 0.2), Reading.GONE),
    ],
)
def test_readings_follow_the_scores(
    scores: tuple[float | None, float | None, float | None, float | None], reading: Reading
) -> None:
    assert demo._reading(*scores) is reading


def test_sentences_follow_the_numbers(outcomes: tuple[Outcome, ...]) -> None:
    bare, unaware, informed = outcomes[5:]
    measured = [
        with_scores(bare, 41.5, 0.99),
        with_scores(unaware, 7.25, 0.0),
        with_scores(informed, 31.0, 0.9),
    ]
    said = [demo.verdict(outcome, measured) for outcome in measured]
    assert said[0].startswith("The photograph came back faithfully (PSNR 41.5 dB).")
    assert "did not come back" in said[1]
    assert "stopped this attack: the PSNR went from 41.5 to 7.2 dB" in said[1]
    assert "hardly helps" in said[2]
    assert "gets +23.8 dB compared with one who does not: now it came back faithfully." in said[2]
    assert demo.headline(measured)[:2] == (
        "Without a defense, 1 of 1 photographs could be read from the update alone.",
        "Of 2 defended cases, 1 stopped the attack.",
    )
    swapped = [with_scores(measured[0], 5.0, 0.0), with_scores(measured[1], 5.0, 0.0)]
    assert demo.headline(swapped)[0].startswith("Without a defense, 0 of 1 photographs")


def test_the_command_writes_the_same_results_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    full = demo.cases
    monkeypatch.setattr(demo, "cases", lambda iterations: full(QUICK))
    threads = torch.get_num_threads()
    assert cli.main(["demo", "--device", "cpu"]) == 0
    assert cli.main(["demo", "--device", "cpu", "-o", "again"]) == 0
    assert torch.get_num_threads() == threads
    written = Path("fedprism-demo")
    assert sorted(file.name for file in written.iterdir()) == ["report.html", "results.json"]
    for file in written.iterdir():
        assert file.read_bytes() == Path("again", file.name).read_bytes(), file.name
    text = (written / "results.json").read_text()
    results = json.loads(text)
    assert str(tmp_path) not in text
    assert len(results["records"]) == len(results["verdicts"]) == len(full())
    assert len(results["records"][0]["scores"]["psnr"]) == 8
    printed = capsys.readouterr()
    assert "8 photos" in printed.out
    assert results["headline"][0] in printed.out
    assert printed.err == ""


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_fetches_nothing(outcomes: tuple[Outcome, ...]) -> None:
    text = pages.demo(outcomes, seed=0)
    page = Page(text)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 2 * sum(len(outcome.names) for outcome in outcomes)
    for attributes in images:
        assert attributes["alt"]
        picture = Image.open(io.BytesIO(base64.b64decode((attributes["src"] or "").partition("base64,")[2])))
        assert (picture.format, picture.size) == ("PNG", (32, 32))
    anchors = {attributes.get("id") for _, attributes in page.tags}
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert len(links) == len(outcomes)
    assert {link.removeprefix("#") for link in links} <= anchors
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?://|url\(|@import", text)
    for word in ("Responsible use", "prefers-color-scheme: dark", "viewport"):
        assert word in text
    for outcome in outcomes:
        assert f"{outcome.psnr:.1f} dB" in text


def test_the_page_shows_names_as_text(outcomes: tuple[Outcome, ...]) -> None:
    hostile = dataclasses.replace(outcomes[0], status="<script>alert(1)</script>", names=('"><b>',) * 8)
    text = pages.demo((hostile,), seed=0)
    assert "<script>" not in text
    assert '"><b>' not in text


def test_the_demo_takes_an_unknown_score_in_its_stride(outcomes: tuple[Outcome, ...]) -> None:
    """An attack may answer fewer samples than there are, or none of them."""
    nothing = dict.fromkeys(("mse", "psnr", "ssim", "avd"), (None,) * 8)
    floor = {"avd_floor": outcomes[0].scores.values["avd_floor"]}
    scores = fp.Scores(values={**nothing, **floor}, rows=(None,) * 8, resolved=frozenset())
    silent = dataclasses.replace(outcomes[0], scores=scores, residual=None)
    assert silent.worst is Reading.GONE
    assert "None of the 8 photographs came back" in demo.verdict(silent, [silent])
    assert "none" in pages.demo((silent,), seed=0)
    json.loads(demo.results_json((silent,), seed=0))

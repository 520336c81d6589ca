"""The report: the numbers of results.json, sentences that follow from them, and nothing private unless on purpose."""

from __future__ import annotations

import base64
import gc
import hashlib
import html
import io
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image

from fedprism import cli, report
from fedprism.audit import Audit, load_audit, parse_plan, prepare, run_audit
from fedprism.errors import BadInput, FedprismError
from fedprism.experiments import Outcome
from fedprism.report.comparing import Change, compare
from planted_audits import CAPTURED, NAMED, OWN, attack, captured, gate, plant, utility
from report_pages import Page, hostile_audit

TEMPLATES = Path(report.__file__).parent / "templates"
NAMESPACE = "http://www.w3.org/2000/svg"
PLAN = """
title = "Small"
[model]
name = "fc2"
kwargs = { hidden = 32 }
[data]
name = "photos"
options = { size = 16 }
[grid]
attacks = ["dense-inversion"]
threats = ["honest_but_curious"]
batch_sizes = [1]
defenses = ["none", { name = "dp-sgd", noise = 1.0 }]
seeds = [0, 1, 2]
[utility]
epochs = 1
seeds = [0, 1]
timed_steps = 0
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "out"
    run_audit(prepare(parse_plan(PLAN)), folder)
    return folder


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.randint(0, 256, (4, 3, 6, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_checks_are_part_of_the_verdict(tmp_path: Path) -> None:
    passed = gate(flag="--fail-above max-psnr=99", limit=99.0, single=True, passed=True, why=[])
    audit = plant(tmp_path / "gates", [attack(psnr=41.25)], gates=[passed, gate()], verdict="leaks")
    text = report.render(audit)
    start, end = text.index('id="verdict"'), text.index('id="advice"')
    told = Page(text[start - 30 : end]).text
    failed = "failed Check: mean PSNR at most 15.0 dB It is beyond."
    last = (
        "passed Check: PSNR of the best-recovered sample at most 99.0 dB Worst: 41.2 dB, dense-inversion, no defense."
    )
    assert told.index(failed) < told.index(last), "failed checks first"
    assert "leaks The server, following the protocol, recovered 2 of 2 private samples without a defense" in told
    assert "--fail-above psnr=15" in told
    bound = gate(flag="--fail-ceiling-above 20", kind="ceiling-above", metric="", limit=20.0, value=None, worst=None)
    assert "Check: ceiling at most 20" in report.render(plant(tmp_path / "bound", [attack()], gates=[bound]))
    assert "Check:" not in report.render(plant(tmp_path / "none", [attack()]))
    for broken in ([1], [{}], [gate(limit="x")], 5):
        folder = tmp_path / "broken"
        document = json.loads((plant(folder, [attack()]).root / "results.json").read_text())
        (folder / "results.json").write_text(
            json.dumps({**document, "conclusion": {**document["conclusion"], "checks": broken}})
        )
        with pytest.raises(BadInput, match="no conclusion"):
            report.render(load_audit(folder))


# --- a real audit ----------------------------------------------------------------------------------------------------


def test_every_number_is_that_of_the_results(real: Path) -> None:
    page = Page(report.render(load_audit(real)))
    summary = json.loads((real / "results.json").read_text())["summary"]
    attacks = [entry for entry in summary if entry["configuration"]["kind"] == "attack"]
    costs = {
        entry["configuration"]["defense"]: entry for entry in summary if entry["configuration"]["kind"] == "utility"
    }
    assert len(attacks) == 2
    for entry in attacks:
        defense = entry["configuration"]["defense"]
        assert f"{entry['metrics']['ssim']['mean']:.3g}" in page.text
        assert f"{costs[defense]['accuracy']:.1%}" in page.text
        assert f"{entry['recovered']} of {entry['samples']}" in page.text
        title = "no defense" if defense == "none" else defense
        assert f"{title}: {entry['recovered'] / entry['samples']:.0%} recovered" in page.all("svg")[0]["aria-label"]
    assert costs["dp-sgd(noise=1.0)"]["epsilon"] > 0


def test_a_real_audit_is_understood_in_its_first_lines(real: Path) -> None:
    text = Page(report.render(load_audit(real))).text
    first = text.index("leaks The server, following the protocol, recovered 3 of 3 private samples without a defense")
    order = [first, *(text.index(f" {part} ") for part in ("Private and recovered", "Defenses", "Recommendation"))]
    order += [text.index(f" {part} ") for part in ("Scope", "Summary for a data-protection", "Appendix")]
    assert order == sorted(order)
    assert "None of the tested defenses is acceptable." in text
    assert "1 stopped every attack that succeeds without it (dp-sgd(noise=1.0)). That is not protection" in text
    for part in ("knowledge used", "0, 1, 2", "torch 2", "blank"):
        assert part in text


def test_the_page_is_one_file_that_fetches_nothing(real: Path) -> None:
    text = report.render(load_audit(real))
    page = Page(text)
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?://|url\(|@import", text.replace(NAMESPACE, ""))
    (policy,) = (each["content"] or "" for each in page.all("meta") if each.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert len(page.scripts) == 1


def test_the_plan_that_is_shown_can_be_run_again(real: Path, tmp_path: Path) -> None:
    shown = re.search(r'<pre tabindex="0">(.*?)</pre>', report.render(load_audit(real)), re.DOTALL)
    assert shown is not None
    assert parse_plan(html.unescape(shown[1])) == parse_plan(PLAN)
    gated = Page(report.render(plant(tmp_path, [attack()], gates=[gate()]))).text
    assert "fedprism audit PLAN.toml --fail-above psnr=15" in gated


def test_pictures_are_those_that_the_audit_kept(real: Path) -> None:
    audit = load_audit(real)
    page = Page(report.render(audit))
    images = page.all("img")
    assert len(images) == 3 * 3 * 2, "three pairs of the leading configuration; then of both, each beside its original"
    assert all(image["alt"] for image in images)
    found = next(f for f in audit if f.description["defense"] == "none" and f.description.get("seed") == 0)
    samples = audit.samples(found.key)
    assert samples is not None
    shown = [Image.open(io.BytesIO(base64.b64decode((i["src"] or "").partition("base64,")[2]))) for i in images]
    assert all((picture.format, picture.size) == ("PNG", (16, 16)) for picture in shown)
    original = samples["originals"][0].permute(1, 2, 0).contiguous().numpy().tobytes()
    assert original in [picture.tobytes() for picture in shown]


def test_controls_and_tables_are_named_for_those_who_listen(real: Path) -> None:
    text = report.render(load_audit(real))
    page = Page(text)
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("select")) == text.count("<label>") == 3
    assert all(each.get("scope") in ("col", "row") for each in page.all("th"))
    anchors = {attributes.get("id") for _, attributes in page.tags}
    assert {(link["href"] or "").removeprefix("#") for link in page.all("a")} <= anchors
    for word in ("prefers-color-scheme: dark", "@media print", "viewport", ":focus-visible"):
        assert word in text


def _luminance(colour: str) -> float:
    levels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark(dark: bool) -> None:
    css = (TEMPLATES / "style.css.j2").read_text()
    colours: dict[str, str] = {}
    for block in re.finditer(r"(dark\) \{\s*)?:root \{([^}]*)\}", css):
        if dark or not block[1]:
            colours |= dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block[2]))
    for name in ("text", "soft", "link", "faithful", "recognisable", "traces", "gone", "unknown", "untested"):
        for ground in ("page", "card", "mark"):
            if (name, ground) != (name, "mark") or name == "text":
                pair = sorted((_luminance(colours[name]), _luminance(colours[ground])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (name, ground)


def test_an_assessment_says_what_was_tested_assumed_and_left(tmp_path: Path) -> None:
    skipped = [{"what": "mkor", "why": "nobody tampers"}]
    broken = attack(attack="idlg", outcomes={"failed": 2}, reasons=["it burnt down"], metrics={}, samples=0)
    text = Page(report.render(plant(tmp_path, [attack(psnr=40.0), broken], skipped=skipped))).text
    part = text[text.index("Summary for a data-protection") : text.index("Appendix")]
    tested = "fc2, random weights, simulated clients holding photos. 1 attack (dense-inversion) in 1 configuration,"
    assert tested in part, "what failed was not tested"
    assert "The model had random weights, as before the first round" in part
    assert "1 combination left out; 0 runs could not start and 2 runs failed" in part
    assert "mkor : nobody tampers" in text
    assert "it burnt down" in text


# --- private samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "asked", "shown"),
    [
        (NAMED, None, True),
        (NAMED, False, False),
        (OWN, None, False),
        (OWN, True, True),
        (CAPTURED, None, False),
        (CAPTURED, True, True),
    ],
)
def test_private_pictures_are_shown_only_on_purpose(
    tmp_path: Path, pictures: torch.Tensor, plan: Mapping[str, Any], asked: bool | None, shown: bool
) -> None:
    entry = captured() if plan is CAPTURED else attack(psnr=40.0)
    text = report.render(plant(tmp_path, [entry], plan=plan, pictures=pictures), show_images=asked)
    assert bool(Page(text).all("img")) is shown
    assert ("closest match" in text) is (shown and plan is not CAPTURED)
    assert ("data:image" in text) is shown
    assert ("--show-images" in text) is not shown


def test_rows_of_a_table_stand_beside_what_came_back(tmp_path: Path) -> None:
    text = PLAN.replace('name = "photos"\noptions = { size = 16 }', 'name = "patients"').partition("[utility]")[0]
    run_audit(prepare(parse_plan(text + '[scores]\nmetrics = ["mse"]\n')), tmp_path / "out")
    page = Page(report.render(load_audit(tmp_path / "out")))
    assert "were recovered" in page.text
    assert "cholesterol" in page.text
    assert "columns right" in page.text
    assert "cholesterol 100%" in page.text
    redacted = Page(report.render(load_audit(tmp_path / "out"), show_images=False))
    assert len(redacted.all("table")) < len(page.all("table"))


# --- two audits ------------------------------------------------------------------------------------------------------


def test_a_comparison_says_what_changed(tmp_path: Path) -> None:
    before = [
        attack(psnr=40.0),
        attack(defense="noise", psnr=20.0),
        attack(defense="clip"),
        attack(defense="prune", psnr=15.0),
        attack(defense="old"),
        utility("none", 0.9),
    ]
    after = [
        attack(psnr=40.0),
        attack(defense="noise"),
        attack(defense="clip", psnr=12.2),
        attack(defense="prune", psnr=18.0),
        attack(defense="new"),
        utility("none", 0.8),
    ]
    first = plant(tmp_path / "a", before)
    second = plant(tmp_path / "b", after, plan={**NAMED, "title": "Later"})
    found = compare(first, second)
    changes = {pair.after.cell.defense: pair.change for pair in found.pairs}
    assert changes == {
        "none": Change.IDENTICAL,
        "noise": Change.BETTER,
        "clip": Change.SAME,
        "prune": Change.WORSE,
    }
    assert [row.cell.defense for row in found.added] == ["new"]
    assert [row.cell.defense for row in found.removed] == ["old"]
    assert found.settings == (("title", "Planted", "Later"),)
    text = Page(report.render_comparison(first, second)).text
    assert "Of 4 shared configurations 1 leak more and 1 leak less than before." in text
    assert "Before: Planted leaks After: Later leaks" in text
    assert "Before: Planted (a) leaks" in Page(report.render_comparison(first, plant(tmp_path / "d", after))).text
    assert "90.0% 80.0%" in text
    assert "All 5 shared configurations have the same numbers." in report.render_comparison(first, first)
    lonely = plant(tmp_path / "c", [attack(defense="other")])
    assert "no configuration in common" in report.render_comparison(first, lonely)


# --- size, hostility, command ----------------------------------------------------------------------------------------


def test_a_thousand_configurations_make_a_page_of_bounded_size(
    tmp_path: Path, pictures: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [attack(psnr=5.0 + k % 50, defense=f"noise-{k % 7}", batch_size=k + 1) for k in range(1000)]
    audit = plant(tmp_path, entries, pictures=pictures, seeds=[0])
    calls, alive = 0, 0
    real = Audit.samples

    def counting(self: Audit, cell: str) -> dict[str, torch.Tensor] | None:
        nonlocal calls, alive
        calls += 1
        if calls in (20, 60):
            gc.collect()  # what earlier tests left behind
            alive = max(alive, sum(type(thing) is Outcome for thing in gc.get_objects()))
        return real(self, cell)

    monkeypatch.setattr(Audit, "samples", counting)
    text = report.render(audit)
    page = Page(text)
    assert 0 < alive < 20, "records are read one at a time"
    assert len([a for a in page.all("tr") if "data-attack" in a]) == 1000
    assert len(page.all("img")) == 25 * 6
    assert len(text) < 3_000_000


def test_hostile_names_are_text(tmp_path: Path, pictures: torch.Tensor) -> None:
    audit = hostile_audit(tmp_path, pictures)
    for text in (report.render(audit), report.render_comparison(audit, audit)):
        page = Page(text)
        assert len(page.all("script")) == (1 if page.scripts else 0)
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
        assert all((link["href"] or "").startswith("#") for link in page.all("a"))
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert "49" not in page.words


def test_damaged_results_are_one_sentence_or_a_page(tmp_path: Path, pictures: torch.Tensor) -> None:
    """Values of every file are replaced at random: nothing but an error of the input may come of it."""
    plant(tmp_path, [attack(psnr=40.0), attack(defense="noise"), utility("none", 0.9)], pictures=pictures)
    rng = random.Random(0)
    files = [tmp_path / "results.json", *sorted((tmp_path / "records").glob("*.json"))]
    junk: list[Any] = [None, [], {}, "x", -1, 1e308, True, [[1]], {"a": 1}, "inf", 2**70, ""]
    refused = 0
    for _ in range(60):
        path = rng.choice(files)
        content = path.read_bytes()
        document = json.loads(content)
        place: Any = document
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.9:
                place = place[key]
                continue
            place[key] = rng.choice(junk)
            break
        path.write_text(json.dumps(document))
        try:
            audit = load_audit(tmp_path)
            report.render(audit)
            report.render_comparison(audit, audit)
        except FedprismError:
            refused += 1
        finally:
            path.write_bytes(content)
    assert 0 < refused < 60


@pytest.mark.parametrize(
    "kept",
    [
        {"recovered": torch.zeros(2, 3, 4, 4)},
        {"recovered": torch.zeros(2, 5, 4, 4, dtype=torch.uint8)},
        {"originals": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)},
        {n: torch.zeros(k, 3, 4, 4, dtype=torch.uint8) for n, k in (("originals", 1), ("recovered", 2))},
        {"recovered": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "indices": torch.tensor([0])},
    ],
)
def test_samples_that_do_not_fit_are_left_out(tmp_path: Path, kept: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    audit = plant(tmp_path, [attack(psnr=40.0)])
    for cell in audit.keys:
        save_file(kept, tmp_path / "samples" / f"{cell}.safetensors")
    assert not Page(report.render(audit)).all("img")


def test_an_audit_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.partition("[utility]")[0].replace("[0, 1, 2]", "[0]"))
    assert cli.main(["audit", str(tmp_path / "plan.toml"), "-o", str(tmp_path / "out"), "--device", "cpu"]) == 0
    page = tmp_path / "out" / "report.html"
    assert str(page) in capsys.readouterr().out
    assert page.read_text() == report.render(load_audit(tmp_path / "out"))


def test_the_command_writes_opens_and_compares(
    tmp_path: Path, pictures: torch.Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(typer, "launch", opened.append)
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        plant(folder, [attack(psnr=40.0)], pictures=pictures)
    assert cli.main(["report", str(first), "--open"]) == 0
    assert opened == [(first / "report.html").as_uri()]
    assert "data:image" in (first / "report.html").read_text()
    assert cli.main(["report", str(first), "--redact", "-o", str(tmp_path / "page.html")]) == 0
    assert "data:image" not in (tmp_path / "page.html").read_text()
    assert cli.main(["compare", str(first), str(second)]) == 0
    assert "same numbers" in (second / "comparison.html").read_text()
    assert cli.main(["compare", str(first)]) == 2
    assert cli.main(["report", str(first), str(second)]) == 2
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("error: ") == 3
    assert str(first / "report.html") in printed.out

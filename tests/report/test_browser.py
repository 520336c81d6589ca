"""The report in a real browser: short, without errors, for screens, phones, paper, keyboards and screen readers."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedprism import report
from planted_audits import CAPTURED, attack, captured, gate, plant, utility
from report_pages import hostile_audit

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium; apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Where root runs the tests, as in containers, chromium refuses its sandbox; the pages are our own.
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pictures = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    long = "clip(norm=1.0) + gaussian-noise(std=0.01) + quantize(bits=8, stochastic=True)"
    entries = [
        attack(psnr=float("inf"), ssim=1.0, labels_leaked=1.0),
        attack(psnr=28.0, ssim=0.8, attack="idlg", batch_size=8),
        attack(psnr=30.0, ssim=0.9, threat="malicious_server", attack="imprint"),
        attack(defense="dp-sgd(noise=1.0)"),
        attack(defense="dp-sgd(noise=1.0)", threat="honest_but_curious +defense", attack="idlg"),
        attack(defense=long, psnr=16.0),
        utility("none", 0.9),
        utility("dp-sgd(noise=1.0)", 0.6, epsilon=8.0),
        utility(long, 0.85),
    ]
    folder = tmp_path_factory.mktemp("audit")
    skipped = [{"what": f"mkor-{k}", "why": "nobody in this plan tampers"} for k in range(5)]
    plant(folder, entries, pictures=pictures, skipped=skipped, verdict="leaks")
    return report.write(folder)


class Opened:
    """A page with everything that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def height(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollHeight"))

    def open_all(self) -> None:
        self.page.click("#everything")

    def rows(self) -> int:
        return int(self.page.locator("#configurations tbody tr:visible").count())

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def opened(browser: Any, path: Path) -> Iterator[Opened]:
    found = Opened(browser, path, viewport={"width": 1280, "height": 900})
    yield found
    found.close()


def test_it_opens_without_complaints_and_asks_for_nothing(opened: Opened, path: Path) -> None:
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [path.as_uri()]
    opened.open_all()
    assert opened.rows() == 6
    broken = "images => images.filter(i => !i.complete || !i.naturalWidth).length"
    opened.page.eval_on_selector_all("img", "images => images.forEach(i => i.scrollIntoView())")
    assert opened.page.eval_on_selector_all("img", broken) == 0


def test_the_verdict_and_the_samples_are_seen_first(opened: Opened) -> None:
    places = [opened.page.locator(f"#{part}").bounding_box() for part in ("verdict", "samples", "defenses", "advice")]
    tops = [place["y"] for place in places]
    assert tops == sorted(tops)
    assert places[1]["y"] + places[1]["height"] < 900, "both are seen without scrolling"
    assert opened.page.locator("#samples img").count() == 6, "three pairs"
    assert opened.page.locator("details[open]").count() == 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More defenses, attackers and reasons than a page can show at once, with long names."""
    folder = tmp_path_factory.mktemp("large")
    pictures = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    names = ["none", *(f"clip(norm={k}.0) + gaussian-noise(std=0.00{k}) + quantize(bits=8)" for k in range(1, 18))]
    threats = ("honest_but_curious", "malicious_server", "eavesdropper", "secure_aggregation", "curious_client")
    entries = [
        attack(psnr=40.0 - 2 * k - size / 4, defense=name, threat=threat, batch_size=size, recovered=max(0, 2 - k // 4))
        for k, name in enumerate(names)
        for threat in threats
        for size in (1, 8, 32)
    ]
    costs = [utility(name, 0.9 - 0.02 * k, epsilon=2.0 + k) for k, name in enumerate(names)]
    skipped = [{"what": f"attack-{k}, attack-{k + 100}", "why": "the input feeds no such layer"} for k in range(40)]
    plant(folder, [*entries, *costs], pictures=pictures, skipped=skipped, gates=[gate()], verdict="leaks", seeds=[0])
    return report.write(folder)


def test_it_stays_short_on_screens_and_phones(browser: Any, path: Path, large: Path) -> None:
    for page in (path, large):
        for width, most in ((1280, 3500), (390, 7000)):
            opened = Opened(browser, page, viewport={"width": width, "height": 844})
            assert opened.height() <= most, (page, width)
            opened.close()


def test_every_defense_has_a_dot_and_a_label_of_its_own(opened: Opened, browser: Any, large: Path) -> None:
    assert opened.page.locator("svg.wide .dot").count() == 3
    words = opened.page.locator("svg.wide").get_attribute("aria-label")
    assert "no defense: 100% recovered, up to 100% not ruled out; accuracy 90.0%." in words
    for width, kind in ((1280, "wide"), (390, "narrow")):
        crowded = Opened(browser, large, viewport={"width": width, "height": 844})
        boxes = crowded.page.eval_on_selector_all(
            f"svg.{kind} .name",
            "nodes => nodes.map(n => { const b = n.getBoundingClientRect(); return [b.top, b.bottom, b.right]; })",
        )
        boxes.sort()
        assert all(above[1] <= below[0] + 1 for above, below in itertools.pairwise(boxes)), "labels overlap"
        card = crowded.page.eval_on_selector("#defenses figure", "node => node.getBoundingClientRect().right")
        assert max(box[2] for box in boxes) <= card
        crowded.close()


def test_filters_work_on_table_and_pictures(opened: Opened) -> None:
    page = opened.page
    opened.open_all()
    pictures = page.locator(".exhibits article:visible").count()
    page.select_option("[name=defense]", "dp-sgd(noise=1.0)")
    assert opened.rows() == 2
    assert page.locator("#count").inner_text() == "2 of 6 configurations"
    assert 0 < page.locator(".exhibits article:visible").count() < pictures
    page.select_option("[name=attack]", "imprint")
    assert opened.rows() == 0
    page.click("button[type=reset]")
    playwright.expect(page.locator("#count")).to_have_text("6 of 6 configurations")
    assert opened.rows() == 6
    assert opened.complaints == []


def test_everything_is_reached_by_keyboard(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#configurations > summary")
    page.keyboard.press("Enter")
    assert page.locator("#configurations[open]").count() == 1
    for wanted in ("attack", "threat", "defense"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.name") == wanted
    page.focus("#c1 summary")
    page.keyboard.press("Enter")
    assert page.locator("#c1 details[open]").count() == 1
    page.locator("a[href='#untested']").first.press("Enter")
    assert page.locator("#untested[open]").count() == 1, "a link into the appendix opens its part"


def test_screen_readers_find_landmarks_headings_and_tables(opened: Opened) -> None:
    page = opened.page
    opened.open_all()
    for landmark in ("main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3, h4", "nodes => nodes.map(n => Number(n.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    unnamed = "nodes => nodes.filter(n => !n.hasAttribute('aria-label') && !n.hasAttribute('aria-labelledby')).length"
    assert page.eval_on_selector_all("section, [role=region], form", unnamed) == 0
    assert page.eval_on_selector_all("img", "nodes => nodes.filter(n => !n.alt).length") == 0
    headless = "nodes => nodes.filter(n => !n.querySelector('thead th[scope=col]')).length"
    assert page.eval_on_selector_all("table", headless) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1280])
def test_it_fits_phones_and_screens_in_light_and_dark(browser: Any, path: Path, scheme: str, width: int) -> None:
    opened = Opened(browser, path, viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") is (scheme == "dark")
    opened.open_all()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()


def test_it_can_be_printed_and_read_without_script(browser: Any, path: Path) -> None:
    opened = Opened(browser, path)
    assert opened.page.pdf().startswith(b"%PDF")
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#everything").is_visible()
    assert opened.page.locator("#verdict").is_visible()
    opened.page.emulate_media(media="print", color_scheme="dark")  # paper is white
    assert opened.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert opened.page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 35, 48)"
    opened.close()
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    page.click("#configurations > summary")
    assert page.locator("#configurations tbody tr:visible").count() == 6
    assert not page.locator("#filters").is_visible()
    assert not page.locator("#everything").is_visible()
    context.close()


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    audit = hostile_audit(tmp_path)
    for written in (report.write(tmp_path), report.write_comparison(tmp_path, tmp_path)):
        opened = Opened(browser, written)
        if opened.page.locator("#everything").count():
            opened.open_all()
            for select in ("[name=attack]", "[name=threat]", "[name=defense]"):
                opened.page.select_option(select, index=1)
        assert opened.page.evaluate("window.hurt") is None
        assert opened.complaints == []
        opened.close()
    assert len(audit) > 0


def test_captures_without_ground_truth_open_too(browser: Any, tmp_path: Path) -> None:
    plant(tmp_path, [captured()], plan=CAPTURED, verdict="leaks")
    opened = Opened(browser, report.write(tmp_path))
    assert opened.complaints == []
    assert "reproduce recorded updates" in opened.page.locator("#verdict").inner_text()
    opened.open_all()
    assert opened.rows() == 1
    assert opened.page.locator("#defenses, svg").count() == 0
    opened.close()

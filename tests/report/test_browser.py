"""The report in a real browser: no errors, a plot that reacts, filters that filter, on a screen and on a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedprism import report
from planted_audits import attack, captured, plant, utility
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
    plant(folder, entries, pictures=pictures, skipped=[{"what": "mkor", "why": "nobody in this plan tampers"}])
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

    def points(self) -> list[str]:
        found: list[str] = self.page.eval_on_selector_all(
            "#chart .point", "points => points.map(p => p.getAttribute('aria-label'))"
        )
        return found

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
    assert opened.rows() == len(opened.points()) == 6
    broken = "images => images.filter(i => !i.complete || !i.naturalWidth).length"
    opened.page.eval_on_selector_all("img", "images => images.forEach(i => i.scrollIntoView())")
    assert opened.page.eval_on_selector_all("img", broken) == 0
    first = opened.page.locator("#verdict").bounding_box()
    assert first["y"] + first["height"] < 900, "the verdict is seen without scrolling"


def test_the_plot_reacts(opened: Opened) -> None:
    page = opened.page
    assert any("PSNR ∞ dB" in text for text in opened.points())
    page.select_option("#metric", "ssim")
    assert all("SSIM" in text for text in opened.points())
    for axis, mark in (("accuracy", "90 %"), ("epsilon", "none"), ("defense", "no defense")):
        page.select_option("#axis", axis)
        assert len(opened.points()) == 6
        assert mark in page.locator("#chart").inner_html()
    page.locator("#chart .point").first.hover(force=True)
    assert "samples" in page.locator("#told").inner_text()
    assert opened.complaints == []


def test_filters_work_on_table_plot_and_pictures(opened: Opened) -> None:
    page = opened.page
    pictures = page.locator(".exhibits article:visible").count()
    page.select_option("[name=defense]", "dp-sgd(noise=1.0)")
    assert opened.rows() == len(opened.points()) == 2
    assert page.locator("#count").inner_text() == "2 of 6 configurations"
    assert 0 < page.locator(".exhibits article:visible").count() < pictures
    page.select_option("[name=attack]", "imprint")
    assert opened.rows() == len(opened.points()) == 0
    page.click("button[type=reset]")
    playwright.expect(page.locator("#chart .point")).to_have_count(6)
    assert opened.rows() == 6


def test_everything_is_reached_by_keyboard(opened: Opened) -> None:
    page = opened.page
    page.focus("#axis")
    page.keyboard.press("Tab")
    first = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert first != second
    assert {first, second} <= set(opened.points())
    assert page.locator("#told").inner_text() == second
    page.keyboard.press("Enter")
    assert page.locator("#configurations details[open]").count() == 1
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1280])
def test_it_fits_phones_and_screens_in_light_and_dark(browser: Any, path: Path, scheme: str, width: int) -> None:
    opened = Opened(browser, path, viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") is (scheme == "dark")
    opened.page.select_option("#axis", "defense")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    left = "node => node.getBoundingClientRect().left"
    card = opened.page.eval_on_selector("#plot .card", left)
    words = opened.page.eval_on_selector_all("#chart text", f"nodes => nodes.map({left})")
    assert min(words) >= card, "a slanted word of the axis leaves the card"
    opened.close()


def test_it_can_be_printed_and_read_without_script(browser: Any, path: Path) -> None:
    opened = Opened(browser, path)
    assert opened.page.pdf().startswith(b"%PDF")
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    opened.page.emulate_media(media="print", color_scheme="dark")  # paper is white
    assert opened.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert opened.page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 35, 48)"
    opened.close()
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("#configurations tbody tr:visible").count() == 6
    assert page.locator("noscript p").is_visible()
    assert not page.locator("#filters").is_visible()
    context.close()


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    audit = hostile_audit(tmp_path)
    for written in (report.write(tmp_path), report.write_comparison(tmp_path, tmp_path)):
        opened = Opened(browser, written)
        for select in ("[name=attack]", "[name=threat]", "[name=defense]"):
            if opened.page.locator(select).count():
                opened.page.select_option(select, index=1)
        assert opened.page.evaluate("window.hurt") is None
        assert opened.complaints == []
        opened.close()
    assert len(audit) > 0


def test_recordings_without_truth_open_too(browser: Any, tmp_path: Path) -> None:
    plant(tmp_path, [captured()])
    opened = Opened(browser, report.write(tmp_path))
    assert opened.complaints == []
    assert opened.rows() == 1
    assert opened.page.locator("#plot").count() == 0
    opened.close()

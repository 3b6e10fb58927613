"""A real browser opens the page: nothing is asked of anybody, nothing complains, nothing is cut off, at any width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from experiments._chromium import Browser, find_chromium, open_browser
from experiments._report_runs import make_facts, make_run
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.html import render_comparison, render_html
from rex_ray.report.reading.schema import RunData

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed here"),
]

RUN, FACTS = make_run(), make_facts()
PAGES = {
    "whole": render_html(RUN, FACTS),
    "twelve": render_html(make_run(12, name="a-name-without-any-space-that-is-longer-than-a-phone-is-wide"), FACTS),
    "many": render_html(make_run(64), FACTS),
    "empty": render_html(RunData(name="empty", policy="bsp", outcome="failed: no node")),
    "compared": render_comparison([replace(RUN, name="bsp"), RUN], [RunFacts(), FACTS]),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 768, 360])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_by_itself_and_fits(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES[name], encoding="utf-8")
    found = browser.open(file, width=width, dark=width == 768)
    assert [request for request in found.requests if not request.startswith("data:")] == [file.as_uri()]
    assert found.errors == ()
    assert found.sideways_px == 0
    assert found.clipped == ()
    assert found.overlapping == ()
    if name != "empty":
        assert found.smallest_text_px >= 11
    assert found.num_nodes < 12_000


def test_a_dark_page_is_dark_and_a_printed_one_has_pages(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES["whole"], encoding="utf-8")
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(file, dark=True)
    assert browser.evaluate(colour) == "rgb(20, 23, 27)"
    browser.open(file)
    assert browser.evaluate(colour) == "rgb(255, 255, 255)"
    pdf = browser.print_pdf()
    assert pdf.startswith(b"%PDF")
    assert 2 <= pdf.count(b"/Type /Page\n") <= 8


def test_every_part_that_takes_input_is_reached_by_keyboard_and_shows_it(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES["whole"], encoding="utf-8")
    browser.open(file)
    reach = """(() => { let n = 0, bare = [];
      for (const e of document.querySelectorAll('a, summary, [tabindex="0"]')) {
        if (!e.checkVisibility()) continue;
        e.focus({focusVisible: true}); n++;
        const shown = document.activeElement === e && getComputedStyle(e).outlineStyle !== 'none';
        if (!shown) bare.push(e.outerHTML.slice(0, 60));
      } return [n, bare]; })()"""
    count, bare = browser.evaluate(reach)
    assert count > 15
    assert bare == []

"""The page is one that a screen reader, a keyboard and a phone can use, whatever the run; and it never grows heavy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from pages import Page

from experiments._report_runs import make_facts, make_run
from rex_ray.report.charts.figure import step_range
from rex_ray.report.facts import RunFacts, Saving
from rex_ray.report.page.bars import ledger_bars
from rex_ray.report.page.document import run_document
from rex_ray.report.page.headline import headline
from rex_ray.report.page.html import render_comparison, render_html
from rex_ray.report.page.key_figures import key_figures
from rex_ray.report.reading.schema import RunData

RUN, FACTS = make_run(), make_facts()
EMPTY = RunData(name="empty", policy="bsp", outcome="failed: no node")

PAGES = {
    "whole": render_html(RUN, FACTS),
    "without facts": render_html(RUN),
    "unfinished": render_html(replace(RUN, outcome="unfinished", metrics=(), noise=None), FACTS),
    "empty": render_html(EMPTY),
    "many workers": render_html(make_run(64), FACTS),
    "compared": render_comparison([make_run(name="bsp", policy="bsp"), RUN, EMPTY], [RunFacts(), FACTS, RunFacts()]),
}
each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


@each_page
def test_nothing_is_fetched_and_no_script_runs(page: str) -> None:
    assert not re.search(r"https?://|@import|url\(|<script|\bon[a-z]+=", page)
    links = [element.attributes["href"] for element in Page(page).of("a", "link")]
    assert all(link.startswith("#") or link == "data:," for link in links)


@each_page
def test_elements_nest_and_anchors_are_unique_and_reached(page: str) -> None:
    elements = Page(page).root.walk()
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = {e.attributes["href"][1:] for e in elements if e.tag == "a"}
    assert targets <= set(ids)
    labels = {e.attributes["aria-labelledby"] for e in elements if "aria-labelledby" in e.attributes}
    assert labels <= set(ids)


@each_page
def test_headings_descend_by_one_and_landmarks_stand_once(page: str) -> None:
    tree = Page(page)
    levels = [int(element.tag[1]) for element in tree.of("h1", "h2", "h3", "h4", "h5")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(tree.of(landmark)) == 1
    assert tree.of("html")[0].attributes["lang"] == "en"
    assert tree.of("a")[0].attributes["href"] == "#content"


@each_page
def test_charts_have_words_and_tables_have_captions_and_scopes(page: str) -> None:
    tree = Page(page)
    for drawing in tree.of("svg"):
        named = drawing.attributes.get("role") == "img" and drawing.attributes.get("aria-label")
        assert named or drawing.attributes.get("aria-hidden") == "true"
    for table in tree.of("table"):
        assert table.children[0].tag == "caption"
        assert table.children[0].all_text().strip()
        assert all(e.attributes.get("scope") in {"col", "row"} for e in table.walk() if e.tag == "th")
    for region in (e for e in tree.root.walk() if e.attributes.get("role") == "region"):
        assert region.attributes["tabindex"] == "0"  # what scrolls is reached by keyboard
        assert region.attributes["aria-label"]


@each_page
def test_every_class_that_is_drawn_is_styled(page: str) -> None:
    css = Page(page).of("style")[0].text
    used = {
        name
        for drawing in Page(page).of("figure")
        for element in drawing.walk()
        for name in element.attributes.get("class", "").split()
    }
    assert bool(used) == ("<figure" in page)
    assert {name for name in used if not re.search(rf"\.{name}\b", css)} <= {"name"}


def test_the_whole_page_has_every_part_in_order() -> None:
    names = [element.all_text() for element in Page(PAGES["whole"]).of("h2")]
    assert names == [
        "Split of the global batch",
        "Own time per worker",
        "Step-time curves",
        "Noise scale",
        "Global batch and learning rate",
        "Metrics over time",
        "Decisions",
        "Where the time went",
        "Under other policies",
        "Searches and their trials",
        "What the parts judged",
        "What happened",
        "Notices",
        "Settings",
    ]
    for shown in (
        "33% less time",
        "95% interval 30% to 35%",
        "61.0 s",
        "91.0 s",
        "−31.0%",
        "×\u00a01.53",
        "0.47",
        "1.2%",
    ):
        assert shown in PAGES["whole"]


def test_what_is_not_known_is_said_and_not_made_up() -> None:
    page = PAGES["without facts"]
    assert "Time saved: not known" in page
    for absent in ("Step-time curves", "Where the time went", "Under other policies", "RII"):
        assert absent not in page
    assert "Nothing was measured" in PAGES["empty"]


@pytest.mark.parametrize(
    ("low", "high", "figure", "sentence"),
    [
        (0.1, 0.3, "20% less time", "95% interval 10% to 30%"),
        (-0.3, -0.1, "20% more time", "95% interval −30% to −10%"),
        (-0.1, 0.3, "No clear difference", "saved (95% interval −10% to 30%)"),
    ],
)
def test_the_headline_says_only_what_the_interval_allows(low: float, high: float, figure: str, sentence: str) -> None:
    fraction = 0.2 if low > -0.3 else -0.2
    found = headline(Saving(fraction=fraction, low=low, high=high, equal_s=10.0, run_s=8.0, method="m"))
    assert found is not None
    assert found.figure == figure
    assert sentence in found.sentence
    assert max(found.run_share, found.equal_share, found.high_share) == pytest.approx(100.0)


def test_a_run_in_equal_shares_is_not_compared_with_itself() -> None:
    found = headline(Saving(fraction=0.0, low=0.0, high=0.0, equal_s=8.0, run_s=8.0, method="m"))
    assert found is not None
    assert found.figure == "Equal shares throughout"


def test_bars_of_the_ledger_meet_at_zero_and_sum() -> None:
    bars = ledger_bars(FACTS.ledger)
    zero = bars[0].start
    assert bars[1].start == zero
    assert bars[2].start + bars[2].length == pytest.approx(zero)
    assert bars[0].start + bars[0].length == pytest.approx(100.0)
    assert bars[-1].value == "+5.1 s"


def test_a_comparison_gives_ratios_to_the_first_and_tells_runs_of_one_name_apart() -> None:
    slow = make_run(name="run", num_steps=400)
    page = render_comparison([RUN, slow], [FACTS, FACTS])
    rows = {
        row.children[0].all_text(): [cell.all_text() for cell in row.children[1:]]
        for row in Page(page).of("tr")
        if row.children[0].attributes.get("scope") == "row"
    }
    assert rows["steps"] == ["200", "400 ×\u00a02.00"]
    assert rows["accuracy 0.9375 in"] == ["14.0 s", "14.0 s ×\u00a01.00"]
    assert "run (2)" in page
    assert "33% (30% to 35%)" in rows["saved against equal shares (estimate)"][0]


def test_the_document_is_json_with_the_units_in_its_names() -> None:
    never = replace(RUN, metrics=(replace(RUN.metrics[0], metrics={"loss": float("nan")}),))
    document = json.loads(json.dumps(run_document(never, FACTS), allow_nan=False))
    assert document["figures"]["num_steps"] == 200
    assert document["saving"]["fraction"] == 0.33
    assert [row["policy"] for row in document["estimates"]] == ["rex", "bsp"]
    assert document["metrics"] == {"loss": None}
    assert document["devices"] == {"T4": 2, "V100": 2}
    assert json.loads(json.dumps(run_document(EMPTY, RunFacts()), allow_nan=False))["saving"] is None


def test_metrics_that_were_no_numbers_have_no_best() -> None:
    losses = (float("nan"), 2.0, 1.0, 3.0)
    points = [replace(RUN.metrics[0], metrics={"loss": loss}) for loss in losses]
    figures = {figure.key: figure for figure in key_figures(replace(RUN, metrics=tuple(points)))}
    assert figures["loss"].detail == "best 1"
    figures = {figure.key: figure for figure in key_figures(replace(RUN, metrics=tuple(points[:1])))}
    assert figures["loss"].detail == ""


def test_anchors_stay_unique_where_metrics_differ_by_a_sign_only() -> None:
    points = tuple(replace(point, metrics={"a/b": point.step, "a b": 2.0 * point.step}) for point in RUN.metrics)
    tree = Page(render_comparison([replace(RUN, metrics=points)] * 2, [FACTS, FACTS]))
    ids = [element.attributes["id"] for element in tree.root.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert {link.attributes["href"][1:] for link in tree.of("a")} <= set(ids)


def test_the_axis_of_steps_reaches_over_every_group_where_one_resumes_earlier() -> None:
    (group,) = RUN.groups
    resumed = replace(group, steps=group.steps[:20] + 100, versions=group.versions[:20])
    assert step_range([group, resumed]) == (0.0, 200.0)


@pytest.mark.parametrize(("num_workers", "num_steps"), [(8, 100_000), (64, 20_000), (1024, 400)])
def test_a_page_stays_light_however_long_or_wide_the_run(num_workers: int, num_steps: int) -> None:
    page = render_html(make_run(num_workers, num_steps, num_metrics=3000), FACTS)
    assert len(page.encode()) < 700_000
    assert not re.search(r'd="[^"]*(nan|inf)', page)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    channels = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_have_the_contrast_that_wcag_aa_asks_for(scheme: int) -> None:
    css = Page(PAGES["whole"]).of("style")[0].text
    colours: dict[str, str] = {}
    for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)[: scheme + 1]:
        colours |= dict(re.findall(r"--([\w]+): (#\w+)", block))
    for ground in ("paper", "wash"):
        for text in ("ink", "soft", "accent", "good", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("k0", "k1", "k2", "k3", "k4", "k5", "whole", "mark", "axis"):
        assert contrast(colours[line], colours["paper"]) >= 3.0, line

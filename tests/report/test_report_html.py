"""The page stands alone, escapes what it is given, and has an answer for a run without steps."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from rex_ray.report.page.html import render_html
from rex_ray.report.page.key_figures import key_figures
from rex_ray.report.page.tables import MOST_FINDINGS, decision_rows, finding_rows, format_gain, format_test
from rex_ray.report.reading.schema import (
    DecisionRow,
    FindingRow,
    GroupData,
    MetricPoint,
    NoiseSeries,
    RunData,
    SearchRow,
    TrialRow,
)

STEPS = np.arange(40)
SHARES = np.where(STEPS[:, None] < 20, [[32, 32]], [[20, 44]])
OWN_S = SHARES * np.array([0.004, 0.002])

RUN = RunData(
    name="demo <rex>",
    policy="rex",
    outcome="finished",
    settings={"global_batch_size": "64"},
    groups=(
        GroupData(
            generation="g",
            devices=("T4", "V100"),
            nodes=("node-a", "node-b"),
            steps=STEPS,
            versions=(STEPS >= 20).astype(np.int64),
            num_rows=SHARES,
            own_s=OWN_S,
            step_s=OWN_S.max(axis=1),
            partial=np.zeros(40, dtype=bool),
            steady=STEPS >= 3,
        ),
    ),
    metrics=tuple(
        MetricPoint(elapsed_s=2.0 + k, epoch=k, step=20 * k, metrics={"accuracy": 0.5 + k / 4}) for k in (0, 1)
    ),
    decisions=(
        DecisionRow(
            number=1,
            kind="reallocate",
            decided_at_step=15,
            reason="predicted <script>alert(1)</script> & more",
            before=(32, 32),
            after=(20, 44),
            version=1,
            applied_at_step=20,
            predicted_gain=0.31,
            measured_gain=0.3125,
        ),
    ),
    notices=("step 7 dropped",),
)


class Outline(HTMLParser):
    """Collects tags, and what a browser would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links.extend(value or "" for name, value in attrs if name in {"src", "href", "srcset", "data"})


def test_the_page_needs_no_network_and_runs_no_script() -> None:
    page = render_html(RUN)
    outline = Outline(page)
    assert all(link.startswith("#") or link == "data:," for link in outline.links)
    assert "script" not in outline.tags
    assert not re.search(r"https?://|@import|url\(", page)
    assert outline.tags.count("svg") == 2 + 3 * 2  # two entries of a key; two charts and a metric in two widths


def test_what_the_run_says_is_text_and_never_markup() -> None:
    page = render_html(RUN)
    assert "<script>alert" not in page
    assert "predicted &lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "demo &lt;rex&gt;" in page


def test_the_page_shows_result_decision_settings_and_notices() -> None:
    page = render_html(RUN)
    for shown in ("finished", "−31.0%", "−31.2%", "global_batch_size", "step 7 dropped", "node-b", "0.75"):
        assert shown in page


GROWING = replace(
    RUN,
    decisions=(
        *RUN.decisions,
        DecisionRow(
            number=2,
            kind="change_global_batch",
            decided_at_step=25,
            reason="the noise scale is above twice the batch",
            before=(20, 44),
            after=(40, 88),
            version=2,
            applied_at_step=30,
            lr_factor=1.62,
            evidence={"p_value": 0.0039, "effect": 0.98},
        ),
    ),
    findings=(
        FindingRow(
            part="trigger",
            step=9,
            verdict="held: cost",
            count=4,
            reason="moving <b>costs</b> more",
            evidence={"p_value": 0.2},
            asks_for=(10, 54),
            predicted_gain=0.05,
        ),
    ),
    searches=(
        SearchRow(
            search_id="g/1/64/measured/7",
            kind="measured",
            started_at_step=12,
            plan=(20, 44),
            trials=(
                TrialRow(trial=0, asked_at_step=13, local_batch_sizes=(24, 40), objective=-2.5, slowest_s=0.0801),
                TrialRow(trial=1, asked_at_step=19, local_batch_sizes=(60, 4), objective=float("inf")),
                TrialRow(trial=2, asked_at_step=22, local_batch_sizes=(16, 48)),
            ),
            outcome="finished",
            result=(24, 40),
        ),
    ),
    noise=NoiseSeries(
        steps=np.array([20, 36]),
        batch=np.array([64, 128]),
        noise_scale=np.array([700.0, 812.0]),
        p_value=np.array([0.01, 0.2]),
        window=8,
        block_steps=4,
    ),
)


def test_what_was_judged_searched_and_grown_stands_on_the_page_and_needs_nothing_else() -> None:
    page = render_html(GROWING)
    for shown in (
        "held: cost",
        "moving &lt;b&gt;costs&lt;/b&gt; more",
        "asks for 10\u00a0/\u00a054",
        "p\u00a0=\u00a00.0039, effect\u00a0+0.98",
        "64\u00a0→\u00a0128 in all, LR\u00a0×\u00a01.62",
        "80.1 ms",
        "refused",
        "not measured",
        "finished, 24\u00a0/\u00a040",
        "Noise scale",
        "Global batch and learning rate",
        "812 rows",
    ):
        assert shown in page
    outline = Outline(page)
    assert all(link.startswith("#") or link == "data:," for link in outline.links)
    assert outline.tags.count("details") == 4  # workers, numbers of the metric, trials, judgements
    assert outline.tags.count("svg") == 2 + 4 + 2 + 5 * 2
    assert len(page) < 80_000


def test_a_test_is_named_by_what_is_known_of_it() -> None:
    assert format_test({}) == "–"
    assert format_test({"effect": -0.4}) == "effect\u00a0−0.40"
    assert format_test({"p_value": 0.5}) == "p\u00a0=\u00a00.5"


def test_of_very_many_findings_the_newest_are_shown_and_the_rest_counted() -> None:
    finding = GROWING.findings[0]
    many = tuple(replace(finding, step=step) for step in range(MOST_FINDINGS + 7))
    assert [row[1] for row in finding_rows(many)[::400]] == ["7"]
    assert "The first 7 are left out here" in render_html(replace(RUN, findings=many))


def test_a_run_without_a_complete_step_gets_a_page_that_says_so() -> None:
    page = render_html(RunData(name="x", policy="bsp", outcome="failed: no node"))
    assert "holds no complete step" in page
    assert "changed nothing" in page


def test_key_figures_compare_with_the_first_split() -> None:
    figures = {figure.label: figure for figure in key_figures(RUN)}
    assert figures["step time"].value == "88 ms"
    assert figures["step time"].detail == "128 ms with the first split"
    assert figures["imbalance"].value == "4.8%"  # 88 against a mean of 84 (80 and 88)
    assert figures["accuracy"].value == "0.75"
    assert figures["changes"].detail == "1 took effect, 1 of them moved rows"


def test_where_the_batch_grew_times_per_row_are_compared() -> None:
    """Half as many rows again after the change, in steps a fifth longer."""
    group = RUN.groups[0]
    later = group.steps >= 20
    num_rows = np.where(later[:, None], [[30, 66]], group.num_rows)
    step_s = np.where(later, 1.2 * 0.128, group.step_s)
    grown = replace(RUN, groups=(replace(group, num_rows=num_rows, step_s=step_s),))
    figures = {figure.label: figure for figure in key_figures(grown)}
    assert figures["step time"].value == "154 ms"
    assert figures["step time"].detail == "1.6 ms per row, 2 ms with the first split and batch"


def test_a_run_that_never_changed_is_compared_with_nothing() -> None:
    group = replace(RUN.groups[0], versions=np.zeros(40, dtype=np.int64))
    figures = {figure.label: figure for figure in key_figures(replace(RUN, groups=(group,), decisions=()))}
    assert figures["step time"].detail == ""


def test_what_was_saved_carries_a_minus_and_the_unknown_a_dash() -> None:
    assert [format_gain(gain) for gain in (0.2, -0.05, None)] == ["−20.0%", "+5.0%", "–"]


def test_a_decision_that_was_advice_only_is_told_from_one_that_never_took_effect() -> None:
    rows = decision_rows(
        [
            replace(RUN.decisions[0], version=None, applied_at_step=None),
            replace(RUN.decisions[0], applied_at_step=None),
        ]
    )
    assert [row[2] for row in rows] == ["not published", "never"]

"""The page on what is attainable shows what the code computes today, and its command writes a sound document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import limits
from experiments._harness import Findings, Settings
from experiments._late import late_row
from experiments._page import fill_page, main
from experiments._rules import rule_rows
from experiments.limits import attainable_row, efficiency_rows

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def page_rows(name):
    """The rows of one table of the page, as columns to cells."""
    found = re.search(rf"<!-- begin {name} -->\n\n(.*?)\n<!-- end {name} -->", PAGE.read_text(), flags=re.DOTALL)
    assert found, f"no table {name!r} in {PAGE}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def cells(row, without=()):
    return {key: "" if value is None else str(value) for key, value in row.items() if key not in without}


@pytest.mark.parametrize(
    ("workload", "cluster"),
    [
        ("resnet50", "2xT4,2xV100"),
        ("resnet50", "8xT4,8xV100-gavel"),
        ("resnet18", "6xT4,6xV100-gavel"),
        ("deepspeech2", "4xT4,4xV100"),
    ],
)
def test_rows_of_the_page_are_what_the_code_computes(workload, cluster):
    rows = page_rows(f"attainable workload={workload}")
    shown = next(row for row in rows if row["cluster"] == cluster)
    assert shown == cells(attainable_row(workload, cluster), without=["workload"])


def test_the_page_has_every_cluster_once():
    for workload in ("resnet50", "resnet18"):
        clusters = [row["cluster"] for row in page_rows(f"attainable workload={workload}")]
        assert len(set(clusters)) == len(clusters)
        for other in ("V100", "V100-gavel"):
            assert {f"{half}xT4,{half}x{other}" for half in (2, 4, 6, 8)} <= set(clusters)


def test_epochs_of_the_page_are_what_the_code_computes():
    assert page_rows("epochs") == [cells(row) for row in efficiency_rows()]


def test_rules_of_the_page_are_what_the_code_computes_and_no_condition_is_free():
    rows = rule_rows()
    assert page_rows("rules") == [cells(row) for row in rows]
    for row in rows:
        lost = [value for key, value in row.items() if key.startswith("phi>")]
        assert lost == sorted(lost, reverse=True)
        assert lost[-1] >= 0


def test_a_row_on_lateness_is_what_the_code_computes():
    shown = next(row for row in page_rows("late") if (row["cluster"], row["per_1000"]) == ("2xT4,2xV100", "2.4"))
    assert shown == cells(late_row("2xT4,2xV100", int(shown["B"]), 2.4, Settings()))


def test_being_late_costs_more_the_later_and_the_more_often():
    rows = page_rows("late")
    assert len(rows) == 4 * 2 * 3
    for row in rows:
        costs = [float(row[f"late_{delay}_pct"]) for delay in (5, 10, 12, 20)] + [float(row["never_pct"])]
        assert costs == sorted(costs)
        assert float(row["late_10_low"]) <= float(row["late_10_pct"]) <= float(row["late_10_high"])
    by_rate = [float(row["late_10_pct"]) for row in rows[:3]]
    assert by_rate == sorted(by_rate)


def test_a_page_is_filled_between_its_comments_only():
    findings = Findings(figures={}, tables={"t": [{"a": "x", "b": 1.5}, {"a": "y", "b": None}]})
    page = "before\n<!-- begin t -->old<!-- end t -->\nmid\n<!-- begin t a=y -->\n<!-- end t a=y -->\nafter"
    filled = fill_page(page, findings)
    assert "| a | b |\n| --- | ---: |\n| x | 1.5 |\n| y |  |\n" in filled
    assert "<!-- begin t a=y -->\n\n| b |\n" in filled
    assert "old" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert fill_page(filled, findings) == filled
    assert fill_page(page, Findings(figures={}, tables={})) == page


def test_the_command_writes_a_document_and_fills_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "_MIXES", limits._MIXES[:16])
    monkeypatch.setattr(limits, "late_rows", lambda settings: [late_row("2xT4,2xV100", 1024, 2.4, settings)])
    page, target = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("<!-- begin late -->\n<!-- end late -->\n")
    main("limits", limits.measure, ["--json", str(target), "--quick", "--page", str(page)])
    capsys.readouterr()
    found = json.loads(target.read_text())
    assert found["name"] == "limits"
    assert found["command"].startswith("python -m experiments.limits")
    assert set(found["tables"]) == {"attainable", "epochs", "rules", "late"}
    assert found["figures"]["oracle_vs_bsp256_resnet50_8_pct"] < -50
    assert "2xT4,2xV100" in page.read_text()

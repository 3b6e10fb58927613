"""The experiment on the report's estimates: a row of each of its tables."""

from __future__ import annotations

from experiments.report_estimates import foretold_rows, saving_row


def test_a_quiet_worlds_row_is_covered_and_near() -> None:
    row = saving_row("dedicated", 0.0, range(1))
    assert row["covered_pct"] == 100.0
    assert row["covered_low_pct"] < 100.0
    assert row["worst_error_points"] < 1.0
    assert row["ledger_worst_part_pct"] < 1.0


def test_what_is_foretold_has_a_row_for_each_source_and_policy(monkeypatch) -> None:
    monkeypatch.setattr("experiments.report_estimates.NUM_STEPS", 200)
    rows = foretold_rows(0.0, range(1))
    assert len({(row["from"], row["policy"]) for row in rows}) == len(rows) == 10
    assert all(row["worst_error_pct"] < 3 for row in rows if row["from"] == "rex")

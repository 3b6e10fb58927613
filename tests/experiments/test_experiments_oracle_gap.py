"""How far a method is from the oracle: parts that add up, on a run short enough for a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.lab import trace
from experiments.oracle_gap import World, gap_row
from rex_ray.scenario import load_learning

LEARNING = load_learning("resnet18")
SHARES = ("sensing_pct", "lag_pct", "spline_pct", "exploration_pct", "unsplit_pct")
PARTS = (*SHARES, "growth_pct", "rate_pct")
WORLD = World(workload="resnet18", cluster="2xT4,2xV100-gavel")


@pytest.fixture(autouse=True)
def short_way(monkeypatch):
    """A fortieth of the way to the target."""
    short = replace(LEARNING, progress_rows=LEARNING.progress_rows / 40)
    monkeypatch.setattr(trace, "load_learning", lambda workload: short)


def shares_pct(row) -> float:
    return sum(row[part] for part in SHARES)


def test_parts_of_a_gap_add_up_and_bsp_loses_by_its_equal_shares_and_its_batch():
    row = gap_row(WORLD, "bsp", 1)
    assert sum(row[part] for part in PARTS) == pytest.approx(row["gap_pct"], abs=0.3)
    assert row["unsplit_pct"] == pytest.approx(shares_pct(row), abs=0.1)
    assert row["unsplit_pct"] > 5
    assert row["growth_pct"] > 1
    assert row["rate_pct"] == pytest.approx(0, abs=0.1)  # at its reference batch, its rate is right
    assert row["lowest"] == row["gap_pct"] == row["highest"] == row["delayed_pct"]


def test_balancing_wins_back_most_of_what_equal_shares_lose():
    bsp, rex = gap_row(WORLD, "bsp", 1), gap_row(WORLD, "rex", 1)
    assert 0 <= shares_pct(rex) < 0.4 * shares_pct(bsp)
    assert rex["gap_pct"] < bsp["gap_pct"]


def test_shares_that_ignore_slowdowns_are_seen_to_be_late():
    slowed = replace(WORLD, per_1000=5.0)
    quiet, late = gap_row(WORLD, "dlb", 1), gap_row(slowed, "dlb", 1)
    assert quiet["sensing_pct"] == 0
    assert late["sensing_pct"] > 1
    assert late["delayed_pct"] < late["gap_pct"]

"""How far a method is from the oracle: parts that add up, on a run short enough for a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import oracle_gap
from experiments.oracle_gap import gap_row
from rex_ray.scenario import load_learning

LEARNING = load_learning("resnet18")
PARTS = ("batch_pct", "split_pct", "rate_pct")


@pytest.fixture(autouse=True)
def short_way(monkeypatch):
    """A fortieth of the way to the target."""
    short = replace(LEARNING, progress_rows=LEARNING.progress_rows / 40)
    monkeypatch.setattr(oracle_gap, "load_learning", lambda workload: short)


def method(name):
    return next(method for method in oracle_gap._METHODS if method.name == name)


def test_parts_of_a_gap_add_up_and_bsp_loses_by_batch_and_split():
    world = oracle_gap._World(workload="resnet18", cluster="2xT4,2xV100-gavel")
    row = gap_row(world, method("bsp 256"), 1)
    assert sum(row[part] for part in PARTS) == pytest.approx(row["gap_pct"], abs=0.2)
    assert row["split_pct"] > 5
    assert row["batch_pct"] > 1
    assert row["rate_pct"] == pytest.approx(0, abs=0.1)  # at its reference batch, its rate is right
    assert row["lowest"] == row["gap_pct"] == row["highest"]


def test_balancing_wins_back_most_of_what_the_split_loses():
    world = oracle_gap._World(workload="resnet18", cluster="2xT4,2xV100-gavel")
    bsp, rex = gap_row(world, method("bsp 256"), 1), gap_row(world, method("rex"), 1)
    assert 0 <= rex["split_pct"] < 0.4 * bsp["split_pct"]
    assert rex["gap_pct"] < bsp["gap_pct"]


def test_a_split_that_ignores_slowdowns_is_seen_to_lose_by_them():
    quiet = oracle_gap._World(workload="resnet18", cluster="2xT4,2xV100-gavel")
    slowed = replace(quiet, per_1000=5.0)
    assert gap_row(slowed, method("bsp 256"), 1)["split_pct"] > gap_row(quiet, method("bsp 256"), 1)["split_pct"]

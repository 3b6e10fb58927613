"""Cells: equal ones give equal results, and the controls stand where the limits say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.lab import sgd
from experiments.lab.cells import Cell, Result
from experiments.lab.fixed import BATCH_OPTION, FIXED, PILOT_SEEDS, chosen, fixed_shares, pilot_cells
from experiments.lab.play import play
from rex_ray.core.errors import ConfigError
from rex_ray.scenario import load_learning, load_network, load_profile, parse_cluster
from rex_ray.sim import Limits, StepTimes

CELL = Cell(method="bsp", workload="resnet18", cluster="2xT4,2xV100-gavel", noise="quiet")


@pytest.fixture(scope="module")
def limits():
    profiles = [load_profile(device, "resnet18") for device in parse_cluster(CELL.cluster)]
    return Limits(load_learning("resnet18"), StepTimes(profiles, load_network("resnet18")), 256)


def test_a_result_survives_its_file():
    result = play(replace(CELL, method="oracle"))
    assert Result.from_json(result.to_json()) == result


@pytest.mark.parametrize("method", ["oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced"])
def test_without_noise_the_controls_take_what_the_limits_say(limits, method):
    shortest_s = {
        "best_fixed_equal": limits.best_fixed_equal.time_s,
        "best_fixed_balanced": limits.best_fixed_balanced.time_s,
    }.get(method, limits.oracle_s)
    cell = replace(CELL, method=method)
    if method.startswith("best_fixed"):
        batch = getattr(limits, method).global_batch_size
        cell = replace(cell, options={BATCH_OPTION: batch})
        assert sum(fixed_shares(cell)) == batch
    result = play(cell)
    # Whole steps, and an epoch's last batch in the same shares, are what the integral leaves out.
    assert result.total_s == pytest.approx(shortest_s, rel=0.02)
    assert result.tta_s == result.total_s


def test_no_control_beats_the_oracle_and_being_late_costs():
    cell = replace(CELL, noise="dedicated", disturbance="random:2.4")
    oracle, late, balanced = (
        play(replace(cell, method=method, options=options)).total_s
        for method, options in [("oracle", {}), ("oracle_delayed", {}), ("best_fixed_balanced", {BATCH_OPTION: 636})]
    )
    assert oracle < late < balanced


def test_the_sweep_is_on_pilot_seeds_and_takes_the_fastest():
    cell = replace(CELL, method="best_fixed_equal")
    pilots = pilot_cells(cell)
    assert {pilot.seed for pilot in pilots} == set(PILOT_SEEDS)
    batches = {pilot.options[BATCH_OPTION] for pilot in pilots}
    assert {256, 512} <= batches
    blank = play(replace(cell, options={BATCH_OPTION: 256}))
    found = {
        pilot.key: replace(blank, tta_s=100.0 if pilot.options[BATCH_OPTION] == 512 else 200.0, total_s=200.0)
        for pilot in pilots
    }
    settled, swept_s = chosen(cell, found)
    assert settled == replace(cell, options={BATCH_OPTION: 512})
    assert swept_s == 200.0 * len(batches)
    with pytest.raises(ConfigError, match="pilot seeds"):
        pilot_cells(replace(cell, seed=PILOT_SEEDS[0]))


def test_a_batch_that_misses_the_target_is_chosen_last():
    cell = replace(CELL, method="best_fixed_equal", learner="digits", global_batch_size=32)
    pilots = pilot_cells(cell)
    blank = play(replace(CELL, method="oracle"))
    found = {
        pilot.key: replace(blank, tta_s=None if pilot.options[BATCH_OPTION] != 64 else 1e6, final_metric=0.9)
        for pilot in pilots
    }
    assert chosen(cell, found)[0].options[BATCH_OPTION] == 64


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 128), (False, 32)])
def test_where_all_batches_miss_the_nearest_to_the_target_is_chosen(monkeypatch, higher_is_better, best):
    cell = replace(CELL, method="best_fixed_equal", learner="digits", global_batch_size=32)
    monkeypatch.setattr("experiments.lab.fixed._higher_is_better", lambda _: higher_is_better)
    pilots = pilot_cells(cell)
    assert max(pilot.options[BATCH_OPTION] for pilot in pilots) >= 64
    blank = play(replace(CELL, method="oracle"))
    found = {
        pilot.key: replace(blank, tta_s=None, final_metric={32: 40.0, 128: 50.0}.get(pilot.options[BATCH_OPTION], 45.0))
        for pilot in pilots
    }
    largest = max(pilot.options[BATCH_OPTION] for pilot in pilots)
    assert chosen(cell, found)[0].options[BATCH_OPTION] == min(best, largest)


@pytest.mark.parametrize("method", ["bsp", "rex", "oracle_delayed", "best_fixed_balanced"])
def test_real_training_takes_the_time_of_its_steps_whoever_decides(method, tmp_path, monkeypatch):
    monkeypatch.setattr(sgd, "PATHS", tmp_path)
    options = {BATCH_OPTION: 64} if method in FIXED else {}
    cell = replace(CELL, method=method, learner="digits", global_batch_size=64, options=options, charges="measured")
    result = play(cell)
    assert result.num_rows == 24 * 1437
    assert len(result.metrics) == len(result.evaluated_s) == 48
    assert result.evaluated_s[-1] == pytest.approx(result.total_s)
    assert result.final_metric == result.metrics[-1]
    first = next(k for k, metric in enumerate(result.metrics) if metric >= 0.9)
    assert result.tta_s == pytest.approx(result.evaluated_s[first])
    assert (result.charged_s > 0) == (method == "rex")
    assert play(cell) == result


def test_what_there_is_not_is_named():
    for wrong in (replace(CELL, method="rexx"), replace(CELL, learner="mnist"), replace(CELL, search="yes")):
        with pytest.raises(ConfigError):
            play(wrong)
    tight = replace(CELL, method="best_fixed_equal", global_batch_size=2048)
    with pytest.raises(ConfigError, match="2048"):
        play(tight)

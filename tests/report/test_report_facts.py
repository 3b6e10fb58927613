"""What is computed of a run, against simulated worlds whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments._known_runs import DEVICES, as_run, play, true_equal_s, world
from rex_ray.report.computing.quantiles import quartiles_by
from rex_ray.report.computing.run_curves import fit_run
from rex_ray.report.computing.run_facts import run_facts
from rex_ray.report.facts import RunFacts
from rex_ray.report.reading.schema import RunData
from rex_ray.scenario import Episode, NoiseModel, load_profile, random_episodes
from rex_ray.sim.regret import ledger

SLOW_T4 = Episode(rank=0, start_step=120, num_steps=90, factor=1.8)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-1e3, 1e3)), min_size=1, max_size=60),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_quartiles_of_many_groups_are_numpys(pairs) -> None:
    keys, values = np.array([key for key, _ in pairs]), np.array([value for _, value in pairs])
    found = quartiles_by(keys, values)
    assert found.keys.tolist() == sorted(set(keys.tolist()))
    for at, key in enumerate(found.keys):
        mine = values[keys == key]
        assert found.counts[at] == mine.size
        expected = np.quantile(mine, [0.25, 0.5, 0.75])
        assert np.allclose([found.low[at], found.middle[at], found.high[at]], expected)


@pytest.mark.parametrize("policy", ["rex", "bsp"])
def test_a_runs_time_is_the_sum_of_its_ledger_and_of_what_no_split_avoids(policy: str) -> None:
    run = as_run(policy, play(policy, world(SLOW_T4, seed=1), 400))
    facts = run_facts(run)
    parts = [row.seconds for row in (*facts.ledger, *facts.unavoidable)]
    total_s = float(run.groups[0].step_s.sum())
    assert sum(parts) == pytest.approx(total_s, rel=1e-12)
    assert facts.oracle_s == pytest.approx(sum(row.seconds for row in facts.unavoidable), rel=1e-12)
    assert sum(row.fraction for row in (*facts.ledger, *facts.unavoidable)) == pytest.approx(1.0)
    assert min(row.seconds for row in facts.unavoidable) >= 0


@pytest.mark.parametrize("policy", ["rex", "dlb"])
def test_the_ledger_of_a_journal_is_that_of_the_true_world(policy: str) -> None:
    scenario = world(SLOW_T4, seed=2)
    played = play(policy, scenario, 500)
    true = ledger(played, scenario, oracle_s=0.0).parts()
    facts = run_facts(as_run(policy, played))
    found = {row.name: row.seconds for row in facts.ledger}
    for name in ("sensing", "lag", "spline", "exploration"):
        assert found.get(name, 0.0) == pytest.approx(true[name], abs=0.008 * played.total_s), name


def test_equal_shares_save_nothing_exactly_and_lose_what_they_do_not_split() -> None:
    run = as_run("bsp", play("bsp", world(SLOW_T4, seed=1), 300))
    facts = run_facts(run)
    assert facts.saving is not None
    assert (facts.saving.fraction, facts.saving.low, facts.saving.high) == (0.0, 0.0, 0.0)
    assert facts.saving.equal_s == facts.saving.run_s == pytest.approx(float(run.groups[0].step_s.sum()))
    assert facts.overhead_fraction == 0.0
    assert max(facts.ledger, key=lambda row: row.seconds).name == "unsplit"


def test_curves_are_the_devices_although_a_slow_worker_ran_other_shares() -> None:
    """A worker that is slow and has fewer rows for it must not pass for one on a flat curve."""
    run = as_run("rex", play("rex", world(SLOW_T4, seed=3), 400))
    assert len({tuple(rows) for rows in run.groups[0].num_rows.tolist()}) > 2
    for fit in run_facts(run).fits:
        true = load_profile(fit.device, "resnet50").own_time_s(fit.rows)
        curve = np.interp(fit.rows, fit.fitted_rows, fit.fitted_s)
        assert np.allclose(curve, true, rtol=0.03), fit.device
        assert (fit.low_s <= fit.own_s).all()
        assert (fit.own_s <= fit.high_s).all()


def test_lasting_slowdowns_are_found_where_they_were() -> None:
    run = as_run("rex", play("rex", world(SLOW_T4, seed=3), 400))
    curves = fit_run(run)
    assert curves is not None
    level = curves.groups[0].level
    true = np.ones_like(level)
    true[120:210, 0] = 1.8
    # A change is told to some steps' accuracy, half a window.
    off = np.abs(level / true - 1) > 0.1
    assert off.sum() <= 24
    assert np.median(level[130:200, 0]) == pytest.approx(1.8, rel=0.04)


def test_a_short_disturbance_is_no_slowdown() -> None:
    blip = Episode(rank=2, start_step=150, num_steps=2, factor=3.0)
    curves = fit_run(as_run("bsp", play("bsp", world(blip, seed=1), 300)))
    assert curves is not None
    assert (curves.groups[0].level == 1.0).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_interval_covers_the_true_saving_in_most_worlds() -> None:
    """Eight worlds, with and without slowdowns, two strengths of noise; ``experiments.report_estimates`` has more."""
    covered, errors = [], []
    for seed in range(8):
        rate = 1.5 * (seed % 2)
        episodes = random_episodes(num_workers=4, num_steps=300, per_1000_worker_steps=rate, seed=seed)
        noise = NoiseModel.dedicated() if seed % 4 < 2 else NoiseModel.shared()
        scenario = world(*episodes, seed=seed, noise=noise)
        played = play("rex", scenario, 300)
        run = as_run("rex", played)
        saving = run_facts(run).saving
        assert saving is not None
        true = 1.0 - float(played.step_s.sum()) / true_equal_s(run, scenario)
        covered.append(saving.low <= true <= saving.high)
        errors.append(saving.fraction - true)
    assert sum(covered) >= 6, (covered, errors)
    assert np.abs(errors).max() < 0.05
    assert abs(float(np.mean(errors))) < 0.015


def test_the_true_saving_is_that_of_a_bsp_run_in_the_same_world() -> None:
    scenario = world(SLOW_T4, seed=4)
    played = play("rex", scenario, 300)
    run = as_run("rex", played)
    equal = play("bsp", scenario, 300)
    assert true_equal_s(run, scenario) == pytest.approx(float(equal.step_s.sum()), rel=1e-9)
    saving = run_facts(run).saving
    assert saving is not None
    true = 1.0 - played.total_s / equal.total_s
    assert saving.fraction == pytest.approx(true, abs=0.02)


def test_facts_are_the_same_for_the_same_run() -> None:
    run = as_run("rex", play("rex", world(seed=5), 200))
    assert run_facts(run).saving == run_facts(run).saving


def test_rii_falls_as_shares_get_right_and_is_within_bounds() -> None:
    facts = run_facts(as_run("rex", play("rex", world(seed=5), 400)))
    assert facts.rii is not None
    assert facts.rii_start is not None
    assert facts.rii_end is not None
    assert 0 <= facts.rii_end < facts.rii_start < 1
    assert facts.rii_end < facts.rii < facts.rii_start
    assert facts.rii_steps.shape == facts.rii_values.shape
    assert (np.diff(facts.rii_steps) > 0).all()
    assert facts.waiting_fraction is not None
    assert 0 <= facts.waiting_fraction < 0.1


def test_a_run_without_clean_steps_has_no_facts() -> None:
    run = as_run("rex", play("rex", world(), 3))
    assert run_facts(run) == RunFacts() or run_facts(run).saving is None
    assert run_facts(RunData(name="", policy="rex", outcome="unfinished")).saving is None


def test_what_a_switch_costs_is_overhead_and_no_saving() -> None:
    """Steps that a new shape makes ten times as long are the change's, and equal shares would not have had them."""
    scenario = world(seed=6)
    played = play("rex", scenario, 300)
    run = as_run("rex", played)
    (group,) = run.groups
    switches = np.flatnonzero(np.diff(group.versions) != 0) + 1
    own_s = group.own_s.copy()
    own_s[switches] *= 10
    costly = replace(group, own_s=own_s, step_s=own_s.max(axis=1) + (group.step_s - group.own_s.max(axis=1)))
    before, after = run_facts(run), run_facts(replace(run, groups=(costly,)))
    extra_s = float((costly.step_s - group.step_s).sum())
    assert after.saving is not None
    assert before.saving is not None
    assert after.saving.equal_s == pytest.approx(before.saving.equal_s, rel=1e-3)
    assert after.overhead_fraction is not None
    assert after.overhead_fraction * after.saving.run_s == pytest.approx(extra_s, rel=0.05)
    found = {row.name: row.seconds for row in after.ledger}
    assert found["switching"] == pytest.approx(extra_s, rel=0.05)


def test_devices_of_the_worlds_are_the_fits() -> None:
    facts = run_facts(as_run("rex", play("rex", world(seed=5), 200)))
    assert [fit.device for fit in facts.fits] == sorted(set(DEVICES))


def test_the_ledger_keeps_groups_apart_that_run_the_same_steps() -> None:
    """A smaller group that resumes from a save decides within the steps of the group before it."""
    run = as_run("rex", play("rex", world(seed=6), 200))
    (first,) = run.groups
    later = int(first.versions.max()) + 1
    second = replace(
        first,
        generation="second",
        devices=first.devices[:2],
        steps=first.steps + 50,
        versions=later + (first.steps >= 100),
        num_rows=first.num_rows[:, :2],
        own_s=first.own_s[:, :2],
        problem=None,
    )
    moved = replace(run.decisions[-1], decided_at_step=149, version=later + 1, after=(100, 156), applied_at_step=150)
    facts = run_facts(replace(run, groups=(first, second), decisions=(*run.decisions, moved)))
    assert facts.oracle_s is not None
    parts_s = facts.oracle_s + sum(row.seconds for row in facts.ledger)
    assert parts_s == pytest.approx(float(first.step_s.sum() + second.step_s.sum()))
    alone = {row.name: row.seconds for row in run_facts(run).ledger}
    assert alone.keys() <= {row.name for row in facts.ledger}

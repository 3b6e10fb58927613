"""Shapes: what each of them does to a step, and that the true optimum is one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.controller import Controller
from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import NoiseModel, StepTimeShape, WorkerTimeline, load_profile, optimal_split, true_optimum
from rex_ray.sim import simulate
from rex_ray.sim.world import mixed_cluster
from rex_ray.worker.emulation import EmulationSpec

T4, V100 = load_profile("T4", "resnet50"), load_profile("V100", "resnet50")

shapes = st.builds(
    StepTimeShape,
    tile_rows=st.sampled_from([1, 2, 3, 8]),
    contention=st.sampled_from([0.0, 0.3, 3.0]),
    hosts=st.sampled_from([(), (0, 0, 1), (0, 1, 0)]),
    loader_rows_per_s=st.sampled_from([None, 30.0, 200.0]),
)


def lines(shape, profiles=(T4, V100, T4), **fields):
    return [
        WorkerTimeline(profile=profile, rank=rank, seed=3, shape=shape, **fields)
        for rank, profile in enumerate(profiles)
    ]


def slowest(timelines, rows, slowdowns=None):
    factors = slowdowns or [1.0] * len(rows)
    return max(line.quiet_time_s(b, rows, slowdown=k) for line, b, k in zip(timelines, rows, factors, strict=True))


@given(st.integers(1, 300))
def test_the_default_shape_changes_nothing(rows):
    plain = lines(StepTimeShape())[0]
    assert plain.quiet_time_s(rows) == float(T4.own_time_s(rows))
    assert plain.own_time(0, rows).data_s == 0.0


@given(st.integers(1, 200), st.sampled_from([8, 32]))
def test_a_tile_costs_the_same_however_full_it_is(rows, tile):
    line = lines(StepTimeShape(tile_rows=tile))[0]
    full = -(-rows // tile) * tile
    assert line.quiet_time_s(rows) == line.quiet_time_s(full) == float(T4.own_time_s(full))


def test_contention_grows_with_the_neighbours_share_and_spares_other_hosts():
    shape = StepTimeShape(contention=0.5, hosts=(0, 0, 1))
    first, second, alone = lines(shape)
    rows = (30, 50, 20)
    assert first.quiet_time_s(30, rows) == pytest.approx(float(T4.own_time_s(30)) * (1 + 0.5 * 0.5))
    assert second.quiet_time_s(50, rows) == pytest.approx(float(V100.own_time_s(50)) * (1 + 0.5 * 0.3))
    assert alone.quiet_time_s(20, rows) == pytest.approx(float(T4.own_time_s(20)))
    assert lines(StepTimeShape(contention=0.5))[2].quiet_time_s(20, rows) == pytest.approx(
        float(T4.own_time_s(20)) * (1 + 0.5 * 0.8)
    )


def test_a_loader_that_cannot_keep_up_is_waited_for():
    line = lines(StepTimeShape(loader_rows_per_s=50.0), time_scale=0.5)[0]
    own = line.own_time(4, 100)
    assert own.total_s == pytest.approx(0.5 * 100 / 50.0)
    assert own.compute_s == pytest.approx(0.5 * float(T4.own_time_s(100)))
    assert own.data_s == pytest.approx(own.total_s - own.compute_s)
    quick = lines(StepTimeShape(loader_rows_per_s=5000.0))[0]
    assert quick.own_time(4, 100).data_s == 0.0


@given(shapes, st.lists(st.integers(1, 90), min_size=3, max_size=3), st.integers(0, 50))
def test_noise_and_parts_add_up_whatever_the_shape(shape, rows, step):
    for line in lines(shape, noise=NoiseModel.shared()):
        own = line.own_time(step, rows[line.rank], rows)
        noise = line.noise.factor(3, line.rank, step)
        assert own.data_s >= 0.0
        assert own.total_s == pytest.approx(noise * line.quiet_time_s(rows[line.rank], rows))
        assert line.own_time_s(step, rows[line.rank], rows) == own.total_s


@given(shapes, st.integers(3, 26), st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=3, max_size=3))
def test_no_split_is_better_than_the_true_optimum(shape, total, slowdowns):
    timelines = lines(shape)
    plan = true_optimum(timelines, total, slowdowns=slowdowns)
    every = ((a, b, total - a - b) for a, b in itertools.product(range(1, total), repeat=2) if total - a - b >= 1)
    best = min(slowest(timelines, rows, slowdowns) for rows in every)
    assert sum(plan.local_batch_sizes) == total
    assert plan.step_time_s == slowest(timelines, plan.local_batch_sizes, slowdowns) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("total", [64, 256, 511])
def test_without_a_shape_it_is_the_exact_split_of_the_profiles(total):
    profiles = (T4, T4, V100, V100)
    plan = true_optimum(lines(StepTimeShape(), profiles), total)
    assert plan.step_time_s == pytest.approx(optimal_split(profiles, total).step_time_s, rel=1e-8)


def test_caps_hold_and_too_many_rows_are_refused():
    timelines = lines(StepTimeShape(tile_rows=8))
    plan = true_optimum(timelines, 30, upper=[4, None, 6]).local_batch_sizes
    assert sum(plan) == 30
    assert plan[0] <= 4
    assert plan[2] <= 6
    with pytest.raises(InfeasibleError, match="no split of 30 rows over 3 workers"):
        true_optimum(timelines, 30, upper=[4, 5, 6])


def test_simulator_and_emulation_play_the_same_shape():
    shape = StepTimeShape(tile_rows=8, contention=0.4, loader_rows_per_s=90.0)
    devices = ("T4", "T4", "V100", "V100")
    scenario = mixed_cluster(devices, "resnet50", global_batch_size=130, shape=shape, seed=5)
    run = simulate(Controller(make_policy("bsp"), seed=0), scenario, num_steps=4)
    spec = EmulationSpec(workload="resnet50", shape=shape, noise=NoiseModel.dedicated(), seed=5)
    rows = tuple(run.steps[0].num_rows.tolist())
    for rank, device in enumerate(devices):
        own = spec.timeline(device, rank).own_time(3, rows[rank], rows)
        assert run.own_s[3][rank] == own.total_s
        assert run.steps[3].data_us[rank] == round(1e6 * own.data_s)
    optimum = true_optimum(scenario.timelines, 130)
    assert spec.optimum(devices, 130).local_batch_sizes == optimum.local_batch_sizes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tile_rows": 0}, "tile_rows"),
        ({"contention": -0.1}, "contention"),
        ({"contention": float("nan")}, "contention"),
        ({"loader_rows_per_s": 0.0}, "loader_rows_per_s"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        StepTimeShape(**fields)


def test_contention_says_what_it_lacks():
    line = lines(StepTimeShape(contention=0.1))[0]
    with pytest.raises(ConfigError, match="pass all_rows"):
        line.quiet_time_s(8)
    with pytest.raises(ConfigError, match="2 hosts for 3 workers"):
        true_optimum(lines(StepTimeShape(contention=0.1, hosts=(0, 1))), 30)

"""The oracle in a world with slowdowns: never behind a late one, and on a quiet world the integral of the limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.core.errors import InfeasibleError
from rex_ray.scenario import (
    Episode,
    NetworkModel,
    NoiseModel,
    StepTimeShape,
    WorkerTimeline,
    load_learning,
    load_network,
    load_profile,
    optimal_split,
    random_episodes,
    true_optimum,
)
from rex_ray.sim.oracle import Limits
from rex_ray.sim.scripted_oracle import ScriptedOracle, oracle_run
from rex_ray.sim.step_times import StepTimes

DEVICES = ("T4", "T4", "V100", "V100")
QUIET = NetworkModel()


def timelines(*episodes, workload="resnet18", **options):
    return [
        WorkerTimeline(profile=load_profile(device, workload), rank=rank, seed=3, episodes=episodes, **options)
        for rank, device in enumerate(DEVICES)
    ]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 30), st.integers(0, 30), st.sampled_from([None, NoiseModel.shared()]))
def test_who_learns_later_is_never_ahead_on_average_and_never_at_all_without_noise(seed, delay, more, noise):
    episodes = random_episodes(num_workers=4, num_steps=300, per_1000_worker_steps=5, seed=seed)
    lines = timelines(*episodes, noise=noise or NoiseModel.quiet())
    early, late, latest = (
        ScriptedOracle(timelines=lines, network=QUIET, num_steps=300, delay_steps=steps).step_s(700)
        for steps in (0, delay, delay + more)
    )
    if noise is None:
        assert (late >= early * (1 - 1e-9)).all()
        assert (latest >= early * (1 - 1e-9)).all()
    else:
        assert late.sum() >= 0.97 * early.sum()


def test_an_event_is_answered_exactly_so_many_steps_late():
    episode = Episode(rank=0, start_step=20, num_steps=30, factor=2.0)
    lines = timelines(episode)
    oracle = ScriptedOracle(timelines=lines, network=QUIET, num_steps=100, delay_steps=10)
    healthy = optimal_split([line.profile for line in lines], 700).local_batch_sizes
    slow = optimal_split([line.profile for line in lines], 700, [2, 1, 1, 1]).local_batch_sizes
    assert healthy != slow
    assert [oracle.shares(700, step) for step in (0, 29, 30, 59, 60, 99)] == [
        healthy, healthy, slow, slow, healthy, healthy,
    ]  # fmt: skip
    step_s = oracle.step_s(700)
    curves = [line.profile for line in lines]
    assert step_s[:20] == pytest.approx(optimal_split(curves, 700).step_time_s)
    assert step_s[20:30] == pytest.approx(2 * float(curves[0].own_time_s(healthy[0])))
    assert step_s[30:50] == pytest.approx(optimal_split(curves, 700, [2, 1, 1, 1]).step_time_s)
    assert step_s[50:60] == pytest.approx(float(curves[1].own_time_s(slow[1])), rel=0.02)
    assert step_s[60:] == pytest.approx(step_s[0])
    never = ScriptedOracle(timelines=lines, network=QUIET, num_steps=100, delay_steps=None)
    assert {never.shares(700, step) for step in range(100)} == {healthy}


def test_pieces_of_a_run_are_the_run():
    episodes = random_episodes(num_workers=4, num_steps=200, per_1000_worker_steps=10, seed=5)
    lines = timelines(*episodes, noise=NoiseModel.dedicated())
    oracle = ScriptedOracle(timelines=lines, network=load_network("resnet18"), num_steps=200, delay_steps=7)
    whole = oracle.step_s(512)
    parts = [oracle.step_s(512, first, 13) for first in range(0, 200, 13)]
    assert np.concatenate(parts) == pytest.approx(whole)
    assert sum(steps for steps, _ in oracle.pieces()) == 200


def test_times_are_those_that_the_engine_would_play():
    episodes = random_episodes(num_workers=4, num_steps=120, per_1000_worker_steps=10, seed=8)
    lines = timelines(*episodes, noise=NoiseModel.shared(), speed_factor=1.1, time_scale=0.5)
    oracle = ScriptedOracle(timelines=lines, network=QUIET, num_steps=120)
    step_s = oracle.step_s(600)
    for step in range(0, 120, 7):
        rows = oracle.shares(600, step)
        assert step_s[step] == pytest.approx(max(line.own_time_s(step, rows[line.rank]) for line in lines))


def test_a_shaped_world_has_its_true_optimum():
    lines = timelines(shape=StepTimeShape(tile_rows=32, contention=0.3))
    oracle = ScriptedOracle(timelines=lines, network=QUIET, num_steps=5)
    assert oracle.step_s(600) == pytest.approx(true_optimum(lines, 600).step_time_s)


def test_without_a_script_the_run_to_the_target_is_the_integral():
    learning, network = load_learning("resnet18"), load_network("resnet18")
    lines = timelines()
    limits = Limits(learning, StepTimes([line.profile for line in lines], network), 256)
    run = oracle_run(lines, network, learning, 256)
    assert run.total_s == pytest.approx(limits.oracle_s, rel=2e-3)
    assert (run.global_batch_size.min(), run.global_batch_size.max()) == pytest.approx(limits.oracle_batches, rel=0.05)
    slowed = oracle_run(timelines(Episode(rank=0, start_step=0, num_steps=None, factor=2.0)), network, learning, 256)
    assert slowed.total_s > run.total_s
    assert slowed.step_s.size == run.step_s.size


@pytest.mark.parametrize("dataset_size", [2500, 50_000])
def test_with_epochs_every_last_step_has_the_rest_and_costs_time(dataset_size):
    learning, network = load_learning("resnet18"), load_network("resnet18")
    endless = oracle_run(timelines(), network, learning, 256)
    run = oracle_run(timelines(), network, learning, 256, dataset_size=dataset_size)
    ends = np.cumsum(run.global_batch_size) % dataset_size == 0
    assert ends.sum() == run.global_batch_size.sum() // dataset_size
    within = np.delete(run.global_batch_size, np.flatnonzero(ends))
    assert within.min() >= 256
    assert endless.total_s < run.total_s < 1.5 * endless.total_s


@pytest.mark.parametrize("shape", [StepTimeShape(), StepTimeShape(tile_rows=12), StepTimeShape(contention=0.4)])
def test_in_multiples_the_oracle_is_the_best_of_all_splits_in_them(shape):
    lines = timelines(Episode(rank=1, start_step=0, num_steps=9, factor=2.0), shape=shape)[:3]
    oracle = ScriptedOracle(timelines=lines, network=QUIET, num_steps=9, local_batch_multiple=8)
    free = ScriptedOracle(timelines=lines, network=QUIET, num_steps=9)
    shares = oracle.shares(64, 0)
    assert sum(shares) == 64
    assert all(rows % 8 == 0 for rows in shares)
    in_eights = [(8 * a, 8 * b, 64 - 8 * a - 8 * b) for a in range(1, 7) for b in range(1, 8 - a)]

    def slowest_s(rows):
        slow = (1.0, 2.0, 1.0)
        return max(lines[rank].quiet_time_s(rows[rank], rows, slowdown=slow[rank]) for rank in range(3))

    assert slowest_s(shares) == pytest.approx(min(map(slowest_s, in_eights)))
    assert slowest_s(free.shares(64, 0)) <= slowest_s(shares) * (1 + 1e-9)
    assert sum(oracle.shares(60, 0)) == 60, "an epoch's last batch may be anything"


def test_in_multiples_every_batch_of_a_run_to_the_target_is_one():
    learning, lines = load_learning("resnet18"), timelines()
    free, run = (oracle_run(lines, QUIET, learning, 256, local_batch_multiple=multiple) for multiple in (1, 32))
    assert (run.global_batch_size % 32 == 0).all()
    assert run.global_batch_size.max() > 256
    assert free.total_s <= run.total_s * (1 + 1e-9) < 1.1 * free.total_s


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(InfeasibleError):
        ScriptedOracle(timelines=timelines(workload="resnet50"), network=QUIET, num_steps=5).step_s(5000)

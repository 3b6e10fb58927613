"""Noise, episodes and timelines: pure functions of (seed, rank, step), with the measured statistics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.scenario import (
    Episode,
    NoiseModel,
    StepTimeShape,
    WorkerTimeline,
    load_profile,
    random_episodes,
    rotating_episodes,
    slowdown_factor,
)
from rex_ray.scenario.noise import _block_factors

T4 = load_profile("T4", "resnet50")
LOADED = StepTimeShape(loader_rows_per_s=400.0)


@pytest.mark.parametrize(("noise", "sd"), [(NoiseModel.dedicated(), 0.01), (NoiseModel(sd=0.04), 0.04)])
def test_noise_has_the_stated_spread_and_memory_also_across_blocks(noise, sd):
    values = np.array([noise.factor(3, 1, step) for step in range(40_000)])
    assert values.mean() == pytest.approx(1.0, abs=0.003)
    assert values.std() == pytest.approx(sd, rel=0.05)
    lag = [np.corrcoef(values[:-k], values[k:])[0, 1] for k in (1, 2)]
    assert lag == pytest.approx([0.6, 0.36], abs=0.03)
    edges = np.arange(256, values.size, 256)
    assert np.corrcoef(values[edges - 1], values[edges])[0, 1] == pytest.approx(0.6, abs=0.2)


@given(st.integers(0, 2**40), st.integers(0, 64), st.lists(st.integers(0, 5000), min_size=2, max_size=12))
def test_a_step_is_the_same_however_it_is_asked_for(seed, rank, steps):
    noise = NoiseModel.shared()
    _block_factors.cache_clear()
    forward = [noise.factor(seed, rank, step) for step in steps]
    _block_factors.cache_clear()
    backward = [noise.factor(seed, rank, step) for step in reversed(steps)]
    assert forward == backward[::-1]
    assert min(forward) > 0


def test_ranks_and_seeds_have_noise_of_their_own():
    noise = NoiseModel.shared()
    series = {(s, r): tuple(noise.factor(s, r, step) for step in range(50)) for s in (0, 1) for r in (0, 1)}
    assert len(set(series.values())) == 4


def test_spikes_come_as_often_as_stated_and_the_first_step_is_slow_once():
    noise = NoiseModel(sd=0.0, spike_probability=0.02, spike_factor=3.0, first_step_factor=9.0)
    values = np.array([noise.factor(1, 0, step) for step in range(1, 20_000)])
    assert set(values) == {1.0, 3.0}
    assert (values == 3.0).mean() == pytest.approx(0.02, abs=0.004)
    assert noise.factor(1, 0, 0) in (9.0, 27.0)
    assert NoiseModel.quiet().factor(5, 5, 5) == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"sd": -0.1},
        {"sd": 0.5},
        {"rho": 0.99},
        {"spike_probability": 1.5},
        {"spike_factor": 0.0},
        {"first_step_factor": float("nan")},
    ],
)
def test_noise_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="noise needs"):
        NoiseModel(**bad)


def test_a_scripted_episode_slows_its_rank_for_its_steps():
    script = (
        Episode(rank=1, start_step=10, num_steps=5, factor=2.0),
        Episode(rank=None, start_step=12, num_steps=None, factor=1.5),
    )
    assert [slowdown_factor(script, 1, step) for step in (9, 10, 12, 14, 15, 999)] == [1.0, 2.0, 3.0, 3.0, 1.5, 1.5]
    assert [slowdown_factor(script, 0, step) for step in (10, 12)] == [1.0, 1.5]


@pytest.mark.parametrize("bad", [{"start_step": -1}, {"num_steps": 0}, {"factor": 0.0}, {"factor": float("nan")}])
def test_an_episode_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="an episode needs"):
        Episode(**{"rank": 0, "start_step": 0, "num_steps": 1, "factor": 1.5} | bad)


def test_random_episodes_have_the_measured_rate_length_and_factor():
    drawn = random_episodes(num_workers=8, num_steps=100_000, per_1000_worker_steps=2.4, seed=4)
    assert len(drawn) == pytest.approx(1920, rel=0.1)
    lengths = np.array([episode.num_steps for episode in drawn])
    assert np.median(lengths) == pytest.approx(12, rel=0.1)
    assert np.quantile(lengths, 0.9) == pytest.approx(100, rel=0.2)
    factors = np.array([episode.factor for episode in drawn])
    assert ((factors >= 1.2) & (factors < 4.3)).all()
    assert (factors < 1.5).mean() == pytest.approx(0.85, abs=0.03)
    assert (factors > 2.4).mean() == pytest.approx(0.05, abs=0.02)
    assert drawn == random_episodes(num_workers=8, num_steps=100_000, per_1000_worker_steps=2.4, seed=4)
    assert random_episodes(num_workers=8, num_steps=100, per_1000_worker_steps=0.0, seed=4) == ()


def test_the_rotating_disturbance_visits_every_worker():
    script = rotating_episodes(num_workers=3, num_steps=180)
    assert [episode.rank for episode in script] == [0, 1, 2, 0, 1, 2]
    assert all(sum(slowdown_factor(script, rank, step) > 1 for rank in range(3)) == 1 for step in range(180))


def test_a_timeline_multiplies_profile_noise_episodes_and_scales():
    noise = NoiseModel.shared()
    script = (Episode(rank=2, start_step=5, num_steps=3, factor=2.0),)
    line = WorkerTimeline(profile=T4, rank=2, seed=9, noise=noise, episodes=script, speed_factor=1.1, time_scale=0.1)
    for step in (4, 6):
        factor = (2.0 if step == 6 else 1.0) * noise.factor(9, 2, step)
        assert line.own_time_s(step, 64) == pytest.approx(float(T4.own_time_s(64)) * 0.11 * factor)
    assert line.own_time_s(6, 0) == 0.0
    assert line.quiet_time_s(64) == pytest.approx(float(T4.own_time_s(64)) * 0.11)


def test_two_timelines_of_one_scenario_agree_whoever_reads_them():
    def line(rank):
        return WorkerTimeline(profile=T4, rank=rank, seed=1, noise=NoiseModel.dedicated())

    assert [line(0).own_time_s(s, 33) for s in range(300)] == [line(0).own_time_s(s, 33) for s in range(300)]
    assert line(0).own_time_s(7, 33) != line(1).own_time_s(7, 33)


@given(
    script=st.lists(
        st.builds(
            Episode,
            rank=st.sampled_from([None, 0, 1]),
            start_step=st.integers(0, 300),
            num_steps=st.none() | st.integers(1, 100),
            factor=st.floats(0.1, 9.0),
        ),
        max_size=8,
    ),
    start=st.integers(0, 300),
    length=st.integers(1, 300),
)
def test_a_stretch_of_a_workers_times_is_its_steps_one_by_one(script, start, length):
    noise = NoiseModel(sd=0.05, rho=0.7, spike_probability=0.01, first_step_factor=9.0)
    line = WorkerTimeline(profile=T4, rank=1, seed=4, noise=noise, episodes=tuple(script), shape=LOADED)
    steps = range(start, start + length)
    assert line.slowdowns(start, start + length).tolist() == [slowdown_factor(script, 1, step) for step in steps]
    assert noise.factors(4, 1, start, start + length).tolist() == [noise.factor(4, 1, step) for step in steps]
    data_s, compute_s = line.own_times(start, start + length, 64)
    single = [line.own_time(step, 64) for step in steps]
    assert data_s.tolist() == [time.data_s for time in single]
    assert compute_s.tolist() == [time.compute_s for time in single]
    assert not any(map(np.any, line.own_times(start, start + length, 0)))

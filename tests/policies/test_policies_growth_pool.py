"""The noise scale in use: fading lines that are what least squares give, and that lead to the present without bias."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.lr_scaling import adascale_gain
from rex_ray.core.noise_scale import MIN_BLOCKS, moments_of_sums
from rex_ray.policies.growth.pool import AHEAD_BLOCKS, LONG, QUICK, FadingLine, NoisePool
from rex_ray.sim.gradients import NoisyGradients

DECAYS = st.sampled_from([LONG, QUICK])
BATCH, REFERENCE = 1024, 256


def line_of(values, decay: float = LONG) -> FadingLine:
    line = FadingLine(decay=decay)
    for value in values:
        line = line.take(value)
    return line


def pool_of(noise, signal) -> NoisePool:
    pool = NoisePool()
    for trace, sq_norm in zip(noise, signal, strict=True):
        pool = pool.take(float(trace), float(sq_norm))
    return pool


def blocks(growth_per_block: float, seed: int, num_blocks: int = 60, ratio: float = 1.0):
    """Blocks of four measured steps while ``phi`` rises evenly in its logarithm; ``ratio`` batches at the end."""
    gradients, rows = NoisyGradients(seed=seed), (BATCH // 4,) * 4
    noise, signal = np.zeros(num_blocks), np.zeros(num_blocks)
    for step in range(4 * num_blocks):
        phi = ratio * BATCH * math.exp(growth_per_block * (step / 4 - num_blocks))
        weighted, reduced = gradients.draw(step, phi, rows)
        trace, sq_norm = moments_of_sums(weighted.sum(), 4, BATCH, reduced)
        noise[step // 4] += trace
        signal[step // 4] += sq_norm
    return noise, signal


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=60), DECAYS)
def test_a_fading_line_is_that_of_weighted_least_squares(values, decay):
    line, count = line_of(values, decay), len(values)
    weights = decay ** np.arange(count)[::-1]
    slope, _ = np.polyfit(np.arange(count) - (count - 1), values, 1, w=np.sqrt(weights))
    mean, found, variance = line._fit(count)
    assert mean == pytest.approx(np.average(values, weights=weights), abs=1e-8)
    assert found == pytest.approx(slope, abs=1e-8)
    assert variance >= 0


@given(st.floats(1, 10), st.floats(0.01, 1), st.integers(4, 100), DECAYS)
def test_what_rises_evenly_is_led_on_exactly(start, slope, count, decay):
    line = line_of([start + slope * index for index in range(count)], decay)
    assert line.ahead(count) == pytest.approx(start + slope * (count - 1 + AHEAD_BLOCKS), rel=1e-4)


@given(st.floats(0.1, 1e6), st.integers(MIN_BLOCKS, 100))
def test_what_stays_the_same_is_its_mean(level, count):
    pool = pool_of([3 * level] * count, [level] * count)
    assert pool.noise_scale == pytest.approx(3.0, rel=1e-6)


def test_a_trend_within_its_noise_is_none():
    """Values without any trend: most of the time the line is the mean, and it is never far from it."""
    rng, followed, off = np.random.default_rng(0), 0, []
    for _ in range(300):
        line = line_of(10 + rng.standard_normal(60))
        followed += line.ahead(60) != line.mean(60)
        off.append(line.ahead(60) - 10)
    assert followed < 0.15 * 300
    assert np.std(off) < 1.35 * 0.18  # the mean of 16 fading values errs by .18 of one


@pytest.mark.parametrize("blocks_per_e_fold", [160, 40, 15])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
def test_the_rate_that_follows_a_rising_noise_scale_is_hardly_late(blocks_per_e_fold, ratio):
    truth = math.log(adascale_gain(BATCH / REFERENCE, ratio * BATCH, REFERENCE))
    late, biased = [], []
    for seed in range(20):
        pool = pool_of(*blocks(1 / blocks_per_e_fold, seed, ratio=ratio))
        gain = adascale_gain(BATCH / REFERENCE, pool.noise_scale, REFERENCE)
        average = adascale_gain(BATCH / REFERENCE, max(pool.noise.total / pool.signal.total, 0), REFERENCE)
        late.append(math.log(gain) - truth)
        biased.append(math.log(average) - truth)
    assert abs(np.mean(late)) < max(0.35 * abs(np.mean(biased)), 0.01)
    assert abs(np.mean(late)) < 0.04
    assert np.std(late) < 0.04


def test_the_noise_scale_is_unknown_beyond_measure_or_that_of_the_sums():
    few = pool_of([4.0] * (MIN_BLOCKS - 1), [1.0] * (MIN_BLOCKS - 1))
    assert few.noise_scale is None
    assert pool_of([0.0] * 9, [0.0] * 9).noise_scale is None
    assert pool_of([4.0] * 9, [-1.0] * 9).noise_scale == math.inf
    # A line that leads the signal below nothing is not followed.
    falling = pool_of([4.0] * 30, np.linspace(3.0, 0.0, 30))
    assert falling.noise_scale == pytest.approx(falling.noise.total / falling.signal.total)


@pytest.mark.parametrize("size", [1e-160, 1e160, 1e300])
def test_norms_of_any_size_make_a_finite_noise_scale(size):
    rng = np.random.default_rng(1)
    pool = pool_of(4 * size * (1 + 0.1 * rng.random(40)), size * (1 + 0.1 * rng.random(40)))
    assert pool.noise_scale == pytest.approx(4.0, rel=0.1)
    assert all(math.isfinite(value) for line in (pool.noise, pool.signal) for value in (line.total, line.squared))

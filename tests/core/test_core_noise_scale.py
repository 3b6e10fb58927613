"""Laws of the gradient moments: unbiased for any shares, an exact identity, honest about what is unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.noise_scale import (
    GradientMoments,
    estimate_gradient_moments,
    moments_from_groups,
    noise_scale,
    read_moments,
)
from rex_ray.core.observations import StepObserved


def draw(shares, draws, *, dim=200, trace=1600.0, seed=7):
    """Local means of Gaussian row gradients around a unit vector: arrays |g_i|^2 [draws, n] and |g|^2 [draws]."""
    rng = np.random.Generator(np.random.Philox(seed))
    b = np.array(shares, dtype=float)
    local = rng.standard_normal((draws, b.size, dim)) * np.sqrt(trace / dim / b)[None, :, None]
    local[..., 0] += 1.0
    reduced = np.einsum("i,tid->td", b / b.sum(), local)
    return (local**2).sum(2), (reduced**2).sum(1)


@pytest.mark.parametrize("shares", [(8, 8, 48), (1, 31, 32), (32, 32), (2,) * 15 + (98,)])
def test_the_noise_trace_is_unbiased_for_skewed_shares(shares):
    local, reduced = draw(shares, 3000)
    moments = [estimate_gradient_moments(a, shares, g) for a, g in zip(local, reduced, strict=True)]
    assert np.mean([m.noise_trace for m in moments]) == pytest.approx(1600, rel=0.03)
    # |G|^2 = 1 is small against the noise of its estimate, so it is held to its own standard error.
    signal = np.array([m.sq_norm for m in moments])
    assert abs(signal.mean() - 1.0) < 4 * signal.std() / math.sqrt(signal.size)


def test_the_equal_share_formula_would_be_far_off_on_the_same_draws():
    shares = np.array([8, 8, 48])
    local, reduced = draw(shares, 3000)
    mean_share = shares.mean()
    naive = (local.mean(1) - reduced) / (1 / mean_share - 1 / shares.sum())
    assert naive.mean() > 1.8 * 1600


@given(st.lists(st.integers(1, 300), min_size=2, max_size=16), st.integers(0, 2**32 - 1))
def test_the_trace_is_the_between_group_mean_square(shares, seed):
    rng = np.random.Generator(np.random.Philox(seed))
    b = np.array(shares, dtype=float)
    local = rng.standard_normal((b.size, 5))
    reduced = (b[:, None] * local).sum(0) / b.sum()
    moments = estimate_gradient_moments((local**2).sum(1), shares, float(reduced @ reduced))
    between = (b[:, None] * (local - reduced) ** 2).sum() / (b.size - 1)
    assert moments.noise_trace == pytest.approx(between, rel=1e-9)
    assert moments.sq_norm == pytest.approx(reduced @ reduced - between / b.sum(), rel=1e-9, abs=1e-9)


def test_equal_shares_give_the_textbook_formula():
    b, n, local, reduced = 32, 4, np.array([3.0, 2.5, 2.0, 4.0]), 1.5
    moments = estimate_gradient_moments(local, [b] * n, reduced)
    big, small = n * b, b
    assert moments.sq_norm == pytest.approx((big * reduced - small * local.mean()) / (big - small))
    assert moments.noise_trace == pytest.approx((local.mean() - reduced) / (1 / small - 1 / big))


def test_sampling_without_replacement_adds_the_finite_population_term():
    rng = np.random.Generator(np.random.Philox(11))
    population = rng.standard_normal((60, 4)) + 0.5
    mean = population.mean(0)
    trace = ((population - mean) ** 2).sum() / 59
    found = []
    for _ in range(4000):
        drawn = population[rng.permutation(60)[:48]]
        local = [drawn[:8].mean(0), drawn[8:].mean(0)]
        found.append(
            estimate_gradient_moments([g @ g for g in local], (8, 40), drawn.mean(0) @ drawn.mean(0), dataset_size=60)
        )
    assert np.mean([m.noise_trace for m in found]) == pytest.approx(trace, rel=0.05)
    assert np.mean([m.sq_norm for m in found]) == pytest.approx(mean @ mean, abs=0.01)
    without_the_term = np.mean([m.sq_norm - m.noise_trace / 60 for m in found])
    assert abs(without_the_term - mean @ mean) > 0.04


def test_micro_batches_are_groups_and_rows_without_gradient_are_not():
    groups = [(8, 2.0), (8, 3.0), (16, 1.5), (32, 1.2)]
    flat = estimate_gradient_moments([g for _, g in groups], [b for b, _ in groups], 1.0)
    nested = moments_from_groups([8 * 2.0 + 8 * 3.0, 16 * 1.5 + 32 * 1.2, 0.0], [2, 2, 0], [16, 48, 0], 1.0)
    assert nested == flat
    padded = estimate_gradient_moments([2.0, 3.0, 1.5, 1.2, math.nan], [8, 8, 16, 32, 0], 1.0)
    assert padded == flat


@pytest.mark.parametrize(("norms", "shares"), [([1.0], [64]), ([1.0, 0.0], [64, 0])])
def test_one_group_shows_no_noise_and_is_refused(norms, shares):
    with pytest.raises(ValueError, match="two groups"):
        estimate_gradient_moments(norms, shares, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        estimate_gradient_moments([1.0, bad], [8, 8], 1.0)


def test_the_noise_scale_is_a_ratio_of_sums_or_unknown():
    moments = [GradientMoments(sq_norm=s, noise_trace=4.0) for s in (3.0, -1.0, 2.0, 0.0) * 2]
    assert noise_scale(moments) == pytest.approx(32 / 8)
    assert noise_scale(moments[:7]) is None
    assert noise_scale([GradientMoments(sq_norm=-1.0, noise_trace=4.0)] * 8) == math.inf
    assert noise_scale([GradientMoments(sq_norm=1.0, noise_trace=-4.0)] * 8) is None
    assert noise_scale([GradientMoments(sq_norm=0.0, noise_trace=0.0)] * 8) is None
    total = sum(moments[1:], moments[0])
    assert total.noise_trace / total.sq_norm == noise_scale(moments)


def step_with(norms, rows, reduced, groups=None, num_norm_steps=1):
    """A complete step with such norms."""
    zeros = np.zeros(len(rows), dtype=np.int64)
    groups = [int(r > 0) for r in rows] if groups is None else groups
    return StepObserved(
        generation="g",
        epoch=0,
        step=0,
        allocation_version=1,
        num_rows=np.array(rows),
        data_us=zeros,
        compute_us=zeros,
        sync_us=zeros,
        step_us=zeros,
        weighted_sq_norm=None if norms is None else np.array(norms, dtype=np.float64),
        num_groups=np.array(groups),
        num_norm_steps=num_norm_steps,
        global_sq_norm=reduced,
    )


def test_a_step_reads_as_its_groups_do():
    shares = (8, 8, 48)
    local, reduced = draw(shares, 1)
    read = read_moments(step_with(local[0] * shares, shares, float(reduced[0])))
    assert read == estimate_gradient_moments(local[0], shares, float(reduced[0]))


def test_ranks_without_rows_are_no_groups_whatever_they_report():
    padded = read_moments(step_with([16.0, math.nan, 24.0], (8, 0, 8), 1.0, groups=[1, 1, 1]))
    assert padded == read_moments(step_with([16.0, 24.0], (8, 8), 1.0))


@pytest.mark.parametrize(
    ("norms", "reduced", "why"),
    [
        (None, None, "not measured"),
        (None, 1.0, "not finite"),
        ([8.0, 8.0], None, "not finite"),
        ([8.0, math.nan], 1.0, "not finite"),
        ([8.0, math.inf], 1.0, "not finite"),
        ([8.0, 8.0], math.inf, "not finite"),
        ([8.0, 7.9], 1.0, "lossy reduction"),
    ],
)
def test_c8_a_step_that_says_nothing_says_why(norms, reduced, why):
    assert read_moments(step_with(norms, (8, 8), reduced)) == why


def test_c3_one_group_is_unknown_and_no_division_by_nothing():
    assert read_moments(step_with([64.0], (64,), 1.0)) == "one group"
    assert read_moments(step_with([64.0, 0.0], (64, 0), 1.0)) == "one group"


def test_c3_two_steps_of_a_lone_worker_are_two_groups_over_both_steps_rows():
    first, second, rows = np.array([1.0, 2.0]), np.array([1.5, 0.5]), 32
    mean = (first + second) / 2
    read = read_moments(
        step_with([rows * (first @ first + second @ second)], (rows,), mean @ mean, groups=[2], num_norm_steps=2)
    )
    assert read == estimate_gradient_moments([first @ first, second @ second], (rows, rows), mean @ mean)


@given(st.floats(1e-12, 1e12))
def test_rounding_of_equal_gradients_is_no_lossy_reduction_and_no_noise(size):
    read = read_moments(step_with([8 * size, 8 * size], (8, 8), float(f"{size * (1 + 1e-8):.9g}")))
    assert read.noise_trace == 0.0
    assert read.sq_norm == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("shares", [(64, 64, 64, 64), (30, 31, 97, 98), (16, 16, 112, 112), (4, 4, 124, 124)])
def test_c1_the_ratio_of_sums_is_the_noise_scale_for_any_shares(shares):
    local, reduced = draw(shares, 3000, trace=1600.0)
    steps = [read_moments(step_with(norms * shares, shares, float(g))) for norms, g in zip(local, reduced, strict=True)]
    assert noise_scale(steps) == pytest.approx(1600.0, rel=0.3)
    assert np.mean([moments.noise_trace for moments in steps]) == pytest.approx(1600.0, rel=0.03)

"""What theory promises of steps whose batch, shares and learning rate change: on a noisy quadratic, where all is known.

``F(x) = x' H x / 2`` with ``L`` the largest of ``H``; a row's gradient is ``H x`` plus noise of covariance
``S``. Worker ``i`` of a step has the mean over ``b_i`` rows, and the step takes ``sum_i (b_i / B) g_i``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.core.apportion import apportion
from rex_ray.core.lr_scaling import adascale_gain
from rex_ray.core.noise_scale import estimate_gradient_moments

DIMS = 12
CURVATURE = np.geomspace(0.2, 1.0, DIMS)
NOISE_SD = np.linspace(0.5, 2.0, DIMS)
TRACE = float((NOISE_SD**2).sum())
M0 = 16


def group_gradients(points: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mean gradients per worker, shape ``[runs, n, DIMS]``; a worker without rows has none (zeros)."""
    noise = rng.standard_normal((len(points), len(sizes), DIMS)) * NOISE_SD
    scale = np.where(sizes > 0, 1 / np.sqrt(np.maximum(sizes, 1)), 0.0)
    there = (sizes > 0)[None, :, None]
    return np.where(there, (CURVATURE * points)[:, None] + noise * scale[None, :, None], 0.0)


def run_sgd(
    rate: float, schedule: Callable[[int], tuple[int, float]], *, steps: int, seed: int, runs: int = 400
) -> tuple[np.ndarray, np.ndarray]:
    """Train many runs side by side under ``schedule(step) -> (batch, factor on the rate)`` with shares drawn anew.

    Returns:
        Mean ``|grad F|^2`` before each step, and mean ``F`` after the last ones, shape ``[steps]`` each.
    """
    rng = np.random.default_rng(seed)
    points = np.tile(np.full(DIMS, 2.0), (runs, 1))
    slopes, values = [], []
    for step in range(steps):
        batch, factor = schedule(step)
        sizes = apportion(batch, rng.random(5) ** 3)
        slopes.append(float(((CURVATURE * points) ** 2).sum(axis=1).mean()))
        gradient = np.einsum("i,rid->rd", sizes / batch, group_gradients(points, sizes, rng))
        points = points - rate * factor * gradient
        values.append(float((CURVATURE * points**2).sum(axis=1).mean()) / 2)
    return np.array(slopes), np.array(values)


shares = st.lists(st.integers(0, 120), min_size=2, max_size=16).filter(
    lambda sizes: sum(size > 0 for size in sizes) > 1
)


@settings(max_examples=25)
@given(sizes=shares, seed=st.integers(0, 1000))
def test_the_weighted_gradient_has_the_variance_of_the_whole_batch_for_any_split(sizes, seed):
    rng, sizes = np.random.default_rng(seed), np.array(sizes)
    gradients = group_gradients(np.zeros((4000, DIMS)), sizes, rng)
    weighted = np.einsum("i,rid->rd", sizes / sizes.sum(), gradients)
    variance = float((weighted**2).sum(axis=1).mean())
    assert variance == pytest.approx(TRACE / sizes.sum(), rel=0.08)


def test_equal_weights_have_more_variance_unless_the_shares_are_equal():
    rng, sizes = np.random.default_rng(0), np.array([4, 4, 124, 124])
    gradients = group_gradients(np.zeros((4000, DIMS)), sizes, rng)
    plain = float((gradients.mean(axis=1) ** 2).sum(axis=1).mean())
    assert plain > 7 * TRACE / sizes.sum()


@pytest.mark.parametrize("num_workers", [2, 3, 8, 16])
def test_moments_of_skewed_shares_are_unbiased(num_workers):
    rng = np.random.default_rng(num_workers)
    sizes = np.maximum(1, (rng.random(num_workers) ** 4 * 200).astype(int))
    point = np.full((6000, DIMS), 0.7)
    gradients = group_gradients(point, sizes, rng)
    whole = np.einsum("i,rid->rd", sizes / sizes.sum(), gradients)
    moments = [
        estimate_gradient_moments((own**2).sum(axis=1), sizes, float((total**2).sum()))
        for own, total in zip(gradients, whole, strict=True)
    ]
    noise = np.array([moment.noise_trace for moment in moments])
    signal = np.array([moment.sq_norm for moment in moments])
    for estimates, truth in ((noise, TRACE), (signal, float(((CURVATURE * point[0]) ** 2).sum()))):
        assert abs(estimates.mean() - truth) < 4 * estimates.std() / np.sqrt(len(estimates))


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), rate=st.floats(0.02, 0.1))
def test_the_bound_of_sgd_holds_under_any_split_and_schedule(seed, rate):
    """``mean |grad F|^2 <= 2 (F_0 - F*) / sum eta + L tr(S) sum(eta^2 / B) / sum eta``, means by ``eta <= 1 / L``."""
    rng = np.random.default_rng(seed)
    batches = M0 * 2 ** rng.integers(0, 4, 60)
    factors = np.array([adascale_gain(batch / M0, 40.0, M0) for batch in batches])
    assert rate * factors.max() <= 1 / CURVATURE.max()
    slopes, _ = run_sgd(rate, lambda step: (int(batches[step]), float(factors[step])), steps=60, seed=seed)
    eta = rate * factors
    start = float((CURVATURE * 4.0).sum()) / 2
    bound = (2 * start + CURVATURE.max() * TRACE * float((eta**2 / batches).sum())) / eta.sum()
    assert float((eta * slopes).sum() / eta.sum()) <= bound


def floor(rate: float, batch: int) -> float:
    """Where ``F`` ends up at a constant batch and rate: the mean over late steps."""
    _, values = run_sgd(rate, lambda _: (batch, 1.0), steps=900, seed=1)
    return float(values[-300:].mean())


def test_the_floor_is_proportional_to_rate_over_batch():
    reference = floor(0.1, M0)
    assert floor(0.1, 4 * M0) == pytest.approx(reference / 4, rel=0.1)
    assert floor(0.05, M0) == pytest.approx(reference / 2, rel=0.15)


def test_growth_removes_the_floor():
    grown = run_sgd(0.1, lambda step: (M0 * (16 if step >= 600 else 1), 1.0), steps=900, seed=1)[1]
    assert grown[-100:].mean() < 0.1 * grown[500:600].mean()

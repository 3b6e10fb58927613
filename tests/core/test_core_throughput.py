"""Pollux's model of a step's time, and its fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.core.throughput import PerfParams, fit_perf_params

ROWS = np.array([16, 32, 64, 128, 256])
params = st.builds(
    PerfParams,
    alpha_c=st.floats(0.005, 0.5),
    beta_c=st.floats(1e-4, 1e-2),
    alpha_n=st.floats(0.01, 0.5),
    beta_n=st.just(1e-8),
    alpha_r=st.just(1e-8),
    beta_r=st.just(1e-8),
    gamma=st.floats(1.0, 8.0),
)


def times_of(truth: PerfParams, num_nodes: object, num_workers: object, rows: object) -> tuple[object, object]:
    return truth.grad_s(rows), truth.step_s(num_nodes, num_workers, rows)


@settings(max_examples=10, deadline=None)
@given(truth=params, num_workers=st.sampled_from([2, 4, 16]))
def test_the_fit_recovers_the_parameters_from_noiseless_times(truth, num_workers):
    group = np.full(ROWS.size, num_workers)
    fitted = fit_perf_params(group, group, ROWS, *times_of(truth, group, group, ROWS))
    assert fitted.alpha_c == pytest.approx(truth.alpha_c, rel=5e-3)
    assert fitted.beta_c == pytest.approx(truth.beta_c, rel=5e-3)
    far = np.array([512, 1024])
    assert fitted.step_s(num_workers, num_workers, far) == pytest.approx(
        truth.step_s(num_workers, num_workers, far), rel=1e-2
    )


@pytest.mark.parametrize("gamma", [1.0, 1.5, 3.0])
def test_what_shows_is_recovered_and_what_does_not_show_vanishes(gamma):
    """A worker per machine says nothing of links within one; one number of workers tells no slope in it."""
    truth = PerfParams(alpha_c=0.02, beta_c=0.002, alpha_n=0.08, beta_n=0, alpha_r=0, beta_r=0, gamma=gamma)
    group = np.full(ROWS.size, 4)
    fitted = fit_perf_params(group, group, ROWS, *times_of(truth, group, group, ROWS))
    assert fitted.gamma == pytest.approx(gamma, rel=0.01)
    assert fitted.alpha_n == pytest.approx(0.08, rel=0.01)
    assert max(fitted.beta_n, fitted.alpha_r, fitted.beta_r) < 1e-4


def test_groups_of_several_sizes_tell_the_slope_and_one_machine_its_own_links():
    truth = PerfParams(alpha_c=0.02, beta_c=0.002, alpha_n=0.08, beta_n=0.01, alpha_r=0.01, beta_r=0.002, gamma=1.0)
    nodes, workers = np.array([2, 2, 4, 8, 1, 1, 1]), np.array([2, 2, 4, 8, 2, 4, 8])
    rows = np.array([32, 64, 64, 64, 32, 64, 64])
    fitted = fit_perf_params(nodes, workers, rows, *times_of(truth, nodes, workers, rows))
    for name in PerfParams.__slots__:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.05), name


def test_one_size_of_batch_is_taken_for_half_constant():
    fitted = fit_perf_params([4], [4], [64], [0.2], [0.3])
    assert fitted.alpha_c == pytest.approx(0.1)
    assert fitted.beta_c * 64 == pytest.approx(0.1, rel=1e-3)
    assert float(fitted.step_s(4, 4, 64)) == pytest.approx(0.3, rel=1e-3)


@given(truth=params, rows=st.integers(1, 4096))
def test_a_step_takes_at_least_its_longer_part_and_at_most_both(truth, rows):
    grad, sync, step = float(truth.grad_s(rows)), float(truth.sync_s(4, 4)), float(truth.step_s(4, 4, rows))
    assert max(grad, sync) * (1 - 1e-9) <= step <= (grad + sync) * (1 + 1e-9)
    assert float(truth.step_s(1, 1, rows)) == pytest.approx(grad)


def test_noise_moves_the_fit_by_no_more_than_itself():
    truth = PerfParams(alpha_c=0.02, beta_c=0.002, alpha_n=0.08, beta_n=0, alpha_r=0, beta_r=0, gamma=1.0)
    group, rng = np.full(ROWS.size, 4), np.random.default_rng(0)
    grad, step = times_of(truth, group, group, ROWS)
    noise = 1 + 0.02 * rng.standard_normal((2, ROWS.size))
    fitted = fit_perf_params(group, group, ROWS, grad * noise[0], step * noise[1])
    error = np.log(fitted.step_s(4, 4, ROWS) / step)
    assert math.sqrt(float(np.mean(error**2))) < 0.03

"""Laws of the fitted curves: positive, non-decreasing, finite, whatever the points; and faithful where they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.curves import fit_curve

T4_RESNET50 = {20: 0.1474, 28: 0.2081, 40: 0.2535, 57: 0.3239, 81: 0.4207, 115: 0.5602, 163: 0.7624, 200: 0.9235}
V100_RESNET18 = {32: 0.0927, 64: 0.101, 129: 0.1099, 257: 0.1171, 513: 0.1275, 1025: 0.232, 2051: 0.44}

points = st.dictionaries(st.integers(1, 4000), st.floats(1e-4, 100.0), min_size=1, max_size=8)


def fit(table, counts=30):
    sizes = sorted(table)
    return fit_curve(sizes, [table[b] for b in sizes], [counts] * len(sizes))


@given(points, st.integers(1, 200))
def test_d3_predictions_are_positive_finite_and_non_decreasing(table, counts):
    curve = fit(table, counts)
    times = curve.predict_s(np.unique(np.concatenate([np.arange(0, 300), np.geomspace(1, 1e6, 100)])))
    assert (times > 0).all()
    assert np.isfinite(times).all()
    assert (np.diff(times) >= -1e-12 * times[1:]).all()


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 5.0)), min_size=2, max_size=8),
    st.integers(4, 50),
)
def test_times_that_rise_are_met_within_their_noise_however_steeply_they_do(steps, counts):
    """Also two sizes, and a small span: a line through zero would promise a time that was measured to be another."""
    rows = np.cumsum([size for size, _ in steps]) + 8
    times = 0.01 * np.cumsum([1.0, *(rise for _, rise in steps[1:])])
    curve = fit_curve(rows, times, [counts] * rows.size)
    missed = curve.predict_s(rows) / times - 1
    assert np.sqrt(np.mean(missed**2)) <= 0.01 + 0.08 / np.sqrt(counts)


def test_times_that_fall_over_a_small_span_are_no_step():
    line = fit_curve([60, 64], [0.066, 0.048], [30, 30])
    assert np.ptp(np.diff(line.predict_s(np.array([32, 48, 64, 80])))) < 1e-9


def test_d3_asking_for_four_times_the_largest_size_stays_linear():
    curve = fit({8: 1.0, 16: 1.5, 32: 3.1, 64: 6.0})
    assert 20.0 < curve.predict_s(256) < 30.0
    assert curve.max_trusted_rows == 128
    tail = curve.predict_s(np.array([128, 256, 384]))
    assert tail[2] - tail[1] == pytest.approx(tail[1] - tail[0])


@given(points, st.floats(1e-5, 1e4))
def test_rows_within_is_the_inverse(table, limit):
    curve = fit(table)
    rows = float(curve.rows_within(limit))
    if rows < 0:
        assert curve.predict_s(0) > limit
    elif np.isfinite(rows):
        assert curve.predict_s(rows) <= limit * (1 + 1e-9)
        assert curve.predict_s(rows + 1) > limit * (1 - 1e-9)
    else:
        assert curve.predict_s(1e9) <= limit * (1 + 1e-9)


@given(points)
def test_an_explicit_scale_is_a_plain_factor(table):
    curve = fit(table)
    rows = np.array([0, 1, 17, 5000])
    assert curve.scaled(1.5).predict_s(rows) == pytest.approx(1.5 * curve.predict_s(rows))
    assert curve.scaled(2.0).rows_within(3.0) == pytest.approx(float(curve.rows_within(1.5)))


def test_one_size_gives_three_tenths_fixed_and_the_rest_proportional():
    curve = fit({64: 0.4})
    rows = np.array([16, 64, 100, 128])
    assert curve.predict_s(rows) == pytest.approx(0.4 * (0.3 + 0.7 * rows / 64))


def test_two_sizes_give_the_line_through_them():
    curve = fit({32: 0.2, 64: 0.35})
    assert curve.predict_s([16, 32, 64, 128]) == pytest.approx([0.125, 0.2, 0.35, 0.65], rel=2e-3)


def test_two_sizes_that_point_below_zero_give_a_line_that_does_not():
    assert fit({32: 0.1, 64: 0.4}).predict_s(1) > 0


def test_many_sizes_in_a_small_span_do_not_bend_the_curve():
    rng = np.random.Generator(np.random.Philox(5))
    table = {b: 0.1 + 0.005 * b * (1 + 0.01 * rng.standard_normal()) for b in (56, 60, 64, 68, 72)}
    curve = fit(table)
    assert curve.predict_s([28, 144]) == pytest.approx([0.1 + 0.005 * 28, 0.1 + 0.005 * 144], rel=0.15)


@pytest.mark.parametrize("table", [T4_RESNET50, V100_RESNET18])
def test_measured_devices_are_fitted_within_a_few_percent(table):
    curve = fit(table, counts=50)
    sizes = np.array(sorted(table))
    misfit = curve.predict_s(sizes) / np.array([table[b] for b in sizes]) - 1
    assert np.abs(misfit).max() < 0.04


def test_a_saturating_device_keeps_its_kink():
    curve = fit({32: 0.1, 128: 0.1, 256: 0.1, 512: 0.2, 1024: 0.4}, counts=50)
    assert curve.predict_s([64, 200]) == pytest.approx([0.1, 0.1], rel=0.03)
    assert curve.predict_s(2048) == pytest.approx(0.8, rel=0.05)


def test_tile_steps_are_followed_and_their_last_slope_is_not_extrapolated():
    steps = {32: 0.1, 48: 0.19, 64: 0.2, 96: 0.38, 128: 0.4, 160: 0.58, 176: 0.6}
    curve = fit(steps, counts=50)
    sizes = np.array(sorted(steps))
    assert curve.predict_s(sizes) == pytest.approx([steps[b] for b in sizes], rel=0.03)
    assert curve.predict_s(352) == pytest.approx(1.2, rel=0.2)

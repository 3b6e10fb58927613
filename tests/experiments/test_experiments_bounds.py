import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, poisson

from experiments.calibration._bounds import Budget, Result, binomial_interval, poisson_interval

COUNTS = st.integers(0, 300).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))


def test_a_quick_budget_takes_the_smaller_number():
    assert Budget(quick=True, seed=3).scaled(full=1000, quick=50) == 50
    assert Budget(quick=False, seed=3).scaled(full=1000, quick=50) == 1000


def test_a_budget_and_a_result_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget().seed = 1  # type: ignore[misc]
    assert Result(figures={"x": 1.0}).tables == {}


@given(COUNTS, st.sampled_from([0.8, 0.95, 0.99]))
def test_the_binomial_interval_is_that_of_scipys_exact_test(counts, level):
    successes, trials = counts
    if trials == 0:
        assert binomial_interval(0, 0, level) == (0.0, 1.0)
        return
    exact = binomtest(successes, trials).proportion_ci(confidence_level=level, method="exact")
    assert binomial_interval(successes, trials, level) == pytest.approx((exact.low, exact.high), rel=1e-9, abs=1e-12)


@given(st.integers(0, 2000), st.floats(0.01, 1e6))
def test_at_the_poisson_bounds_the_count_is_just_credible(events, exposure):
    low, high = poisson_interval(events, exposure)
    assert 0.0 <= low <= events / exposure <= high
    assert poisson.cdf(events, high * exposure) == pytest.approx(0.025, rel=1e-6)
    if events:
        assert poisson.sf(events - 1, low * exposure) == pytest.approx(0.025, rel=1e-6)


def test_nothing_seen_is_not_nothing_possible():
    # The "rule of three", with two tails: 3.689 = -ln(0.025).
    assert poisson_interval(0, 1.0) == pytest.approx((0.0, -math.log(0.025)))
    low, high = binomial_interval(0, 1000)
    assert low == 0.0
    assert high == pytest.approx(-math.log(0.025) / 1000, rel=0.01)


def test_known_values():
    # Ulm 1990, table of exact Poisson limits: 10 events -> 4.80 .. 18.39.
    assert poisson_interval(10, 1.0) == pytest.approx((4.795, 18.390), abs=1e-3)
    assert binomial_interval(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)


@given(st.integers(0, 50), st.floats(0.1, 100.0))
def test_more_exposure_with_the_same_rate_narrows_the_interval(events, exposure):
    narrow, wide = poisson_interval(events * 4, exposure * 4), poisson_interval(events, exposure)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


@pytest.mark.parametrize("call", [
    lambda: binomial_interval(2, 1), lambda: binomial_interval(-1, 1), lambda: binomial_interval(1, 2, 1.0),
    lambda: poisson_interval(-1, 1.0), lambda: poisson_interval(1, 0.0), lambda: poisson_interval(1, math.nan),
    lambda: poisson_interval(1, 1.0, 0.0),
])  # fmt: skip
def test_counts_that_cannot_be_are_named(call):
    with pytest.raises(ValueError, match="got"):
        call()

"""Bounds of a counted rate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from rex_ray.core.rates import poisson_interval


@pytest.mark.parametrize("num_events", [0, 1, 7, 300])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_bounds_are_garwoods(num_events, level):
    low, high = poisson_interval(num_events, 2.5, level)
    tail = (1 - level) / 2
    assert low == pytest.approx(chi2.ppf(tail, 2 * num_events) / 2 / 2.5 if num_events else 0.0)
    assert high == pytest.approx(chi2.ppf(1 - tail, 2 * num_events + 2) / 2 / 2.5)


def test_bounds_cover_the_truth_at_least_as_often_as_they_say():
    counts = np.random.default_rng(0).poisson(3.0, 4000)
    bounds = {count: poisson_interval(int(count), 1.0) for count in set(counts.tolist())}
    covered = np.mean([bounds[count][0] <= 3.0 <= bounds[count][1] for count in counts.tolist()])
    assert covered >= 0.95


@pytest.mark.parametrize("wrong", [(-1, 1.0, 0.95), (0, 0.0, 0.95), (0, float("inf"), 0.95), (0, 1.0, 1.0)])
def test_counts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="a rate needs"):
        poisson_interval(*wrong)

"""The exact split equals brute force, keeps its bounds, and says why when it cannot."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.split import CurveSet, LineSet, exact_split


def curve(rows, seconds, scale=1.0):
    return StepTimeCurve(
        knot_rows=np.array(rows, dtype=float), knot_s=np.array(seconds, dtype=float), scale=scale, max_trusted_rows=64
    )


@st.composite
def curves(draw):
    """Non-decreasing chains with flats, kinks and steps; few distinct heights, so ties are common."""
    num_knots = draw(st.integers(2, 5))
    gaps = draw(st.lists(st.integers(1, 6), min_size=num_knots - 1, max_size=num_knots - 1))
    rises = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 3.0]), min_size=num_knots - 1, max_size=num_knots - 1))
    start = draw(st.sampled_from([0.1, 0.2, 1.0]))
    scale = draw(st.sampled_from([0.5, 1.0, 1.7]))
    return curve(np.concatenate([[0], np.cumsum(gaps)]), start + np.concatenate([[0], np.cumsum(rises)]), scale)


@given(data=st.data(), workers=st.lists(curves(), min_size=1, max_size=4))
def test_the_split_equals_brute_force(data, workers):
    n = len(workers)
    lower = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    upper = [lo + data.draw(st.integers(0, 6)) for lo in lower]
    total = data.draw(st.integers(sum(lower), sum(upper)))
    plan = exact_split(workers, total, lower, upper)

    def slowest(sizes):
        return max((float(c.predict_s(b)) if b else 0.0) for c, b in zip(workers, sizes, strict=True))

    every = product(*(range(lo, hi + 1) for lo, hi in zip(lower, upper, strict=True)))
    best = min(slowest(sizes) for sizes in every if sum(sizes) == total)
    assert sum(plan.local_batch_sizes) == total
    assert all(lo <= b <= hi for lo, b, hi in zip(lower, plan.local_batch_sizes, upper, strict=True))
    assert plan.step_time_s == pytest.approx(best, rel=1e-6)
    assert plan.step_time_s == pytest.approx(slowest(plan.local_batch_sizes), rel=1e-9)


@given(data=st.data(), workers=st.lists(curves(), min_size=1, max_size=4), multiple=st.sampled_from([2, 3, 8]))
def test_in_multiples_the_split_equals_brute_force_over_all_splits_in_them(data, workers, multiple):
    n = len(workers)
    lower = data.draw(st.lists(st.integers(0, 2 * multiple), min_size=n, max_size=n))
    units = [(-(-lo // multiple), -(-lo // multiple) + data.draw(st.integers(0, 5))) for lo in lower]
    upper = [most * multiple + data.draw(st.integers(0, multiple - 1)) for _, most in units]
    total = multiple * data.draw(st.integers(sum(least for least, _ in units), sum(most for _, most in units)))
    plan = exact_split(workers, total, lower, upper, multiple)

    def slowest(sizes):
        return max((float(c.predict_s(b)) if b else 0.0) for c, b in zip(workers, sizes, strict=True))

    every = product(*(range(0, hi + 1, multiple) for hi in upper))
    allowed = (s for s in every if sum(s) == total and all(lo <= b for lo, b in zip(lower, s, strict=True)))
    assert sum(plan.local_batch_sizes) == total
    assert all(lo <= b <= hi for lo, b, hi in zip(lower, plan.local_batch_sizes, upper, strict=True))
    assert all(b % multiple == 0 for b in plan.local_batch_sizes)
    assert plan.step_time_s == pytest.approx(min(map(slowest, allowed)), rel=1e-6)
    assert plan.step_time_s == pytest.approx(slowest(plan.local_batch_sizes), rel=1e-9)


def test_rounding_the_exact_split_to_multiples_is_slower_than_splitting_in_them():
    """Why multiples are a matter of the split: the nearest multiples cost a twentieth here."""
    workers = [curve([0, 100], [0.0, 1.0]), curve([0, 100], [0.0, 0.63]), curve([0, 100], [0.0, 0.63])]
    free = np.array(exact_split(workers, 48).local_batch_sizes)
    rounded = 8 * np.array([2, 2, 2])
    assert (np.abs(rounded - free) <= 5).all()
    plan = exact_split(workers, 48, multiple=8)
    assert plan.local_batch_sizes == (8, 24, 16)
    assert plan.step_time_s < 0.96 * max(float(c.predict_s(b)) for c, b in zip(workers, rounded, strict=True))


def test_rows_that_are_no_multiple_are_named():
    with pytest.raises(InfeasibleError, match="60 rows cannot be shared out in multiples of 8"):
        exact_split([curve([0, 10], [0.1, 1.0])] * 2, 60, multiple=8)


def test_equal_workers_share_equally_and_the_first_take_the_rest():
    plan = exact_split([curve([0, 10], [0.1, 1.1])] * 3, 64)
    assert plan.local_batch_sizes == (22, 21, 21)


def test_a_slow_worker_at_its_lower_bound_does_not_slacken_the_others():
    slow, fast = curve([0, 1], [50.0, 60.0]), curve([0, 100], [0.1, 1.1])
    plan = exact_split([slow, fast, fast], 101, lower=[1, 1, 1])
    assert plan.local_batch_sizes == (1, 50, 50)


def test_workers_on_a_plateau_share_its_rows():
    flat, steep = curve([0, 1000], [1.0, 1.0]), curve([0, 100], [0.1, 10.1])
    plan = exact_split([steep, flat, flat], 109)
    assert plan.local_batch_sizes == (9, 50, 50)
    assert plan.step_time_s == pytest.approx(1.0)


def test_a_worker_whose_curve_crosses_anothers_gets_what_it_is_good_at():
    hostbound, steady = curve([0, 129, 513, 1025], [0.09, 0.11, 0.13, 0.23]), curve([0, 1024], [0.02, 0.7])
    small = exact_split([steady, hostbound], 40, lower=[0, 0]).local_batch_sizes
    large = exact_split([steady, hostbound], 1024).local_batch_sizes
    assert small[0] > small[1]
    assert large[0] < large[1] / 3


def test_rows_that_nobody_has_room_for_are_named():
    workers = [curve([0, 10], [0.1, 1.0])] * 2
    with pytest.raises(InfeasibleError, match="global batch of 64 rows does not fit 2 workers: at most 24 rows"):
        exact_split(workers, 64, upper=[12, 12])
    with pytest.raises(InfeasibleError, match="too small for 2 workers that need 8"):
        exact_split(workers, 7, lower=[4, 4])
    with pytest.raises(InfeasibleError, match="does not fit"):
        exact_split(workers, 8, lower=[4, 1], upper=[3, None])


def test_an_unknown_upper_bound_is_none():
    workers = [curve([0, 10], [0.1, 1.1]), curve([0, 10], [0.1, 1.1])]
    assert exact_split(workers, 40, upper=[5, None]).local_batch_sizes == (5, 35)


@given(workers=st.lists(curves(), min_size=1, max_size=4), limit=st.floats(0.01, 20))
def test_most_rows_inverts_the_prediction(workers, limit):
    together = CurveSet(workers)
    lo, hi = np.zeros(len(workers), dtype=int), np.full(len(workers), 50)
    limits = np.array([limit / 2, limit])
    most = together.most_rows(limits, lo, hi)
    assert most.shape == (2, len(workers))
    for limit_s, rows in zip(limits, most, strict=True):
        for c, b in zip(workers, rows, strict=True):
            assert b == 0 or c.predict_s(b) <= limit_s * (1 + 1e-6)
            assert b == 50 or c.predict_s(b + 1) > limit_s * (1 - 1e-6)


@given(
    lines=st.lists(st.tuples(st.floats(1e-9, 5.0), st.just(0.0) | st.floats(1e-4, 3.0)), min_size=1, max_size=6),
    rows_each=st.integers(1, 50),
    limit=st.floats(0.01, 20),
)
def test_lines_are_the_curves_that_they_draw(lines, rows_each, limit):
    fixed_s, row_s = np.array(lines).T
    far = 2.0**20
    drawn = CurveSet([curve([0.0, far], [fixed, fixed + per_row * far]) for fixed, per_row in lines])
    straight = LineSet(fixed_s, row_s)
    sizes = np.arange(len(lines)) * rows_each
    assert straight.own_s(sizes) == pytest.approx(drawn.own_s(sizes), rel=1e-6)
    lower, upper = np.ones(len(lines), dtype=np.int64), np.full(len(lines), 10_000)
    most = straight.most_rows(np.array([limit]), lower, upper)
    assert np.abs(most - drawn.most_rows(np.array([limit]), lower, upper)).max() <= 1
    one, other = (exact_split(workers, rows_each * len(lines)) for workers in (straight, drawn))
    assert sum(one.local_batch_sizes) == sum(other.local_batch_sizes)
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-6)

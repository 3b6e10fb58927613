"""Laws of the largest-remainder method."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.apportion import apportion, rows_per_rank
from rex_ray.core.errors import InfeasibleError

weights = st.lists(st.floats(0.0, 1e6).filter(lambda w: w == 0 or w > 1e-6), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("total", "num_workers", "expected"), [(64, 3, [22, 21, 21]), (7, 5, [2, 2, 1, 1, 1]), (0, 3, [0, 0, 0])]
)
def test_d4_shares_are_integers_with_an_exact_sum_and_deterministic(total, num_workers, expected):
    assert apportion(total, [1 / num_workers] * num_workers).tolist() == expected
    assert apportion(total, [1 / num_workers] * num_workers).tolist() == expected


@given(total=st.integers(0, 10**6), w=weights)
def test_counts_sum_exactly_and_lie_within_one_row_of_the_quota(total, w):
    counts = apportion(total, w)
    assert counts.sum() == total
    quota = total * np.array(w) / sum(w) if sum(w) else np.full(len(w), total / len(w))
    assert (np.abs(counts - quota) < 1 + 1e-6).all()


@given(data=st.data(), w=weights)
def test_bounds_hold_whenever_they_leave_room(data, w):
    lower = data.draw(st.lists(st.integers(0, 50), min_size=len(w), max_size=len(w)))
    room = data.draw(st.lists(st.integers(0, 50), min_size=len(w), max_size=len(w)))
    upper = [lo + more for lo, more in zip(lower, room, strict=True)]
    total = data.draw(st.integers(sum(lower), sum(upper)))
    counts = apportion(total, w, lower, upper)
    assert counts.sum() == total
    assert (counts >= lower).all()
    assert (counts <= upper).all()


@given(data=st.data(), exponents=st.lists(st.floats(-12, 12), min_size=1, max_size=8))
def test_the_sum_is_exact_however_far_apart_the_weights_are(data, exponents):
    n = len(exponents)
    lower = np.array(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)))
    upper = lower + data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    counts = apportion(total, 10.0 ** np.array(exponents), lower, upper)
    assert counts.sum() == total
    assert ((lower <= counts) & (counts <= upper)).all()


@given(data=st.data(), w=weights, multiple=st.sampled_from([1, 3, 8]))
def test_in_multiples_the_same_laws_hold_of_units(data, w, multiple):
    lower = data.draw(st.lists(st.integers(0, 50), min_size=len(w), max_size=len(w)))
    least = [-(-lo // multiple) for lo in lower]
    most = [lo + data.draw(st.integers(0, 9)) for lo in least]
    upper = [hi * multiple + data.draw(st.integers(0, multiple - 1)) for hi in most]
    units = data.draw(st.integers(sum(least), sum(most)))
    counts = apportion(units * multiple, w, lower, upper, multiple)
    assert (counts == multiple * apportion(units, w, least, most)).all()
    assert ((np.array(lower) <= counts) & (counts <= np.array(upper))).all()
    with pytest.raises(InfeasibleError, match="multiples of 8"):
        apportion(units * 8 + 1, w, multiple=8)


def test_a_heavy_rank_that_is_full_leaves_the_rest_to_the_light_ones_in_proportion():
    assert apportion(36, [1e17, 2.0, 1.0], upper=[6, 100, 100]).tolist() == [6, 20, 10]


@given(w=weights, total=st.integers(0, 1000))
def test_a_heavier_rank_never_gets_fewer_rows(w, total):
    counts = apportion(total, w)
    for i, j in zip(range(len(w)), range(1, len(w)), strict=False):
        if w[i] > w[j]:
            assert counts[i] >= counts[j]


def test_ties_go_to_the_lower_rank_whatever_the_last_bit_says():
    assert apportion(1, [0.1 + 0.2, 0.3]).tolist() == [1, 0]
    assert apportion(1, [0.3, 0.1 + 0.2]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("total", "lower", "upper"), [(2, [1, 1, 1], None), (10, None, [3, 3, 3]), (5, [3, 0], [2, 9])]
)
def test_infeasible_bounds_are_named(total, lower, upper):
    size = len(lower or upper)
    with pytest.raises(InfeasibleError, match=f"cannot divide {total} rows over {size} ranks"):
        apportion(total, [1.0] * size, lower, upper)


@pytest.mark.parametrize("bad", [[], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="weights must be"):
        apportion(3, bad)


def test_a2_last_partial_batch_is_split_by_the_current_shares():
    steps = [rows_per_rank(min(96, 1000 - start), (8, 24, 64)) for start in range(0, 1000, 96)]
    assert len(steps) == 11
    assert steps[:10] == [(8, 24, 64)] * 10
    assert steps[10] == (3, 10, 27)
    assert np.sum(steps) == 1000


shares = st.lists(st.integers(0, 200), min_size=1, max_size=10).filter(lambda values: sum(values) > 0)


@given(data=st.data(), sizes=shares)
def test_rows_of_a_partial_batch_obey_the_stated_law(data, sizes):
    num_rows = data.draw(st.integers(0, sum(sizes)))
    counts = rows_per_rank(num_rows, sizes)
    sharers = sum(size > 0 for size in sizes)
    assert sum(counts) == num_rows
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))
    if num_rows >= sharers:
        assert all(count > 0 for count, size in zip(counts, sizes, strict=True) if size > 0)
    else:
        assert max(counts) <= num_rows


@given(sizes=shares)
def test_a_full_batch_equals_its_shares(sizes):
    assert rows_per_rank(sum(sizes), sizes) == tuple(sizes)


@pytest.mark.parametrize(("num_rows", "sizes"), [(-1, (1, 2)), (3, (0, 0)), (3, ()), (3, (4, -1))])
def test_rows_without_a_taker_are_refused(num_rows, sizes):
    with pytest.raises(ValueError, match="cannot divide"):
        rows_per_rank(num_rows, sizes)

"""The signed-rank test against SciPy's where SciPy is right, and its own answers where it is not."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rex_ray.core.wilcoxon import MAX_EXACT, signed_rank, smallest_p

SIDES = ("greater", "less", "two-sided")
values = st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-3)
whole_values = st.integers(-40, 40).filter(bool)
few_values = st.sampled_from([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])


def by_hand(differences: list[float], alternative: str) -> float:
    """Count every assignment of signs to the midranks: the definition."""
    ranks = stats.rankdata(np.abs(differences))
    observed = ranks[np.array(differences) > 0].sum()
    sums = np.array([np.dot(signs, ranks) for signs in product((0, 1), repeat=len(ranks))])
    more, less = np.mean(sums >= observed - 1e-9), np.mean(sums <= observed + 1e-9)
    return {"greater": more, "less": less, "two-sided": min(1.0, 2 * min(more, less))}[alternative]


@pytest.mark.parametrize("alternative", SIDES)
@given(st.lists(values, min_size=1, max_size=MAX_EXACT, unique_by=lambda value: round(abs(value), 3)))
def test_the_exact_distribution_is_scipys(alternative, differences):
    expected = stats.wilcoxon(differences, alternative=alternative, method="exact").pvalue
    assert float(signed_rank(differences, alternative).p_value) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("alternative", SIDES)
@given(st.lists(few_values, min_size=1, max_size=9))
def test_ties_are_counted_out_as_well(alternative, differences):
    assert float(signed_rank(differences, alternative).p_value) == pytest.approx(by_hand(differences, alternative))


@pytest.mark.parametrize("alternative", SIDES)
@settings(max_examples=25)
@given(st.lists(whole_values, min_size=MAX_EXACT + 1, max_size=60))
def test_many_differences_take_scipys_normal_approximation(alternative, differences):
    expected = stats.wilcoxon(differences, alternative=alternative, method="asymptotic", correction=False).pvalue
    assert float(signed_rank(differences, alternative).p_value) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.lists(few_values, min_size=7, max_size=7), min_size=1, max_size=5))
def test_a_table_of_rows_is_each_row_by_itself(rows):
    together = signed_rank(rows)
    for row, p_value, effect in zip(rows, together.p_value, together.effect, strict=True):
        alone = signed_rank(row)
        assert (float(alone.p_value), float(alone.effect)) == (p_value, effect)


@pytest.mark.parametrize("count", [1, 13, 14, 60])
@pytest.mark.parametrize("alternative", SIDES)
def test_c6_all_zero_differences_are_no_evidence_however_many(count, alternative):
    result = signed_rank(np.zeros(count), alternative)
    assert (float(result.p_value), float(result.effect)) == (1.0, 0.0)
    assert (int(result.num_used), int(result.num_zeros)) == (0, count)


def test_no_values_at_all_are_no_evidence():
    assert float(signed_rank(np.zeros(0)).p_value) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("alternative", SIDES)
def test_c8_what_is_not_finite_is_dropped_and_counted(bad, alternative):
    clean = [0.3, -1.2, 0.8, 2.0, 1.1]
    spoilt = signed_rank([*clean, bad], alternative)
    assert float(spoilt.p_value) == float(signed_rank(clean, alternative).p_value)
    assert (int(spoilt.num_used), int(spoilt.num_dropped)) == (5, 1)


def test_c8_one_infinity_does_not_make_evidence_out_of_noise():
    assert float(signed_rank([0.1, -0.2, 0.3, -0.4, math.inf]).p_value) > 0.4
    assert float(signed_rank([math.inf] * 8).p_value) == 1.0


@given(st.lists(few_values, min_size=2, max_size=10), st.integers(0, 2**31))
def test_the_last_bit_does_not_break_ties(differences, seed):
    rng = np.random.default_rng(seed)
    nudged = np.nextafter(differences, np.inf * rng.choice([-1, 1], len(differences)))
    assert float(signed_rank(nudged).p_value) == float(signed_rank(differences).p_value)


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_c5_the_smallest_reachable_p_is_reached_and_never_passed(count):
    best = np.arange(1.0, count + 1)
    assert float(signed_rank(best).p_value) == smallest_p(count) == 2.0**-count
    assert float(signed_rank(best, "two-sided").p_value) == smallest_p(count, "two-sided") == 2.0 ** (1 - count)
    assert float(signed_rank(-best, "less").p_value) == smallest_p(count, "less")


def test_the_effect_runs_from_all_negative_to_all_positive():
    assert float(signed_rank([1.0, 2.0, 3.0]).effect) == 1.0
    assert float(signed_rank([-1.0, -2.0, -3.0]).effect) == -1.0
    assert float(signed_rank([1.0, 2.0, -3.0]).effect) == 0.0


def test_the_level_is_kept_on_symmetric_noise():
    rng = np.random.default_rng(0)
    fired = signed_rank(rng.standard_t(3, (20_000, 8))).p_value < 0.05
    assert 0.03 < fired.mean() < 0.05


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 1e-12, 3.5]) | st.floats(allow_subnormal=False), max_size=25),
    st.sampled_from(["greater", "less", "two-sided"]),
)
def test_one_row_alone_is_what_it_is_among_others(values, alternative):
    alone, among = signed_rank(values, alternative), signed_rank([values, values], alternative)
    for name in ("p_value", "effect", "num_used", "num_zeros", "num_dropped"):
        assert getattr(alone, name) == getattr(among, name)[1], name

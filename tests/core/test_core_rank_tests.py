"""The rank test agrees with SciPy's, and says nothing where there is nothing to say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from rex_ray.core.rank_tests import compare_ranks, one_sided_p

few_values = st.lists(st.integers(0, 6), min_size=2, max_size=30)


@given(first=few_values, second=few_values)
def test_z_and_p_are_scipys_with_ties_and_in_both_directions(first, second):
    result = compare_ranks([first], [second])
    z = float(result.z[0])
    if len(set(first + second)) == 1:
        assert z == 0.0, "SciPy says NaN: there is no evidence either way"
        return
    for alternative, signed in (("greater", z), ("less", -z)):
        p_value = mannwhitneyu(first, second, alternative=alternative, method="asymptotic").pvalue
        if signed > 0:
            assert one_sided_p(signed) == pytest.approx(p_value, rel=1e-9)
        else:
            assert p_value >= 0.5 - 0.5 / len(first) / len(second) or signed <= 0


@given(first=few_values, second=few_values)
def test_cliffs_delta_is_the_difference_of_two_chances(first, second):
    pairs = [(x, y) for x in first for y in second]
    expected = (sum(x > y for x, y in pairs) - sum(x < y for x, y in pairs)) / len(pairs)
    assert compare_ranks([first], [second]).cliffs_delta[0] == pytest.approx(expected)


@given(
    first=few_values,
    second=few_values,
    stretch=st.sampled_from([np.exp, lambda v: 3 * v - 7, lambda v: v**3]),
)
def test_only_the_order_of_values_counts_and_exchanging_the_samples_changes_the_sign(first, second, stretch):
    x, y = np.array([first], dtype=float), np.array([second], dtype=float)
    plain, other = compare_ranks(x, y), compare_ranks(stretch(x), stretch(y))
    assert plain.z.tolist() == other.z.tolist()
    assert compare_ranks(y, x).z[0] == pytest.approx(-plain.z[0])


def test_many_pairs_at_once_are_the_same_as_one_after_the_other():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 50, (40, 8)), rng.integers(0, 60, (40, 96))
    together = compare_ranks(x, y)
    apart = [compare_ranks(x[k : k + 1], y[k : k + 1]) for k in range(40)]
    assert together.z.tolist() == [float(one.z[0]) for one in apart]
    assert together.cliffs_delta.tolist() == [float(one.cliffs_delta[0]) for one in apart]


def test_eight_samples_above_ninety_six_are_beyond_doubt_and_one_spike_is_not():
    usual = np.linspace(0.0, 1.0, 96)[None]
    assert compare_ranks(np.full((1, 8), 2.0) + np.arange(8), usual).z[0] > 4.5
    spiked = np.linspace(0.1, 0.9, 8)[None].copy()
    spiked[0, 3] = 1e9
    assert abs(compare_ranks(spiked, usual).z[0]) < 1.0

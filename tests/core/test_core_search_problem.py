"""What a search is asked, and by what it judges an answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.search_problem import SPREAD_WEIGHT, objective_of

times = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=16)


@given(own_s=times, factor=st.floats(0.01, 100))
def test_a_group_that_is_slower_throughout_is_worse_by_just_that(own_s, factor):
    scaled = [factor * time_s for time_s in own_s]
    assert objective_of(scaled) == pytest.approx(objective_of(own_s) + math.log(factor), abs=1e-9)


@given(own_s=times, order=st.randoms())
def test_it_is_the_slowest_rank_plus_less_than_a_quarter_and_ranks_have_no_names(own_s, order):
    objective = objective_of(own_s)
    assert -1e-12 <= objective - math.log(max(own_s)) < SPREAD_WEIGHT
    shuffled = list(own_s)
    order.shuffle(shuffled)
    assert objective_of(shuffled) == pytest.approx(objective, abs=1e-12)


def test_of_two_splits_with_one_slowest_rank_the_busier_one_is_better():
    assert objective_of([0.2, 0.19, 0.19]) < objective_of([0.2, 0.1, 0.1])
    assert objective_of([0.2, 0.2]) == pytest.approx(math.log(0.2))


def test_a_rank_without_rows_does_not_count_and_no_time_at_all_is_worth_nothing():
    assert objective_of([0.2, 0.0, 0.1]) == objective_of([0.2, 0.1])
    assert objective_of(np.zeros(3)) == math.inf
    assert objective_of([0.1, math.inf]) == math.inf
    assert objective_of([0.1, math.nan]) == math.inf, "a rank whose time is unknown is no rank without rows"
    assert objective_of([0.1, -0.1]) == math.inf

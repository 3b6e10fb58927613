"""What a move for an event is worth, and what earlier events say of how long it will be of use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.policies.trigger.gate import expected_use_steps, stakes

times = st.lists(st.floats(1.0, 1e3), min_size=2, max_size=6)


@given(healthy=times, factor=st.floats(1.0, 4.0))
def test_a_move_never_gains_more_than_the_excess_and_costs_nothing_where_nothing_happened(healthy, factor):
    before = np.array(healthy)
    rows = np.full(before.size, 32)
    after = before.copy()
    after[0] *= factor
    at_stake = stakes(rows, before, after)
    assert 0 <= at_stake.gain_us <= at_stake.slow_us
    assert at_stake.loss_us >= 0
    balanced = np.full(before.size, 100.0)
    quiet = stakes(rows, balanced, balanced)
    assert quiet.gain_us == pytest.approx(0)
    assert quiet.loss_us == pytest.approx(0)


def test_of_four_equal_workers_one_twice_as_slow_gains_six_times_what_a_useless_move_costs():
    healthy = np.full(4, 100.0)
    at_stake = stakes(np.full(4, 64), healthy, healthy * [2, 1, 1, 1])
    assert at_stake.slow_us - at_stake.gain_us == pytest.approx(4 / 3.5 * 100)
    assert at_stake.gain_us / at_stake.loss_us == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("lengths", "age", "expected"),
    [
        ((), 4, 0.0),
        ((), 30, 20.0),
        ((12, 12, 12, 12), 4, 0.0),
        ((30, 30, 30, 30), 4, 16.0),
        ((30, 30, 30, 30), 40, 30.0),
        ((12, 12, 12, 12, 12, 90), 4, 0.0),
        ((12, 12, 12, 12, 90), 13, 3.0),
        ((12, 50, 300), 13, (27 + 277) / 2),
        ((12, 40, 60, 80), 5, (0 + 25 + 45) / 3),
    ],
)
def test_earlier_events_tell_how_long_new_shares_would_be_of_use(lengths, age, expected):
    assert expected_use_steps(lengths, age, lag_steps=10.0) == pytest.approx(expected)

"""Which steps are measured: all of them at first and after a change of the batch, then one in so many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.core.measuring import NormSchedule

schedules = st.builds(NormSchedule, interval_steps=st.integers(1, 16), dense_steps=st.integers(0, 64))


@given(schedules, st.integers(0, 10_000), st.integers(0, 200))
def test_the_first_steps_of_a_batch_are_all_measured_and_later_ones_at_the_interval(schedule, since, later):
    due = schedule.is_due(since + later, since)
    if later < schedule.dense_steps:
        assert due
    else:
        assert due == ((since + later) % schedule.interval_steps == 0)


@given(st.integers(0, 64), st.integers(0, 200))
def test_an_interval_of_0_measures_nothing(dense, step):
    assert not NormSchedule(interval_steps=0, dense_steps=dense).is_due(step, 0)


@pytest.mark.parametrize("fields", [{"interval_steps": -1}, {"dense_steps": -1}])
def test_negative_steps_are_refused(fields):
    with pytest.raises(ConfigError, match="0 or more"):
        NormSchedule(**fields)

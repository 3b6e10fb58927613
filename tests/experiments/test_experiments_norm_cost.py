from __future__ import annotations

import pytest

from experiments.norm_cost import KINDS, step_seconds


@pytest.mark.dist
def test_every_kind_of_norms_is_timed_and_taken_where_it_should():
    seconds = step_seconds(num_rounds=2, seed=0)
    assert set(seconds) == set(KINDS)
    assert all(times.shape == (2, 2) and (times > 0).all() for times in seconds.values())

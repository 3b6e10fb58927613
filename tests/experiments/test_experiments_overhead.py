from __future__ import annotations

import pytest

from experiments._overhead_parts import PARTS, measure_parts


@pytest.mark.dist
def test_every_part_of_the_overhead_can_be_measured_and_norms_are_taken_where_they_should():
    parts = measure_parts(num_rounds=3, seed=0)
    assert set(parts) == set(PARTS)
    assert all(low <= median <= high for median, low, high in parts.values())

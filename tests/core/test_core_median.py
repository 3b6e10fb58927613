from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rex_ray.core.median import median

FINITE = st.floats(-1e9, 1e9)


@given(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=9), elements=FINITE), st.data()
)
def test_it_is_numpys_median(values, data):
    axis = data.draw(st.integers(0, values.ndim - 1))
    before = values.copy()
    assert median(values, axis=axis) == pytest.approx(np.median(values, axis=axis), rel=1e-12)
    assert (values == before).all()

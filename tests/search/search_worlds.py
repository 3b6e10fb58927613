"""Problems for searches, and what really happens when a split runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from rex_ray.core.apportion import apportion
from rex_ray.core.curves import StepTimeCurve, fit_curve
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.split import exact_split
from rex_ray.core.types import FloatArray
from rex_ray.search.helper import SearchHelper
from rex_ray.search.protocol import Reply
from rex_ray.search.space import LocalBatchSizes

ROWS = np.array([16.0, 32.0, 64.0, 128.0])
SLOW = fit_curve(ROWS, 0.02 + 0.003 * ROWS, [50] * 4)
FAST = fit_curve(ROWS, 0.03 + 0.001 * ROWS, [50] * 4)


def problem_of(
    curves: Sequence[StepTimeCurve],
    global_batch_size: int,
    kind: SearchKind = "model",
    *,
    lower: int = 1,
    upper: int | None = None,
    max_trials: int = 15,
    multiple: int = 1,
) -> SearchProblem:
    """What a policy would ask whose group runs equal shares."""
    n = len(curves)
    most = global_batch_size if upper is None else upper
    shapes, shape_of, scales = SearchProblem.condense(curves)
    return SearchProblem(
        kind=kind,
        plan=exact_split(curves, global_batch_size, [lower] * n, [most] * n, multiple).local_batch_sizes,
        incumbent=tuple(apportion(global_batch_size, np.ones(n), multiple=multiple).tolist()),
        lower=(lower,) * n,
        upper=(most,) * n,
        shapes=shapes,
        shape_of=shape_of,
        scales=scales,
        max_trials=max_trials,
        local_batch_multiple=multiple,
    )


def mixed(num_workers: int = 4, rows_each: int = 64, kind: SearchKind = "model", max_trials: int = 15) -> SearchProblem:
    """Slow and fast workers by turns, each kind with a slightly and a clearly slower member: four groups."""
    scales = (1.0, 1.0, 1.5, 1.25)
    curves = [(SLOW, FAST)[rank % 2].scaled(scales[rank % 4]) for rank in range(num_workers)]
    return problem_of(curves, num_workers * rows_each, kind, max_trials=max_trials)


def tiny(kind: SearchKind = "model") -> SearchProblem:
    """Two workers and few rows: a space without need of Ax."""
    return problem_of([SLOW, FAST], 24, kind)


def tiled_s(problem: SearchProblem, sizes: LocalBatchSizes, tile: int = 32) -> FloatArray:
    """Own times of devices that compute whole tiles only, which no curve of the problem shows."""
    rows = [-(-size // tile) * tile for size in sizes]
    return np.array([float(curve.predict_s(b)) for curve, b in zip(problem.curves(), rows, strict=True)])


def wait_for(helper: SearchHelper, is_it: Callable[[list[Reply]], bool], limit_s: float = 90.0) -> list[Reply]:
    """Poll until ``is_it`` is true of everything said so far; the limit is a test's, not the helper's."""
    said: list[Reply] = []
    deadline = time.monotonic() + limit_s
    while not is_it(said):
        assert time.monotonic() < deadline, f"after {limit_s:g} s there is only {said}"
        said += helper.poll()
        time.sleep(0.01)
    return said


@st.composite
def problems(draw: st.DrawFn, kind: SearchKind = "model") -> SearchProblem:
    """Two to nine workers of two kinds at any scale, and bounds that leave room."""
    n = draw(st.integers(2, 9))
    curves = [draw(st.sampled_from([SLOW, FAST])).scaled(draw(st.floats(0.5, 3.0, allow_nan=False))) for _ in range(n)]
    multiple = draw(st.sampled_from([1, 1, 4, 6]))
    lower = multiple * draw(st.integers(0, 3))
    units = draw(st.integers(max(n * lower // multiple, 1), 96 * n // multiple))
    upper = draw(st.integers(max(multiple * -(-units // n), lower), units * multiple))
    return problem_of(curves, units * multiple, kind, lower=lower, upper=upper, multiple=multiple)

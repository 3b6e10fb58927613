"""What searches are asked in experiments: mixed clusters on published step times."""

from __future__ import annotations

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.split import exact_split
from rex_ray.scenario.profiles import load_profile

__all__ = ["SPEEDS", "search_problem"]

SPEEDS: dict[str, tuple[tuple[str, float], ...]] = {
    "two speeds": (("T4", 1.0), ("V100", 1.0)),
    "four speeds": (("T4", 1.0), ("V100", 1.0), ("T4", 1.5), ("V100", 1.3)),
}
"""Kinds and factors on their own times that workers have by turns; a search tells no more than four speeds apart."""

_ROWS_PER_WORKER = 96


def search_problem(
    num_workers: int, speeds: str, kind: SearchKind = "model", max_trials: int = 15, workload: str = "resnet50"
) -> SearchProblem:
    """Return what a group that runs equal shares would ask.

    Args:
        num_workers: size of the group, 96 rows for each.
        speeds: a name from ``SPEEDS``.
        kind: as in ``SearchProblem``.
        max_trials: as in ``SearchProblem``.
        workload: whose step times.
    """
    members = [SPEEDS[speeds][rank % len(SPEEDS[speeds])] for rank in range(num_workers)]
    curves = [load_profile(device, workload).curve.scaled(factor) for device, factor in members]
    rows = _ROWS_PER_WORKER * num_workers
    lower, upper = [1] * num_workers, [min(rows, curve.max_trusted_rows) for curve in curves]
    shapes, shape_of, scales = SearchProblem.condense(curves)
    return SearchProblem(
        kind=kind,
        plan=exact_split(curves, rows, lower, upper).local_batch_sizes,
        incumbent=tuple(apportion(rows, np.ones(num_workers)).tolist()),
        lower=tuple(lower),
        upper=tuple(upper),
        shapes=shapes,
        shape_of=shape_of,
        scales=scales,
        max_trials=max_trials,
    )

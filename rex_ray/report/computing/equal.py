"""The equal split of a run's own global batches: what its saving is counted against."""

from __future__ import annotations

import numpy as np

from rex_ray.core.apportion import apportion, rows_per_rank
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import IntArray
from rex_ray.policies.limits import equal_shares
from rex_ray.report.reading.schema import GroupData

__all__ = ["allocated_rows", "equal_rows", "equal_split"]


def allocated_rows(data: GroupData) -> IntArray:
    """Return the global batch that each step's allocation asks for, shape ``[k]``: that of its fullest step."""
    _, version = np.unique(data.versions, return_inverse=True)
    most = np.zeros(version.max() + 1, dtype=np.int64)
    np.maximum.at(most, version, data.num_rows.sum(axis=1))
    rows: IntArray = most[version]
    return rows


def equal_rows(data: GroupData) -> IntArray:
    """Return every rank's rows in equal shares of the same steps, shape ``[k, n]``, as ``bsp`` gives them.

    A worker whose memory is full leaves its rest to the others, and an epoch's last batch is cut in proportion.
    """
    pairs = np.stack([allocated_rows(data), data.num_rows.sum(axis=1)], axis=1)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    shares = [rows_per_rank(rows, equal_split(data, batch)) for batch, rows in distinct.tolist()]
    result: IntArray = np.array(shares, dtype=np.int64)[which.ravel()]
    return result


def equal_split(data: GroupData, global_batch_size: int) -> tuple[int, ...]:
    """Return equal shares of a batch within the group's limits."""
    if data.problem is not None:
        try:
            return equal_shares(data.problem, global_batch_size)
        except InfeasibleError:
            # Rows that ran are no question of limits: a data set smaller than its batch is no whole multiple.
            pass
    return tuple(apportion(global_batch_size, np.ones(data.num_workers)).tolist())

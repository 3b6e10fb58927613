"""How large and how small a global batch may become."""

from __future__ import annotations

from rex_ray.core.types import Problem
from rex_ray.policies.limits import least_rows, whole_rows

__all__ = ["largest_batch", "most_rows", "smallest_batch"]

MIN_STEPS_PER_EPOCH = 16
"""A batch is at most this part of the data set, unless it began larger: an epoch of fewer steps leaves neither an
order to shuffle nor steps to take the learning rate down in."""


def smallest_batch(problem: Problem) -> int:
    """Return the reference batch, or the least rows that every worker may be given where those are more."""
    return max(problem.global_batch_size, min(least_rows(problem), largest_batch(problem)))


def largest_batch(problem: Problem) -> int:
    """Return the largest batch that limits, the data set and the workers' known memories allow, ``M0`` at least."""
    if problem.dataset_size is None:
        return most_rows(problem)
    by_data = whole_rows(problem, problem.dataset_size // MIN_STEPS_PER_EPOCH)
    return min(most_rows(problem), max(problem.global_batch_size, by_data))


def most_rows(problem: Problem) -> int:
    """Return the largest batch that the limits and the workers' known memories let the group run, ``M0`` at least."""
    reference = problem.global_batch_size
    limit = whole_rows(problem, max(problem.max_global_batch_size, reference))
    multiple = problem.local_batch_multiple
    memory = [worker.max_local_batch_size for worker in problem.workers]
    known = [rows // multiple * multiple for rows in memory if rows is not None]
    # One worker whose memory is unknown could take all the rest; the split and its model know what it has shown.
    return max(reference, min(limit, sum(known))) if len(known) == len(memory) else limit

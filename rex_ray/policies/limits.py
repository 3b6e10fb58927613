"""How few and how many rows each rank of a group may be given."""

from __future__ import annotations

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import Allocation, IntArray, Problem

__all__ = ["are_alike", "equal_shares", "known_bounds", "least_rows", "resumed_shares", "share_bounds", "whole_rows"]

_UNBOUNDED = 2**40

_SAME_SHARES = 0.03
"""Shares that differ by no more than this fraction of the batch in all are much the same proposal."""


def are_alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shares of a batch are much the same: noise in the curves moves rows to and fro."""
    if len(one) != len(other):
        return False
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) <= _SAME_SHARES * sum(one)


def least_rows(problem: Problem) -> int:
    """Return the fewest rows of a global batch that gives every rank its minimum, in whole multiples."""
    multiple = problem.local_batch_multiple
    return sum(-(-worker.min_local_batch_size // multiple) * multiple for worker in problem.workers)


def whole_rows(problem: Problem, num_rows: int) -> int:
    """Return the largest global batch of at most ``num_rows`` rows that shares may make up, one multiple at least."""
    multiple = problem.local_batch_multiple
    return max(num_rows // multiple, 1) * multiple


def share_bounds(problem: Problem, global_batch_size: int) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most rows per rank, each of shape ``[n]``, in whole multiples.

    A global batch too small for everyone's minimum leaves no choice: its rows are the minima, in equal parts. Where
    there are fewer rows than ranks, some have none and join the reduction with weight 0.
    """
    lower = np.array([worker.min_local_batch_size for worker in problem.workers], dtype=np.int64)
    upper = np.array(
        [
            _UNBOUNDED if worker.max_local_batch_size is None else worker.max_local_batch_size
            for worker in problem.workers
        ],
        dtype=np.int64,
    )
    multiple = problem.local_batch_multiple
    upper = upper // multiple * multiple
    lower = np.minimum(-(-lower // multiple) * multiple, upper)
    if lower.sum() > global_batch_size:
        rows = global_batch_size // multiple * multiple
        lower = apportion(rows, np.ones(problem.num_workers), upper=lower, multiple=multiple)
    return lower, upper


def equal_shares(problem: Problem, global_batch_size: int, fits: IntArray | None = None) -> tuple[int, ...]:
    """Return equal shares within the ranks' bounds, differing by one row where the division leaves a rest.

    Args:
        problem: the group and its limits.
        global_batch_size: rows of a step.
        fits: most rows per rank that memory has shown to hold, shape ``[n]``, see ``known_bounds``.

    Raises:
        InfeasibleError: the group cannot hold so many rows.
    """
    lower, upper = known_bounds(problem, global_batch_size, fits)
    multiple = problem.local_batch_multiple
    if upper.sum() < global_batch_size:
        units = "" if multiple == 1 else f" in multiples of {multiple}"
        raise InfeasibleError(
            f"a global batch of {global_batch_size} rows does not fit {problem.num_workers} workers that hold "
            f"{upper.sum()} together{units}: lower global_batch_size or use more workers"
        )
    shares = apportion(global_batch_size, np.ones(problem.num_workers), lower, upper, multiple)
    return tuple(int(share) for share in shares)


def resumed_shares(
    problem: Problem, current: Allocation | None, global_batch_size: int, fits: IntArray | None = None
) -> tuple[int, ...] | None:
    """Return the shares that training resumes from, if this group can still run them.

    Args:
        problem: the group and its limits; its ranks may be on other kinds of device than those that ran the shares.
        current: what training resumes from.
        global_batch_size: rows of a step.
        fits: most rows per rank that memory has shown to hold, shape ``[n]``, see ``known_bounds``.
    """
    if current is None or len(current.local_batch_sizes) != problem.num_workers:
        return None
    if current.global_batch_size != global_batch_size:
        return None
    lower, upper = known_bounds(problem, global_batch_size, fits)
    sizes = np.array(current.local_batch_sizes, dtype=np.int64)
    is_whole = sizes % problem.local_batch_multiple == 0
    is_held = bool(((lower <= sizes) & (sizes <= upper) & is_whole).all())
    return current.local_batch_sizes if is_held else None


def known_bounds(problem: Problem, global_batch_size: int, fits: IntArray | None) -> tuple[IntArray, IntArray]:
    """Return ``share_bounds`` with what memory has shown to hold, shape ``[n]``; None: nothing was seen of it.

    Where so little is known to fit that the batch would not, the ranks' own bounds stand: what runs, runs.
    """
    lower, upper = share_bounds(problem, global_batch_size)
    if fits is None:
        return lower, upper
    multiple = problem.local_batch_multiple
    within = np.maximum(np.minimum(upper, fits // multiple * multiple), lower)
    return lower, within if within.sum() >= global_batch_size else upper

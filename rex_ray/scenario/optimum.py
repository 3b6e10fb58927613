"""The best that any split can do in a world with a shape: an exact search over the true times.

``optimal_split`` bisects curves that never fall, which is all that profiles need. Tiles make stairs of them, and
contention couples the workers, so the truth of a shaped world is searched in tables instead: slower, and exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.split import SplitPlan
from rex_ray.core.types import FloatArray, IntArray, read_only
from rex_ray.scenario.timeline import WorkerTimeline

__all__ = ["true_optimum"]

# Times nearer than this (relative) are one time.
_SAME_TIME = 1e-12


def true_optimum(
    timelines: Sequence[WorkerTimeline],
    global_batch_size: int,
    *,
    slowdowns: Sequence[float] | None = None,
    upper: Sequence[int | None] | None = None,
    multiple: int = 1,
) -> SplitPlan:
    """Return the split with the shortest quiet step, every rank having a row at least.

    Args:
        timelines: one per rank, all of one shape.
        global_batch_size: rows to split.
        slowdowns: present factor of episodes per rank, default 1.
        upper: most rows per rank, default what the profiles' sources ran.
        multiple: what every share is a multiple of.

    Raises:
        InfeasibleError: the bounds leave no room for ``global_batch_size``, or it is no multiple of ``multiple``.
    """
    n = len(timelines)
    factors = [1.0] * n if slowdowns is None else list(slowdowns)
    caps = [line.profile.max_local_batch_size for line in timelines] if upper is None else list(upper)
    most = np.array([global_batch_size if cap is None else min(cap, global_batch_size) for cap in caps])
    units = most // multiple
    is_whole = global_batch_size % multiple == 0 and not (units == 0).any()
    if n == 0 or n * multiple > global_batch_size or int(units.sum()) * multiple < global_batch_size or not is_whole:
        raise InfeasibleError(
            f"no split of {global_batch_size} rows over {n} workers fits at most {most.tolist()} rows"
            + ("" if multiple == 1 else f" in multiples of {multiple}")
        )
    hosts = _hosts(timelines)
    if len(hosts) == 1:
        rows_in_all = global_batch_size
        tables = [
            _table(line, rows_in_all, rows_in_all, factors[rank], int(most[rank]), multiple)
            for rank, line in enumerate(timelines)
        ]
        sizes = _min_max(tables, global_batch_size)
    else:
        sizes = _over_hosts(timelines, hosts, global_batch_size, factors, most, multiple)
    rows = tuple(int(size) for size in sizes)
    own_s = [
        line.quiet_time_s(mine, rows, slowdown=factor)
        for line, mine, factor in zip(timelines, rows, factors, strict=True)
    ]
    return SplitPlan(local_batch_sizes=rows, step_time_s=max(own_s), own_s=read_only(own_s, np.float64))


def _hosts(timelines: Sequence[WorkerTimeline]) -> list[list[int]]:
    """Return the ranks of each host; without contention hosts make no difference, and there is one."""
    shape = timelines[0].shape
    if shape.contention == 0 or not shape.hosts:
        return [list(range(len(timelines)))]
    shape.neighbours(0, len(timelines))  # refuses hosts that do not fit
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(shape.hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _table(
    line: WorkerTimeline, host_rows: int, all_rows: int, slowdown: float, most: int, multiple: int
) -> FloatArray:
    """Return the quiet own time of ``0 .. host_rows`` rows while the host computes ``host_rows``; inf is ruled out."""
    rows = np.arange(host_rows + 1)
    beside = 1.0 + line.shape.contention * (host_rows - rows) / all_rows
    alone_s = line.profile.own_time_s(line.shape.tiled(rows)) * (line.speed_factor * line.time_scale * slowdown)
    table: FloatArray = np.maximum(alone_s * beside, line.shape.loader_s(rows) * line.time_scale)
    table[(rows == 0) | (rows > most) | (rows % multiple > 0)] = np.inf
    return table


def _over_hosts(
    timelines: Sequence[WorkerTimeline],
    hosts: list[list[int]],
    total: int,
    factors: Sequence[float],
    most: IntArray,
    multiple: int,
) -> IntArray:
    """Split over hosts first: given its rows, what a host takes depends on nobody else."""
    known: dict[tuple[tuple[int, float, float, int], ...], tuple[FloatArray, dict[int, IntArray]]] = {}
    found = []
    for members in hosts:
        lines = [timelines[rank] for rank in members]
        limits = [(factors[rank], int(most[rank])) for rank in members]
        key = tuple((id(x.profile), x.speed_factor, *limit) for x, limit in zip(lines, limits, strict=True))
        if key not in known:  # clusters are built of like hosts
            known[key] = _inside_host(lines, limits, total, multiple)
        found.append(known[key])
    result = np.zeros(len(timelines), dtype=np.int64)
    sizes = _min_max([table for table, _ in found], total)
    for members, (_, splits), rows in zip(hosts, found, sizes, strict=True):
        result[members] = splits[int(rows)]
    return result


def _inside_host(
    lines: Sequence[WorkerTimeline], limits: Sequence[tuple[float, int]], total: int, multiple: int
) -> tuple[FloatArray, dict[int, IntArray]]:
    """Return the best time of ``0 .. total`` rows of one host (inf is ruled out), and the split behind each."""
    table = np.full(total + 1, np.inf)
    splits: dict[int, IntArray] = {}
    for rows in range(len(lines) * multiple, min(sum(most for _, most in limits), total) + 1, multiple):
        own = [_table(line, rows, total, *limit, multiple) for line, limit in zip(lines, limits, strict=True)]
        splits[rows] = _min_max(own, rows)
        table[rows] = max(float(times[size]) for times, size in zip(own, splits[rows], strict=True))
    return table, splits


def _min_max(tables: Sequence[FloatArray], total: int) -> IntArray:
    """Return the split of ``total`` with the least maximum over ``tables[i][rows_i]``; inf entries are ruled out."""
    if all((table[1:-1] <= table[2:]).all() for table in tables):
        return _by_deadline(tables, total)
    return _by_dynamic_programme(tables, total)


def _by_deadline(tables: Sequence[FloatArray], total: int) -> IntArray:
    """Tables that never fall from one row on: what is done by a deadline grows with it, so deadlines are bisected."""
    candidates = np.unique(np.concatenate([table[1:] for table in tables]))
    candidates = candidates[np.isfinite(candidates)]
    least = max(float(table[1]) for table in tables)
    low, high = int(np.searchsorted(candidates, least)), candidates.size - 1
    while low < high:
        middle = (low + high) // 2
        if int(_done_by(tables, float(candidates[middle])).sum()) >= total:
            high = middle
        else:
            low = middle + 1
    most = _done_by(tables, float(candidates[low]))
    return 1 + apportion(total - len(tables), most - 1, upper=most - 1)


def _done_by(tables: Sequence[FloatArray], deadline_s: float) -> IntArray:
    limit = deadline_s * (1 + _SAME_TIME)
    return np.array([int(np.searchsorted(table[1:], limit, side="right")) for table in tables], dtype=np.int64)


def _by_dynamic_programme(tables: Sequence[FloatArray], total: int) -> IntArray:
    """Any tables: ``best[i, r]`` is the least maximum of the first ``i`` workers with ``r`` rows together.

    The first worker has no choice, and of the last one's a single one is asked for: two workers cost one pass.
    """
    own = [_padded(table, total) for table in tables]
    best, chosen = np.maximum(own[0], 0.0), []
    for table in own[1:-1]:
        best, choice = _joined(best, table)
        chosen.append(choice)
    sizes, left = [], total
    if len(own) > 1:
        sizes.append(int(np.argmin(np.maximum(own[-1], best[::-1]))))
        left -= sizes[-1]
    for choice in reversed(chosen):
        sizes.append(int(choice[left]))
        left -= sizes[-1]
    return np.array([left, *sizes[::-1]], dtype=np.int64)


def _padded(table: FloatArray, total: int) -> FloatArray:
    own = np.full(total + 1, np.inf)
    own[: table.size] = table[: total + 1]
    return own


def _joined(best: FloatArray, own: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return the least maximum with one worker more, for every number of rows, and that worker's rows; shapes ``[r]``.

    Row by row: all splits of all numbers in one array took three times as long, twice as many entries in memory.
    """
    values, choice = np.full(best.size, np.inf), np.zeros(best.size, dtype=np.int64)
    for rows in range(best.size):
        worst = np.maximum(own[: rows + 1], best[rows::-1])
        choice[rows] = worst.argmin()
        values[rows] = worst[choice[rows]]
    return values, choice

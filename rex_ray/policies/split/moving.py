"""Rows move from the straggler to the leader, fewer and fewer as they begin to move to and fro (LB-BSP)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import IntArray, Problem, read_only
from rex_ray.policies.split.windowed import Move, Window

__all__ = ["MoveMemory", "MoveRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveMemory:
    """Rows per move, and which way each rank's last move went.

    Attributes:
        delta: rows of the next move.
        start: rows of the first one.
        way: 1 for a rank that was last given rows, -1 for one that gave, 0 for one that did neither; shape ``[n]``.
    """

    delta: int
    start: int
    way: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRows:
    """``delta`` rows per window from the slowest rank to the fastest, ``delta`` halved when a move takes one back.

    Attributes:
        window: clean steps between two moves.
        first_share: the first ``delta``, as a fraction of an equal share.
        min_gap: a straggler that is behind the leader by no more than this fraction is left alone.
    """

    window: int = 10
    first_share: float = 0.125
    min_gap: float = 0.05

    @property
    def smoothing(self) -> float:
        """The plain mean of a window."""
        return 0.0

    def begin(self, problem: Problem, global_batch_size: int) -> MoveMemory:
        """Begin with the first ``delta``."""
        multiple = problem.local_batch_multiple
        start = multiple * max(1, round(self.first_share * global_batch_size / problem.num_workers / multiple))
        way = read_only(np.zeros(problem.num_workers), np.int64)
        return MoveMemory(delta=start, start=start, way=way)

    def judge(self, memory: MoveMemory, window: Window) -> Move | str:
        """Return the next move, or why there is none."""
        with_room = window.sizes < window.upper
        if not with_room.any():
            return "no rank has room for more rows"
        slow = int(np.argmax(window.own_s))
        fast = int(np.argmin(np.where(with_room, window.own_s, np.inf)))
        spare = int(window.sizes[slow] - window.lower[slow])
        gap_s = float(window.own_s[slow] - window.own_s[fast])
        if spare <= 0:
            return f"rank {slow} is the slowest and has no row to give"
        if gap_s <= self.min_gap * window.own_s[slow]:
            return f"rank {slow} is behind rank {fast} by {gap_s:.3g} s, too little to move rows for"
        row_s = float(window.own_s[slow] / window.sizes[slow])
        row_s += float(window.own_s[fast] / window.sizes[fast]) if window.sizes[fast] > 0 else row_s
        delta = memory.delta
        if gap_s > memory.start * row_s:
            delta = memory.start
        elif memory.way[slow] > 0 or memory.way[fast] < 0:
            delta = delta // 2 // window.multiple * window.multiple
            if delta == 0 and gap_s <= row_s * window.multiple:
                what = "a row" if window.multiple == 1 else f"{window.multiple} rows"
                return f"{what} to and fro between ranks {slow} and {fast} is all that is left to move"
        moved = min(max(delta, window.multiple), spare, int(window.upper[fast] - window.sizes[fast]))
        sizes = window.sizes.copy()
        sizes[slow] -= moved
        sizes[fast] += moved
        return Move(
            local_batch_sizes=tuple(sizes.tolist()),
            reason=f"{moved} rows from the slowest rank {slow} to the fastest rank {fast}",
            evidence={"gap_s": gap_s, "slowest_s": float(window.own_s[slow]), "delta": float(delta)},
        )

    def moved(self, memory: MoveMemory, before: IntArray, after: IntArray) -> MoveMemory:
        """Take over what a move says: its rows, and its way. Any other change begins afresh."""
        change = after - before
        if np.count_nonzero(change) != 2:
            return MoveMemory(
                delta=memory.start, start=memory.start, way=read_only(np.zeros_like(memory.way), np.int64)
            )
        delta = min(int(change.max()), memory.start)
        way = np.where(change != 0, np.sign(change), memory.way)
        return MoveMemory(delta=delta, start=memory.start, way=read_only(way, np.int64))

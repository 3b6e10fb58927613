"""Who is slowest and why, from the newest steady steps under the present shares."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from rex_ray.control.events import StepObserved
from rex_ray.core.types import FloatArray, StepFlag, WorkerSpec

__all__ = ["Slowness"]

_NEWEST_STEPS: Final = 16
_CHUNK_STEPS: Final = 8
_SLOWED: Final = 1.25
"""A worker's own time over its best under the same shares; step times of one worker vary by some per cent."""

_EVEN: Final = 0.05
_STANDS_OUT: Final = 1.1
_MOSTLY_DATA: Final = 0.5


class Slowness:
    """Looks at own times rank by rank.

    A worker is compared with itself first: its own time in the newest eight steady steps against its best eight under
    the same shares. Only then with the others, whose cards and shares may differ for good reasons.

    Args:
        workers: the group, in rank order.
    """

    def __init__(self, workers: tuple[WorkerSpec, ...]) -> None:
        self._workers = workers
        self._shares: tuple[int, ...] = ()
        self._newest: deque[StepObserved] = deque(maxlen=_NEWEST_STEPS)
        self._chunk: list[StepObserved] = []
        self._best_us: FloatArray | None = None
        self._factor = np.ones(len(workers))
        self._since: list[int | None] = [None] * len(workers)

    def run(self, shares: tuple[int, ...]) -> None:
        """Hear that the group runs other shares from the next step on; the same ones change nothing."""
        if shares != self._shares:
            self._shares = shares
            self._newest.clear()
            self._chunk.clear()
            self._best_us = None
            self._factor = np.ones(len(self._workers))
            self._since = [None] * len(self._workers)

    def take(self, step: StepObserved) -> None:
        """Take in a complete step; only steady ones count."""
        if step.flags != StepFlag.NONE:
            return
        self._newest.append(step)
        self._chunk.append(step)
        if len(self._chunk) == _CHUNK_STEPS:
            self._close_chunk()

    @property
    def own_s(self) -> FloatArray:
        """Median own time per rank in seconds, shape ``[n]``; NaN before the first steady step."""
        if not self._newest:
            return np.full(len(self._workers), np.nan)
        median_us: FloatArray = np.median([step.own_us for step in self._newest], axis=0)
        return median_us / 1e6

    def slowest(self, own_s: FloatArray) -> tuple[int | None, str]:
        """Return whose own time is the longest, and why in a few words; ``(None, "")`` where nothing is known."""
        if not self._newest or len(own_s) < 2:
            return None, ""
        rank = int(np.argmax(own_s))
        return rank, self._why(rank, own_s)

    def _why(self, rank: int, own_s: FloatArray) -> str:
        since = self._since[rank]
        if since is not None:
            return f"slowed down {self._factor[rank]:.2g}x since step {since}"
        excess = own_s[rank] / own_s.mean() - 1.0
        if excess < _EVEN:
            return "even with the others"
        data_share = self._data_share()
        if data_share[rank] > _MOSTLY_DATA and data_share[rank] > 1.5 * np.median(data_share):
            return f"waits for its data {data_share[rank]:.0%} of the time"
        return self._against_others(rank, own_s)

    def _against_others(self, rank: int, own_s: FloatArray) -> str:
        """Compare the time of a row, with workers of its own kind first: only they should be alike."""
        rows = np.median([step.num_rows for step in self._newest], axis=0)
        row_s = own_s / np.maximum(rows, 1.0)
        me = self._workers[rank]
        with_rows = rows > 0
        alike = [w.rank for w in self._workers if w.device == me.device and w.rank != rank and with_rows[w.rank]]
        others = [w.rank for w in self._workers if w.device != me.device and with_rows[w.rank]]
        if alike and row_s[rank] > _STANDS_OUT * np.median(row_s[alike]):
            return f"{row_s[rank] / np.median(row_s[alike]):.2g}x as long a row as other {me.device}"
        if others and row_s[rank] > _STANDS_OUT * np.median(row_s[others]):
            return f"{me.device} takes {row_s[rank] / np.median(row_s[others]):.2g}x as long a row as others"
        return f"larger share: {rows[rank]:.0f} of {rows.sum():.0f} rows"

    def _data_share(self) -> FloatArray:
        data_us = np.sum([step.data_us for step in self._newest], axis=0)
        own_us = np.sum([step.own_us for step in self._newest], axis=0)
        share: FloatArray = data_us / np.maximum(own_us, 1)
        return share

    def _close_chunk(self) -> None:
        median_us: FloatArray = np.maximum(np.median([step.own_us for step in self._chunk], axis=0), 1.0)
        first_step = self._chunk[0].step
        self._chunk.clear()
        self._best_us = median_us if self._best_us is None else np.minimum(self._best_us, median_us)
        self._factor = median_us / self._best_us
        self._since = [
            (first_step if since is None else since) if factor >= _SLOWED else None
            for since, factor in zip(self._since, self._factor.tolist(), strict=True)
        ]

"""From records of single ranks to complete steps, in order: the gate that only sound evidence passes.

Here times become integer microseconds and norms lose all but nine digits, before any judgement sees them; so a replay
compares integers, not the last bits of some machine's arithmetic. A step leaves this gate whole or not at all: its
arrays hold no gaps and nothing that is not finite. What is turned away is counted by its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rex_ray.core.observations import StepObserved, TelemetryGap
from rex_ray.core.types import FloatArray, IntArray, StepFlag, StepRecord, frozen, read_only

__all__ = ["MAX_ROWS", "MAX_TIME_S", "StepAssembler", "TelemetryWatch", "quantise_norm", "quantise_norms"]

MAX_TIME_S = 1e9
"""Some thirty years: a larger "time" is a broken clock, and would overflow the microseconds."""

MAX_ROWS = 2**31
"""More rows than any rank's share; sums over ranks stay far from overflowing."""


@dataclass(slots=True)
class _Step:
    """The records of one step that have arrived, by rank."""

    records: list[StepRecord | None]
    num_missing: int
    fault: str | None = None


@dataclass(slots=True)
class StepAssembler:
    """Collects one group's records and lets complete steps out, in step order.

    Args:
        generation: identity of the group; records of any other are stale.
        num_workers: size of the group.
        first_step: the group's first optimizer step.
        max_lag_steps: a step still incomplete so far behind the newest complete one is given up.
        max_pending_steps: memory bound: with more steps pending, the oldest incomplete one is given up.
    """

    generation: str
    num_workers: int
    first_step: int = 0
    max_lag_steps: int = 32
    max_pending_steps: int = 1024
    _pending: dict[int, _Step] = field(default_factory=dict, init=False)
    _dropped: Counter[str] = field(default_factory=Counter, init=False)
    _versions: tuple[int, int] | None = field(default=None, init=False)
    _next_step: int = field(default=0, init=False)
    _newest_complete: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._next_step = self.first_step

    @property
    def dropped(self) -> Mapping[str, int]:
        """What was turned away, by reason: records, but whole steps under ``"... step"``."""
        return dict(self._dropped)

    @property
    def last_step(self) -> int:
        """The newest step that was let out or given up; one before the first at the start."""
        return self._next_step - 1

    def publish(self, version: int) -> None:
        """Expect records that bear ``version``, and no longer only those of earlier ones.

        Versions of a group are consecutive, so the first and the last name them all. Before the first call
        every version is taken.
        """
        first, last = self._versions or (version, version)
        self._versions = (min(first, version), max(last, version))

    def add(self, records: Iterable[StepRecord]) -> list[StepObserved]:
        """Take records in and return every step that is now complete, in step order."""
        for record in records:
            self._take(record)
        return self._release()

    def _take(self, record: StepRecord) -> None:
        if record.generation != self.generation:
            self._dropped["stale generation"] += 1
            return
        if not 0 <= record.rank < self.num_workers:
            self._dropped["unknown rank"] += 1
            return
        if record.step < self._next_step:
            self._dropped["late"] += 1
            return
        step = self._pending.get(record.step)
        if step is None:
            step = self._pending[record.step] = _Step([None] * self.num_workers, self.num_workers)
        elif step.records[record.rank] is not None:
            self._dropped["duplicate"] += 1
            return
        step.records[record.rank] = record
        step.num_missing -= 1
        if self._versions is not None and not self._versions[0] <= record.allocation_version <= self._versions[1]:
            self._dropped["unknown version"] += 1
            step.fault = "unknown version step"
        if step.num_missing == 0 and record.step > self._newest_complete:
            self._newest_complete = record.step

    def _release(self) -> list[StepObserved]:
        """Let out what is complete. A step that is given up does not hold back those behind it."""
        released: list[StepObserved] = []
        while self._pending:
            step = self._pending.get(self._next_step)
            if step is not None and step.num_missing == 0:
                del self._pending[self._next_step]
                observed = self._observe(step)
                if observed is not None:
                    released.append(observed)
                self._next_step += 1
            elif self._given_up_before() > self._next_step:
                # Steps of which nothing ever came are skipped in one stride.
                skip_to = self._next_step + 1 if step else min(*self._pending, self._given_up_before())
                self._dropped["incomplete step"] += skip_to - self._next_step
                self._pending.pop(self._next_step, None)
                self._next_step = skip_to
            else:
                break
        return released

    def _given_up_before(self) -> int:
        """The step before which nothing incomplete is waited for any longer."""
        if len(self._pending) > self.max_pending_steps:
            return min(self._pending) + 1
        return self._newest_complete - self.max_lag_steps + 1

    def _observe(self, step: _Step) -> StepObserved | None:
        records = [record for record in step.records if record is not None]
        if step.fault is None and len({record.allocation_version for record in records}) > 1:
            step.fault = "mixed versions step"
        times = np.array([(r.data_s, r.compute_s, r.sync_s, r.step_s) for r in records], dtype=np.float64)
        # A NaN fails both comparisons.
        if step.fault is None and not ((times >= 0.0) & (times < MAX_TIME_S)).all():
            step.fault = "impossible time step"
        num_rows = read_only([r.num_rows for r in records], np.int64)
        if step.fault is None and num_rows.min() < 0:
            step.fault = "negative rows step"
        if step.fault is None and num_rows.max() > MAX_ROWS:
            step.fault = "impossible rows step"
        if step.fault is not None:
            self._dropped[step.fault] += 1
            return None
        return _assembled(records, num_rows, times)


@dataclass(slots=True)
class TelemetryWatch:
    """Says when complete steps have been missing for too long.

    Args:
        after_us: how long without a complete step until that is worth an event.
    """

    after_us: int = 10_000_000
    _seen: tuple[str, int] | None = field(default=None, init=False)
    _since_us: int = field(default=0, init=False)

    def look(self, now_us: int, generation: str, last_step: int) -> TelemetryGap | None:
        """Look at the newest complete step of a group; ask at every tick. Repeats while nothing comes."""
        if self._seen != (generation, last_step):
            self._seen, self._since_us = (generation, last_step), now_us
        waited_us = now_us - self._since_us
        if waited_us < self.after_us:
            return None
        self._since_us = now_us
        return TelemetryGap(generation=generation, last_step=last_step, waited_us=waited_us)


def _assembled(records: list[StepRecord], num_rows: IntArray, times: FloatArray) -> StepObserved:
    first = records[0]
    times_us = np.rint(times.T * 1e6).astype(np.int64)
    times_us.setflags(write=False)
    norms = _norms(records)
    flags = StepFlag.NONE
    for record in records:
        if record.flags:
            flags |= record.flags
    return StepObserved(
        generation=first.generation,
        epoch=first.epoch,
        step=first.step,
        allocation_version=first.allocation_version,
        num_rows=num_rows,
        data_us=times_us[0],
        compute_us=times_us[1],
        sync_us=times_us[2],
        step_us=times_us[3],
        weighted_sq_norm=norms,
        num_groups=None if norms is None else read_only([r.num_groups for r in records], np.int64),
        num_norm_steps=1 if norms is None else max(r.num_norm_steps for r in records),
        global_sq_norm=None if first.global_sq_norm is None else _square(first.global_sq_norm),
        loss=_mean_loss(records),
        peak_memory_bytes=_peak_memory(records),
        flags=flags,
    )


def quantise_norm(value: float) -> float | None:
    """Round to nine significant digits, what two machines still agree on; what is not finite is no norm."""
    return float(f"{value:.9g}") if math.isfinite(value) else None


def quantise_norms(values: list[float | None]) -> FloatArray | None:
    """Round every rank's norm, shape ``[n]``; None where any rank has none."""
    norms = [None if value is None else quantise_norm(value) for value in values]
    return None if None in norms else frozen(np.array(norms, dtype=np.float64))


def _norms(records: list[StepRecord]) -> FloatArray | None:
    if records[0].weighted_sq_norm is None:
        return None
    squares = [record.weighted_sq_norm for record in records]
    return quantise_norms([None if square is None else _square(square) for square in squares])


def _square(value: float) -> float | None:
    """A measured square norm as it is judged; what is negative was none."""
    return quantise_norm(value) if value >= 0.0 else None


def _mean_loss(records: list[StepRecord]) -> float | None:
    total, rows = 0.0, 0
    for record in records:
        if record.num_rows == 0:
            continue
        if record.loss is None:
            return None
        total += record.num_rows * record.loss
        rows += record.num_rows
    return quantise_norm(total / rows) if rows else None


def _peak_memory(records: list[StepRecord]) -> IntArray | None:
    peaks = [-1 if r.peak_memory_bytes is None else r.peak_memory_bytes for r in records]
    return read_only(peaks, np.int64) if max(peaks) >= 0 else None

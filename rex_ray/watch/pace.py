"""How fast it goes, and how long that will take: rows against the driver's clock."""

from __future__ import annotations

from collections import deque
from typing import Final

from rex_ray.control.events import ScheduleReported, StepObserved
from rex_ray.core.types import StepFlag

__all__ = ["Pace"]

_NEWEST_STEPS: Final = 32
_LEAST_APART_US: Final = 1_000_000
_MOST_MARKS: Final = 600
_LEAST_SPAN_US: Final = 3_000_000


class Pace:
    """Counts one group's rows. Bounded, and fresh with each group: time that a restart took says nothing.

    The time left is what the newest ten minutes make of the rows left, evaluation and saves included.

    Args:
        first_step: the group's next step.
        rows_per_epoch: rows of an epoch, or None where nobody has counted them.
    """

    def __init__(self, first_step: int, rows_per_epoch: int | None) -> None:
        self._rows_per_epoch = rows_per_epoch
        self._is_counted = rows_per_epoch is not None
        self._last_step = first_step - 1
        self._epoch = -1
        self._epoch_rows = 0
        self._is_whole_epoch = False
        self._rows = 0
        self._batch = 0
        self._newest: deque[tuple[int, float]] = deque(maxlen=_NEWEST_STEPS)
        self._marks: deque[tuple[int, int]] = deque(maxlen=_MOST_MARKS)

    def step(self, step: StepObserved) -> None:
        """Take in a complete step. Those that never came whole are counted by the batch of the next one."""
        rows = int(step.num_rows.sum())
        if not step.flags & StepFlag.PARTIAL or not self._batch:
            self._batch = rows
        missed_rows = (step.step - self._last_step - 1) * self._batch
        self._last_step = step.step
        self._rows += rows + missed_rows
        self._newest.append((rows, float(step.step_us.mean())))
        if step.epoch > self._epoch:
            self._enter(step.epoch)
            self._epoch_rows = rows
        elif step.epoch == self._epoch:
            self._epoch_rows += rows + missed_rows

    def schedule(self, event: ScheduleReported) -> None:
        """Hear where the loop is in its epoch; steps before that may still be under way, or later ones be here."""
        if event.epoch >= self._epoch:
            if event.epoch > self._epoch:
                self._enter(event.epoch)
            on_their_way = event.step - 1 - self._last_step
            self._epoch_rows = max(event.cursor - on_their_way * self._batch, 0)

    def tick(self, now_us: int) -> None:
        """Hear the time."""
        if not self._rows:
            return
        if not self._marks or now_us - self._marks[-1][0] >= _LEAST_APART_US:
            self._marks.append((now_us, self._rows))

    @property
    def rows_per_s(self) -> float:
        """Rows per second over the newest steps, NaN before the first."""
        total_us = sum(step_us for _, step_us in self._newest)
        return sum(rows for rows, _ in self._newest) / (total_us / 1e6) if total_us > 0 else float("nan")

    @property
    def step_us(self) -> tuple[float, ...]:
        """Wall time of the newest steps in microseconds, the mean over ranks."""
        return tuple(step_us for _, step_us in self._newest)

    def left_s(self, num_epochs: int | None) -> float | None:
        """Seconds to the end of the last epoch at the pace of the newest minutes; None where it cannot be known."""
        if num_epochs is None or self._rows_per_epoch is None or self._epoch < 0 or not self._marks:
            return None
        (began_us, began_rows), (now_us, now_rows) = self._marks[0], self._marks[-1]
        if now_us - began_us < _LEAST_SPAN_US or now_rows <= began_rows:
            return None
        done = min(self._epoch_rows, self._rows_per_epoch)
        left = max(num_epochs - self._epoch, 0) * self._rows_per_epoch - done
        return max(left, 0) * (now_us - began_us) / 1e6 / (now_rows - began_rows)

    def _enter(self, epoch: int) -> None:
        """Of streams, an epoch that was seen from its beginning to its end tells how long the next ones are."""
        is_next = epoch == self._epoch + 1
        if self._is_whole_epoch and is_next and not self._is_counted:
            self._rows_per_epoch = self._epoch_rows
        self._is_whole_epoch = is_next
        self._epoch, self._epoch_rows = epoch, 0

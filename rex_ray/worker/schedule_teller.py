"""Tells the controller's side how far the loop is to go and at what learning rate, every now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from rex_ray.core.types import StepRecord
from rex_ray.worker.link import Record, ScheduleRecord
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.progress import Progress

__all__ = ["ScheduleTeller"]

_INTERVAL_S: Final = 5.0
"""A schedule that moves with every batch is a curve to people, not a list of its points."""


class ScheduleTeller:
    """Stands before rank 0's link and adds a schedule to records that leave anyhow, where it is due and new.

    At a step where none is due this costs a look at the clock; the optimizer is read between two steps, so that the
    global batch's factor is not in its rate.

    Args:
        generation: identity of the worker group.
        send: takes records; must return at once.
        progress: where training stands in the data.
        interval_s: shortest time between two schedules.
    """

    def __init__(
        self,
        generation: str,
        send: Callable[[Sequence[Record]], None],
        progress: Progress,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._generation = generation
        self._send = send
        self._progress = progress
        self._interval_s = interval_s
        self._due_s = 0.0
        self._told: tuple[int | None, float | None] = (None, None)
        self._num_epochs: int | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def announce(self, num_epochs: int) -> None:
        """Hear how many epochs the loop asks for; told with the next step."""
        self._num_epochs = num_epochs
        self._due_s = 0.0

    def send(self, records: Sequence[Record]) -> None:
        """Pass records on, and a schedule with them where it is due."""
        if now_s() >= self._due_s and isinstance(records[0], StepRecord):
            self._due_s = now_s() + self._interval_s
            what = (self._num_epochs, self._learning_rate())
            if what != self._told:
                self._told = what
                records = [*records, self._record()]
        self._send(records)

    def _record(self) -> ScheduleRecord:
        position = self._progress.position
        num_epochs, learning_rate = self._told
        return ScheduleRecord(
            generation=self._generation,
            epoch=position.epoch,
            step=position.step,
            cursor=position.cursor,
            num_epochs=num_epochs,
            learning_rate=learning_rate,
        )

    def _learning_rate(self) -> float | None:
        """The first group's rate; None of a rate on a device, whose reading would wait for all that is queued there."""
        if self.optimizer is None or not self.optimizer.param_groups:
            return None
        rate = self.optimizer.param_groups[0].get("lr")
        if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
            return None
        return None if rate is None else float(rate)

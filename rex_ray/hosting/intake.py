"""What a worker's batch is to a controller: records and events, or a drop that is counted and said once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

from rex_ray.control.codec import CodecError
from rex_ray.control.events import (
    ORDINARY_INCIDENTS,
    IncidentReported,
    MemoryLimited,
    MetricReported,
    ScheduleReported,
)
from rex_ray.core.types import StepRecord
from rex_ray.hosting.wire import Batch, checked, decode, is_sound_incident, is_sound_metric, is_sound_schedule

__all__ = ["Intake"]

logger = logging.getLogger("rex_ray")

_MOST_OF_A_KIND: Final = 256
_MOST_KINDS: Final = 64
_MOST_CHARACTERS: Final = 2000
_MOST_RANKS: Final = 4096


class Intake:
    """Judges what comes out of the telemetry queue, before any of it is believed."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._drops_of: dict[int, int] = {}
        self._incidents: Counter[str] = Counter()

    @property
    def dropped(self) -> Counter[str]:
        """What was turned away here or never came, by reason."""
        return +self._dropped

    def open(self, batch: object) -> Batch | None:
        """Return a batch if it is one, else None."""
        try:
            sound = checked(batch)
        except CodecError as error:
            if not self._dropped["malformed batch"]:
                logger.warning("%s; it is dropped, and so is every other such thing from now on", error)
            self._dropped["malformed batch"] += 1
            return None
        self._count_drops(sound)
        return sound

    def records(self, batch: Batch) -> list[StepRecord]:
        """Return a batch's step records."""
        records = decode(batch)
        self._dropped["malformed record"] += len(batch.steps) - len(records)
        return records

    def events(
        self, batch: Batch, generation: str | None
    ) -> Iterator[MetricReported | ScheduleReported | IncidentReported | MemoryLimited]:
        """Yield a batch's metrics and schedules, of the running group only, and its incidents.

        An incident is told also of a group that is gone: what ended it may well be the reason. What it says of a kind
        of device's memory comes after it, and is never left out.
        """
        for metric in batch.metrics:
            if not is_sound_metric(metric):
                self._dropped["malformed record"] += 1
            elif metric.generation != generation:
                self._dropped["stale metric"] += 1
            else:
                yield MetricReported(
                    generation=metric.generation,
                    epoch=metric.epoch,
                    step=metric.step,
                    elapsed_us=round(metric.elapsed_s * 1e6),
                    metrics={name: float(value) for name, value in metric.metrics.items()},
                )
        for schedule in batch.schedules:
            if not is_sound_schedule(schedule):
                self._dropped["malformed record"] += 1
            elif schedule.generation == generation:
                yield ScheduleReported(
                    generation=schedule.generation,
                    epoch=schedule.epoch,
                    step=schedule.step,
                    cursor=schedule.cursor,
                    num_epochs=schedule.num_epochs,
                    learning_rate=None if schedule.learning_rate is None else float(schedule.learning_rate),
                )
        for incident in batch.incidents:
            if not is_sound_incident(incident):
                self._dropped["malformed record"] += 1
            elif self._is_worth_a_line(incident.kind):
                message = incident.message[:_MOST_CHARACTERS]
                level = logging.INFO if incident.kind in ORDINARY_INCIDENTS else logging.WARNING
                logger.log(level, "rank %d, step %d: %s", incident.rank, incident.step, message)
                yield IncidentReported(
                    generation=incident.generation,
                    rank=incident.rank,
                    step=incident.step,
                    kind=incident.kind,
                    message=message,
                )
            if incident.limits is not None and is_sound_incident(incident):
                yield MemoryLimited(
                    generation=incident.generation,
                    rank=incident.rank,
                    step=incident.step,
                    device=incident.limits.device,
                    num_rows=incident.limits.num_rows,
                )

    def _is_worth_a_line(self, kind: str) -> bool:
        """The first ones of a kind, then ever more rarely: what happens at every step must not fill the disk."""
        kind = kind if kind in self._incidents or len(self._incidents) < _MOST_KINDS else "any other kind"
        self._incidents[kind] += 1
        count = self._incidents[kind]
        if count <= _MOST_OF_A_KIND or count & (count - 1) == 0:
            return True
        self._dropped["incident like many before"] += 1
        return False

    def _count_drops(self, batch: Batch) -> None:
        """Add what a worker lost since it last said so; a count that falls is a new process's.

        Batches may overtake one another, so that a count falls without one: too many are better than too few.
        """
        before = self._drops_of.pop(batch.rank, 0)
        self._dropped["not taken by the queue"] += batch.num_dropped - (before if batch.num_dropped >= before else 0)
        # The rank heard of last is the last one forgotten, whatever ranks a foreign batch names.
        self._drops_of[batch.rank] = batch.num_dropped
        while len(self._drops_of) > _MOST_RANKS:
            del self._drops_of[next(iter(self._drops_of))]

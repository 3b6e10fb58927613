"""What a rank says aloud and to the journal, beside its records: what went wrong and was dealt with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rex_ray.worker.link import IncidentRecord, KindLimit
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.progress import Progress
from rex_ray.worker.step import StepInHand

__all__ = ["Notices"]

_log = logging.getLogger("rex_ray")


class Notices:
    """The one way to the journal for what is no measurement.

    Args:
        rank: this rank.
        generation: identity of the worker group, written into every incident.
        progress: where training stands.
        records: takes incidents, between the records of steps.
    """

    def __init__(self, *, rank: int, generation: str, progress: Progress, records: RecordQueue) -> None:
        self._rank = rank
        self._generation = generation
        self._progress = progress
        self._records = records

    def incident(self, step: int, kind: str, message: str, limits: KindLimit | None = None) -> None:
        """Tell the journal of something that went wrong on this rank and was dealt with.

        Args:
            step: in which it did.
            kind: a word for the like of it.
            message: what it was, in a sentence.
            limits: what was learnt by it of a kind of device.
        """
        self._records.tell(
            IncidentRecord(
                generation=self._generation, rank=self._rank, step=step, kind=kind, message=message, limits=limits
            )
        )

    def now(self, kind: str, message: str) -> None:
        """Tell the journal of something at the next step."""
        self.incident(self._progress.position.step, kind, message)

    def aloud(self, kind: str, message: str) -> None:
        """Tell the journal of something at the next step, and whoever reads the log."""
        _log.warning("%s", message)
        self.now(kind, message)

    def long_wait(self, told: str) -> None:
        """Say that a wait for other ranks passed half its limit."""
        self.aloud("waiting", told)

    def snapshot_trouble(self, trouble: str) -> None:
        """Say that a local snapshot failed."""
        self.aloud("snapshot", trouble)

    def resumed(self, in_words: str, troubles: Sequence[str]) -> None:
        """Say where training goes on, and which newer states could not be read."""
        for trouble in troubles:
            self.aloud("damaged_save", f"passed over a save that is not whole: {trouble}")
        _log.warning("%s", in_words)

    def ended_by_memory(self, step: StepInHand | None, device_kind: str, message: str) -> None:
        """Memory ran out in the step in hand, and training ends here: have later groups give fewer rows.

        Outside of a step, as while evaluating, it says nothing about shares.
        """
        if step is None or step.closed or not step.num_rows:
            return
        self.incident(
            step.plan.step,
            "out_of_memory",
            f"memory ran out at {step.num_rows} rows on {device_kind}, which ends this group ({message})",
            limits=KindLimit(device=device_kind, num_rows=step.num_rows),
        )

"""How ranks learn how many rows each of them has in a step of streams, whose lengths nobody knows beforehand.

Each rank tells its count as soon as it has read the step's rows, one step before they are used. So the answer is
there by the time it is asked for, and no step waits for it but the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from rex_ray.core.errors import RexError
from rex_ray.worker.group.side_group import PendingValues, SideGroup

__all__ = ["Count", "StepCounts", "StreamEnd"]


class StreamEnd(IntEnum):
    """What a rank's stream can still bring after the rows that were read."""

    OPEN = 0
    ENDED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one rank tells of its rows for a step.

    Attributes:
        epoch: the step's.
        step: the step, counted over the whole run.
        num_rows: rows read for it.
        end: what comes after them.
        formless: the rank has no batch by whose form it could make an empty one.
        first_rows: stands for the rows themselves, where they are the first that a session reads; else 0.
    """

    epoch: int
    step: int
    num_rows: int
    end: StreamEnd
    formless: bool
    first_rows: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the rank has no row for the step, nor for any later one."""
        return self.num_rows == 0 and self.end is StreamEnd.ENDED


class StepCounts:
    """Counts of the step that was read last, on their way.

    Args:
        group: ranks to tell; used for nothing else, so that stray calls cannot come between.
    """

    def __init__(self, group: SideGroup) -> None:
        self._group = group
        self._pending: PendingValues | None = None

    def tell(self, count: Count) -> None:
        """Send this rank's count, and return at once."""
        assert self._pending is None, "a step's counts are read before the next ones are told"
        told = torch.tensor(
            [count.epoch, count.step, count.num_rows, count.end, count.formless, count.first_rows], dtype=torch.int64
        )
        self._pending = self._group.gather_later(told, f"the row counts of step {count.step}")

    def read(self) -> tuple[Count, ...]:
        """Return every rank's count, in rank order.

        Raises:
            LinkError: a rank did not tell within the limit.
            RexError: the ranks are at different steps.
        """
        assert self._pending is not None, "counts are told before they are read"
        rows = self._pending.read().tolist()
        self._pending = None
        counts = tuple(
            Count(
                epoch=epoch, step=step, num_rows=num_rows, end=StreamEnd(end), formless=bool(formless), first_rows=first
            )
            for epoch, step, num_rows, end, formless, first in rows
        )
        if len({(count.epoch, count.step) for count in counts}) > 1:
            places = ", ".join(f"rank {k}: epoch {c.epoch}, step {c.step}" for k, c in enumerate(counts))
            raise RexError(
                f"the ranks ask their streams for different steps ({places}); every rank must iterate session.loader "
                "alike, and leave the loop at the same batch"
            )
        return counts

    def share_form(self, form: Any) -> Any:
        """Return ``form``, or where that is None the first one that any rank has. Collective, and rare."""
        forms = self._group.gather_objects(form, "the form of an empty batch")
        return form if form is not None else next((other for other in forms if other is not None), None)

    def forget(self) -> None:
        """Let counts under way arrive, and drop them: the step that they are for will not come."""
        if self._pending is not None:
            self._pending.read()
            self._pending = None

    def close(self, timeout_s: float) -> None:
        """Let the last counts arrive, so that nobody leaves while others still listen."""
        if self._pending is not None:
            self._pending.read(timeout_s)
            self._pending = None
        self._group.close()

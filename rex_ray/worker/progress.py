"""How far training has come: the place in the data, and what this session's batches add up to."""

from __future__ import annotations

from rex_ray.worker.data.sampler import Plan, Position
from rex_ray.worker.step import StepInHand

__all__ = ["Progress"]


class Progress:
    """Moves on with every batch that is consumed.

    Args:
        position: where training begins in the data.

    Attributes:
        position: the next step, and where its rows begin; whoever ends an epoch sets it.
        reference_batch: rows of a reference step; None until the ranks have agreed on it.
        num_batches: batches that were handed out in this session.
        own_rows_since_sync: this rank's rows since buffers were last made alike on all ranks.
        total_rows_since_sync: all ranks' rows since then.
    """

    __slots__ = (
        "_reference_steps",
        "_rows",
        "num_batches",
        "own_rows_since_sync",
        "position",
        "reference_batch",
        "total_rows_since_sync",
    )

    def __init__(self, position: Position | None = None) -> None:
        self.position = Position() if position is None else position
        self.reference_batch: int | None = None
        self.num_batches = 0
        self.own_rows_since_sync = 0
        self.total_rows_since_sync = 0
        self._reference_steps = 0
        self._rows = 0

    def consume(self, step: StepInHand) -> None:
        """Move past a batch."""
        plan = step.plan
        total_rows = plan.total_rows
        self.position = plan.after
        self._reference_steps += self._reference_steps_of(plan)
        self._rows += total_rows
        self.own_rows_since_sync += step.num_rows
        self.total_rows_since_sync += total_rows

    def synchronised(self) -> None:
        """Buffers are alike on all ranks: count the rows behind their differences anew."""
        self.own_rows_since_sync = self.total_rows_since_sync = 0

    def reference_steps(self, in_hand: StepInHand | None) -> int:
        """Return how many steps of the reference batch this session's batches make up, the one in hand included."""
        open_steps = 0 if in_hand is None or in_hand.consumed else self._reference_steps_of(in_hand.plan)
        return self._reference_steps + open_steps

    def rows(self, in_hand: StepInHand | None) -> int:
        """Return the rows of all ranks in this session's batches, the one in hand included."""
        open_rows = 0 if in_hand is None or in_hand.consumed else in_hand.plan.total_rows
        return self._rows + open_rows

    def _reference_steps_of(self, plan: Plan) -> int:
        return 1 if self.reference_batch is None else plan.reference_steps(self.reference_batch)

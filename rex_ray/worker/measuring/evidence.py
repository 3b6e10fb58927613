"""Which steps' times are evidence of what they ran with, and why others are not."""

from __future__ import annotations

from rex_ray.core.types import StepFlag
from rex_ray.worker.data.sampler import Plan

__all__ = ["Evidence"]


class Evidence:
    """Flags each step as it begins.

    Args:
        warm_up_steps: first steps of a session whose times are not evidence.
        settle_steps: first steps after a change of shares whose times are not evidence.

    Attributes:
        is_timed: marks of the reduction can be set at all; without them no step's times are evidence.
    """

    def __init__(self, *, warm_up_steps: int, settle_steps: int) -> None:
        self._settle_steps = settle_steps
        self._unsettled = warm_up_steps
        self._sizes: tuple[int, ...] | None = None
        self._after_gap = True
        self.is_timed = True

    def gap(self) -> None:
        """Something other than training takes place: the next step's times are no evidence."""
        self._after_gap = True

    def flags_of(self, plan: Plan) -> StepFlag:
        """Return why the step that begins is no evidence; called once for each."""
        flags = StepFlag.NONE
        sizes = plan.allocation.local_batch_sizes
        if sizes != self._sizes:
            if self._sizes is not None:
                self._unsettled = max(self._unsettled, self._settle_steps)
            self._sizes = sizes
        if self._unsettled > 0:
            self._unsettled -= 1
            flags |= StepFlag.WARM_UP
        elif not self.is_timed:
            flags |= StepFlag.WARM_UP
        if self._after_gap:
            self._after_gap = False
            flags |= StepFlag.AFTER_GAP
        if plan.partial:
            flags |= StepFlag.PARTIAL
        return flags

"""Which allocation is in force at which step."""

from __future__ import annotations

from bisect import bisect_right

from rex_ray.core.types import Allocation

__all__ = ["Schedule"]


class Schedule:
    """Allocations by the step from which they hold, oldest first. Every rank holds the same one.

    Args:
        first: allocation in force until another one takes effect.
    """

    def __init__(self, first: Allocation) -> None:
        self._steps = [0]
        self._allocations = [first]

    @property
    def newest(self) -> Allocation:
        """The allocation that was added last, whether in force yet or not."""
        return self._allocations[-1]

    def at(self, step: int) -> Allocation:
        """Return the allocation in force at ``step``."""
        return self._allocations[max(bisect_right(self._steps, step) - 1, 0)]

    def add(self, effective_step: int, allocation: Allocation) -> None:
        """Put ``allocation`` in force from ``effective_step`` on, which is not before the newest one's."""
        assert effective_step >= self._steps[-1], "control boundaries pass in step order, and so do their switches"
        self._steps.append(effective_step)
        self._allocations.append(allocation)

    def forget_before(self, step: int) -> None:
        """Drop what no step from ``step`` on can ask for."""
        keep = max(bisect_right(self._steps, step) - 1, 0)
        del self._steps[:keep], self._allocations[:keep]

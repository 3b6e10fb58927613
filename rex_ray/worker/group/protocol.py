"""The switch protocol without its wire: what rank 0 says at a control boundary, and what every rank makes of it.

No torch and no network, so that a simulation of a whole cluster runs the very code that a worker runs. Rank 0 fixes
the step at which shares change when it *says* so; everybody hears it at the next boundary. That step lies beyond every
batch that any loader has drawn ahead, and every rank checks so when it hears: a lead too small would be rows seen
twice, without any error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rex_ray.core.errors import RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.data.schedule import Schedule

__all__ = ["LONG_STEP_S", "SwitchProtocol", "check_shares"]

LONG_STEP_S = 0.1
"""From this step time on every step is a control boundary; shorter steps pass one as often in time, or less, so that
its share of the time stays small whatever the step's (``experiments.overhead`` measures it)."""

_NOTHING_NEW = -1.0
# Version, effective step, steps to the next boundary and the learning rate's factor; a size per rank follows.
_HEAD = 4


class SwitchProtocol:
    """One rank's part in the agreed changes of the schedule.

    Args:
        rank: this rank; rank 0 speaks.
        num_ranks: size of the group.
        latest: the newest allocation that is known here; asked on rank 0 only.
        schedule: where agreed allocations are entered.
        next_undrawn: first step that this rank's loader has not drawn yet.
        ahead: most batches that any rank's loader draws beyond the one in the user's hand.
        interval_steps: steps between two boundaries while steps are short.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        latest: Callable[[], Allocation | None],
        schedule: Schedule,
        next_undrawn: Callable[[], int],
        ahead: int,
        interval_steps: int,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._latest = latest
        self._schedule = schedule
        self._next_undrawn = next_undrawn
        self._ahead = ahead
        self._short_interval = interval_steps
        self._interval = 1
        self._boundary_at: int | None = None
        self._said_version = schedule.newest.version

    def is_boundary(self, step: int) -> bool:
        """Whether the moment before ``step`` is a boundary that was not passed yet."""
        return self._boundary_at is None or step >= self._boundary_at

    def say(self, step: int, step_s: float | None) -> tuple[float, ...]:
        """Pass the boundary before ``step``; return what rank 0 tells all, zeros on any other rank.

        Whatever was said at the last boundary must have been heard before.

        Args:
            step: the batch about to be handed out.
            step_s: a recent step's wall time on this rank; rank 0's sets the interval.

        Raises:
            RexError: shares that this group cannot run were published.
        """
        message = self._news(step, step_s) if self._rank == 0 else (0.0,) * (_HEAD + self._num_ranks)
        self._boundary_at = step + self._interval
        self._schedule.forget_before(step)
        return message

    def hear(self, message: Sequence[float], step: int) -> None:
        """Take in what rank 0 said at the last boundary, at the one before ``step``.

        Raises:
            RexError: the loader has already drawn batches that the new shares should have shaped.
        """
        version, effective, interval, lr_factor, *sizes = message
        self._interval = int(interval)
        if version == _NOTHING_NEW:
            return
        effective_step = int(effective)
        undrawn = self._next_undrawn()
        if effective_step < undrawn:
            raise RexError(
                f"rank {self._rank}: allocation {int(version)} should take effect at step {effective_step}, but "
                f"this rank's loader has already drawn every step before {undrawn} (now at step {step}); rows would "
                "be seen twice. The lead is agreed when the loader is made: make the loader alike on all ranks"
            )
        allocation = Allocation(
            version=int(version), local_batch_sizes=tuple(int(size) for size in sizes), lr_factor=lr_factor
        )
        self._schedule.add(effective_step, allocation)

    def _news(self, step: int, step_s: float | None) -> tuple[float, ...]:
        next_interval = float(self._interval_for(step_s))
        allocation = self._latest()
        if allocation is None or allocation.version <= self._said_version:
            return (_NOTHING_NEW, 0.0, next_interval, 0.0, *(0.0,) * self._num_ranks)
        check_shares(allocation, self._num_ranks)
        self._said_version = allocation.version
        # Everybody hears this at the next boundary, before asking the loader for that boundary's batch: by then a
        # loader has drawn `ahead` batches beyond the one before it.
        effective_step = step + self._interval + self._ahead
        sizes = (float(size) for size in allocation.local_batch_sizes)
        return (float(allocation.version), float(effective_step), next_interval, allocation.lr_factor, *sizes)

    def _interval_for(self, step_s: float | None) -> int:
        """Return the steps between boundaries at this pace; at most what was asked for short steps."""
        if step_s is None or step_s <= 0:
            return 1
        return min(self._short_interval, math.ceil(LONG_STEP_S / step_s))


def check_shares(allocation: Allocation, num_ranks: int) -> None:
    """Refuse shares that no group of ``num_ranks`` can run.

    Raises:
        RexError: wrong length, a negative share, or no row at all.
    """
    sizes = allocation.local_batch_sizes
    if len(sizes) != num_ranks or min(sizes) < 0 or sum(sizes) < 1:
        raise RexError(f"the controller published shares {sizes} for {num_ranks} workers")

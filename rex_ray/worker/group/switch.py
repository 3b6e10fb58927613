"""How all ranks change their shares at one step, without ever waiting for the controller.

Rank 0 asks its link for the newest allocation at a *control boundary* and broadcasts it in the background; everybody
reads the broadcast at the next boundary, so its latency hides behind training. The step at which it takes effect lies
beyond every batch that any rank's loader has drawn ahead. A disagreement among ranks would be a hang or, worse, rows
seen twice without any error, so every rank checks the lead when it reads.

A boundary is the moment before batch ``n`` is handed out. It runs once per ``n``: a loop may well ask for a batch
twice (a stray ``next(iter(loader))``, an epoch's end), and every broadcast must be met exactly once by every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rex_ray.core.errors import RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.side_group import PendingBroadcast, SideGroup
from rex_ray.worker.link import ControlLink

__all__ = ["LONG_STEP_S", "Switch", "check_shares"]

LONG_STEP_S = 0.1
"""From this step time on every step is a control boundary; shorter steps pass one as often in time, or less, so that
its share of the time stays small whatever the step's (``experiments.overhead`` measures it)."""

_NOTHING_NEW = -1.0


class Switch:
    """One rank's part in the agreed changes of the schedule.

    Args:
        group: ranks to agree with; used for nothing else, so that stray calls cannot come between.
        link: asked for allocations, on rank 0 only.
        schedule: where agreed allocations are entered.
        next_undrawn: first step that this rank's loader has not drawn yet.
        ahead: most batches that any rank's loader draws beyond the one in the user's hand.
        interval_steps: steps between two boundaries while steps are short.
    """

    def __init__(
        self,
        *,
        group: SideGroup,
        link: ControlLink,
        schedule: Schedule,
        next_undrawn: Callable[[], int],
        ahead: int,
        interval_steps: int,
    ) -> None:
        self._group = group
        self._link = link
        self._schedule = schedule
        self._next_undrawn = next_undrawn
        self._ahead = ahead
        self._short_interval = interval_steps
        self._interval = 1
        self._boundary_at: int | None = None
        self._sent_version = schedule.newest.version
        self._pending: PendingBroadcast | None = None

    def boundary(self, step: int, step_s: float | None) -> None:
        """Pass the moment before ``step``: read the last broadcast, launch the next. Harmless when repeated.

        Args:
            step: the batch about to be handed out.
            step_s: a recent step's wall time on this rank; rank 0's sets the interval.

        Raises:
            LinkError: rank 0's broadcast did not arrive in time.
            RexError: the loader has already drawn batches that the new shares should have shaped.
        """
        if self._boundary_at is not None and step < self._boundary_at:
            return
        if self._pending is not None:
            self._read(self._pending.read(), step)
        self._pending = self._launch(step, step_s)
        self._boundary_at = step + self._interval
        self._schedule.forget_before(step)

    def close(self, timeout_s: float) -> None:
        """Let the last broadcast end, so that nobody leaves while others still listen."""
        if self._pending is not None:
            self._pending.read(timeout_s)
            self._pending = None

    def _launch(self, step: int, step_s: float | None) -> PendingBroadcast:
        num_ranks = self._group.size
        message = torch.zeros(4 + num_ranks, dtype=torch.float64)
        if self._group.rank == 0:
            message[0] = _NOTHING_NEW
            message[2] = self._interval_for(step_s)
            allocation = self._link.latest()
            if allocation is not None and allocation.version > self._sent_version:
                check_shares(allocation, num_ranks)
                # Everybody reads this at the next boundary, before asking the loader for that boundary's batch:
                # by then a loader has drawn `ahead` batches beyond the one before it.
                effective_step = step + self._interval + self._ahead
                head = (allocation.version, effective_step, message[2].item(), allocation.lr_factor)
                message = torch.tensor([*head, *allocation.local_batch_sizes], dtype=torch.float64)
                self._sent_version = allocation.version
        return self._group.broadcast_later(message, f"the control message of step {step}")

    def _interval_for(self, step_s: float | None) -> int:
        """Return the steps between boundaries at this pace; at most what was asked for short steps."""
        if step_s is None or step_s <= 0:
            return 1
        return min(self._short_interval, math.ceil(LONG_STEP_S / step_s))

    def _read(self, message: torch.Tensor, step: int) -> None:
        version, effective, interval, lr_factor, *sizes = message.tolist()
        self._interval = int(interval)
        if version == _NOTHING_NEW:
            return
        effective_step = int(effective)
        undrawn = self._next_undrawn()
        if effective_step < undrawn:
            raise RexError(
                f"rank {self._group.rank}: allocation {int(version)} should take effect at step {effective_step}, but "
                f"this rank's loader has already drawn every step before {undrawn} (now at step {step}); rows would "
                "be seen twice. The lead is agreed when the loader is made: make the loader alike on all ranks"
            )
        allocation = Allocation(
            version=int(version), local_batch_sizes=tuple(int(size) for size in sizes), lr_factor=lr_factor
        )
        self._schedule.add(effective_step, allocation)


def check_shares(allocation: Allocation, num_ranks: int) -> None:
    """Refuse shares that no group of ``num_ranks`` can run.

    Raises:
        RexError: wrong length, a negative share, or no row at all.
    """
    sizes = allocation.local_batch_sizes
    if len(sizes) != num_ranks or min(sizes) < 0 or sum(sizes) < 1:
        raise RexError(f"the controller published shares {sizes} for {num_ranks} workers")

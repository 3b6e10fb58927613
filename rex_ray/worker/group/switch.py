"""How all ranks change their shares at one step, without ever waiting for the controller.

Rank 0 asks its link for the newest allocation at a *control boundary* and broadcasts it in the background; everybody
reads the broadcast at the next boundary, so its latency hides behind training. What is said and what is made of it is
``protocol``'s; here it goes over the wire.

A boundary is the moment before batch ``n`` is handed out. It runs once per ``n``: a loop may well ask for a batch
twice (a stray ``next(iter(loader))``, an epoch's end), and every broadcast must be met exactly once by every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.asked_saves import AskedSaves, SnapshotTurns
from rex_ray.worker.group.protocol import SwitchProtocol
from rex_ray.worker.group.side_group import PendingValues, SideGroup
from rex_ray.worker.link import ControlLink

__all__ = ["Switch"]


class Switch:
    """One rank's part in the agreed changes of the schedule.

    Args:
        group: ranks to agree with; used for nothing else, so that stray calls cannot come between.
        link: asked for allocations, on rank 0 only.
        schedule: where agreed allocations are entered.
        next_undrawn: first step that this rank's loader has not drawn yet.
        ahead: most batches that any rank's loader draws beyond the one in the user's hand.
        interval_steps: steps between two boundaries while steps are short.
        save: saves at once, on every rank, see ``AskedSaves``; default: requests are heard and forgotten.
        snapshots: local copies between saves, likewise; default: none.
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
        save: Callable[[str], bool] = bool,
        snapshots: SnapshotTurns | None = None,
    ) -> None:
        self._group = group
        self._saves = AskedSaves(link.save_request if group.rank == 0 else lambda: None, save, snapshots)
        self._protocol = SwitchProtocol(
            rank=group.rank,
            num_ranks=group.size,
            latest=link.latest,
            schedule=schedule,
            next_undrawn=next_undrawn,
            ahead=ahead,
            interval_steps=interval_steps,
        )
        self._pending: PendingValues | None = None

    def boundary(self, step: int, step_s: float | None) -> None:
        """Pass the moment before ``step``: read the last broadcast, launch the next. Harmless when repeated.

        Args:
            step: the batch about to be handed out.
            step_s: a recent step's wall time on this rank; rank 0's sets the interval.

        Raises:
            LinkError: rank 0's broadcast did not arrive in time.
            RexError: the loader has already drawn batches that the new shares should have shaped.
        """
        if self._protocol.is_boundary(step):
            self._pass(step, step_s)
        self._saves.make()

    def _pass(self, step: int, step_s: float | None) -> None:
        if self._pending is not None:
            *shares, asked = self._pending.read().tolist()
            self._protocol.hear(shares, step)
            self._saves.hear(asked)
        told = (*self._protocol.say(step, step_s), self._saves.say())
        # By way of an array: torch's own way from a tuple takes several times as long.
        message = torch.from_numpy(np.array(told, dtype=np.float64))
        self._pending = self._group.broadcast_later(message, f"the control message of step {step}")

    def close(self, timeout_s: float) -> None:
        """Let the last broadcast end, so that nobody leaves while others still listen."""
        if self._pending is not None:
            self._pending.read(timeout_s)
            self._pending = None

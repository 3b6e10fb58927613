"""Saves that somebody outside of the loop asks for, and snapshots, made by all ranks at one boundary.

The request rides on rank 0's control message, as one number more: no rank ever waits for news of a drain. Everybody
hears it at the same boundary, so the step before which to save needs no further agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rex_ray.worker.link import SaveRequest

__all__ = ["AskedSaves", "SnapshotTurns"]

_NOBODY, _SAVE, _SNAPSHOT = 0.0, 1.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTurns:
    """Local snapshots; by default there are none.

    Attributes:
        due: whether it is time for one; asked on rank 0 only.
        take: takes one; False: not at this boundary, so the next one asks again. Must answer alike on all ranks.
    """

    due: Callable[[], bool] = bool
    take: Callable[[], bool] = bool


class AskedSaves:
    """One rank's part in saves that are asked for.

    Args:
        newest: the newest request that is known here; asked on rank 0 only.
        save: saves now, for the given reason; False: not at this boundary, so the next one asks again. Must answer
            alike on all ranks.
        snapshots: taken where nobody asks for a save.
    """

    def __init__(
        self,
        newest: Callable[[], SaveRequest | None],
        save: Callable[[str], bool],
        snapshots: SnapshotTurns | None = None,
    ) -> None:
        self._newest = newest
        self._save = save
        self._snapshots = snapshots or SnapshotTurns()
        self._said_number = -1
        self._reason = "asked for on rank 0"
        self._is_due = False
        self._snapshot_is_due = False

    def say(self) -> float:
        """Return what rank 0 tells all at this boundary."""
        request = self._newest()
        if request is None or request.number <= self._said_number:
            return _SNAPSHOT if not self._snapshot_is_due and self._snapshots.due() else _NOBODY
        self._said_number, self._reason = request.number, request.reason
        return _SAVE

    def hear(self, told: float) -> None:
        """Take in what rank 0 told at the last boundary."""
        self._is_due = self._is_due or told == _SAVE
        self._snapshot_is_due = self._snapshot_is_due or told == _SNAPSHOT

    def make(self) -> None:
        """Save, if that is due: every rank comes by here before the same step."""
        if self._is_due and self._save(self._reason):
            self._is_due = self._snapshot_is_due = False
        if self._snapshot_is_due and self._snapshots.take():
            self._snapshot_is_due = False

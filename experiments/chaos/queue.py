"""The telemetry queue in virtual time."""

from __future__ import annotations

from collections import deque

__all__ = ["MOST_QUEUED", "Queue"]

MOST_QUEUED = 300


class Queue:
    """The telemetry queue: bounded, and empty when it comes back from the dead."""

    def __init__(self) -> None:
        self._held: deque[object] = deque()
        self.is_alive = True

    def put(self, batch: object) -> bool:
        """Return whether it was taken."""
        if self.is_alive and len(self._held) < MOST_QUEUED:
            self._held.append(batch)
            return True
        return False

    def take(self, most: int) -> list[object]:
        """Return the oldest."""
        return [self._held.popleft() for _ in range(min(most, len(self._held)))]

    def die(self) -> None:
        """Lose everything."""
        self.is_alive = False
        self._held.clear()

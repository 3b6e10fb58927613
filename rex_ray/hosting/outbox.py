"""What waits for the telemetry queue, and when it may be sent: the judgement of a pump, without thread or clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rex_ray.worker.link import Record

__all__ = ["Outbox"]

_MOST_WAITING = 4096
_EARLY_RECORDS = 16
_MOST_IN_FLIGHT = 8
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 8.0


class Outbox:
    """Bounded, and honest about what it lost. One thread puts, another takes."""

    def __init__(self) -> None:
        # Full, it lets go of the oldest by itself: two threads that both take from it could meet at its last one.
        self._waiting: deque[Record] = deque(maxlen=_MOST_WAITING)
        # One count per thread: an increment is no atomic operation.
        self._num_overflown = 0
        self._num_untaken = 0
        self._num_in_flight = 0
        self._retry_at_s = 0.0
        self._back_off_s = _FIRST_BACK_OFF_S
        self._is_broken = False

    @property
    def num_dropped(self) -> int:
        """Records that never reached the queue."""
        return self._num_overflown + self._num_untaken

    def put(self, records: Sequence[Record]) -> bool:
        """Take records, the oldest ones' place where there are too many; return whether to send soon."""
        self._num_overflown += max(len(self._waiting) + len(records) - _MOST_WAITING, 0)
        self._waiting.extend(records)
        return len(self._waiting) >= _EARLY_RECORDS

    def take(self, now_s: float, *, is_last: bool = False) -> list[Record]:
        """Return what to put into the queue now, and count it as under way; nothing while the queue takes none.

        Args:
            now_s: the present.
            is_last: nobody asks again, so that even a queue that took nothing is tried once more.
        """
        if not is_last and (now_s < self._retry_at_s or self._num_in_flight >= _MOST_IN_FLIGHT):
            return []
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._num_in_flight += bool(records)
        return records

    def arrived(self) -> bool:
        """A put went well; return whether that is news, since the last one did not."""
        self._num_in_flight -= 1
        was_broken, self._is_broken, self._back_off_s = self._is_broken, False, _FIRST_BACK_OFF_S
        return was_broken

    def failed(self, num_records: int, now_s: float) -> bool:
        """A put of so many records failed; return whether that is news."""
        self._num_in_flight -= 1
        self._num_untaken += num_records
        self._retry_at_s = now_s + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, _LAST_BACK_OFF_S)
        was_broken, self._is_broken = self._is_broken, True
        return not was_broken

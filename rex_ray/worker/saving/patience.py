"""A storage fails now and then, and works when it is asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from rex_ray.core.errors import RexError
from rex_ray.worker.measuring.timing import now_s

__all__ = ["StallWatch", "asked", "patiently"]

_Result = TypeVar("_Result")
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
# A storage that moves no byte for so long is stuck, whatever it is allowed to fail.
_LEAST_STALL_S: Final = 60.0


class StallWatch:
    """Tells a storage that is slow from one whose client will not come back.

    Args:
        retry_s: how long it may be asked again where it fails.
    """

    def __init__(self, retry_s: float) -> None:
        self._limit_s = max(retry_s, _LEAST_STALL_S) + _LONGEST_PAUSE_S
        self._moved_s = now_s()

    def moved(self) -> None:
        """Bytes went through."""
        self._moved_s = now_s()

    def stalled_s(self) -> float | None:
        """Return how long nothing has moved, None while that is within the limit."""
        idle_s = now_s() - self._moved_s
        return None if idle_s < self._limit_s else idle_s


def patiently(act: Callable[[], _Result], limit_s: float, on_failure: Callable[[Exception], object] = str) -> _Result:
    """Act, with growing pauses between attempts, until it works or the next attempt would come too late.

    Args:
        act: what a storage may refuse; an error of our own is not the storage's, and not tried again.
        limit_s: from the first failure to the begin of the last attempt; so what fails after long hours is tried again.
        on_failure: told of every failure, the last included.

    Raises:
        Exception: what the last attempt raised.
    """
    failed_s, pause_s = None, _FIRST_PAUSE_S
    while True:
        try:
            return act()
        except RexError:
            raise
        except Exception as error:
            on_failure(error)
            failed_s = now_s() if failed_s is None else failed_s
            if now_s() - failed_s + pause_s > limit_s:
                raise
        threading.Event().wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def asked(act: Callable[[], _Result], limit_s: float, on_progress: Callable[[], None]) -> _Result:
    """Ask a storage with patience, while others wait; a refusal is an answer, too.

    Args:
        act: as of ``patiently``.
        limit_s: likewise.
        on_progress: called whenever the storage answered.
    """
    answer = patiently(act, limit_s, lambda _: on_progress())
    on_progress()
    return answer

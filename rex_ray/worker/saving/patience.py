"""A storage fails now and then, and works when it is asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from rex_ray.core.errors import RexError
from rex_ray.worker.measuring.timing import now_s

__all__ = ["LONGEST_PAUSE_S", "patiently"]

_Result = TypeVar("_Result")
_FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0


def patiently(act: Callable[[], _Result], limit_s: float, on_failure: Callable[[Exception], object] = str) -> _Result:
    """Act, with growing pauses between attempts, until it works or the next attempt would come too late.

    Args:
        act: what a storage may refuse; an error of our own is not the storage's, and not tried again.
        limit_s: from the beginning to the begin of the last attempt.
        on_failure: told of every failure, the last included.

    Raises:
        Exception: what the last attempt raised.
    """
    began_s, pause_s = now_s(), _FIRST_PAUSE_S
    while True:
        try:
            return act()
        except RexError:
            raise
        except Exception as error:
            on_failure(error)
            if now_s() - began_s + pause_s > limit_s:
                raise
        threading.Event().wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

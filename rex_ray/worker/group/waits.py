"""What the training thread waits for: said before each wait, and in the error if it breaks.

Classes and no generators, since a wait is told at every step.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from rex_ray.core.errors import LinkError
from rex_ray.worker.measuring.timing import now_s

__all__ = ["Told", "Waiter", "Waiting", "is_backend_error"]


class Waiter(Protocol):
    """Whose training thread waits.

    Attributes:
        waits_for: what for; read by another thread.
    """

    waits_for: str | None

    def lost(
        self, what: str, waited_s: float, *, limit_s: float | None = None, error: BaseException | None = None
    ) -> LinkError:
        """Return the error of a wait that failed."""
        ...


class Waiting:
    """The training thread waits for others within the block.

    Args:
        waiter: whose it is.
        what: what is waited for.
    """

    __slots__ = ("_before", "_waiter", "_what")

    def __init__(self, waiter: Waiter, what: str) -> None:
        self._waiter = waiter
        self._what = what
        self._before: str | None = None

    def __enter__(self) -> None:
        waiter = self._waiter
        self._before, waiter.waits_for = waiter.waits_for, self._what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiter.waits_for = self._before


class Told(Waiting):
    """The same; a backend's error becomes one that says for whom this rank waited.

    Args:
        waiter: whose it is.
        what: what is waited for.
        limit_s: its limit, where it is known.
        any_error: whatever goes wrong in there is the backend's; else only what looks like it.
    """

    __slots__ = ("_any_error", "_began_s", "_limit_s")

    def __init__(self, waiter: Waiter, what: str, limit_s: float | None, *, any_error: bool) -> None:
        super().__init__(waiter, what)
        self._limit_s = limit_s
        self._any_error = any_error
        self._began_s = now_s()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        waiter = self._waiter
        try:
            if isinstance(error, RuntimeError) and (self._any_error or is_backend_error(error)):
                waited_s = now_s() - self._began_s
                raise waiter.lost(self._what, waited_s, limit_s=self._limit_s, error=error) from error
        finally:
            waiter.waits_for = self._before


def is_backend_error(error: BaseException) -> bool:
    """Whether a collective's backend raised this, because a peer is gone or a limit passed."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return isinstance(error, dist.DistError) or any(mark in text for mark in ("gloo", "NCCL", "Operation timed out"))

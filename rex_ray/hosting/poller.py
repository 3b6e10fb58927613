"""Asks the controller for news, in a thread of its own; what the loop pays is a look at a field. Rank 0 has one."""

from __future__ import annotations

import logging
import threading
import time

from rex_ray.core.errors import RexError, first_line
from rex_ray.core.types import Allocation
from rex_ray.hosting.listener import Listener
from rex_ray.hosting.transport import POLL_LIMIT_S, Pending, Transport, UnreachableError
from rex_ray.worker.link import GroupInfo, SaveRequest

__all__ = ["Poller"]

logger = logging.getLogger("rex_ray")

_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 8.0
_SLICE_S = 0.5


class Poller:
    """Keeps what the controller said last. If nobody answers, the last allocation stays in force.

    Args:
        transport: carries questions.
        group: the group that asks.
        known: the allocation that the group joined with; None if nobody answered then, so that this goes on trying.
    """

    def __init__(self, transport: Transport, group: GroupInfo, known: Allocation | None) -> None:
        self._transport = transport
        self._group = group
        self._listener = Listener(known)
        self._is_broken = known is None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rex_ray-poller", daemon=True)

    @property
    def newest(self) -> Allocation | None:
        """The newest allocation that was published, or None; a read of a field."""
        return self._listener.newest

    @property
    def save(self) -> SaveRequest | None:
        """The newest request for a save, or None; a read of a field."""
        return self._listener.save

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; a question under way is left to itself."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        back_off_s = _FIRST_BACK_OFF_S
        while not self._stopping.is_set():
            try:
                news = self._poll()
            except RexError as error:
                self._tell_broken(error)
                self._stopping.wait(back_off_s)
                back_off_s = min(2 * back_off_s, _LAST_BACK_OFF_S)
                continue
            if self._stopping.is_set():
                return
            if self._is_broken:
                self._is_broken = False
                logger.warning("the controller answers again")
            back_off_s = _FIRST_BACK_OFF_S
            self._listener.hear(news)

    def _poll(self) -> Allocation | SaveRequest | None:
        """Ask once, and wait in slices, so that a stop is heard.

        Raises:
            RexError: the controller is gone, refused, or did not answer within twice its own limit.
        """
        known_version = self._listener.known_version
        pending: Pending[Allocation | SaveRequest | None]
        if known_version is None:
            pending = self._transport.join(self._group)
        else:
            pending = self._transport.latest(self._group.generation, known_version, self._listener.known_save)
        deadline = time.monotonic() + 2 * POLL_LIMIT_S
        while not self._stopping.is_set():
            if pending.arrived(_SLICE_S):
                return pending.result()
            if time.monotonic() >= deadline:
                raise UnreachableError(f"no answer within {2 * POLL_LIMIT_S:g} s")
        return None

    def _tell_broken(self, error: RexError) -> None:
        if not self._is_broken:
            self._is_broken = True
            logger.warning(
                "the controller does not answer (%s); training goes on under the last allocation", first_line(error)
            )

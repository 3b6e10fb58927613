"""Those who look on, each on a thread of its own: a slow tracker holds up neither training nor the others."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from rex_ray.watch.seams import Progress, RunInfo, Sight, Watcher

__all__ = ["Audience"]

logger = logging.getLogger("rex_ray")

_MOST_WAITING: Final = 10_000


class Audience:
    """Shows every watcher the same sights in the same order.

    Args:
        watchers: begun at once, each on its own thread.
        run: what they look at.
    """

    def __init__(self, watchers: Sequence[Watcher], run: RunInfo) -> None:
        self._seats = [_Seat(watcher, run) for watcher in watchers]

    def show(self, sights: Iterable[Sight]) -> None:
        """Pass sights on; returns at once."""
        shown = tuple(sights)
        for seat in self._seats:
            seat.show(shown)

    def close(self, limit_s: float) -> None:
        """Have all of them see what waits and close, within a limit for all together."""
        for seat in self._seats:
            seat.dismiss()
        deadline = time.monotonic() + limit_s
        for seat in self._seats:
            seat.join(max(deadline - time.monotonic(), 0.0), limit_s)


class _Seat:
    """One watcher and what waits for it. Its first fault is logged, and ends it."""

    def __init__(self, watcher: Watcher, run: RunInfo) -> None:
        self._watcher = watcher
        self._name = type(watcher).__name__
        self._run_info = run
        self._waiting: deque[Sight] = deque()
        self._news = threading.Condition()
        self._is_over = False
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name=f"rex_ray-{self._name}", daemon=True)
        self._thread.start()

    def show(self, sights: Sequence[Sight]) -> None:
        """Have sights wait; a newer ``Progress`` takes the place of one that nobody has looked at yet."""
        with self._news:
            for sight in sights:
                if isinstance(sight, Progress) and self._waiting and isinstance(self._waiting[-1], Progress):
                    self._waiting.pop()
                self._waiting.append(sight)
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._num_lost += 1
            self._news.notify()

    def dismiss(self) -> None:
        """Nothing more is shown."""
        with self._news:
            self._is_over = True
            self._news.notify()

    def join(self, left_s: float, limit_s: float) -> None:
        """Wait for the watcher's end; after the limit it is left to itself, and ends with the process."""
        self._thread.join(left_s)
        if self._thread.is_alive():
            logger.warning("%s did not close within %g s and is left behind", self._name, limit_s)

    def _run(self) -> None:
        try:
            self._look_on()
        except Exception:  # a tracker's client raises what it likes
            logger.warning("%s failed and sees nothing more of this run; training goes on", self._name, exc_info=True)
            with self._news:
                self._waiting = deque(maxlen=0)

    def _look_on(self) -> None:
        self._watcher.begin(self._run_info)
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._waiting or self._is_over)
                    if not self._waiting:
                        break
                    sight = self._waiting.popleft()
                self._watcher.see(sight)
        finally:
            self._watcher.close()
            if self._num_lost:
                logger.warning("%s was too slow and missed %d sights", self._name, self._num_lost)

"""A log line in plain English for every decision: what changes, why, what is hoped for, and later what came of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import Final

from rex_ray.loggers.terminal import line_handler
from rex_ray.watch.seams import Ended, Happened, RunInfo, Sight

__all__ = ["DecisionLog"]

_KINDS: Final = frozenset({"group", "decided", "applied", "measured", "withdrawn", "lost"})


class DecisionLog:
    """Logs at INFO through the logger ``rex_ray.decisions``.

    Where the program has set up no logging, lines go to standard error, as ``rex_ray: ...``.

    Args:
        kinds: kinds of ``Happened`` to log. Left out by default are ``"incident"``, which the control actor logs
            itself as it hears of it, and ``"noted"``.
    """

    def __init__(self, kinds: Collection[str] = _KINDS) -> None:
        self._kinds = frozenset(kinds)
        self._logger = logging.getLogger("rex_ray.decisions")
        self._own: logging.Handler | None = None
        self._name = ""

    def begin(self, run: RunInfo) -> None:
        """Have somewhere to log to."""
        self._name = run.name
        if not self._logger.hasHandlers():
            self._own = line_handler(sys.stderr)
            self._logger.addHandler(self._own)
            self._logger.setLevel(logging.INFO)

    def see(self, sight: Sight) -> None:
        """Log what is worth a line."""
        if isinstance(sight, Happened) and sight.kind in self._kinds:
            self._logger.info("%s, step %d: %s", self._name, max(sight.step, 0), sight.text)
        elif isinstance(sight, Ended):
            self._logger.info("%s: the run ended: %s", self._name, sight.reason)

    def close(self) -> None:
        """Leave the program's logging as it was."""
        if self._own is not None:
            self._logger.removeHandler(self._own)
            self._logger.setLevel(logging.NOTSET)
            self._own = None

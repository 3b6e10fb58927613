"""Has people see a run while it goes on: a thread in the driver asks the controller and shows what it says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError, LinkError, first_line
from rex_ray.loggers.audience import Audience
from rex_ray.loggers.decision_log import DecisionLog
from rex_ray.loggers.progress_line import ProgressLine
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.watch.seams import Ended, RunInfo, Watcher

__all__ = ["ANSWER_LIMIT_S", "chosen_watchers", "looked_on", "plain_settings"]

logger = logging.getLogger("rex_ray")

_INTERVAL_S: Final = 1.0
ANSWER_LIMIT_S: Final = 5.0
"""Whoever asks the controller gives it so long to answer."""

_LAST_BACK_OFF_S: Final = 8.0
_CLOSE_LIMIT_S: Final = 60.0


def chosen_watchers(loggers: Sequence[Watcher], *, verbose: bool) -> tuple[Watcher, ...]:
    """Return a progress line and a decision log, unless one is among the loggers given, and these.

    Raises:
        ConfigError: something that is no logger.
    """
    for given in loggers:
        missing = [name for name in ("begin", "see", "close") if not callable(getattr(given, name, None))]
        if missing or isinstance(given, type):
            raise ConfigError(
                f"loggers=[...] takes objects with begin, see and close, such as rex_ray.loggers.TensorBoardLogger(); "
                f"got {given!r}"
            )
    own: list[Watcher] = [ProgressLine(), DecisionLog()] if verbose else []
    return (*(watcher for watcher in own if not any(isinstance(given, type(watcher)) for given in loggers)), *loggers)


def plain_settings(config: RexConfig, num_workers: int) -> dict[str, bool | int | float | str]:
    """Return a configuration flat, as trackers want it; what is not set is left out."""
    settings = dict(_flat(config.to_mapping()))
    return settings | {"num_workers": num_workers}


@contextmanager
def looked_on(
    ask: Callable[[Mark], Shown], watchers: Sequence[Watcher], run: RunInfo, seen: Mark | None = None
) -> Iterator[None]:
    """Show a run to its watchers while the body goes on, and its end after it; leave no thread behind.

    Args:
        ask: asks the controller, which must outlive the body, within ``ANSWER_LIMIT_S``; raises ``LinkError`` where it
            does not answer.
        watchers: who looks on.
        run: what they are told of it.
        seen: where to begin; default: at the run's beginning.
    """
    if not watchers:
        yield
        return
    looking = _Looking(ask, Audience(watchers, run), seen or Mark())
    looking.start()
    try:
        yield
    finally:
        looking.stop()


class _Looking:
    """Asks once a second. A controller that is down is waited for, and goes on where it was last heard."""

    def __init__(self, ask: Callable[[Mark], Shown], audience: Audience, seen: Mark) -> None:
        self._ask = ask
        self._audience = audience
        self._mark = seen
        self._has_ended = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rex_ray-watching", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Look once more, at the run's end, and have everybody close, within a limit."""
        self._stopping.set()
        self._thread.join(2 * ANSWER_LIMIT_S)
        if not self._thread.is_alive():
            try:
                self._look()
            except LinkError as error:
                logger.warning("the last seconds of the run were not seen (%s); its journal may have them", error)
        self._audience.close(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        wait_s = _INTERVAL_S
        while not self._stopping.wait(wait_s):
            try:
                self._look()
            except LinkError as error:
                # Its workers say aloud that it does not answer; who only looks on need not say so too.
                logger.debug("nothing is seen of the run: %s", first_line(error))
                wait_s = min(2 * wait_s, _LAST_BACK_OFF_S)
            else:
                wait_s = _INTERVAL_S

    def _look(self) -> None:
        if self._has_ended:
            return  # nothing comes after the end, not even where the run stands
        shown = self._ask(self._mark)
        if shown.num_missed:
            logger.warning("%d events of the run were not asked for in time and are not shown", shown.num_missed)
        self._mark = shown.mark
        self._audience.show(shown.in_order)
        self._has_ended = any(isinstance(sight, Ended) for sight in shown.sights)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)

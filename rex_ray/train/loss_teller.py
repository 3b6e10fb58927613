"""What the driver's run makes of workers that failed, in Ray Train's controller process."""

from __future__ import annotations

import logging
from typing import Any, Final

from ray.exceptions import RayError
from ray.train import UserCallback

from rex_ray.core.errors import ConfigError
from rex_ray.train.telemetry import first_line

__all__ = ["LossTeller"]

logger = logging.getLogger("rex_ray")

_ASK_LIMIT_S: Final = 2.0


class LossTeller(UserCallback):  # type: ignore[misc]
    """Tells the control actor which workers failed, and ends a run that a mistake of the user's would end for ever.

    Ray Train starts the group anew whatever failed, as often as ``max_failures`` says. A ``ConfigError`` comes again;
    twice in a row it is the run's own.

    Args:
        control: handle of the control actor.
    """

    def __init__(self, control: Any) -> None:
        self._control = control
        self._mistake: str | None = None

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Pass on who failed, and of which group: this may arrive when the next one has joined already.

        No other group forms while this waits, so an answer within the limit is of the group that lost them. An actor
        that is down gives none, and hears of the loss by the next group.

        Raises:
            ConfigError: a worker's, for the second time in a row; Ray Train ends the run with it.
        """
        del run_context
        self._tell(worker_exceptions)
        before, self._mistake = self._mistake, mistake_of(worker_exceptions)
        if self._mistake is not None and self._mistake == before:
            raise ConfigError(f"{self._mistake} (the workers were started again, and ended by it again)")

    def _tell(self, worker_exceptions: dict[int, Exception]) -> None:
        try:
            generation = self._control.generation.remote().future().result(_ASK_LIMIT_S)
        except (RayError, TimeoutError):
            logger.warning("the control actor does not answer; that ranks failed it learns from the next group")
            return
        self._control.lost.remote(generation, {rank: first_line(error) for rank, error in worker_exceptions.items()})


def mistake_of(worker_exceptions: dict[int, Exception]) -> str | None:
    """Return the first ``ConfigError`` of the workers, None if none has raised one."""
    for _, error in sorted(worker_exceptions.items()):
        # What the loop raised comes inside of an error of Ray Train's.
        raised = getattr(error, "_base_exc", error)
        if isinstance(raised, ConfigError):
            return str(raised)
    return None

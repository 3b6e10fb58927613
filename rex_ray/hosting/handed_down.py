"""What one ``fit`` of a run leaves to the next: the controller's memory, handed down and taken up."""

from __future__ import annotations

import logging
from dataclasses import replace

from rex_ray.control.codec import CodecError
from rex_ray.control.controller import Controller
from rex_ray.control.events import GroupStarted
from rex_ray.control.remembered import memory_text, remembered

__all__ = ["HandedDown"]

logger = logging.getLogger("rex_ray")


class HandedDown:
    """The memory that an earlier life left, and the one to leave.

    Args:
        earlier: of an earlier ``fit``, or None.
        reference_rows: global batch of the group that runs already, where this life goes on from its own journal.
    """

    def __init__(self, earlier: str | None, reference_rows: int | None) -> None:
        self._earlier = earlier
        self._reference_rows = reference_rows

    def given(self, event: GroupStarted, controller: Controller) -> GroupStarted:
        """Return a group's start with the earlier life's memory, if it resumes from a save and nothing is known yet.

        A group that begins at its first step is another training: what was measured at a later stage is wrong there.
        """
        self._reference_rows = event.problem.global_batch_size
        if self._earlier is None or event.allocation is None or controller.state.policy_state is not None:
            return event
        try:
            remembered(controller.policy, self._earlier, event.problem.global_batch_size)
        except CodecError as error:
            logger.warning("what the controller knew before is not used: %s; it learns anew", error)
            self._earlier = None
        return replace(event, memory=self._earlier)

    def left(self, controller: Controller) -> str | None:
        """Return what the policy knows by now; None before the first group."""
        state = controller.state.policy_state
        if state is None or self._reference_rows is None:
            return None
        return memory_text(controller.policy, state, self._reference_rows)

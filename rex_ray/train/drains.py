"""Nodes that are about to be taken away: how Ray says so, and when the group that trains there should save.

Ray's own way for a training loop to hear of it, ``ray.train.get_preemption_info``, is a barrier over all workers, and
would have to be passed at every step. So the control actor looks instead, and its request for a save rides on a
control message that is sent anyway.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

import ray

from rex_ray.control.events import DrainNoticed
from rex_ray.core.types import WorkerSpec

__all__ = ["LAST_SAVE_S", "DrainWatch", "draining_nodes", "node_tag", "wait_out_notice"]

logger = logging.getLogger("rex_ray")

LAST_SAVE_S: Final = 10.0
"""So long before a node goes the group saves once more: a save waits for Ray Train's looks at its workers, some 2 s
apart, and what is trained after it is lost. The first save, at once, is for a node that goes early."""

_NODE_TAG_LETTERS: Final = 6

_NOTICE_EARLY_S, _NOTICE_LATE_S = 15.0, 30.0
"""A loss so long before or after the time that notice was given for is what it was given of."""

_COUNTED_WITHIN_S: Final = 10.0
"""Several of Ray Train's looks at its workers."""

_cannot_tell = False


def node_tag(node_id: str) -> str:
    """Return the part of Ray's name for a node that stands in ``WorkerSpec.node``."""
    return node_id[:_NODE_TAG_LETTERS]


def draining_nodes() -> Mapping[str, int]:
    """Return the nodes that are being drained, each with its deadline in ms since 1970; 0: none is known.

    Ray has no public call for it (2.60); its own watcher uses this one. Without it nobody is told, and nothing else
    changes.
    """
    global _cannot_tell  # noqa: PLW0603 - said once per process
    try:
        drained: dict[str, int] = ray._private.state.state.get_draining_nodes()
    except Exception as error:  # noqa: BLE001 - private: whatever it raises, training goes on
        if not _cannot_tell:
            _cannot_tell = True
            logger.warning("Ray does not say which nodes are drained (%s); no save is made ahead of it", error)
        return {}
    return drained


class DrainWatch:
    """Turns drained nodes into notices: one when a node is first seen, one when its time has nearly come."""

    def __init__(self) -> None:
        self._noticed: set[tuple[str, str]] = set()
        self._last_noticed: set[tuple[str, str]] = set()

    def notices(
        self,
        generation: str,
        workers: Sequence[WorkerSpec],
        drained: Mapping[str, int],
        now_ms: float | None = None,
    ) -> list[DrainNoticed]:
        """Return what the controller should hear.

        Args:
            generation: the running group.
            workers: its members.
            drained: see ``draining_nodes``.
            now_ms: the present in ms since 1970; default: the clock's.
        """
        now_ms = time.time() * 1e3 if now_ms is None else now_ms
        events = []
        for node_id, deadline_ms in sorted(drained.items()):
            ranks = tuple(worker.rank for worker in workers if worker.node.rpartition("/")[2] == node_tag(node_id))
            left_s = (deadline_ms - now_ms) / 1e3 if deadline_ms else None
            if ranks and self._is_news((generation, node_id), left_s):
                left_us = None if left_s is None else max(round(left_s * 1e6), 0)
                reason = f"node {node_tag(node_id)} is being drained"
                events.append(DrainNoticed(generation=generation, ranks=ranks, left_us=left_us, reason=reason))
        return events

    def _is_news(self, place: tuple[str, str], left_s: float | None) -> bool:
        is_late = left_s is not None and left_s <= LAST_SAVE_S
        is_news = place not in self._noticed or (is_late and place not in self._last_noticed)
        self._noticed.add(place)
        if is_late:
            self._last_noticed.add(place)
        return is_news


def wait_out_notice() -> None:
    """Wait, where peers were lost at about the time that a notice said: Ray Train is to count that, and not the error.

    It does so once the notice's time is over, and ends this process then. An error that it hears of before is one of
    ``FailureConfig(max_failures=...)``, also where a rank merely says that its peers, on the node that was taken away,
    do not answer any more.
    """
    left_s = _notice_left_s()
    if left_s is not None and -_NOTICE_LATE_S <= left_s <= _NOTICE_EARLY_S:
        logger.warning("peers were lost as notice said; Ray Train ends this group when the notice's time is over")
        time.sleep(max(left_s, 0.0) + _COUNTED_WITHIN_S)


def _notice_left_s() -> float | None:
    """Return the seconds until the time that this worker's group was given notice for; None: it was given none.

    Ray Train's public call for it is a barrier over all workers, of whom some are gone.
    """
    try:
        context = importlib.import_module("ray.train.v2._internal.execution.context").get_train_context()
        info = context.preemption_context.preemption_info
        return None if info is None or info.deadline_ms is None else float(info.deadline_ms / 1e3 - time.time())
    except Exception:  # noqa: BLE001 - private: whatever it raises, the error itself is told
        return None

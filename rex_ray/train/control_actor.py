"""The control actor: where the controller's service meets Ray.

It drains the Queue, gives the controller its events in order, and answers the workers. It may die at any moment: Ray
starts it again, it restores itself from its journal, and training, which never waits for it, finds it there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.queue import Empty

from rex_ray.config import RexConfig
from rex_ray.core.types import LearntShape
from rex_ray.hosting.control_service import ControlService
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.train.drains import DrainWatch, draining_nodes
from rex_ray.train.prometheus import Exporter
from rex_ray.train.telemetry import first_line

__all__ = ["NAMESPACE", "ControlActor"]

logger = logging.getLogger("rex_ray")

NAMESPACE: Final = "rex_ray"
"""Ray's namespace of the queue, whose name every driver is to find; by default each driver has one for itself."""

_DRAIN_S: Final = 0.1
_QUEUE_WAIT_S: Final = 1.0
_QUEUE_RETRY_S: Final = 5.0
_MOST_BATCHES: Final = 256
_LOOK_S: Final = 1.0
_EXPORT_S: Final = 1.0


class ControlActor(ControlService):
    """Drives one run's controller, and takes what the workers sent out of the run's Queue.

    Args:
        config: what to adapt and how.
        queue_name: Ray name of the queue's actor, where the workers' records come from; the driver owns it. A handle
            would be an argument in the object store, which a restart may find gone.
        journal_dir: directory of the journal; if it holds one, this is a restart and goes on from it.
        learnt: what is known of kinds of device from earlier jobs.
        store: of the run, where that is not the journal's machine: a driver elsewhere finds there what was learnt.
        memory: what the controller of an earlier ``fit`` of the run knew.
    """

    def __init__(
        self,
        config: RexConfig,
        queue_name: str,
        journal_dir: str,
        learnt: tuple[LearntShape, ...] = (),
        store: ArrowStore | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__(config, Path(journal_dir), learnt, store, memory)
        self._queue_name = queue_name
        self._queue: Any = None
        self._run(self._drain())
        self._run(self._watch_nodes())
        # <storage_path>/<name>/rex_ray/journal
        self._exporter = Exporter(Path(journal_dir).parents[1].name)
        self._run(self._export())

    async def _export(self) -> None:
        """Emit metrics; a fault of theirs is said once and ends them, not the controller."""
        try:
            while True:
                self._exporter.export(self._host.progress())
                await asyncio.sleep(_EXPORT_S)
        except Exception as error:  # noqa: BLE001 - whatever Ray's metrics may raise
            logger.warning("no metrics are emitted any more: %s", first_line(error))
        finally:
            with contextlib.suppress(Exception):
                self._exporter.end()

    async def _take_the_rest(self) -> None:
        with contextlib.suppress(RayError, ValueError):  # whoever killed the queue was told of by the drain
            while batches := await self._queued(wait_s=0.0):
                for batch in batches:
                    self._host.take(batch)

    async def _drain(self) -> None:
        while True:
            try:
                batches = await self._queued(wait_s=_QUEUE_WAIT_S)
            except (RayError, ValueError) as error:  # ValueError: Ray knows no such actor any more
                logger.warning("the telemetry queue does not answer (%s); nothing is observed", first_line(error))
                await asyncio.sleep(_QUEUE_RETRY_S)
                continue
            for batch in batches:
                self._host.take(batch)
            # A flood is taken in portions, so that joins and polls are answered in between.
            await asyncio.sleep(_DRAIN_S if len(batches) < _MOST_BATCHES else 0.0)

    async def _queued(self, wait_s: float) -> list[Any]:
        """Return what the Queue holds, a portion at most, after waiting a while for the first batch."""
        if self._queue is None:
            self._queue = ray.get_actor(self._queue_name, namespace=NAMESPACE)
        try:
            batches: list[Any] = [await self._queue.get.remote(wait_s)] if wait_s else []
        except Empty:
            return []
        rest: int = await self._queue.qsize.remote()
        if rest:
            batches += await self._queue.get_nowait_batch.remote(min(rest, _MOST_BATCHES))
        return batches

    async def _watch_nodes(self) -> None:
        """Hear of nodes that are about to be taken away."""
        watch = DrainWatch()
        while True:
            await asyncio.sleep(_LOOK_S)
            drained = await asyncio.to_thread(draining_nodes)
            group = self._host.group
            if drained and group is not None:
                for notice in watch.notices(group.generation, group.problem.workers, drained):
                    self._host.handle(notice)

"""The control actor: where the pure controller meets Ray and a clock.

It drains the Queue, gives the controller its events in order, and answers the workers. It may die at any moment: Ray
starts it again, it restores itself from its journal, and training, which never waits for it, finds it there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.queue import Empty

from rex_ray.config import RexConfig
from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import RexError
from rex_ray.core.types import Allocation, Problem
from rex_ray.train.control_host import ControlHost, ControlStatus
from rex_ray.train.telemetry import POLL_LIMIT_S, first_line
from rex_ray.train.wire import Batch
from rex_ray.worker.link import GroupInfo

__all__ = ["ControlActor"]

logger = logging.getLogger("rex_ray")

_TICK_S: Final = 0.5
_DRAIN_S: Final = 0.1
_QUEUE_WAIT_S: Final = 1.0
_QUEUE_RETRY_S: Final = 5.0
_LISTEN_S: Final = 0.1


class ControlActor:
    """Drives one run's controller. Async, so that a worker's long poll holds up nobody.

    Args:
        config: what to adapt and how.
        queue_name: Ray name of the queue's actor, where the workers' records come from; the driver owns it. A handle
            would be an argument in the object store, which a restart may find gone.
        journal_dir: directory of the journal; if it holds one, this is a restart and goes on from it.
    """

    def __init__(self, config: RexConfig, queue_name: str, journal_dir: str) -> None:
        _log_to_stderr()
        self._config = config
        self._queue_name = queue_name
        self._queue: Any = None
        self._news = asyncio.Event()
        self._host = ControlHost(config, Path(journal_dir), self._spread)
        self._started_s = time.monotonic()
        self._tasks = [asyncio.ensure_future(loop) for loop in (self._drain(), self._listen(), self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def join(self, group: GroupInfo) -> Allocation:
        """Take a group that formed; return its first allocation. Asking twice is harmless.

        Raises:
            InfeasibleError: no allocation fits the group's bounds.
            RexError: the controller has failed.
        """
        problem = Problem(
            workers=group.workers,
            global_batch_size=group.global_batch_size,
            max_global_batch_size=max(self._config.growth_limit, group.global_batch_size),
            dataset_size=group.dataset_size,
            optimizer=group.optimizer,
        )
        self._host.handle(
            GroupStarted(generation=group.generation, problem=problem, step=group.step, allocation=group.allocation)
        )
        if self._host.generation != group.generation or self._host.published is None:
            raise RexError(f"the controller decides nothing: {self._host.fault or 'the run has ended'}")
        return self._host.published

    async def latest(self, generation: str, version: int) -> Allocation | None:
        """Return the newest allocation of ``generation`` once it is newer than ``version``; None after 10 s without.

        A group that is not the running one hears nothing.
        """
        deadline = time.monotonic() + POLL_LIMIT_S
        while (left_s := deadline - time.monotonic()) > 0:
            newest = self._host.published
            if newest is not None and newest.version > version and generation == self._host.generation:
                return newest
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        return None

    async def lost(self, ranks: dict[int, str]) -> None:
        """Hear from Ray Train which ranks failed, and why."""
        self._host.lose(ranks)

    async def status(self) -> ControlStatus:
        """Say how the controller is."""
        return self._host.status()

    async def finish(self, reason: str) -> ControlStatus:
        """Take in what the Queue still holds, end the run in the journal, and stop. Asking twice is harmless."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(RayError, ValueError):  # whoever killed the queue was told of by the drain
            for batch in await self._queued(wait_s=0.0):
                self._host.take(batch)
        self._host.end(reason)
        return self._host.status()

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
            await asyncio.sleep(_DRAIN_S)

    async def _queued(self, wait_s: float) -> list[Batch]:
        """Return everything that the Queue holds, after waiting a while for the first batch."""
        if self._queue is None:
            self._queue = ray.get_actor(self._queue_name)
        try:
            batches: list[Batch] = [await self._queue.get.remote(wait_s)] if wait_s else []
        except Empty:
            return []
        rest: int = await self._queue.qsize.remote()
        if rest:
            batches += await self._queue.get_nowait_batch.remote(rest)
        return batches

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._host.tick(time.monotonic() - self._started_s)

    async def _listen(self) -> None:
        """Hear searches also while no telemetry comes, which the drain waits for."""
        while True:
            await asyncio.sleep(_LISTEN_S)
            self._host.hear_searches()

    def _spread(self, _: Allocation) -> None:
        """Wake every long poll; each sees for itself whether this is news to it."""
        self._news.set()
        self._news = asyncio.Event()

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fail(error)


def _log_to_stderr() -> None:
    """Ray carries an actor's standard error to the driver; Python's last resort would print bare messages there too."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rex_ray: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False

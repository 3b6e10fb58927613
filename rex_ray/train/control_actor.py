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
from rex_ray.control.events import GroupStarted, SaveAsked
from rex_ray.core.types import Allocation, LearntShape, Problem
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.control_status import ControlStatus
from rex_ray.hosting.journal_files import JournalFolder
from rex_ray.hosting.profile_files import PROFILES_FILE, put_profiles, write_profiles
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.train.drains import DrainWatch, draining_nodes
from rex_ray.train.telemetry import POLL_LIMIT_S, first_line
from rex_ray.worker.link import GroupInfo, SaveRequest
from rex_ray.worker.saving.store import cause_of

__all__ = ["ControlActor"]

logger = logging.getLogger("rex_ray")

_TICK_S: Final = 0.5
_DRAIN_S: Final = 0.1
_QUEUE_WAIT_S: Final = 1.0
_QUEUE_RETRY_S: Final = 5.0
_LISTEN_S: Final = 0.1
_MOST_BATCHES: Final = 256
_LOOK_S: Final = 1.0
_PROFILES_S: Final = 30.0
_PUT_LIMIT_S: Final = 5.0


class ControlActor:
    """Drives one run's controller. Async, so that a worker's long poll holds up nobody.

    Args:
        config: what to adapt and how.
        queue_name: Ray name of the queue's actor, where the workers' records come from; the driver owns it. A handle
            would be an argument in the object store, which a restart may find gone.
        journal_dir: directory of the journal; if it holds one, this is a restart and goes on from it.
        learnt: what is known of kinds of device from earlier jobs.
        store: of the run, where that is not the journal's machine: a driver elsewhere finds the profiles there.
    """

    def __init__(
        self,
        config: RexConfig,
        queue_name: str,
        journal_dir: str,
        learnt: tuple[LearntShape, ...] = (),
        store: ArrowStore | None = None,
    ) -> None:
        _log_to_stderr()
        self._config = config
        self._queue_name = queue_name
        self._queue: Any = None
        self._news = asyncio.Event()
        self._learnt = learnt
        self._store = store
        self._profiles = Path(journal_dir).with_name(PROFILES_FILE)
        self._host = ControlHost(config, JournalFolder(Path(journal_dir)), self._spread, on_save=self._spread)
        self._started_s = time.monotonic()
        loops = (self._drain(), self._listen(), self._tick(), self._watch_nodes(), self._keep_profiles())
        self._tasks = [asyncio.ensure_future(loop) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def join(self, group: GroupInfo) -> Allocation:
        """Take a group that formed; return its first allocation. Asking twice is harmless.

        Raises:
            InfeasibleError: no allocation fits the group's bounds.
            RexError: the controller has failed, or another group has taken this one's place.
        """
        problem = Problem(
            workers=group.workers,
            global_batch_size=group.global_batch_size,
            max_global_batch_size=max(self._config.growth_limit, group.global_batch_size),
            dataset_size=group.dataset_size,
            optimizer=group.optimizer,
            local_batch_multiple=group.local_batch_multiple,
            learnt=self._learnt,
        )
        return self._host.join(
            GroupStarted(generation=group.generation, problem=problem, step=group.step, allocation=group.allocation)
        )

    async def latest(self, generation: str, version: int, save_number: int = -1) -> Allocation | SaveRequest | None:
        """Return the newest allocation of ``generation`` once it is newer than ``version``; None after 10 s without.

        Or else a request for a save that is newer than ``save_number``. A group that is not the running one hears
        nothing.
        """
        deadline = time.monotonic() + POLL_LIMIT_S
        while (left_s := deadline - time.monotonic()) > 0:
            news = self._host.newer(generation, version) or self._host.newer_save(generation, save_number)
            if news is not None:
                return news
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        return None

    async def generation(self) -> str | None:
        """Say which group runs, for whoever tells of its losses."""
        return self._host.generation

    async def lost(self, generation: str | None, ranks: dict[int, str]) -> None:
        """Hear from Ray Train which ranks of a group failed, and why. May come late: the group is named."""
        self._host.lose(generation, ranks)

    async def request_save(self, reason: str) -> bool:
        """Have the running group save; False if there is none, or nobody to ask it."""
        generation = self._host.generation
        if generation is not None:
            self._host.handle(SaveAsked(generation=generation, reason=reason))
        return generation is not None and self._host.fault is None

    async def status(self) -> ControlStatus:
        """Say how the controller is."""
        return self._host.status()

    async def finish(self, reason: str) -> ControlStatus:
        """Take in what the Queue still holds, end the run in the journal, and stop. Asking twice is harmless."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(RayError, ValueError):  # whoever killed the queue was told of by the drain
            while batches := await self._queued(wait_s=0.0):
                for batch in batches:
                    self._host.take(batch)
        self._host.end(reason)
        await self._write_profiles()
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
            # A flood is taken in portions, so that joins and polls are answered in between.
            await asyncio.sleep(_DRAIN_S if len(batches) < _MOST_BATCHES else 0.0)

    async def _queued(self, wait_s: float) -> list[Any]:
        """Return what the Queue holds, a portion at most, after waiting a while for the first batch."""
        if self._queue is None:
            self._queue = ray.get_actor(self._queue_name)
        try:
            batches: list[Any] = [await self._queue.get.remote(wait_s)] if wait_s else []
        except Empty:
            return []
        rest: int = await self._queue.qsize.remote()
        if rest:
            batches += await self._queue.get_nowait_batch.remote(min(rest, _MOST_BATCHES))
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

    async def _keep_profiles(self) -> None:
        while True:
            await asyncio.sleep(_PROFILES_S)
            await self._write_profiles()

    async def _write_profiles(self) -> None:
        """Write what is known of kinds of device. It is a help for later jobs: a full disk is no fault of this one."""
        try:
            if learnt := self._host.learnt:
                write_profiles(self._profiles, learnt)
                if self._store is not None:
                    await asyncio.wait_for(asyncio.to_thread(put_profiles, self._store, learnt), _PUT_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
            logger.warning(
                "the profiles of device kinds cannot be written (%s); later jobs learn anew", cause_of(error)
            )

    def _spread(self, _: Allocation | None = None) -> None:
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

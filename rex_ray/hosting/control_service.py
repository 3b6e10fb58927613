"""A control host with a clock: what every driver's end of the control plane does, however messages come to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from rex_ray.config import RexConfig
from rex_ray.control.events import GroupStarted, SaveAsked
from rex_ray.core.types import Allocation, LearntShape, Problem
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.control_status import ControlStatus
from rex_ray.hosting.journal_files import JournalFolder
from rex_ray.hosting.memory_file import put_memory, write_memory
from rex_ray.hosting.profile_files import PROFILES_FILE, put_profiles, write_profiles
from rex_ray.hosting.transport import POLL_LIMIT_S
from rex_ray.loggers.terminal import line_handler
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.worker.link import GroupInfo, SaveRequest
from rex_ray.worker.saving.store import Store, cause_of

__all__ = ["ControlService", "log_to_stderr"]

logger = logging.getLogger("rex_ray")

_TICK_S: Final = 0.5
_LISTEN_S: Final = 0.1
_LEARNT_S: Final = 30.0
_PUT_LIMIT_S: Final = 5.0


class ControlService:
    """Drives one run's controller. Async, so that a worker's long poll holds up nobody.

    Made inside a running event loop, on whose thread everything happens; so nothing here needs a lock.

    Args:
        config: what to adapt and how.
        journal_dir: directory of the journal; if it holds one, this is a restart and goes on from it.
        learnt: what is known of kinds of device from earlier jobs.
        store: of the run, where that is not the journal's machine: a driver elsewhere finds there what was learnt.
        memory: what an earlier controller of the run knew.
    """

    def __init__(
        self,
        config: RexConfig,
        journal_dir: Path,
        learnt: tuple[LearntShape, ...] = (),
        store: Store | None = None,
        memory: str | None = None,
    ) -> None:
        log_to_stderr()
        self._config = config
        self._news = asyncio.Event()
        self._learnt = learnt
        self._store = store
        self._run_dir = journal_dir.parent
        journal = JournalFolder(journal_dir)
        self._host = ControlHost(config, journal, self._spread, on_save=self._spread, memory=memory)
        self._started_s = time.monotonic()
        self._tasks: list[asyncio.Future[None]] = []
        for loop in (self._listen(), self._tick(), self._keep_learnt()):
            self._run(loop)

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

    def take(self, batch: object) -> None:
        """Take one worker's records, or whatever came in their place."""
        self._host.take(batch)

    async def generation(self) -> str | None:
        """Say which group runs, for whoever tells of its losses."""
        return self._host.generation

    async def lost(self, generation: str | None, ranks: dict[int, str]) -> None:
        """Hear which ranks of a group failed, and why. May come late: the group is named."""
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

    async def sights(self, mark: Mark) -> Shown:
        """Say what happened since a mark, and where the run stands; also after the run's end."""
        return self._host.sights(mark)

    async def finish(self, reason: str) -> ControlStatus:
        """Take in what still waits, end the run in the journal, and stop. Asking twice is harmless."""
        for task in self._tasks:
            task.cancel()
        await self._take_the_rest()
        self._host.end(reason)
        await self._write_learnt()
        return self._host.status()

    def pause(self) -> None:
        """Write what the journal holds back and stop, with the run's end left open: another life goes on from here."""
        for task in self._tasks:
            task.cancel()
        self._host.pause()

    async def _take_the_rest(self) -> None:
        """Take in what the workers sent and nobody has taken yet; a driver's own."""

    def _run(self, loop: Coroutine[Any, Any, None]) -> None:
        """Have a loop run until the end; one that fails ends decisions, not training."""
        task = asyncio.ensure_future(loop)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._host.tick(time.monotonic() - self._started_s)

    async def _listen(self) -> None:
        """Hear searches also while no telemetry comes."""
        while True:
            await asyncio.sleep(_LISTEN_S)
            self._host.hear_searches()

    async def _keep_learnt(self) -> None:
        while True:
            await asyncio.sleep(_LEARNT_S)
            await self._write_learnt()

    async def _write_learnt(self) -> None:
        """Write what was learnt. It is a help for later jobs: a full disk is no fault of this one."""
        try:
            if learnt := self._host.learnt:
                write_profiles(self._run_dir / PROFILES_FILE, learnt)
                if self._store is not None:
                    await asyncio.wait_for(asyncio.to_thread(put_profiles, self._store, learnt), _PUT_LIMIT_S)
            if (memory := self._host.memory) is not None:
                write_memory(self._run_dir, memory)
                if self._store is not None:
                    await asyncio.wait_for(asyncio.to_thread(put_memory, self._store, memory), _PUT_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
            logger.warning("what was learnt cannot be written (%s); later jobs learn anew", cause_of(error))

    def _spread(self, _: Allocation | None = None) -> None:
        """Wake every long poll; each sees for itself whether this is news to it."""
        self._news.set()
        self._news = asyncio.Event()

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fail(error)


def log_to_stderr() -> None:
    """Have a process of ours speak on its standard error, which its driver hears."""
    if not logger.handlers:
        logger.addHandler(line_handler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False

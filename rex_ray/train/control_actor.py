"""The control actor: where the pure controller meets Ray, a clock and a disk.

It drains the Queue, gives the controller its events in order, writes the journal, and only then publishes what the
controller commands. It may die at any moment: Ray starts it again, it restores itself from its journal, and training,
which never waits for it, finds it there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, assert_never

import ray
from ray.exceptions import RayError
from ray.util.queue import Empty

from rex_ray.config import RexConfig
from rex_ray.control.codec import CodecError
from rex_ray.control.commands import (
    ApplyAllocation,
    CancelSearch,
    Command,
    RequestCheckpoint,
    RequestWorldSize,
    StartSearch,
    TellTrial,
)
from rex_ray.control.events import Event, GroupStarted, MetricReported, RunEnded, SearchFailed, Ticked, WorkerLost
from rex_ray.control.journal import EVENTS_FILE, Chunk
from rex_ray.control.journalled import JournalledController, Turn
from rex_ray.control.phases import Running, Starting, Switching
from rex_ray.core.errors import InfeasibleError, RexError
from rex_ray.core.types import Allocation, Problem
from rex_ray.train.journal_files import append_chunks, read_files
from rex_ray.train.telemetry import POLL_LIMIT_S, first_line
from rex_ray.train.wire import Batch, decode
from rex_ray.worker.link import GroupInfo, MetricRecord

__all__ = ["ControlActor", "ControlStatus"]

logger = logging.getLogger("rex_ray")

_TICK_S: Final = 0.5
_DRAIN_S: Final = 0.1
_QUEUE_RETRY_S: Final = 5.0
_GAP_S: Final = 10.0
_HEADER_MARK: Final = b'{"header":'


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """How the controller is.

    Attributes:
        phase: name of the controller's phase.
        generation: the running group, or None.
        last_step: newest complete step.
        allocation: what was published last to that group.
        last_reason: the policy's newest reason, also for changing nothing.
        num_events: events in the journal.
        num_restarts: how often the actor came back from its journal.
        dropped: what was turned away, by reason.
        gap: the newest complaint about missing telemetry, or None while steps come in.
        fault: why the controller decides nothing any more, or None while it is well.
    """

    phase: str
    generation: str | None
    last_step: int
    allocation: Allocation | None
    last_reason: str
    num_events: int
    num_restarts: int
    dropped: dict[str, int]
    gap: str | None
    fault: str | None


class ControlActor:
    """Drives one run's controller. Async, so that a worker's long poll holds up nobody.

    Events are handled and their commands emitted without a pause between them, on the one thread of the event loop;
    so commands leave in the controller's order, and nothing here needs a lock.

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
        self._dir = Path(journal_dir)
        self._published: Allocation | None = None
        self._news = asyncio.Event()
        self._dropped: Counter[str] = Counter()
        self._worker_drops: dict[int, int] = {}
        self._fault: str | None = None
        self._can_write = True
        self._gap: str | None = None
        self._num_restarts = 0
        self._ended = False
        self._controller = self._begin()
        self._started_s = self._progress_s = time.monotonic()
        self._progress_step = -1
        self._first_us = self._controller.now_us
        self._tasks = [asyncio.ensure_future(self._drain()), asyncio.ensure_future(self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    # --- what workers and the driver call

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
        )
        self._handle(
            GroupStarted(generation=group.generation, problem=problem, step=group.step, allocation=group.allocation)
        )
        if self._fault is not None or self._published is None:
            raise RexError(f"the controller decides nothing: {self._fault or 'the run has ended'}")
        return self._published

    async def latest(self, generation: str, version: int) -> Allocation | None:
        """Return the newest allocation of ``generation`` once it is newer than ``version``; None after 10 s without.

        A group that is not the running one hears nothing.
        """
        deadline = time.monotonic() + POLL_LIMIT_S
        while (left_s := deadline - time.monotonic()) > 0:
            newest = self._published
            if newest is not None and newest.version > version and generation == self._generation:
                return newest
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        return None

    async def lost(self, ranks: dict[int, str]) -> None:
        """Hear from Ray Train which ranks failed, and why."""
        for rank, reason in sorted(ranks.items()):
            if self._generation is not None:
                self._handle(WorkerLost(generation=self._generation, rank=rank, reason=reason))

    async def status(self) -> ControlStatus:
        """Say how the controller is."""
        state = self._controller.controller.state
        dropped = Counter(self._controller.dropped) + self._dropped
        dropped["not taken by the queue"] = sum(self._worker_drops.values())
        return ControlStatus(
            phase=type(state.phase).__name__,
            generation=self._generation,
            last_step=state.last_step,
            allocation=self._published,
            last_reason=state.last_reason,
            num_events=state.num_events,
            num_restarts=self._num_restarts,
            dropped=dict(+dropped),
            gap=self._gap,
            fault=self._fault,
        )

    async def finish(self, reason: str) -> ControlStatus:
        """Take in what the Queue still holds, end the run in the journal, and stop. Asking twice is harmless."""
        if not self._ended:
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(RayError, ValueError):  # whoever killed the queue was told of by the drain
                self._take_all(await self._queued(wait_s=0.0))
            fault, self._fault = self._fault, None
            if self._can_write:  # the end belongs into the journal also of a controller that failed
                self._handle(RunEnded(reason=reason))
                self._append(self._controller.flush())
            self._fault = fault or self._fault
            self._ended = True
        return await self.status()

    # --- events in

    def _begin(self) -> JournalledController:
        """Begin a journal, or go on from the one that an earlier life of this actor left."""
        files = read_files(self._dir)
        if not files:
            controller, chunks = JournalledController.begin(
                policy=self._config.policy,
                policy_options=self._config.policy_options,
                seed=self._config.seed,
                mode=self._config.mode,
            )
            self._append(chunks)
            return controller
        self._num_restarts = files.get(EVENTS_FILE, b"").count(_HEADER_MARK)
        try:
            controller, turn = JournalledController.resume(files)
        except CodecError as error:
            # What can be read of the damaged journal may still tell the story: nothing more is written to it.
            self._can_write = False
            self._fail(error)
            controller, _ = JournalledController.begin(policy="bsp", mode="off")
            return controller
        self._carry_out(turn)
        state = controller.controller.state
        logger.warning(
            "the control actor is back from its journal: restart %d, %d events, last step %d",
            self._num_restarts,
            state.num_events,
            state.last_step,
        )
        return controller

    async def _drain(self) -> None:
        while True:
            try:
                batches = await self._queued(wait_s=1.0)
            except (RayError, ValueError) as error:  # ValueError: Ray knows no such actor any more
                logger.warning("the telemetry queue does not answer (%s); nothing is observed", first_line(error))
                await asyncio.sleep(_QUEUE_RETRY_S)
                continue
            self._take_all(batches)
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

    def _take_all(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            if batch.num_dropped:
                self._worker_drops[batch.rank] = batch.num_dropped
            self._guarded(partial(self._add, batch))
            for metric in batch.metrics:
                self._take_metric(metric)

    def _add(self, batch: Batch) -> Turn:
        return self._controller.add(decode(batch))

    def _take_metric(self, metric: MetricRecord) -> None:
        if metric.generation != self._generation:
            self._dropped["stale metric"] += 1
            return
        self._handle(
            MetricReported(
                generation=metric.generation,
                epoch=metric.epoch,
                step=metric.step,
                elapsed_us=round(metric.elapsed_s * 1e6),
                metrics=dict(metric.metrics),
            )
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._handle(Ticked(now_us=self._first_us + int((now_s - self._started_s) * 1e6)))
            self._watch_progress(now_s)

    def _watch_progress(self, now_s: float) -> None:
        """Say once when complete steps stop coming; the controller has its own event for it."""
        step = self._controller.controller.state.last_step
        if step != self._progress_step or self._generation is None:
            self._progress_step, self._progress_s, self._gap = step, now_s, None
        elif now_s - self._progress_s >= _GAP_S and self._gap is None:
            self._gap = f"no complete step since step {step}"
            logger.warning("%s for %.0f s; training may well go on, unobserved", self._gap, now_s - self._progress_s)

    def _handle(self, event: Event) -> None:
        self._guarded(lambda: self._controller.handle(event))

    # --- faults

    def _guarded(self, handle: Callable[[], Turn]) -> None:
        """Handle something; a fault of the controller or the disk ends decisions, not training, and is told in full.

        Raises:
            InfeasibleError: the user's to hear; nothing has changed.
        """
        if self._ended or self._fault is not None:
            return
        try:
            self._carry_out(handle())
        except InfeasibleError:
            raise
        except Exception as error:  # noqa: BLE001 - logged with its traceback by _fail
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Decide nothing more. The journal stays as it is, and so does the last allocation."""
        self._fault = f"{type(error).__name__}: {error}"
        logger.error("the controller failed; training goes on under the last allocation", exc_info=error)

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # --- commands out

    def _carry_out(self, turn: Turn) -> None:
        """Write the journal, then emit: a command that nobody remembers must not be obeyed."""
        self._append(turn.chunks)
        for command in turn.commands:
            self._emit(command)

    def _append(self, chunks: Iterable[Chunk]) -> None:
        if self._can_write:
            self._can_write = False  # a write that fails half-way must be the journal's last
            append_chunks(self._dir, chunks)
            self._can_write = True

    def _emit(self, command: Command) -> None:
        match command:
            case ApplyAllocation(allocation=allocation):
                self._published = allocation
                self._news.set()
                self._news = asyncio.Event()
            case StartSearch(search_id=search_id):
                self._handle(SearchFailed(search_id=search_id, reason="there is no search helper"))
            case TellTrial() | CancelSearch():
                pass  # no search is ever under way
            case RequestWorldSize(num_workers=num_workers, reason=reason):
                logger.warning("the policy asks for %d workers (%s); resizing is up to you", num_workers, reason)
            case RequestCheckpoint(reason=reason):
                logger.warning("the policy asks for a save (%s); the next report makes one", reason)
            case unknown:
                assert_never(unknown)

    @property
    def _generation(self) -> str | None:
        phase = self._controller.controller.phase
        return phase.group.generation if isinstance(phase, Starting | Running | Switching) else None


def _log_to_stderr() -> None:
    """Ray carries an actor's standard error to the driver; Python's last resort would print bare messages there too."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rex_ray: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False

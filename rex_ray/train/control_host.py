"""What the control actor does that has nothing to do with Ray: a controller, its journal, and their faults."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, assert_never

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
from rex_ray.control.events import (
    Event,
    IncidentReported,
    MetricReported,
    RunEnded,
    SearchFailed,
    Ticked,
    WorkerLost,
)
from rex_ray.control.journal import EVENTS_FILE, Chunk
from rex_ray.control.journalled import JournalledController, Turn
from rex_ray.control.phases import Running, Starting, Switching
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation
from rex_ray.search.helper import SearchHelper
from rex_ray.search.protocol import Reply
from rex_ray.train.journal_files import append_chunks, read_files
from rex_ray.train.search_events import event_of
from rex_ray.train.wire import Batch, decode
from rex_ray.worker.link import IncidentRecord, MetricRecord

__all__ = ["ControlHost", "ControlStatus"]

logger = logging.getLogger("rex_ray")

_GAP_S: Final = 10.0
_HEADER_MARK: Final = b'{"header":'


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """How the controller is.

    Attributes:
        phase: name of the controller's phase.
        generation: the running group, or None.
        last_step: newest complete step.
        allocation: what was published last.
        last_reason: the policy's newest reason, also for changing nothing.
        num_events: events handled.
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


class Searching(Protocol):
    """Who carries searches out, and never has anybody wait: see ``SearchHelper``."""

    def start(self, search_id: str, seed: int, problem: SearchProblem) -> None:
        """Begin a search."""
        ...

    def tell(self, search_id: str, trial: int, objective: float, own_s: Sequence[float] = ()) -> None:
        """Give a search the objective of a trial that it asked for."""
        ...

    def cancel(self, search_id: str) -> None:
        """Call a search off."""
        ...

    def poll(self) -> list[Reply]:
        """Return what was said since the last call."""
        ...

    def close(self) -> None:
        """Have no process left."""
        ...


class ControlHost:
    """Drives one run's controller and writes its journal.

    An event's commands are emitted before the next event is handled, all on one thread; so commands leave in the
    controller's order, and nothing here needs a lock.

    Args:
        config: what to adapt and how.
        directory: of the journal; if it holds one, this goes on from it.
        on_news: called with every allocation that is published, the last one again when going on from a journal.
        make_helper: called when the first search is asked for.
    """

    def __init__(
        self,
        config: RexConfig,
        directory: Path,
        on_news: Callable[[Allocation], None],
        make_helper: Callable[[], Searching] = SearchHelper,
    ) -> None:
        self._dir = directory
        self._on_news = on_news
        self._published: Allocation | None = None
        self._dropped: Counter[str] = Counter()
        self._worker_drops: dict[int, int] = {}
        self._fault: str | None = None
        self._gap: str | None = None
        self._can_write = True
        self._has_ended = False
        self._num_restarts = 0
        self._make_helper = make_helper
        self._helper: Searching | None = None
        self._controller = self._begin(config)
        # They lived in a process that ended with this host's predecessor.
        for search_id in self._controller.controller.state.searches:
            self.handle(SearchFailed(search_id=search_id, reason="the helper was lost with the control actor"))
        self._first_us = self._controller.now_us
        self._progress_step, self._progress_s = -1, 0.0

    @property
    def published(self) -> Allocation | None:
        """The newest allocation that was published."""
        return self._published

    @property
    def fault(self) -> str | None:
        """Why the controller decides nothing any more, or None while it is well."""
        return self._fault

    @property
    def generation(self) -> str | None:
        """The running group."""
        phase = self._controller.controller.phase
        return phase.group.generation if isinstance(phase, Starting | Running | Switching) else None

    def status(self) -> ControlStatus:
        """Say how the controller is."""
        state = self._controller.controller.state
        dropped = Counter(self._controller.dropped) + self._dropped
        dropped["not taken by the queue"] = sum(self._worker_drops.values())
        return ControlStatus(
            phase=type(state.phase).__name__,
            generation=self.generation,
            last_step=state.last_step,
            allocation=self._published,
            last_reason=state.last_reason,
            num_events=state.num_events,
            num_restarts=self._num_restarts,
            dropped=dict(+dropped),
            gap=self._gap,
            fault=self._fault,
        )

    # --- events in

    def handle(self, event: Event) -> None:
        """Take one event.

        Raises:
            InfeasibleError: no allocation fits a new group's bounds; nothing has changed.
        """
        self._guarded(partial(self._controller.handle, event))

    def take(self, batch: Batch) -> None:
        """Take one worker's records."""
        if batch.num_dropped:
            self._worker_drops[batch.rank] = batch.num_dropped
        self._guarded(lambda: self._controller.add(decode(batch)))
        for metric in batch.metrics:
            self._take_metric(metric)
        for incident in batch.incidents:
            self._take_incident(incident)

    def lose(self, ranks: dict[int, str]) -> None:
        """Hear which ranks failed, and why."""
        for rank, reason in sorted(ranks.items()):
            if self.generation is not None:
                self.handle(WorkerLost(generation=self.generation, rank=rank, reason=reason))

    def hear_searches(self) -> None:
        """Take what searches said since the last call; their limits run out here, too."""
        for reply in self._helper.poll() if self._helper is not None else ():
            self.handle(event_of(reply))

    def tick(self, elapsed_s: float) -> None:
        """Hear the time since this host was made; say once when complete steps stop coming."""
        self.handle(Ticked(now_us=self._first_us + int(elapsed_s * 1e6)))
        step = self._controller.controller.state.last_step
        if step != self._progress_step or self.generation is None:
            self._progress_step, self._progress_s, self._gap = step, elapsed_s, None
        elif elapsed_s - self._progress_s >= _GAP_S and self._gap is None:
            self._gap = f"no complete step since step {step}"
            logger.warning("%s for %.0f s; training may well go on, unobserved", self._gap, _GAP_S)

    def end(self, reason: str) -> None:
        """End the run in the journal; nothing is taken afterwards. Also of a controller that failed."""
        if self._has_ended:
            return
        fault, self._fault = self._fault, None
        if self._can_write:
            self.handle(RunEnded(reason=reason))
            self._append(self._controller.flush())
        self._fault = fault or self._fault
        self._has_ended = True
        self._dismiss_helper()

    def fail(self, error: BaseException) -> None:
        """Decide nothing more. The journal stays as it is, and so does the last allocation."""
        self._fault = f"{type(error).__name__}: {error}"
        self._dismiss_helper()
        logger.error("the controller failed; training goes on under the last allocation", exc_info=error)

    # --- inside

    def _begin(self, config: RexConfig) -> JournalledController:
        """Begin a journal, or go on from the one that an earlier life left."""
        files = read_files(self._dir)
        if not files:
            controller, chunks = JournalledController.begin(
                policy=config.policy, policy_options=config.policy_options, seed=config.seed, mode=config.mode
            )
            self._append(chunks)
            return controller
        self._num_restarts = files.get(EVENTS_FILE, b"").count(_HEADER_MARK)
        try:
            controller, turn = JournalledController.resume(files)
        except CodecError as error:
            # What can be read of the damaged journal may still tell the story: nothing more is written to it.
            self._can_write = False
            self.fail(error)
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

    def _take_metric(self, metric: MetricRecord) -> None:
        if metric.generation != self.generation:
            self._dropped["stale metric"] += 1
            return
        self.handle(
            MetricReported(
                generation=metric.generation,
                epoch=metric.epoch,
                step=metric.step,
                elapsed_us=round(metric.elapsed_s * 1e6),
                metrics=dict(metric.metrics),
            )
        )

    def _take_incident(self, incident: IncidentRecord) -> None:
        """Journal an incident, also of a group that is gone: what ended it may well be the reason."""
        logger.warning("rank %d, step %d: %s", incident.rank, incident.step, incident.message)
        self.handle(
            IncidentReported(
                generation=incident.generation,
                rank=incident.rank,
                step=incident.step,
                kind=incident.kind,
                message=incident.message,
            )
        )

    def _guarded(self, handle: Callable[[], Turn]) -> None:
        """Handle something; a fault of the controller or the disk ends decisions, not training, and is told in full."""
        if self._has_ended or self._fault is not None:
            return
        try:
            self._carry_out(handle())
        except InfeasibleError:
            raise
        except Exception as error:  # noqa: BLE001 - logged with its traceback by fail()
            self.fail(error)

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
                self._on_news(allocation)
            case StartSearch(search_id=search_id, seed=seed, problem=problem):
                self._helper = self._helper or self._make_helper()
                self._helper.start(search_id, seed, problem)
            case TellTrial(search_id=search_id, trial=trial, objective=objective, own_s=own_s):
                if self._helper is not None:
                    self._helper.tell(search_id, trial, objective, own_s)
            case CancelSearch(search_id=search_id):
                if self._helper is not None:
                    self._helper.cancel(search_id)
            case RequestWorldSize(num_workers=num_workers, reason=reason):
                logger.warning("the policy asks for %d workers (%s); resizing is up to you", num_workers, reason)
            case RequestCheckpoint(reason=reason):
                logger.warning("the policy asks for a save (%s); the next report makes one", reason)
            case unknown:
                assert_never(unknown)

    def _dismiss_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

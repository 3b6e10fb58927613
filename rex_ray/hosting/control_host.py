"""What the control actor does that has nothing to do with Ray: a controller, its journal, and their faults."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from rex_ray.config import RexConfig
from rex_ray.control.events import Event, GroupStarted, RunEnded, SearchFailed, Ticked, WorkerLost
from rex_ray.control.journal import EVENTS_FILE, Chunk
from rex_ray.control.journalled import JournalledController, Turn
from rex_ray.control.phases import Ended, Group, Running, Starting, Switching
from rex_ray.core.errors import InfeasibleError, RexError
from rex_ray.core.types import Allocation, LearntShape
from rex_ray.hosting.control_status import ControlStatus
from rex_ray.hosting.emission import Emission, Searching
from rex_ray.hosting.handed_down import HandedDown
from rex_ray.hosting.intake import Intake
from rex_ray.hosting.journal_files import JournalStore
from rex_ray.hosting.search_events import event_of
from rex_ray.policies.base import Policy
from rex_ray.policies.learnt import learnt_shapes
from rex_ray.search.helper import SearchHelper
from rex_ray.watch.backlog import Backlog, Mark, Shown
from rex_ray.watch.seams import Progress
from rex_ray.worker.link import SaveRequest

__all__ = ["ControlHost"]

logger = logging.getLogger("rex_ray")

_GAP_S: Final = 10.0
_HEADER_MARK: Final = b'{"header":'


class ControlHost:
    """Drives one run's controller and writes its journal.

    An event's commands are emitted before the next event is handled, all on one thread; so commands leave in the
    controller's order, and nothing here needs a lock.

    Args:
        config: what to adapt and how.
        store: of the journal; if it holds one, this goes on from it.
        on_news: called with every allocation that is published, the last one again when going on from a journal.
        make_helper: called when the first search is asked for.
        custom_policy: the policy itself where it is not a registered one.
        on_save: called when a save is asked for.
        memory: of an earlier ``fit`` of the run, for the first group if it resumes from a save.
    """

    def __init__(
        self,
        config: RexConfig,
        store: JournalStore,
        on_news: Callable[[Allocation], None],
        make_helper: Callable[[], Searching] = SearchHelper,
        custom_policy: Policy[Any] | None = None,
        on_save: Callable[[], None] = lambda: None,
        memory: str | None = None,
    ) -> None:
        self._store = store
        self._intake = Intake()
        self._backlog = Backlog()
        self._is_shown = True
        self._emission = Emission(on_news, make_helper, on_save)
        self._fault: str | None = None
        self._gap: str | None = None
        self._can_write = True
        self._num_restarts = 0
        self._controller = self._begin(config, custom_policy)
        self._has_ended = isinstance(self._controller.controller.phase, Ended)
        self._handed_down = HandedDown(memory, self.group.problem.global_batch_size if self.group else None)
        # They lived in a process that ended with this host's predecessor.
        for search_id in self._controller.controller.state.searches:
            self.handle(SearchFailed(search_id=search_id, reason="the helper was lost with the control actor"))
        self._first_us = self._controller.now_us
        self._progress_step, self._progress_s = -1, 0.0

    @property
    def published(self) -> Allocation | None:
        """The newest allocation that was published."""
        return self._emission.published

    @property
    def fault(self) -> str | None:
        """Why the controller decides nothing any more, or None while it is well."""
        return self._fault

    @property
    def group(self) -> Group | None:
        """The running group."""
        phase = self._controller.controller.phase
        return phase.group if isinstance(phase, Starting | Running | Switching) else None

    @property
    def generation(self) -> str | None:
        """Identity of the running group."""
        group = self.group
        return None if group is None else group.generation

    @property
    def learnt(self) -> tuple[LearntShape, ...]:
        """What is known by now of each kind of device."""
        return learnt_shapes(self._controller.controller.state.policy_state)

    @property
    def memory(self) -> str | None:
        """What the policy knows by now, for the next ``fit`` of the run; None before a group, and after a fault."""
        return None if self._fault is not None else self._handed_down.left(self._controller.controller)

    def newer(self, generation: str, version: int) -> Allocation | None:
        """Return the newest allocation of the running group, if that is ``generation`` and knows only ``version``."""
        return self._emission.newer(generation, version) if generation == self.generation else None

    def newer_save(self, generation: str, number: int) -> SaveRequest | None:
        """Return the newest request for a save, if ``generation`` runs and knows only of ``number``."""
        return self._emission.newer_save(generation, number) if generation == self.generation else None

    def status(self) -> ControlStatus:
        """Say how the controller is."""
        state = self._controller.controller.state
        return ControlStatus(
            phase=type(state.phase).__name__,
            generation=self.generation,
            last_step=state.last_step,
            allocation=self.published,
            last_reason=state.last_reason,
            num_events=state.num_events,
            num_restarts=self._num_restarts,
            dropped=dict(+(Counter(self._controller.dropped) + self._intake.dropped)),
            gap=self._gap,
            fault=self._fault,
            row_limits=dict(state.row_limits.most),
        )

    def sights(self, mark: Mark) -> Shown:
        """Say what happened since a mark, and where the run stands."""
        return self._backlog.since(mark, self.progress())

    def progress(self) -> Progress:
        """Say where the run stands."""
        return replace(self._backlog.progress(), gap=self._gap, fault=self._fault)

    # --- events in

    def handle(self, event: Event) -> None:
        """Take one event.

        Raises:
            InfeasibleError: no allocation fits a new group's bounds; nothing has changed.
        """
        self._guarded(partial(self._controller.handle, event))

    def join(self, event: GroupStarted) -> Allocation:
        """Take a group that formed; return its first allocation. Asking twice is harmless.

        Raises:
            InfeasibleError: no allocation fits the group's bounds.
            RexError: the controller has failed, or another group has taken this one's place.
        """
        self.handle(self._handed_down.given(event, self._controller.controller))
        first = self.newer(event.generation, -1)
        if first is None:
            raise RexError(f"the controller decides nothing: {self._fault or self._why_not()}")
        return first

    def take(self, batch: object) -> None:
        """Take one worker's records, as they come out of the queue."""
        sound = self._intake.open(batch)
        if sound is None:
            return
        self._guarded(lambda: self._controller.add(self._intake.records(sound)))
        for event in self._intake.events(sound, self.generation):
            self.handle(event)

    def lose(self, generation: str | None, ranks: dict[int, str]) -> None:
        """Hear which ranks of a group failed, and why; news of a group that is gone is too late to matter."""
        for rank, reason in sorted(ranks.items()):
            if generation is not None and generation == self.generation:
                self.handle(WorkerLost(generation=generation, rank=rank, reason=reason))

    def hear_searches(self) -> None:
        """Take what searches said since the last call; their limits run out here, too."""
        for reply in self._emission.replies():
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
            if self._can_write:
                self._guarded(lambda: Turn(chunks=self._controller.flush()))
        self._fault = fault or self._fault
        self._has_ended = True
        self._backlog.end(self._controller.now_us / 1e6, reason)
        self._emission.dismiss_helper()

    def pause(self) -> None:
        """Write what the journal holds back, and take nothing afterwards; a host of another life goes on from it."""
        self._guarded(lambda: Turn(chunks=self._controller.flush()))
        self._has_ended = True
        self._emission.dismiss_helper()

    def fail(self, error: BaseException) -> None:
        """Decide nothing more. The journal stays as it is, and so does the last allocation."""
        self._fault = f"{type(error).__name__}: {error}"
        self._emission.dismiss_helper()
        logger.error("the controller failed; training goes on under the last allocation", exc_info=error)

    # --- inside

    def _begin(self, config: RexConfig, policy: Policy[Any] | None) -> JournalledController:
        """Begin a journal, or go on from the one that an earlier life left."""
        files = self._store.read()
        if not any(files.values()):
            # Also where an earlier life died before its first byte was written.
            controller, chunks = JournalledController.begin(
                policy=config.policy,
                policy_options=config.policy_options,
                seed=config.seed,
                mode=config.mode,
                custom_policy=policy,
            )
            self._append(chunks)
            return controller
        self._num_restarts = files.get(EVENTS_FILE, b"").count(_HEADER_MARK)
        try:
            controller, turn = JournalledController.resume(files, custom_policy=policy)
            self._shown(lambda: self._backlog.take_earlier(turn.earlier))
            self._carry_out(turn)
            self._backlog.resumed(self._num_restarts)
        except Exception as error:  # noqa: BLE001 - logged with its traceback by fail()
            # Whatever it is, a next life would meet it again. What can be read of a damaged journal may still tell
            # the story, and of a full disk no more fits: nothing more is written.
            self._can_write = False
            self.fail(error)
            controller, _ = JournalledController.begin(policy="bsp", mode="off")
            return controller
        state = controller.controller.state
        logger.warning(
            "the control actor is back from its journal: restart %d, %d events, last step %d",
            self._num_restarts,
            state.num_events,
            state.last_step,
        )
        return controller

    def _why_not(self) -> str:
        return "the run has ended" if self._has_ended else "another worker group has taken this one's place"

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
            self._emission.emit(command)
        self._shown(lambda: self._backlog.take(turn.entries))

    def _shown(self, show: Callable[[], None]) -> None:
        """Have something seen. That is no decision: a fault in it ends what is seen, and nothing else."""
        if not self._is_shown:
            return
        try:
            show()
        except Exception:
            self._is_shown = False
            logger.warning("the run is not shown any more; decisions and journal go on", exc_info=True)

    def _append(self, chunks: Iterable[Chunk]) -> None:
        if self._can_write:
            self._can_write = False  # a write that fails half-way must be the journal's last
            self._store.append(chunks)
            self._can_write = True

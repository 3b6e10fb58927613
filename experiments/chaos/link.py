"""A group's way to the control actor and back: joining, polls and pumps, each with what may happen to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import InfeasibleError, RexError
from rex_ray.core.types import Allocation, Problem, WorkerSpec
from rex_ray.hosting.listener import Listener
from rex_ray.hosting.outbox import Outbox
from rex_ray.hosting.wire import encode
from rex_ray.worker.link import GroupInfo, NullLink, Record, SaveRequest

if TYPE_CHECKING:
    from experiments.chaos.world import World

__all__ = ["GLOBAL_BATCH_SIZE", "MOST_ROWS", "Link"]

GLOBAL_BATCH_SIZE, MOST_ROWS = 24, 64
_JOIN_LIMIT_S, _RETRY_S, _POLL_LIMIT_S, _PUMP_S = 24.0, 0.5, 20.0, 0.5
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 8.0


class Link:
    """All ranks' links.

    Args:
        world: where they are.
        generation: of their group.
        num_ranks: of their group.
        step: the group's first.
        resumed: the allocation that it resumes from.
        begin: called with the first allocation, whoever decided it.
    """

    def __init__(
        self,
        world: World,
        *,
        generation: str,
        num_ranks: int,
        step: int,
        resumed: Allocation | None,
        begin: Callable[[Allocation], None],
    ) -> None:
        self._world = world
        self._info = GroupInfo(
            generation=generation,
            workers=tuple(WorkerSpec(rank=rank, device=f"kind {rank % 2}") for rank in range(num_ranks)),
            dataset_size=world.num_rows,
            global_batch_size=GLOBAL_BATCH_SIZE,
            step=step,
            allocation=resumed,
        )
        self._begin = begin
        self._has_begun = False
        self._is_alive = True
        self._back_off_s = _FIRST_BACK_OFF_S
        self._num_polls = 0
        self.listener = Listener(None)
        self.outboxes = [Outbox() for _ in range(num_ranks)]
        self._join(world.clock.now_s + _JOIN_LIMIT_S)
        world.clock.after(_JOIN_LIMIT_S, self._give_up_joining)

    def cut(self) -> None:
        """The group's processes end; what they had sent is still under way, but a call dies with its caller."""
        self._is_alive = False

    def send(self, rank: int, records: list[Record]) -> None:
        """Take a rank's records along."""
        self.outboxes[rank].put(records)

    # --- joining

    def _join(self, deadline_s: float) -> None:
        def answer(first: Allocation | None) -> None:
            if first is None:
                self._give_up_joining()
            elif self._is_alive and not self._has_begun:
                self.listener = Listener(first)
                self._start(first)

        def fail() -> None:
            if not self._has_begun and self._world.clock.now_s + _RETRY_S < deadline_s:
                self._world.clock.after(_RETRY_S, lambda: self._join(deadline_s))

        if self._is_alive and not self._has_begun:
            self._call_join(answer, fail)

    def _call_join(self, answer: Callable[[Any], None], fail: Callable[[], None]) -> None:
        info = self._info
        problem = Problem(
            workers=info.workers,
            global_batch_size=info.global_batch_size,
            max_global_batch_size=MOST_ROWS,
            dataset_size=info.dataset_size,
        )
        event = GroupStarted(generation=info.generation, problem=problem, step=info.step, allocation=info.allocation)

        def act(host: Any) -> Allocation | None:
            try:
                return host.join(event) if self._is_alive else None  # type: ignore[no-any-return]
            except InfeasibleError:
                raise  # no group here is too large for its workers
            except RexError:
                return None

        self._call(lambda: self._world.actor.call(act, answer, fail))

    def _give_up_joining(self) -> None:
        """Nobody answers: train with equal shares, and go on asking."""
        if self._is_alive and not self._has_begun:
            self._world.say(f"{self._info.generation} is not heard")
            self._start(NullLink().join(self._info, 0.0))

    def _start(self, first: Allocation) -> None:
        self._has_begun = True
        self._poll()
        for rank in range(len(self.outboxes)):
            self._pump(rank)
        self._begin(first)

    # --- polls and pumps

    def _poll(self) -> None:
        """Ask for news; an answer that does not come is given up, and one that comes late is still heard."""
        if not self._is_alive:
            return
        self._num_polls += 1
        number = self._num_polls

        def again(delay_s: float) -> None:
            self._num_polls += 1
            self._world.clock.after(delay_s, self._poll)

        def answer(news: Allocation | SaveRequest | None) -> None:
            if self._world.chance.strikes("answer lost", 0.03):
                return
            self.listener.hear(news)
            if number == self._num_polls:
                self._back_off_s = _FIRST_BACK_OFF_S
                again(0.05)

        def fail() -> None:
            if number == self._num_polls:
                again(self._back_off_s)
                self._back_off_s = min(2 * self._back_off_s, _LAST_BACK_OFF_S)

        listener, generation = self.listener, self._info.generation
        if listener.known_version is None:
            self._call_join(answer, fail)
        else:
            self._call(lambda: self._world.actor.latest(generation, listener, answer, fail))
        self._world.clock.after(_POLL_LIMIT_S, fail)

    def _call(self, call: Callable[[], None]) -> None:
        self._world.clock.after(self._world.net_delay_s(), lambda: call() if self._is_alive else None)

    def _pump(self, rank: int) -> None:
        if not self._is_alive:
            return
        world, outbox = self._world, self.outboxes[rank]
        if not world.chance.strikes("slow pump", 0.01):
            records = outbox.take(world.clock.now_s)
            num_records = len(records)
            if records:
                batch = encode(rank, records, outbox.num_dropped)
                world.post(batch, outbox.arrived, lambda: outbox.failed(num_records, world.clock.now_s))
        world.clock.after(_PUMP_S * world.chance.of("pump").uniform(0.5, 1.5), lambda: self._pump(rank))

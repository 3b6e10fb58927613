"""A worker group in virtual time: the real sampler, switch protocol, outbox and listener, on simulated ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import RexError
from rex_ray.core.types import Allocation, Problem, StepFlag, StepRecord, WorkerSpec
from rex_ray.train.listener import Listener
from rex_ray.train.outbox import Outbox
from rex_ray.train.wire import encode
from rex_ray.worker.data.sampler import ElasticSampler, Plan, Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.protocol import SwitchProtocol
from rex_ray.worker.link import GroupInfo, IncidentRecord, MetricRecord, NullLink

if TYPE_CHECKING:
    from experiments.chaos.world import Save, World

__all__ = ["Group"]

_JOIN_LIMIT_S, _POLL_LIMIT_S, _PUMP_S = 24.0, 20.0, 0.5
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 8.0
_SAVE_EVERY, _INTERVAL_STEPS = 25, 4


class _Rank:
    """One worker: what it has drawn, and what it said and heard."""

    def __init__(self, group: Group, rank: int, first: Allocation, ahead: int) -> None:
        self.ahead = ahead
        self.schedule = Schedule(first)
        self.sampler = ElasticSampler(dataset_size=group.world.num_rows, rank=rank, seed=1, schedule=self.schedule)
        self.protocol = SwitchProtocol(
            rank=rank,
            num_ranks=group.num_ranks,
            latest=lambda: group.listener.newest,
            schedule=self.schedule,
            next_undrawn=lambda: self.sampler.next_undrawn,
            ahead=group.ahead,
            interval_steps=_INTERVAL_STEPS,
        )
        self.messages: deque[tuple[float, ...]] = deque()
        self.has_said = False
        self._batches: Iterator[list[tuple[int, int]]] = iter(())
        self._rows: deque[list[int]] = deque()

    def begin_pass(self, position: Position) -> None:
        """Iterate the loader: its processes draw ahead at once."""
        self.sampler.rewind(position)
        self._batches = iter(self.sampler)
        self._rows.clear()
        self._draw(self.ahead)

    def next_batch(self) -> tuple[Plan, list[int]] | None:
        """Return the next batch, None at the epoch's end."""
        self._draw(1)
        if not self._rows:
            return None
        plan = self.sampler.drawn.popleft()
        return plan, self._rows.popleft()

    def _draw(self, count: int) -> None:
        for _ in range(count):
            rows = next(self._batches, None)
            if rows is not None:
                self._rows.append([row for _, row in rows])


class Group:
    """A worker group from its formation to its end.

    Args:
        world: where it lives.
        generation: its identity.
        num_ranks: its size.
        save: what it resumes from.
    """

    def __init__(self, world: World, generation: str, num_ranks: int, save: Save) -> None:
        self.world = world
        self.generation = generation
        self.num_ranks = num_ranks
        self.is_alive = True
        self.position = save.position
        self.counts = save.counts.copy()
        self.num_steps = 0
        self.outboxes = [Outbox() for _ in range(num_ranks)]
        self.listener = Listener(None)
        self.in_force: Allocation | None = None
        self._resumed = save.allocation
        chance = world.chance.of("group")
        self._aheads = [chance.choice((0, 0, 1, 2, 4)) for _ in range(num_ranks)]
        self.ahead = max(self._aheads)
        self._speeds = [chance.uniform(0.008, 0.03) for _ in range(num_ranks)]
        self._ranks: list[_Rank] = []
        self._last_step_s: float | None = None
        self._back_off_s = _FIRST_BACK_OFF_S
        self._num_polls = 0
        self._joined = False
        world.say(f"{generation} forms with {num_ranks} ranks, drawing {self._aheads} ahead, at {self.position}")
        self._join(world.clock.now_s + _JOIN_LIMIT_S)
        world.clock.after(_JOIN_LIMIT_S, self._give_up_joining)

    def die(self) -> None:
        """Every process of it ends; what it had sent is still under way."""
        self.is_alive = False

    # --- joining, and news

    def _event(self) -> GroupStarted:
        problem = Problem(
            workers=tuple(WorkerSpec(rank=rank, device=f"kind {rank % 2}") for rank in range(self.num_ranks)),
            global_batch_size=24,
            max_global_batch_size=64,
            dataset_size=self.world.num_rows,
        )
        return GroupStarted(
            generation=self.generation, problem=problem, step=self.position.step, allocation=self._resumed
        )

    def _call_join(self, answer: Any, fail: Any) -> None:
        event = self._event()

        def act(host: Any) -> Any:
            try:
                return host.join(event) if self.is_alive else None  # a call dies with its caller
            except RexError:
                return None

        delay_s = self.world.net_delay_s()
        self.world.clock.after(delay_s, lambda: self.world.actor.call(act, answer, fail) if self.is_alive else None)

    def _join(self, deadline_s: float) -> None:
        def answer(first: Allocation | None) -> None:
            if first is None:
                self._give_up_joining()
            elif self.is_alive and not self._joined:
                self.listener = Listener(first)
                self._begin(first)

        def fail() -> None:
            if not self._joined and self.world.clock.now_s < deadline_s:
                self.world.clock.after(0.5, lambda: self._join(deadline_s) if self.is_alive else None)

        if not self._joined:
            self._call_join(answer, fail)

    def _give_up_joining(self) -> None:
        """Nobody answers: train with equal shares, and go on asking."""
        if self._joined or not self.is_alive:
            return
        event = self._event()
        info = GroupInfo(
            generation=self.generation,
            workers=event.problem.workers,
            dataset_size=self.world.num_rows,
            global_batch_size=24,
            step=event.step,
            allocation=self._resumed,
        )
        self.world.say(f"{self.generation} is not heard")
        self._begin(NullLink().join(info, 0.0))

    def _poll(self) -> None:
        """Ask for news; an answer that does not come is given up, and one that comes late is still heard."""
        if not self.is_alive:
            return
        self._num_polls += 1
        number = self._num_polls

        def again(delay_s: float) -> None:
            if number == self._num_polls:
                self._num_polls += 1
                self.world.clock.after(delay_s, self._poll)

        def answer(news: Allocation | None) -> None:
            if self.world.chance.strikes("answer lost", 0.03):
                return
            self.listener.hear(news)
            self._back_off_s = _FIRST_BACK_OFF_S
            again(0.05)

        def fail() -> None:
            self._back_off_s = min(2 * self._back_off_s, _LAST_BACK_OFF_S)
            again(self._back_off_s)

        version = self.listener.known_version
        if version is None:
            self._call_join(answer, fail)
        else:
            self.world.clock.after(
                self.world.net_delay_s(), lambda: self.world.actor.latest(self.generation, version, answer, fail)
            )
        self.world.clock.after(_POLL_LIMIT_S, fail if number == self._num_polls else lambda: None)

    # --- training

    def _begin(self, first: Allocation) -> None:
        self._joined = True
        self.in_force = first
        self._ranks = [_Rank(self, rank, first, self._aheads[rank]) for rank in range(self.num_ranks)]
        for rank in self._ranks:
            rank.begin_pass(self.position)
        self._poll()
        for rank in range(self.num_ranks):
            self._pump(rank)
        self._step()

    def _boundaries(self) -> None:
        """All ranks pass the moment before the next step, in any order."""
        step = self.position.step
        order = list(range(self.num_ranks))
        self.world.chance.of("order").shuffle(order)
        for number in order:
            rank = self._ranks[number]
            if not rank.protocol.is_boundary(step):
                continue
            if rank.has_said:
                self.world.laws.check("no rank hangs", bool(rank.messages), f"rank {number} waits before step {step}")
                rank.protocol.hear(rank.messages.popleft(), step)
            said = rank.protocol.say(step, self._last_step_s)
            rank.has_said = True
            if number == 0:
                for other in self._ranks:
                    other.messages.append(said)

    def _step(self) -> None:
        if not self.is_alive:
            return
        world = self.world
        if world.chance.strikes("stray pass", 0.004):
            for rank in self._ranks:
                rank.begin_pass(self.position)
        self._boundaries()
        batches = [rank.next_batch() for rank in self._ranks]
        if batches[0] is None:
            self._end_epoch(batches)
            batches = [rank.next_batch() for rank in self._ranks]
        plans = [batch[0] for batch in batches if batch is not None]
        world.laws.check("one step, one plan", len(plans) == self.num_ranks, f"{len(plans)} ranks have a batch")
        own_s = [0.01 + speed * rows for speed, rows in zip(self._speeds, plans[0].num_rows, strict=True)]
        own_s = [value * world.chance.of("noise").uniform(0.95, 1.1) for value in own_s]
        world.laws.step(self.generation, plans, [round(value * 1e6) for value in own_s])
        for number, batch in enumerate(batches):
            assert batch is not None
            np.add.at(self.counts, batch[1][: plans[0].num_rows[number]], 1)
            self._send(number, self._record(plans[0], number, own_s, max(own_s)))
        self.in_force = plans[0].allocation
        self.position = plans[0].after
        self.num_steps += 1
        world.num_steps += 1
        self._last_step_s = max(own_s)
        if self.num_steps % _SAVE_EVERY == 0:
            world.save(self)
        stalled_s = world.chance.delay_s("stall", 0.0, 40.0, 0.001)
        world.clock.after(self._last_step_s + stalled_s, self._step)

    def _end_epoch(self, batches: list[Any]) -> None:
        world = self.world
        world.laws.check("one step, one plan", not any(batches), "an epoch ends on some ranks only")
        world.laws.epoch(self.position.epoch, self.counts)
        self.counts[:] = 0
        self.position = Position(epoch=self.position.epoch + 1, step=self.position.step)
        for rank in self._ranks:
            rank.begin_pass(self.position)
        self._boundaries()

    # --- telemetry

    def _record(self, plan: Plan, rank: int, own_s: list[float], step_s: float) -> StepRecord:
        return StepRecord(
            generation=self.generation,
            epoch=plan.epoch,
            rank=rank,
            step=plan.step,
            allocation_version=plan.allocation.version,
            num_rows=plan.num_rows[rank],
            data_s=0.0,
            compute_s=own_s[rank],
            sync_s=step_s - own_s[rank],
            step_s=step_s,
            loss=0.0 if self.world.chance.is_calm else 1.0,
            flags=StepFlag.PARTIAL if plan.partial else StepFlag.NONE,
        )

    def _send(self, rank: int, record: StepRecord) -> None:
        outbox, chance = self.outboxes[rank], self.world.chance
        outbox.put([record])
        if chance.strikes("incident", 0.01):
            outbox.put(
                [
                    IncidentRecord(
                        generation=self.generation, rank=rank, step=record.step, kind="drawn", message="it was bad"
                    )
                ]
            )
        if rank == 0 and record.step % 40 == 0:
            metrics = {"loss": 1.0, "bad": float("nan")}
            outbox.put(
                [
                    MetricRecord(
                        generation=self.generation, epoch=record.epoch, step=record.step, elapsed_s=1.0, metrics=metrics
                    )
                ]
            )

    def _pump(self, rank: int) -> None:
        if not self.is_alive:
            return
        world, outbox = self.world, self.outboxes[rank]
        if not world.chance.strikes("slow pump", 0.01):
            records = outbox.take(world.clock.now_s)
            if records:
                batch = encode(rank, records, outbox.num_dropped)
                num_records = len(records)
                world.post(
                    batch,
                    outbox.arrived,
                    lambda: outbox.failed(num_records, world.clock.now_s),
                )
        world.clock.after(_PUMP_S * world.chance.of("pump").uniform(0.5, 1.5), lambda: self._pump(rank))

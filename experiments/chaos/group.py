"""A worker group in virtual time: the real sampler, schedule and switch protocol on simulated ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.chaos.link import Link
from rex_ray.core.types import Allocation, StepFlag, StepRecord
from rex_ray.worker.data.sampler import ElasticSampler, Plan, Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.asked_saves import AskedSaves
from rex_ray.worker.group.protocol import SwitchProtocol
from rex_ray.worker.link import IncidentRecord, MetricRecord, Record

if TYPE_CHECKING:
    from experiments.chaos.world import Save, World

__all__ = ["Group"]

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
            latest=lambda: group.link.listener.newest,
            schedule=self.schedule,
            next_undrawn=lambda: self.sampler.next_undrawn,
            ahead=group.ahead,
            interval_steps=_INTERVAL_STEPS,
        )
        self.saves = AskedSaves(
            newest=lambda: group.link.listener.save if rank == 0 else None, save=lambda _: group.asked_to_save(rank)
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
        self.in_force: Allocation | None = None
        self.newest_saved = -1
        self._savers: list[int] = []
        chance = world.chance.of("group")
        self._aheads = [chance.choice((0, 0, 1, 2, 4)) for _ in range(num_ranks)]
        self.ahead = max(self._aheads)
        self._speeds = [chance.uniform(0.008, 0.03) for _ in range(num_ranks)]
        self._ranks: list[_Rank] = []
        self._last_step_s: float | None = None
        world.say(f"{generation} forms with {num_ranks} ranks, drawing {self._aheads} ahead, at {self.position}")
        self.link = Link(
            world,
            generation=generation,
            num_ranks=num_ranks,
            step=self.position.step,
            resumed=save.allocation,
            begin=self._begin,
        )

    def die(self) -> None:
        """Every process of it ends; what it had sent is still under way."""
        self.is_alive = False
        self.link.cut()

    def asked_to_save(self, rank: int) -> bool:
        """A rank saves before the next step, since somebody asked."""
        self._savers.append(rank)
        return True

    # --- training

    def _begin(self, first: Allocation) -> None:
        self.in_force = first
        self._ranks = [_Rank(self, rank, first, self._aheads[rank]) for rank in range(self.num_ranks)]
        for rank in self._ranks:
            rank.begin_pass(self.position)
        self._step()

    def _boundaries(self) -> None:
        """All ranks pass the moment before the next step, in any order."""
        step = self.position.step
        order = list(range(self.num_ranks))
        self.world.chance.of("order").shuffle(order)
        for number in order:
            rank = self._ranks[number]
            if rank.protocol.is_boundary(step):
                self._boundary(number, step)
            rank.saves.make()
        if self._savers:
            is_all = sorted(self._savers) == list(range(self.num_ranks))
            self.world.laws.check("one save, all ranks", is_all, f"ranks {self._savers} save before step {step}")
            self._savers.clear()
            self.newest_saved = self.link.listener.known_save
            self.world.save(self)

    def _boundary(self, number: int, step: int) -> None:
        rank = self._ranks[number]
        if rank.has_said:
            self.world.laws.check("no rank hangs", bool(rank.messages), f"rank {number} waits before step {step}")
            *shares, asked = rank.messages.popleft()
            rank.protocol.hear(shares, step)
            rank.saves.hear(asked)
        said = (*rank.protocol.say(step, self._last_step_s), rank.saves.say())
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
        stalled_s = world.chance.delay_s("stall", 0.0, 70.0, 0.001)
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
        records: list[Record] = [record]
        if self.world.chance.strikes("incident", 0.01):
            records.append(
                IncidentRecord(
                    generation=self.generation, rank=rank, step=record.step, kind="drawn", message="it was bad"
                )
            )
        if rank == 0 and record.step % 40 == 0:
            metrics = {"loss": 1.0, "bad": float("nan")}
            records.append(
                MetricRecord(
                    generation=self.generation, epoch=record.epoch, step=record.step, elapsed_s=1.0, metrics=metrics
                )
            )
        self.link.send(rank, records)

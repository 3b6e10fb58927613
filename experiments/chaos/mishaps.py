"""What befalls a run: every second each fault has its chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.chaos.queue import MOST_QUEUED
from rex_ray.control.events import DrainNoticed, Event, MemoryLimited, SaveAsked, SearchFailed, TrialProposed
from rex_ray.core.observations import TelemetryGap

if TYPE_CHECKING:
    from experiments.chaos.world import World

__all__ = ["FAULTS", "Mishaps"]

_ASK_LIMIT_S = 2.0

FAULTS = (
    "actor killed",
    "actor killed in a write",
    "actor killed before it tells",
    "actor slow",
    "disk full",
    "queue lost",
    "queue flooded",
    "group lost",
    "group resized",
    "late loss",
    "late call",
    "answer lost",
    "batch lost",
    "batch twice",
    "late batch",
    "slow pump",
    "incident",
    "outside event",
    "stall",
    "stray pass",
    "helper cannot start",
    "helper dies",
    "helper silent",
    "helper slow",
    "helper stale",
)
"""Every kind of fault, by the name under which it can be left out."""

_DOOMS = {
    "torn": ("actor killed in a write", 0.02),
    "before emit": ("actor killed before it tells", 0.02),
    "full": ("disk full", 0.004),
}


class Mishaps:
    """Strikes a world.

    Args:
        world: what is struck.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def strike(self) -> None:
        """See what befalls the run in this second, and again in the next."""
        world, chance = self._world, self._world.chance
        if chance.strikes("actor killed", 0.02):
            world.actor.kill()
        if world.actor.store.doom is None:
            for how, (fault, probability) in _DOOMS.items():
                if chance.strikes(fault, probability):
                    world.actor.doomed(how)
        if chance.strikes("actor slow", 0.02):
            world.actor.be_slow(chance.of("actor slow").uniform(1.0, 40.0))
        if chance.strikes("queue lost", 0.01):
            world.say("the queue dies")
            world.queue.die()
            world.clock.after(chance.of("queue").uniform(0.5, 20.0), self._revive_queue)
        if chance.strikes("queue flooded", 0.01):
            self._flood()
        if world.group.is_alive and chance.strikes("group lost", 0.025):
            self._lose_group(told=True)
        elif world.group.is_alive and chance.strikes("group resized", 0.01):
            self._lose_group(told=False)
        if chance.strikes("outside event", 0.1):
            self._tell_something()
        host = world.actor.host
        if host is not None and host.fault is not None and chance.of("fault").random() < 0.05:
            world.actor.kill()  # nobody but its end has a controller without a disk decide again
        world.clock.after(1.0, self.strike)

    def _tell_something(self) -> None:
        """What else a controller hears, of this group or of one that is gone."""
        world = self._world
        drawn = world.chance.of("outside")
        generation = drawn.choice((world.group.generation, "g0"))
        rank, step = drawn.randrange(world.group.num_ranks), world.group.position.step
        event: Event = drawn.choice(
            (
                DrainNoticed(generation=generation, ranks=(rank,), left_us=30_000_000, reason="drawn"),
                SaveAsked(generation=generation, reason="drawn"),
                MemoryLimited(generation=generation, rank=rank, step=step, device="kind 0", num_rows=1000),
                TelemetryGap(generation=generation, last_step=step, waited_us=10_000_000),
                SearchFailed(search_id=f"{generation}/1/24/measured/3", reason="drawn"),
                TrialProposed(search_id=f"{generation}/1/24/measured/3", trial=1, local_batch_sizes=(24,)),
            )
        )
        world.actor.call(lambda host: host.handle(event), lambda _: None, lambda: None)

    def _flood(self) -> None:
        """Foreign things fill the queue."""
        self._world.say("the queue is flooded")
        junk = self._world.chance.of("flood")
        for _ in range(MOST_QUEUED):
            self._world.queue.put(junk.choice([None, 7, "no batch", {"rank": 0}, b"\x00" * 9]))

    def _revive_queue(self) -> None:
        self._world.queue.is_alive = True

    def _lose_group(self, *, told: bool) -> None:
        world = self._world
        group, chance = world.group, world.chance
        group.die()
        world.say(f"{group.generation} ends, {'a rank was lost' if told else 'to be resized'}")
        if not told:
            world.clock.after(chance.of("resize").uniform(1.5, 6.0), world.reform)
            return
        asked_s = world.clock.now_s
        rank = chance.of("lost").randrange(group.num_ranks)

        def tell(generation: str | None) -> None:
            if world.clock.now_s - asked_s < _ASK_LIMIT_S:
                late_s = chance.delay_s("late loss", 0.1, 60.0, 0.3)
                world.clock.after(late_s, lambda: self._tell_loss(generation, rank))

        world.actor.call(lambda host: host.generation, tell, lambda: None)
        world.clock.after(_ASK_LIMIT_S + chance.of("reform").uniform(0.5, 10.0), world.reform)

    def _tell_loss(self, generation: str | None, rank: int) -> None:
        self._world.actor.call(lambda host: host.lose(generation, {rank: "killed"}), lambda _: None, lambda: None)

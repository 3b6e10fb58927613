"""One run of one seed: a control actor, a queue, a search helper and worker groups, and what befalls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.chaos.actor import Actor
from experiments.chaos.clock import Chance, Clock
from experiments.chaos.group import Group
from experiments.chaos.helper import StubChild
from experiments.chaos.laws import LawBroken, Laws
from experiments.chaos.link import GLOBAL_BATCH_SIZE, MOST_ROWS
from experiments.chaos.mishaps import Mishaps
from experiments.chaos.policy import Unrest
from experiments.chaos.queue import Queue
from rex_ray.config import RexConfig
from rex_ray.core.observations import Observation, StepObserved
from rex_ray.core.types import Allocation
from rex_ray.hosting.wire import Batch
from rex_ray.policies.registry import make_policy
from rex_ray.worker.data.sampler import Position

__all__ = ["Outcome", "Save", "World", "run_seed"]


_CALM_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What a group resumes from: a position, the rows counted in its epoch, the shares in force."""

    position: Position
    counts: np.ndarray
    allocation: Allocation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one seed.

    Attributes:
        seed: the seed.
        num_events: events of virtual time.
        num_journalled: events in the journal.
        num_checks: times that a law was held against what happened.
        num_restarts: lives of the control actor beyond the first.
        num_groups: worker groups.
        num_steps: steps that the groups ran.
        most_state_bytes: largest memory of the controller, as JSON.
        bytes_an_event: the journal's size by the events in it.
        struck: how often each fault struck.
        broken: the law that was broken, and how; None: all held.
        trace: the last lines before that.
    """

    seed: int
    num_events: int
    num_journalled: int
    num_checks: int
    num_restarts: int
    num_groups: int
    num_steps: int
    most_state_bytes: int
    bytes_an_event: float
    struck: Mapping[str, int] = field(default_factory=dict)
    broken: str | None = None
    trace: tuple[str, ...] = ()


class _Witness:
    """Any policy, with the laws looking on; silent where a restored controller repeats what it did."""

    def __init__(self, world: World, policy: Any) -> None:
        self._world = world
        self._policy = policy
        self.name = policy.name
        self.init = policy.init

    def decide(self, state: Any, observation: Observation, rng: Any) -> Any:
        laws, host = self._world.laws, self._world.actor.host
        if laws.is_live and host is not None and isinstance(observation, StepObserved):
            laws.observed(host._controller.controller.state, observation)
        return self._policy.decide(state, observation, rng)


class World:
    """Wires it all together, and lets faults strike.

    Args:
        seed: of everything.
        without: faults that are left out.
    """

    def __init__(self, seed: int, without: frozenset[str] = frozenset()) -> None:
        self.chance = Chance(seed, without)
        self.clock = Clock()
        self._policy = make_policy("rex") if seed % 5 == 4 else Unrest()
        self.laws = Laws(knows_shares=isinstance(self._policy, Unrest))
        self.num_rows = self.chance.of("rows").randrange(200, 900)
        self.queue = Queue()
        self.num_groups = self.num_steps = self.num_saves = 0
        config = RexConfig(global_batch_size=GLOBAL_BATCH_SIZE, max_global_batch_size=MOST_ROWS, seed=seed)
        self.actor = Actor(self, config, lambda: _Witness(self, self._policy))
        self._saved = Save(position=Position(), counts=np.zeros(self.num_rows, dtype=np.int64), allocation=None)
        self.actor.start()
        self.group = self._form()
        self.clock.after(1.0, Mishaps(self).strike)

    @property
    def policy(self) -> Any:
        """The policy without its witness."""
        return self._policy

    @property
    def outboxes(self) -> list[Any]:
        """Of the living group."""
        return self.group.link.outboxes

    def say(self, what: str) -> None:
        """Write a line of the trace."""
        self.laws.say(self.clock.now_s, what)

    def net_delay_s(self) -> float:
        """How long a call is under way: its caller may die meanwhile."""
        return self.chance.delay_s("late call", 0.02, 1.0)

    def make_child(self, env: Mapping[str, str]) -> StubChild:
        """Start a search helper, if the machine lets us."""
        del env
        if self.chance.strikes("helper cannot start", 0.2):
            raise OSError("no process left")
        return StubChild(self)

    def save(self, group: Group) -> None:
        """A group saves; now and then it resumes from there much later."""
        self.num_saves += 1
        self._saved = Save(position=group.position, counts=group.counts.copy(), allocation=group.in_force)

    def post(self, batch: Batch, arrived: Callable[[], Any], failed: Callable[[], Any]) -> None:
        """Send a batch to the queue; it may be lost, come twice, or long after its group is gone."""
        if self.chance.strikes("batch lost", 0.02):
            self.clock.after(1.0, failed)
            return
        twice = self.chance.strikes("batch twice", 0.02)
        for copy in range(1 + twice):
            delay_s = self.chance.delay_s("late batch", 0.1, 90.0, 0.02)

            def deliver(copy: int = copy) -> None:
                taken = self.queue.put(batch)
                if copy == 0:
                    (arrived if taken else failed)()

            self.clock.after(delay_s, deliver)

    def reform(self) -> None:
        """Form the next group."""
        self.group = self._form()

    def _form(self) -> Group:
        self.num_groups += 1
        generation = f"g{self.num_groups}"
        return Group(self, generation, self.chance.of("size").randint(1, 5), self._saved)

    # --- the run

    def run(self, num_events: int) -> int:
        """Let that many events happen, then have faults cease; return how many events the journal holds."""
        while self.clock.num_events < num_events:
            self.clock.advance()
        self.say("faults cease")
        self.chance.is_calm = True
        self.actor.store.doom = None
        if self.actor.host is not None and self.actor.host.fault is not None:
            self.actor.kill()
        until_s = self.clock.now_s + _CALM_S
        while self.clock.now_s < until_s:
            self.clock.advance()
        host, group = self.actor.host, self.group
        assert host is not None
        assert group.in_force is not None
        self.laws.settled(host, group.generation, group.in_force, group.position.step - 1)
        asked = host.newer_save(group.generation, group.newest_saved)
        self.laws.check("asked for and saved", asked is None, f"{asked} came to nothing, {group.newest_saved} is saved")
        host.end("finished")
        self.laws.check("no fault of its own", host.fault is None, f"the controller failed: {host.fault}")
        return self.laws.journal(self.actor.store.read(), self._policy)


def run_seed(seed: int, num_events: int, without: frozenset[str] = frozenset()) -> Outcome:
    """Run one seed."""
    world = World(seed, without)
    broken, num_journalled = None, 0
    try:
        num_journalled = world.run(num_events)
    except LawBroken as error:
        broken = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, a seed must be named for it
        broken = f"no crash: {type(error).__name__}: {error}"
    return Outcome(
        seed=seed,
        num_events=world.clock.num_events,
        num_journalled=num_journalled,
        num_checks=world.laws.num_checks,
        num_restarts=world.actor.num_restarts,
        num_groups=world.num_groups,
        num_steps=world.num_steps,
        most_state_bytes=world.laws.most_state_bytes,
        bytes_an_event=world.laws.most_bytes_an_event,
        struck=dict(world.chance.struck),
        broken=broken,
        trace=tuple(world.laws.trace),
    )

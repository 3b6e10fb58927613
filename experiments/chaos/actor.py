"""The control actor's process in virtual time: it dies at any point, is slow, and comes back from its journal."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rex_ray.config import RexConfig
from rex_ray.control.journal import Chunk
from rex_ray.core.types import Allocation
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.listener import Listener
from rex_ray.search.helper import HelperLimits, SearchHelper

if TYPE_CHECKING:
    from experiments.chaos.world import World

__all__ = ["Actor", "Killed", "MemoryStore"]

_BEAT_S, _POLL_LIMIT_S, _PORTION = 0.25, 10.0, 256
_SLOW_S, _RESTART_S = 15.0, 8.0


class Killed(BaseException):
    """The process ends here. No ``Exception``: nobody inside of it lives to handle it."""


class MemoryStore:
    """A journal's bytes, of which a kill or a full disk leaves any prefix.

    Args:
        world: whose chance cuts writes short.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.files: dict[str, bytearray] = {}
        self.doom: str | None = None

    def read(self) -> dict[str, bytes]:
        """Return the files by name."""
        return {name: bytes(data) for name, data in self.files.items()}

    def append(self, chunks: Iterable[Chunk]) -> None:
        """Append chunks in order, or a part of them."""
        waiting = [(name, data) for name, data in chunks if data]
        doom = self.doom if waiting and self.doom in ("torn", "full") else None
        left = self._world.chance.of("torn").randrange(sum(len(data) for _, data in waiting)) if doom else None
        for name, data in waiting:
            kept = data if left is None else data[:left]
            self.files.setdefault(name, bytearray()).extend(kept)
            left = None if left is None else left - len(kept)
        if doom is not None:
            self.doom = None
            raise Killed if doom == "torn" else OSError(errno.ENOSPC, "no space left on the device")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Poll:
    """A call that waits for news: of an allocation beyond a version, or of a save beyond a number."""

    due_s: float
    generation: str
    version: int
    save_number: int
    answer: Callable[[Any], None]
    fail: Callable[[], None]


class Actor:
    """Calls come in, some of them wait; one thing at a time, as on an actor's event loop."""

    def __init__(self, world: World, config: RexConfig, make_policy: Callable[[], Any]) -> None:
        self._world = world
        self._config = config
        self._make_policy = make_policy
        self.store = MemoryStore(world)
        self.host: ControlHost | None = None
        self.num_restarts = 0
        self._life = 0
        self._started_s = 0.0
        self._slow_until_s = 0.0
        self._early: list[Callable[[], None]] = []
        self._polls: list[_Poll] = []
        self._in_turn = False

    def start(self) -> None:
        """Begin, or go on from the journal."""
        world = self._world
        self._life += 1
        self._started_s = world.clock.now_s
        world.laws.is_live = False
        try:
            self.host = ControlHost(
                self._config, self.store, self._news, self._make_helper, custom_policy=self._make_policy()
            )
            world.laws.is_live = True
            if self.host.fault is None:
                world.laws.restored(self.host)
        except Killed:
            world.say("the control actor is killed while it comes back")
            self.host = None
            self.kill()
            return
        fault = self.host.fault
        world.laws.check("no fault of its own", fault is None or "no space left" in fault, f"it comes back: {fault}")
        life, early = self._life, self._early
        self._early = []
        for arrive in early:
            world.clock.after(0.0, arrive)
        world.clock.after(_BEAT_S, lambda: self._beat(life, 0))

    def kill(self) -> None:
        """End the process; Ray starts it again after a while."""
        world = self._world
        world.say("the control actor dies")
        if self.host is not None:
            self.host._emission.dismiss_helper()  # its pipes break, and it ends
        self.host, polls, self._polls = None, self._polls, []
        self._slow_until_s = 0.0
        self._life += 1
        self.num_restarts += 1
        for poll in polls:
            world.clock.after(0.1, poll.fail)
        world.clock.after(world.chance.of("restart").uniform(0.2, _RESTART_S), self._start_unless_up)

    def call(self, act: Callable[[ControlHost], Any], answer: Callable[[Any], None], fail: Callable[[], None]) -> None:
        """Have a method run; of an actor that is down it waits, or fails."""
        self._arrive(lambda: self._run(lambda host: answer(act(host)), fail), fail)

    def latest(
        self, generation: str, listener: Listener, answer: Callable[[Any], None], fail: Callable[[], None]
    ) -> None:
        """The long poll of a listener that has joined."""
        assert listener.known_version is not None
        poll = _Poll(
            due_s=self._world.clock.now_s + _POLL_LIMIT_S,
            generation=generation,
            version=listener.known_version,
            save_number=listener.known_save,
            answer=answer,
            fail=fail,
        )
        self._arrive(lambda: self._polls.append(poll), fail)
        self._answer_polls()

    def beat_once(self, *, ticks: bool) -> None:
        """Drain the queue, hear searches, and now and then tick."""
        world = self._world
        now_s = world.clock.now_s
        for batch in world.queue.take(_PORTION):
            self._run(lambda host, batch=batch: host.take(batch))
        self._run(lambda host: host.hear_searches())
        if ticks:
            self._run(lambda host: host.tick(now_s - self._started_s), ticked=True)
        self._answer_polls()

    def doomed(self, how: str) -> None:
        """Have the next write or publication be this life's last."""
        self.store.doom = how

    def be_slow(self, seconds: float = _SLOW_S) -> None:
        """Block the event loop."""
        self._slow_until_s = self._world.clock.now_s + seconds

    # --- inside

    def _start_unless_up(self) -> None:
        if self.host is None:
            self.start()

    def _arrive(self, act: Callable[[], None], fail: Callable[[], None]) -> None:
        world = self._world
        if self.host is None:
            if world.chance.of("down").random() < 0.5:
                self._early.append(act)
            else:
                world.clock.after(0.2, fail)
        elif world.clock.now_s < self._slow_until_s:
            world.clock.after(self._slow_until_s - world.clock.now_s, lambda: self._arrive(act, fail))
        else:
            act()

    def _beat(self, life: int, number: int) -> None:
        if life != self._life:
            return
        world = self._world
        if world.clock.now_s >= self._slow_until_s:
            self.beat_once(ticks=number % 2 == 0)
            if self.host is not None and number % 64 == 0:
                world.laws.bounded(self.host, world.outboxes)
        world.clock.after(_BEAT_S, lambda: self._beat(life, number + 1))

    def _run(
        self, act: Callable[[ControlHost], None], fail: Callable[[], None] = lambda: None, *, ticked: bool = False
    ) -> None:
        host = self.host
        if host is None:
            fail()
            return
        try:
            act(host)
        except Killed:
            self.kill()
            fail()
            return
        world = self._world
        if host.fault is not None:
            known = "no space left" in host.fault
            world.laws.check("no fault of its own", known, f"the controller failed: {host.fault}")
        else:
            world.laws.turn(host, ticked=ticked)
        self._answer_polls()

    def _answer_polls(self) -> None:
        if self.host is None:
            return
        host, waiting = self.host, []
        for poll in self._polls:
            news = host.newer(poll.generation, poll.version) or host.newer_save(poll.generation, poll.save_number)
            if news is not None or self._world.clock.now_s >= poll.due_s:
                self._world.clock.after(self._world.net_delay_s(), partial(poll.answer, news))
            else:
                waiting.append(poll)
        self._polls = waiting

    def _news(self, allocation: Allocation) -> None:
        """What is published is written already; and whoever is killed here has told nobody."""
        if self.store.doom == "before emit":
            self.store.doom = None
            raise Killed
        self._world.laws.published(allocation)
        self._world.say(f"version {allocation.version} is published: {allocation.local_batch_sizes}")

    def _make_helper(self) -> SearchHelper:
        world = self._world
        limits = HelperLimits(answer_s=20.0, tell_s=40.0, pause_s=0.5, max_deaths=10**6, idle_s=60.0)
        return SearchHelper(limits, clock=lambda: world.clock.now_s, make_child=world.make_child)

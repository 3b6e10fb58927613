"""The search helper's process in virtual time: it answers, is slow, falls silent, dies, and talks of stale searches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rex_ray.search.dialogue import SplitSearch
from rex_ray.search.protocol import Message, decode, encode, objective_from, problem_from

if TYPE_CHECKING:
    from experiments.chaos.world import World

__all__ = ["StubChild"]


class _Standing:
    """Where Ax would propose: the plan, again and again."""

    def __init__(self, space: Any, quantum: int, plan: tuple[int, ...]) -> None:
        self._point = space.point_of(plan, quantum)

    def tell(self, point: Any, objective: float) -> None:
        """Nothing is learnt."""

    def propose(self) -> Any:
        """Return the same point."""
        return self._point


class StubChild:
    """Speaks the helper's protocol with the real dialogue; see ``rex_ray.search.child.Child``."""

    pid = 1

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[int, SplitSearch] = {}
        self._said: list[Message] = []
        self._is_alive, self._is_silent = True, False
        self._stale: Message | None = None
        self._free_s = 0.0

    def send(self, message: Message) -> None:
        """Take a message, over the wire and back."""
        chance = self._world.chance
        self._is_alive = self._is_alive and not chance.strikes("helper dies", 0.06)
        self._is_silent = self._is_silent or chance.strikes("helper silent", 0.1)
        if self._is_alive and not self._is_silent:
            # A pipe keeps the order of what is written into it.
            now_s = self._world.clock.now_s
            self._free_s = max(self._free_s, now_s) + chance.delay_s("helper slow", 0.3, 30.0)
            self._world.clock.after(self._free_s - now_s, lambda: self._handle(decode(encode(message).strip())))

    def exchange(self) -> tuple[list[Message], bool]:
        """Return what it said since, and whether it lives."""
        said, self._said = self._said, []
        if self._stale is not None and self._world.chance.strikes("helper stale", 0.2):
            said.append(self._stale)
        return said, self._is_alive

    def last_words(self) -> str:
        """Say how it died."""
        return "the search helper ended (exit status -9)"

    def kill(self) -> None:
        """End it."""
        self._is_alive = False

    def is_gone(self) -> bool:
        """Whether nothing is left of it."""
        return not self._is_alive

    def end(self, timeout_s: float) -> None:
        """End it."""
        del timeout_s
        self._is_alive = False

    def _handle(self, message: Message) -> None:
        if not self._is_alive:
            return
        number = int(message.get("search", -1))
        try:
            self._serve(number, message)
        except Exception as error:  # noqa: BLE001 - as the real helper does
            self._open.pop(number, None)
            self._said.append({"op": "failed", "search": number, "reason": str(error)})

    def _serve(self, number: int, message: Message) -> None:
        if message["op"] == "start":
            problem = problem_from(message["problem"])
            self._open[number] = SplitSearch(problem, partial(_Standing, plan=problem.plan))
            self._go_on(number)
        elif message["op"] == "tell" and number in self._open:
            own_s = tuple(message["own_s"])
            self._open[number].tell(int(message["trial"]), objective_from(message["objective"]), own_s)
            self._go_on(number)
        elif message["op"] == "cancel":
            self._open.pop(number, None)

    def _go_on(self, number: int) -> None:
        search = self._open[number]
        trial = search.ask()
        if trial is not None:
            said: Message = {"op": "trial", "search": number, "trial": trial.number, "sizes": trial.local_batch_sizes}
        else:
            del self._open[number]
            found = search.result()
            if found is None:
                said = {"op": "failed", "search": number, "reason": "every trial was refused"}
            else:
                said = {
                    "op": "finished",
                    "search": number,
                    "sizes": found.local_batch_sizes,
                    "objective": found.objective,
                    "num_trials": found.num_trials,
                    "cpu_s": 0.1,
                }
        self._stale = said
        self._said.append(said)

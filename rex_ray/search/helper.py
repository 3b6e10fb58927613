"""The asker's end of the helper: one process that is started when it is needed, and never waited for.

Everything here but ``close`` returns at once. What a helper owes, dies with or never says becomes a ``Failed`` reply,
so that whoever asks needs no case for it: the exact split stands. One thread may use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rex_ray.core.search_problem import SearchProblem
from rex_ray.search.child import Child
from rex_ray.search.protocol import Failed, Finished, Message, Reply, TrialAsked, objective_to, problem_to, reply_from

__all__ = ["HelperLimits", "SearchHelper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperLimits:
    """How long what may take.

    Attributes:
        cpu_s: the helper's processor time per search; it ends with the best so far.
        answer_s: until a helper that owes an answer is given up and ended. It includes importing Ax, and is generous:
            a helper that steps aside for busy cores is slow, and nobody waits for it.
        tell_s: until a search that waits to be told a trial is given up.
        pause_s: after a helper died, before another is started; doubles with every death in a row.
        max_deaths: in a row, after which no further helper is started.
        idle_s: after which a helper without a search is ended: once it has imported Ax it holds 800 MB of memory, and
            importing it again takes a few seconds that nobody waits for.
    """

    cpu_s: float = 5.0
    answer_s: float = 120.0
    tell_s: float = 900.0
    pause_s: float = 1.0
    max_deaths: int = 5
    idle_s: float = 120.0


@dataclass(slots=True)
class _Asked:
    search_id: str
    due_s: float
    waits_to_be_told: bool = False


class SearchHelper:
    """Searches in a process of its own.

    Args:
        limits: how long what may take.
        env: of the process, beside the present one.
        clock: seconds that only go forward.
        make_child: starts a process, given its environment.
    """

    def __init__(
        self,
        limits: HelperLimits | None = None,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_child: Callable[[Mapping[str, str]], Child] = Child,
    ) -> None:
        self._limits = limits or HelperLimits()
        self._env = dict(env or {})
        self._clock = clock
        self._make_child = make_child
        self._child: Child | None = None
        self._dying: list[Child] = []
        self._asked: dict[int, _Asked] = {}
        self._next_number = 0
        self._failures: list[Reply] = []
        self._num_deaths = 0
        self._not_before_s = -float("inf")
        self._last_used_s = -float("inf")
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        return self._child.pid if self._child is not None else None

    def warm_up(self) -> None:
        """Start the process and have it import Ax, if that is possible now."""
        if self._blocked() is None:
            self._send({"op": "warm"})

    def start(self, search_id: str, seed: int, problem: SearchProblem) -> None:
        """Begin a search; one of the same name is called off."""
        self.cancel(search_id)
        if (reason := self._blocked()) is not None:
            self._failures.append(Failed(search_id=search_id, reason=reason))
            return
        number = self._next_number
        self._next_number += 1
        self._asked[number] = _Asked(search_id, self._clock() + self._limits.answer_s)
        request = {"op": "start", "seed": seed, "cpu_limit_s": self._limits.cpu_s, "problem": problem_to(problem)}
        self._send({**request, "search": number})

    def tell(self, search_id: str, trial: int, objective: float, own_s: Sequence[float] = ()) -> None:
        """Give a search the objective of a trial that it asked for; of a search that is over, nothing happens."""
        number = self._number_of(search_id)
        if number is None:
            return
        self._asked[number] = _Asked(search_id, self._clock() + self._limits.answer_s)
        said = {"op": "tell", "trial": trial, "objective": objective_to(objective), "own_s": tuple(own_s)}
        self._send({**said, "search": number})

    def cancel(self, search_id: str) -> None:
        """Call a search off: nothing more is heard of it."""
        self._failures = [reply for reply in self._failures if reply.search_id != search_id]
        number = self._number_of(search_id)
        if number is not None:
            del self._asked[number]
            self._send({"op": "cancel", "search": number})

    def owes(self, search_id: str) -> bool:
        """Whether it is the helper's turn to say something of a search."""
        number = self._number_of(search_id)
        return number is not None and not self._asked[number].waits_to_be_told

    def poll(self) -> list[Reply]:
        """Return what was said since the last call, in order. Call it every now and then: it also keeps the limits."""
        replies: list[Reply] = []
        if self._child is not None:
            messages, is_alive = self._child.exchange()
            replies.extend(reply for message in messages if (reply := self._understand(message)) is not None)
            if not is_alive:
                self._bury(self._child.last_words())
        self._keep_limits()
        self._dying = [child for child in self._dying if not child.is_gone()]
        failures, self._failures = self._failures, []
        return replies + failures

    def close(self, timeout_s: float = 2.0) -> None:
        """End the process, by force if need be. What is still open is dropped; later searches fail."""
        self._is_closed = True
        self._asked.clear()
        self._failures.clear()
        if self._child is not None:
            self._child.end(timeout_s)
            self._child = None
        for child in self._dying:
            child.end(timeout_s)
        self._dying.clear()

    # --- inside

    def _blocked(self) -> str | None:
        """Start the process where there is none; say why that cannot be."""
        if self._child is not None:
            return None
        if self._is_closed:
            return "the search helper is closed"
        if self._num_deaths >= self._limits.max_deaths:
            return f"the search helper died {self._num_deaths} times in a row and is not started again"
        if self._clock() < self._not_before_s:
            return "the search helper died and is not started again yet"
        try:
            self._child = self._make_child(self._env)
        except OSError as error:
            self._count_death()
            return f"the search helper cannot be started: {error}"
        return None

    def _send(self, message: Message) -> None:
        if self._child is not None:
            self._last_used_s = self._clock()
            self._child.send(message)

    def _number_of(self, search_id: str) -> int | None:
        return next((number for number, asked in self._asked.items() if asked.search_id == search_id), None)

    def _understand(self, message: Message) -> Reply | None:
        number = message.get("search")
        asked = self._asked.get(number) if isinstance(number, int) else None
        if asked is None or not isinstance(number, int):
            return None
        try:
            reply = reply_from(message, asked.search_id)
        except (KeyError, TypeError, ValueError) as error:
            reply = Failed(search_id=asked.search_id, reason=f"the search helper said what nobody understands: {error}")
        if isinstance(reply, TrialAsked):
            asked.waits_to_be_told, asked.due_s = True, self._clock() + self._limits.tell_s
        else:
            del self._asked[number]
        if isinstance(reply, Finished):
            self._num_deaths = 0
        return reply

    def _keep_limits(self) -> None:
        now_s = self._clock()
        for number, asked in list(self._asked.items()):
            if now_s < asked.due_s:
                continue
            if asked.waits_to_be_told:
                del self._asked[number]
                self._send({"op": "cancel", "search": number})
                reason = f"its trial was not measured within {self._limits.tell_s:g} s"
                self._failures.append(Failed(search_id=asked.search_id, reason=reason))
            else:
                # Nothing less ends a computation that does not return.
                self._bury(f"the search helper gave no answer within {self._limits.answer_s:g} s")
                return
        if not self._asked and now_s - self._last_used_s >= self._limits.idle_s:
            self._let_go()

    def _bury(self, reason: str) -> None:
        self._let_go()
        self._count_death()
        self._failures.extend(Failed(search_id=asked.search_id, reason=reason) for asked in self._asked.values())
        self._asked.clear()

    def _let_go(self) -> None:
        """End the process; ``poll`` sees to it that no zombie is left."""
        if self._child is not None:
            self._child.kill()
            self._dying.append(self._child)
            self._child = None

    def _count_death(self) -> None:
        self._not_before_s = self._clock() + self._limits.pause_s * 2**self._num_deaths
        self._num_deaths += 1

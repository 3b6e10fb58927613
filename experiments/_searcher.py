"""Searches for simulated runs: the live helper process, waited for, since virtual time stands still meanwhile.

The processor limit is wide, so that the same seed gives the same answer on a busy machine: a search that was cut short
by its limit would not. One searcher may serve many runs::

    with HelperSearcher() as searcher:
        simulate(controller, scenario, num_steps=2000, searcher=searcher)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.events import Event
from rex_ray.core.search_problem import SearchProblem
from rex_ray.hosting.search_events import event_of
from rex_ray.search.helper import HelperLimits, SearchHelper
from rex_ray.search.protocol import Finished, Reply

__all__ = ["Decision", "HelperSearcher", "decide", "wait_for_reply"]

_POLL_S = 0.002
_LIMIT_S = 300.0


class HelperSearcher:
    """``sim.engine.Searcher`` on top of a helper process that lives until it is closed.

    Args:
        latency_steps: steps of the simulated group until an answer arrives; a live one takes a few seconds, and the
            first, with the import of Ax, some more.
        cpu_limit_s: the helper's processor time per search.
    """

    def __init__(self, latency_steps: int = 20, cpu_limit_s: float = 120.0) -> None:
        self.latency_steps = latency_steps
        self.num_searches = 0
        self.cpu_s = 0.0
        self.helper = SearchHelper(HelperLimits(cpu_s=cpu_limit_s, answer_s=_LIMIT_S, pause_s=0.0))

    def carry_out(self, command: StartSearch | TellTrial | CancelSearch) -> Sequence[Event]:
        """Take a command; return the event that it leads to, once the helper has said it."""
        match command:
            case StartSearch(search_id=search_id, seed=seed, problem=problem):
                self.num_searches += 1
                self.helper.start(search_id, seed, problem)
            case TellTrial(search_id=search_id, trial=trial, objective=objective, own_s=own_s):
                self.helper.tell(search_id, trial, objective, own_s)
                if not self.helper.owes(search_id):
                    return ()
            case CancelSearch(search_id=search_id):
                self.helper.cancel(search_id)
                return ()
        reply = wait_for_reply(self.helper)
        if isinstance(reply, Finished):
            self.cpu_s += reply.cpu_s
        return (event_of(reply),)

    def close(self) -> None:
        """End the process."""
        self.helper.close()

    def __enter__(self) -> Self:
        """Itself: ``close`` is called at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One search from question to answer.

    Attributes:
        wall_s: seconds that the asker saw.
        cpu_s: of the helper's processor time.
        reply: the answer.
    """

    wall_s: float
    cpu_s: float
    reply: Finished


def decide(helper: SearchHelper, problem: SearchProblem, seed: int) -> Decision:
    """Have a search on curves and time it.

    Raises:
        RuntimeError: it failed.
    """
    begun_s = time.perf_counter()
    helper.start("decision", seed, problem)
    reply = wait_for_reply(helper)
    wall_s = time.perf_counter() - begun_s
    if isinstance(reply, Finished):
        return Decision(wall_s=wall_s, cpu_s=reply.cpu_s, reply=reply)
    raise RuntimeError(f"the search gave no answer: {reply}")


def wait_for_reply(helper: SearchHelper) -> Reply:
    """Return the next thing that a helper says.

    Raises:
        TimeoutError: it says nothing, although its own limits should have made it fail.
    """
    deadline_s = time.monotonic() + 2 * _LIMIT_S
    while time.monotonic() < deadline_s:
        for reply in helper.poll():
            return reply
        time.sleep(_POLL_S)
    raise TimeoutError("the search helper says nothing")

"""One search, one trial at a time: which splits are looked at, in which order, when it is enough, and who wins.

Pure: neither Ax nor a clock is known here. Where the space is small every split is looked at; else a ``Proposer``
(Ax, in the helper process) says where to look next. A search never ends with a split that is worse than the plan it
began with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rex_ray.core.search_problem import SearchProblem, objective_of
from rex_ray.search.space import MIN_GAIN, LocalBatchSizes, Point, SplitSpace

__all__ = ["Proposer", "Result", "SplitSearch", "Trial", "run_on_curves"]

_PATIENCE = 5
_MAX_REPEATS = 3
_MAX_CORRECTIONS = 4
_ENUMERATED_ON_CURVES = 64
"""Splits that are all judged on the curves where there are no more: that takes milliseconds, one Ax trial 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate that wants to be judged."""

    number: int
    local_batch_sizes: LocalBatchSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search ended with; ``objective`` as in ``objective_of``."""

    local_batch_sizes: LocalBatchSizes
    objective: float
    num_trials: int


class Proposer(Protocol):
    """Who says where to look next, from what is known."""

    def tell(self, point: Point, objective: float) -> None:
        """Take a judged point, one's own or another's; ``inf`` where it cannot be run."""
        ...

    def propose(self) -> Point:
        """Return where to look next."""
        ...


class SplitSearch:
    """One search as a dialogue: ``ask`` for a candidate, have it judged, ``tell`` its objective, until None.

    Args:
        problem: what is asked.
        make_proposer: called at most once, with the space and a quantum, where there is too much to look at all of it.
        is_spent: whether the search's means are used up; what is under way is still told.
    """

    def __init__(
        self,
        problem: SearchProblem,
        make_proposer: Callable[[SplitSpace, int], Proposer],
        is_spent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.space = SplitSpace(problem)
        self._problem = problem
        self._make_proposer = make_proposer
        self._is_spent = is_spent
        self._objectives: dict[LocalBatchSizes, float] = {}
        self._proposer: Proposer | None = None
        self._quantum = self.space.finest
        self._corrections: deque[LocalBatchSizes] = deque()
        self._num_corrections = 0
        self._since_gain = 0
        self._asked: Trial | None = None
        self._asked_point: Point | None = None
        on_curves = problem.kind == "model"
        self._small = _ENUMERATED_ON_CURVES if on_curves else problem.max_trials
        self.needs_proposer = self.space.all_splits(self.space.finest, self._small) is None
        # Looking at all of a small space on curves costs nobody a step.
        self._max_trials = math.inf if on_curves and not self.needs_proposer else problem.max_trials
        self._candidates = self._order()

    def ask(self) -> Trial | None:
        """Return the next candidate, or None when the search is over. The last one must have been told."""
        assert self._asked is None, "the last trial was not told"
        if len(self._objectives) >= self._max_trials or (self._objectives and self._is_spent()):
            return None
        for sizes, point in self._candidates:
            if sizes not in self._objectives:
                self._asked_point = point
                self._asked = Trial(number=len(self._objectives), local_batch_sizes=sizes)
                return self._asked
        return None

    def tell(self, number: int, objective: float, own_s: Sequence[float] = ()) -> None:
        """Take the asked trial's objective (``inf``: it was refused) and, where known, every rank's own time.

        Raises:
            ValueError: another trial is under way, or none.
        """
        trial = self._asked
        if trial is None or trial.number != number:
            raise ValueError(f"trial {number} was not asked for")
        self._asked = None
        objective = math.inf if math.isnan(objective) else objective
        best = min(self._objectives.values(), default=math.inf)
        self._objectives[trial.local_batch_sizes] = objective
        self._since_gain = 0 if objective < best - MIN_GAIN else self._since_gain + 1
        if self._proposer is not None:
            self._inform(self._proposer, trial.local_batch_sizes, self._asked_point)
        if objective < best and own_s and self._problem.kind == "measured":
            better = self.space.corrected(trial.local_batch_sizes, own_s)
            self._corrections = deque([better] if better is not None else [])

    def result(self) -> Result | None:
        """Return the best split so far, the plan unless another is better; None where every trial was refused."""
        plan = self._problem.plan
        floor = self._objectives.get(plan, math.inf)
        limit_s = math.inf
        if self._problem.kind == "model":
            limit_s = float(self.space.own_s(plan).max())
        best, best_objective = plan, floor
        for sizes, objective in self._objectives.items():
            if objective < best_objective and float(self.space.own_s(sizes).max()) <= limit_s:
                best, best_objective = sizes, objective
        if not math.isfinite(best_objective):
            return None
        return Result(local_batch_sizes=best, objective=best_objective, num_trials=len(self._objectives))

    # --- inside

    def _order(self) -> Iterator[tuple[LocalBatchSizes, Point | None]]:
        """Seeds, then what corrected curves say, then all that there is, or what the proposer says.

        The seeds settle the quantum: a tile plan that was measured best says that there are tiles.
        """
        for sizes in self.space.seeds():
            yield sizes, None
        self._since_gain = 0
        yield from self._corrected()
        best = self.result()
        if best is not None:
            self._quantum = self.space.quantum_of(best.local_batch_sizes)
        everything = self.space.all_splits(self._quantum, self._small)
        if everything is not None:
            yield from ((sizes, None) for sizes in everything)
            return
        proposed = self._proposed()
        while self._since_gain < _PATIENCE:
            yield from self._corrected()
            following = next(proposed, None)
            if following is None:
                return
            yield following

    def _corrected(self) -> Iterator[tuple[LocalBatchSizes, Point | None]]:
        while self._corrections and self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            yield self._corrections.popleft(), None

    def _proposed(self) -> Iterator[tuple[LocalBatchSizes, Point | None]]:
        proposer = self._make_proposer(self.space, self._quantum)
        for sizes in self._objectives:
            self._inform(proposer, sizes, None)
        self._proposer = proposer
        num_repeats = 0
        while num_repeats < _MAX_REPEATS:
            point = proposer.propose()
            sizes = self.space.split(point)
            known = self._objectives.get(sizes)
            if known is None:
                num_repeats = 0
                yield sizes, point
            else:
                # Points that round to the same rows cost nobody a trial.
                num_repeats += 1
                proposer.tell(point, known)

    def _inform(self, proposer: Proposer, sizes: LocalBatchSizes, point: Point | None) -> None:
        """Tell of a judged split, where the proposer's space has it."""
        point = point if point is not None else self.space.point_of(sizes, self._quantum)
        if point is not None:
            proposer.tell(point, self._objectives[sizes])


def run_on_curves(search: SplitSearch) -> Result | None:
    """Carry a whole search out on its curves."""
    while (trial := search.ask()) is not None:
        own_s = search.space.own_s(trial.local_batch_sizes)
        search.tell(trial.number, objective_of(own_s))
    return search.result()

"""A search without Ax: the library's own dialogue, and a proposer that walks through the space point by point."""

from __future__ import annotations

from collections.abc import Sequence

from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.events import Event, SearchFinished, TrialProposed
from rex_ray.core.search_problem import objective_of
from rex_ray.search.dialogue import SplitSearch
from rex_ray.search.space import MAX_SHIFT, Point, SplitSpace


class Walker:
    """Looks at shifts in the order of a Kronecker sequence: deterministic, and nowhere dense."""

    def __init__(self, space: SplitSpace) -> None:
        self.space, self.count = space, 0

    def tell(self, point: Point, objective: float) -> None:
        """Learn nothing."""

    def propose(self) -> Point:
        self.count += 1
        quanta = self.space.quanta
        shifts = tuple(
            MAX_SHIFT * (2 * ((0.5 + self.count * root) % 1.0) - 1)
            for root in (0.618034, 0.754878, 0.569840)[: self.space.num_shifts]
        )
        return Point(shifts=shifts, quantum=quanta[self.count % len(quanta)])


class PureSearcher:
    """Carries out searches within the simulation; ``silent`` ones are never answered."""

    def __init__(self, latency_steps: int = 3, *, silent: bool = False) -> None:
        self.latency_steps = latency_steps
        self.silent = silent
        self.searches: dict[str, SplitSearch] = {}
        self.started: list[StartSearch] = []
        self.cancelled: list[str] = []

    def carry_out(self, command: StartSearch | TellTrial | CancelSearch) -> Sequence[Event]:
        match command:
            case CancelSearch(search_id=search_id):
                self.cancelled.append(search_id)
                self.searches.pop(search_id, None)
                return []
            case StartSearch(search_id=search_id, problem=problem):
                self.started.append(command)
                if self.silent:
                    return []
                search = self.searches[search_id] = SplitSearch(problem, lambda space, *_: Walker(space))
                if problem.kind == "model":
                    while (trial := search.ask()) is not None:
                        search.tell(trial.number, objective_of(search.space.own_s(trial.local_batch_sizes)))
                return self._next(search_id)
            case TellTrial(search_id=search_id):
                if search_id not in self.searches:
                    return []
                self.searches[search_id].tell(command.trial, command.objective, command.own_s)
                return self._next(search_id)

    def _next(self, search_id: str) -> Sequence[Event]:
        search = self.searches[search_id]
        if (trial := search.ask()) is not None:
            return [TrialProposed(search_id=search_id, trial=trial.number, local_batch_sizes=trial.local_batch_sizes)]
        del self.searches[search_id]
        result = search.result()
        if result is None:
            return []
        return [
            SearchFinished(search_id=search_id, local_batch_sizes=result.local_batch_sizes, objective=result.objective)
        ]

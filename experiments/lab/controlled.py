"""A cell whose policy runs in the production controller, with or without the real search helper."""

from __future__ import annotations

from functools import cache

from experiments._searcher import HelperSearcher
from experiments.lab.cells import Cell
from experiments.lab.measures import Played
from experiments.lab.methods import method_of
from rex_ray.control.controller import Controller
from rex_ray.core.errors import ConfigError
from rex_ray.policies.registry import make_policy
from rex_ray.sim import Learner, Scenario, Searcher, SimulatedRun, simulate

__all__ = ["played", "run_controlled"]


def run_controlled(cell: Cell, scenario: Scenario, learner: Learner, *, num_steps: int) -> SimulatedRun:
    """Run a cell's policy until the learner is done.

    Args:
        cell: the run.
        scenario: its world.
        learner: a fresh one.
        num_steps: most steps.

    Raises:
        ConfigError: a name that there is not.
    """
    method = method_of(cell.method)
    controller = Controller(make_policy(method.policy, {**method.options, **cell.options}), seed=cell.seed)
    return simulate(controller, scenario, num_steps=num_steps, learner=learner, searcher=_searcher(cell.search))


def played(run: SimulatedRun) -> Played:
    """Return what a simulated run comes down to."""
    return Played(
        own_s=run.own_s,
        step_s=run.step_s,
        num_rows=run.num_rows,
        num_switches=len(run.allocations) - 1,
        charged_s=run.charged_s,
    )


def _searcher(name: str) -> Searcher | None:
    match name:
        case "none":
            return None
        case "helper":
            return _helper()
        case _:
            raise ConfigError(f"search must be helper or none, got {name!r}")


@cache
def _helper() -> HelperSearcher:
    """One for all cells of this process: the import of Ax takes seconds. It ends with its standard input."""
    return HelperSearcher()

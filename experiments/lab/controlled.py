"""Who decides in a cell: the production controller, with or without the real search helper; or someone who knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from experiments._searcher import HelperSearcher
from experiments.lab.cells import Cell
from experiments.lab.measures import Played, timed
from experiments.lab.methods import method_of
from rex_ray.control.controller import Controller
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import IntArray
from rex_ray.policies.registry import make_policy
from rex_ray.sim import Learner, Scenario, ScriptedOracle, Searcher, SimulatedRun, simulate

__all__ = ["DELAYS", "played", "played_by_oracle", "run_controlled"]

DELAYS = {"oracle": 0, "oracle_delayed": 10}
"""How many steps after it began or ended an episode is known to each oracle."""


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
    return simulate(
        controller, scenario, num_steps=num_steps, learner=learner, searcher=_searcher(cell.search), keep="figures"
    )


def played(run: SimulatedRun) -> Played:
    """Return what a simulated run comes down to."""
    return Played(
        step_s=run.step_s,
        slowest_s=run.slowest_s,
        mean_own_s=run.mean_own_s,
        num_rows=run.num_rows,
        step_charges_s=run.step_charges_s,
        num_switches=len(run.allocations) - 1,
    )


def played_by_oracle(scenario: Scenario, num_rows: Sequence[int] | IntArray, delay_steps: int) -> Played:
    """Return what an oracle's batches come down to in the shares of someone who knows the script.

    Args:
        scenario: the world.
        num_rows: rows per step.
        delay_steps: how many steps after it began or ended an episode is known.
    """
    script = ScriptedOracle(
        timelines=scenario.timelines, network=scenario.network, num_steps=len(num_rows), delay_steps=delay_steps
    )
    # An epoch's last rows may be fewer than workers, which no split of the oracle's knows.
    fewest = len(scenario.timelines)
    shares = [script.shares(max(int(rows), fewest), step) for step, rows in enumerate(num_rows)]
    num_switches = sum(before != after for before, after in pairwise(shares))
    return replace(timed(scenario, shares), num_switches=num_switches)


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

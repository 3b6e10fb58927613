"""Running a cell: the production controller in virtual time, or a control that knows the answer."""

from __future__ import annotations

import numpy as np

from experiments.lab.cells import TRACE, Cell, Result
from experiments.lab.methods import method_of
from experiments.lab.worlds import scenario_of
from rex_ray.control.controller import Controller
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import WorkerTimeline, load_learning
from rex_ray.sim import Scenario, TraceLearner, oracle_run, simulate
from rex_ray.sim.gradients import NoisyGradients

__all__ = ["play"]

# A run that needs more has failed; the slowest, BSP at the reference batch, needs a fifth.
_MOST_STEPS = 2_000_000
_DELAYS = {"oracle": 0, "oracle_delayed": 10}


def play(cell: Cell) -> Result:
    """Run a cell.

    Raises:
        ConfigError: a name that there is not.
        RuntimeError: the target is out of reach.
    """
    if cell.learner != TRACE:
        raise ConfigError(f"no task of real SGD is called {cell.learner!r}")
    learning = load_learning(cell.workload)
    # Episodes beyond the last step cost nothing, and BSP at the reference batch takes the most steps.
    num_steps = int(learning.epochs_to_target(cell.global_batch_size) * learning.dataset_size / cell.global_batch_size)
    scenario = scenario_of(cell, learning.dataset_size, num_steps)
    if cell.method in _DELAYS:
        run = oracle_run(
            scenario.timelines,
            scenario.network,
            learning,
            cell.global_batch_size,
            delay_steps=_DELAYS[cell.method],
        )
        return _result(scenario, run.step_s, run.global_batch_size, tta_s=run.total_s)
    method = method_of(cell.method)
    learner = TraceLearner(
        learning=learning, reference_batch_size=cell.global_batch_size, gradients=NoisyGradients(seed=cell.seed)
    )
    controller = Controller(make_policy(method.policy, {**method.options, **cell.options}), seed=cell.seed)
    run_ = simulate(controller, scenario, num_steps=_MOST_STEPS, learner=learner)
    if not learner.is_done:
        raise RuntimeError(f"{cell.method} did not reach the target in {_MOST_STEPS} steps")
    rows = np.array([int(step.num_rows.sum()) for step in run_.steps])
    return _result(
        scenario, run_.step_s, rows, tta_s=run_.total_s, own_s=run_.own_s, num_switches=len(run_.allocations) - 1
    )


def _result(
    scenario: Scenario,
    step_s: FloatArray,
    rows: IntArray,
    *,
    tta_s: float | None,
    own_s: FloatArray | None = None,
    num_switches: int = 0,
) -> Result:
    total_s = float(step_s.sum())
    wait = imbalance = 0.0
    if own_s is not None:
        wait = float((step_s[:, None] - own_s).sum() / (own_s.shape[1] * total_s))
        imbalance = float((own_s.max(axis=1) / own_s.mean(axis=1) - 1).mean())
    peak = sum(_peak_rows_per_s(line) for line in scenario.timelines)
    return Result(
        tta_s=tta_s,
        total_s=total_s,
        num_steps=len(step_s),
        num_rows=int(rows.sum()),
        smallest_batch=int(rows[:-1].min(initial=rows.max())),
        largest_batch=int(rows.max()),
        num_switches=num_switches,
        imbalance=imbalance,
        rii=1.0 - float(rows.sum()) / (total_s * peak),
        rii_wait=wait,
    )


def _peak_rows_per_s(line: WorkerTimeline) -> float:
    rows = np.arange(1, line.profile.max_local_batch_size + 1)
    return float((rows / line.profile.own_time_s(rows)).max())

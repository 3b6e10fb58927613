"""Cells whose progress is made by measured noise scales: nothing is trained, so a run takes a second or two."""

from __future__ import annotations

import math
from dataclasses import replace

from experiments.lab.cells import Cell, Result
from experiments.lab.controlled import DELAYS, played, played_by_oracle, run_controlled
from experiments.lab.fixed import FIXED, fixed_shares, run_fixed
from experiments.lab.measures import Played, result_of
from experiments.lab.worlds import scenario_of
from rex_ray.scenario import LearningCurve, load_learning
from rex_ray.sim import Scenario, TraceLearner, oracle_run
from rex_ray.sim.gradients import NoisyGradients
from rex_ray.sim.regret import ledger

__all__ = ["play_trace"]

# A run that needs more has failed; the slowest, BSP at the reference batch, needs a fifth.
_MOST_STEPS = 2_000_000


def play_trace(cell: Cell) -> Result:
    """Run a cell to the target of its workload.

    Raises:
        ConfigError: a name that there is not.
        RuntimeError: the target is out of reach.
    """
    learning = load_learning(cell.workload)
    # Episodes beyond the last step cost nothing, and BSP at the reference batch takes the most steps.
    num_steps = int(learning.epochs_to_target(cell.global_batch_size) * learning.dataset_size / cell.global_batch_size)
    scenario = scenario_of(cell, learning.dataset_size, num_steps)
    if cell.method in DELAYS:
        what = _oracle(cell, scenario, learning)
    else:
        learner = TraceLearner(
            learning=learning,
            reference_batch_size=cell.global_batch_size,
            gradients=NoisyGradients(seed=cell.seed),
        )
        if cell.method in FIXED:
            # A learning rate that is right for the batch, as in ``sim.Limits``: a sweep would have tuned it, too.
            what = run_fixed(scenario, learner, fixed_shares(cell), lambda _: math.inf, num_steps=_MOST_STEPS)
        else:
            run = run_controlled(cell, scenario, learner, num_steps=_MOST_STEPS)
            oracle_s = _oracle(replace(cell, method="oracle"), scenario, learning).total_s
            what = replace(played(run), lost_s=ledger(run, scenario, oracle_s=oracle_s, learning=learning).parts())
        if not learner.is_done:
            raise RuntimeError(f"{cell.method} did not reach the target in {_MOST_STEPS} steps")
    return result_of(what, scenario, tta_s=what.total_s)


def _oracle(cell: Cell, scenario: Scenario, learning: LearningCurve) -> Played:
    run = oracle_run(
        scenario.timelines,
        scenario.network,
        learning,
        cell.global_batch_size,
        delay_steps=DELAYS[cell.method],
        dataset_size=learning.dataset_size,
    )
    return played_by_oracle(scenario, run.global_batch_size, DELAYS[cell.method])

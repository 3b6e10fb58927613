"""Cells that train: a real model on real data, in the virtual time of a cluster that is not there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from experiments.lab.cells import Cell, Result
from experiments.lab.controlled import DELAYS, played, played_by_oracle, run_controlled
from experiments.lab.fixed import FIXED, fixed_shares, run_fixed
from experiments.lab.measures import Played, result_of
from experiments.lab.real import play_real_oracle, seconds_to_target
from experiments.lab.worlds import scenario_of
from rex_ray.sim import Scenario
from workloads.learning import SgdLearner, make_learner
from workloads.learning.rates import AdaScaleRate

__all__ = ["PATHS", "play_sgd"]

PATHS = Path(__file__).parents[2] / "out" / "paths"
"""Where ways through training are kept: whoever trains the same schedule of batches again reads it there."""


def play_sgd(cell: Cell) -> Result:
    """Run a cell to the end of its task's epochs. A target that is not reached leaves ``tta_s`` None.

    Raises:
        ConfigError: a name that there is not, or a task whose data are not at hand.
    """
    learner = make_learner(cell.learner, seed=cell.seed, reference_batch_size=cell.global_batch_size, cache_dir=PATHS)
    num_steps = learner.num_epochs * math.ceil(learner.dataset_size / cell.global_batch_size)
    scenario = scenario_of(cell, learner.dataset_size, num_steps)
    what = _played(cell, scenario, learner, num_steps)
    ends_s = what.whole_s.cumsum()
    result = result_of(what, scenario, tta_s=seconds_to_target(learner, what.whole_s))
    return replace(
        result,
        final_metric=learner.final_metric,
        evaluated_s=tuple(float(ends_s[found.num_steps - 1]) for found in learner.evaluations),
        metrics=tuple(found.metric for found in learner.evaluations),
    )


def _played(cell: Cell, scenario: Scenario, learner: SgdLearner, num_steps: int) -> Played:
    if cell.method in DELAYS:
        rows = play_real_oracle(scenario, learner, cell.global_batch_size)
        return played_by_oracle(scenario, rows, DELAYS[cell.method])
    if cell.method in FIXED:
        rate, shares = AdaScaleRate(cell.global_batch_size), fixed_shares(cell)
        batch = sum(shares)
        return run_fixed(
            scenario, learner, shares, lambda step: rate.factor(batch, learner.noise_scale, step), num_steps=num_steps
        )
    return played(run_controlled(cell, scenario, learner, num_steps=num_steps))

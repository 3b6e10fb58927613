"""The controls on real SGD: the oracle and its late cousin. Their steps are trained, not integrated.

An oracle differs from a method in what it knows: every curve of step times, the script of slowdowns (at once, late, or
never) and the noise scale of all chunks of the steps so far. It costs nothing to know them: there are no probes,
searches or switches, and an allocation is in place at the next look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray, IntArray, frozen
from rex_ray.sim import Scenario, ScriptedOracle, StepTimes
from workloads.learning import SgdLearner
from workloads.learning.rates import LOOK_STEPS, AdaScaleRate

__all__ = ["RealRun", "play_real_oracle", "seconds_to_target"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealRun:
    """A run to the end of the learner's epochs.

    Attributes:
        step_s: duration per step in seconds, shape ``[steps]``.
        rows: rows per step, shape ``[steps]``.
        tta_s: seconds to the learner's target; None where it was not reached.
        final_metric: the metric at the end.
    """

    step_s: FloatArray
    rows: IntArray
    tta_s: float | None
    final_metric: float | None

    @property
    def total_s(self) -> float:
        """Duration in seconds."""
        return float(self.step_s.sum())


def play_real_oracle(
    scenario: Scenario, learner: SgdLearner, reference_batch_size: int, *, delay_steps: int = 0
) -> RealRun:
    """Play ``rex``'s own rule without its ignorance: the batch of the best goodput, split exactly, at AdaScale's rate.

    Args:
        scenario: cluster, script and limits of the global batch.
        learner: a fresh one.
        reference_batch_size: ``M0``, the smallest batch.
        delay_steps: how many steps after it began or ended an episode is known.

    Raises:
        InfeasibleError: the reference batch does not fit the cluster.
    """
    times = StepTimes([line.profile for line in scenario.timelines], scenario.network)
    most = min(scenario.problem.max_global_batch_size or times.most_rows, times.most_rows)
    batches = np.arange(reference_batch_size, max(most, reference_batch_size) + 1)
    rows_per_s = batches / times.balanced_s(batches)

    def best(noise_scale: float | None) -> int:
        if noise_scale is None:
            return reference_batch_size
        worth = np.ones(batches.size) if np.isinf(noise_scale) else 1.0 / (noise_scale + batches)
        return int(batches[np.argmax(rows_per_s * worth)])

    rate = AdaScaleRate(reference_batch_size)
    oracle = ScriptedOracle(
        timelines=scenario.timelines,
        network=scenario.network,
        num_steps=_most_steps(learner, reference_batch_size),
        delay_steps=delay_steps,
    )
    batch, rows, step_s = reference_batch_size, list[int](), list[FloatArray]()
    while not learner.is_done:
        if len(rows) % LOOK_STEPS == 0:
            batch = best(learner.noise_scale)
        taken = min(batch, learner.num_rows_left)
        step_s.append(oracle.step_s(max(taken, times.num_workers), len(rows), 1))
        learner.advance(taken, rate.factor(batch, learner.noise_scale, len(rows)))
        rows.append(taken)
    return _finished(learner, np.concatenate(step_s), rows)


def seconds_to_target(learner: SgdLearner, step_s: FloatArray) -> float | None:
    """Return the virtual seconds to the learner's target, given each step's; None where it was not reached."""
    steps = learner.steps_to_target()
    return None if steps is None else float(step_s[:steps].sum())


def _most_steps(learner: SgdLearner, batch: int) -> int:
    return learner.num_epochs * -(-learner.dataset_size // batch)


def _finished(learner: SgdLearner, step_s: FloatArray, rows: list[int]) -> RealRun:
    return RealRun(
        step_s=step_s,
        rows=frozen(np.array(rows)),
        tta_s=seconds_to_target(learner, step_s),
        final_metric=learner.final_metric,
    )

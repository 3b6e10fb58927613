"""The controls on real SGD: the oracle and its late cousin. Their steps are trained, not integrated.

An oracle differs from a method in what it knows: every curve of step times, the script of slowdowns (at once, late, or
never) and the noise scale of all chunks of the steps so far. It costs nothing to know them: there are no probes,
searches or switches, and an allocation is in place at the next look.
"""

from __future__ import annotations

import numpy as np

from rex_ray.core.types import FloatArray, IntArray, frozen
from rex_ray.sim import Scenario, StepTimes
from workloads.learning import SgdLearner
from workloads.learning.rates import LOOK_STEPS, AdaScaleRate

__all__ = ["play_real_oracle", "seconds_to_target"]


def play_real_oracle(scenario: Scenario, learner: SgdLearner, reference_batch_size: int) -> IntArray:
    """Play ``rex``'s own rule without its ignorance: the batch of the best goodput, split exactly, at AdaScale's rate.

    Args:
        scenario: cluster, script and limits of the global batch.
        learner: a fresh one.
        reference_batch_size: ``M0``, the smallest batch.

    Returns:
        Rows per step to the end of the learner's epochs, shape ``[steps]``. How long the steps take is another's to
        say: when an oracle hears of an episode changes its shares and not its batches.

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
    batch, rows = reference_batch_size, list[int]()
    while not learner.is_done:
        if len(rows) % LOOK_STEPS == 0:
            batch = best(learner.noise_scale)
        taken = min(batch, learner.num_rows_left)
        learner.advance(taken, rate.factor(batch, learner.noise_scale, len(rows)))
        rows.append(taken)
    return frozen(np.array(rows))


def seconds_to_target(learner: SgdLearner, step_s: FloatArray) -> float | None:
    """Return the virtual seconds to the learner's target, given each step's; None where it was not reached."""
    steps = learner.steps_to_target()
    return None if steps is None else float(step_s[:steps].sum())

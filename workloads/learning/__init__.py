"""Real SGD as a ``sim.Learner``: what training makes of a schedule of batches, without the time that it takes.

The reduced gradient does not depend on how a batch is split, so the way that a model goes depends on the schedule of
(rows, learning-rate factor) alone: it is trained once, here, and whatever cluster it is imagined on, the norms and
the accuracies are real. Modules: ``tasks`` (data, model, recipe by name), ``images``, ``features``,
``text``, ``files`` (the data), ``models``,
``training`` (one optimizer step), ``store`` (paths kept on disk), ``learner`` (the seam), ``pilot`` (how the recipes
were chosen).
"""

from __future__ import annotations

from workloads.learning.learner import Evaluation, SgdLearner, make_learner
from workloads.learning.tasks import task_names

__all__ = ["Evaluation", "SgdLearner", "make_learner", "task_names"]

"""Training that is not run: progress by measured noise scales, and the gradient norms that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import IntArray, frozen
from rex_ray.scenario.learning import LearningCurve
from rex_ray.sim.gradients import NoisyGradients
from rex_ray.sim.seams import StepNorms

__all__ = ["TraceLearner"]


@dataclass(slots=True, kw_only=True)
class TraceLearner:
    """A ``sim.Learner`` that learns as fast as a published run did at this noise scale.

    A step of ``B`` rows can make ``B (phi + M0) / (phi + B)`` reference rows of progress, ``phi`` at the progress
    made so far: as much as AdaScale's gain, if its learning rate allows it. A step at the learning-rate factor ``f``
    makes no more than ``f`` times what a step of the user's reference batch makes, for whom ``f = 1`` is right. So a
    factor below the gain costs in proportion, and one above it gives nothing: a rate too high for its batch is at
    best no help, and how much it harms no noise scale tells.

    Attributes:
        learning: how the noise scale goes, and where the target is.
        reference_batch_size: the batch that the learning rate was tuned for (``Problem.global_batch_size``).
        gradients: draws the norms; None: nothing is measured.
        progress_rows: reference rows of progress so far.
    """

    learning: LearningCurve
    reference_batch_size: int
    gradients: NoisyGradients | None = None
    progress_rows: float = 0.0

    def __post_init__(self) -> None:
        if self.reference_batch_size < 1:
            raise ConfigError(f"a learner needs a reference batch of at least 1 row, got {self.reference_batch_size}")

    @property
    def is_done(self) -> bool:
        """Whether the target is reached."""
        return self.progress_rows >= self.learning.target_rows

    @property
    def noise_scale(self) -> float:
        """The true ``phi`` at the present progress, in rows."""
        return float(self.learning.noise_scale_at(self.progress_rows))

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms | None:
        """Return the norms of a step, a rank's rows being one group; None: nothing is measured."""
        if self.gradients is None:
            return None
        weighted, reduced = self.gradients.draw(step, self.noise_scale, num_rows)
        return StepNorms(weighted_sq_norm=weighted, num_groups=_groups(tuple(num_rows)), global_sq_norm=reduced)

    def advance(self, num_rows: int, lr_factor: float) -> None:
        """Take one optimizer step of so many rows at a learning-rate factor relative to the reference batch."""
        phi = self.noise_scale
        possible, usual = (
            rows * float(self.learning.efficiency(rows, phi)) for rows in (num_rows, self.reference_batch_size)
        )
        self.progress_rows += min(possible, lr_factor * usual)


@lru_cache(maxsize=16)
def _groups(num_rows: tuple[int, ...]) -> IntArray:
    return frozen(np.array([int(rows > 0) for rows in num_rows], dtype=np.int64))

"""The limits: how fast training could be on a cluster for someone who knows every curve, and for the simplest choices.

Nothing is random and nothing is learnt here, so nothing needs to be played step by step: a step time for every global
batch, one integral over progress. Whatever a method does on the same curves takes at least the oracle's time.

The oracle is ``rex``'s own rule without its ignorance: at each moment the batch of the best goodput, split exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.scenario.learning import LearningCurve
from rex_ray.sim.step_times import StepTimes

__all__ = ["GROWTH_CAP", "MIN_STEPS_PER_EPOCH", "FixedBatch", "Limits", "largest_batch"]

GROWTH_CAP = 8
"""Largest global batch in reference batches: how far the learning rate is trusted to follow."""

MIN_STEPS_PER_EPOCH = 16
"""The global batch stays below the data set's size divided by this."""

# Every batch is a candidate up to so many; beyond, they are spaced evenly in the logarithm.
_MAX_CANDIDATES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """A global batch kept from start to end, and the seconds to the target that it takes."""

    global_batch_size: int
    time_s: float


def largest_batch(reference_batch_size: int, dataset_size: int, most_rows: int) -> int:
    """Return the largest global batch that growth may reach: by reference batches, data set and memory."""
    by_data = max(reference_batch_size, dataset_size // MIN_STEPS_PER_EPOCH)
    return min(GROWTH_CAP * reference_batch_size, by_data, most_rows)


class Limits:
    """Times to the target on one cluster.

    Every batch's learning rate is taken to be right for it (AdaScale): a row is worth ``(phi + M0) / (phi + B)``.

    Args:
        learning: how the noise scale goes.
        times: the cluster's step times.
        reference_batch_size: the user's ``M0``: no batch below it is considered, nor one above ``largest_batch``.

    Raises:
        InfeasibleError: the reference batch does not fit the cluster.
    """

    def __init__(self, learning: LearningCurve, times: StepTimes, reference_batch_size: int) -> None:
        times.check(reference_batch_size)
        self.reference_batch_size = reference_batch_size
        largest = largest_batch(reference_batch_size, learning.dataset_size, times.most_rows)
        self.largest_batch = largest - largest % times.multiple
        candidates = _candidates(reference_batch_size, self.largest_batch)
        self.batches = np.unique(candidates // times.multiple * times.multiple)
        self._learning = learning
        self._times = times
        self._parts, self._noise_scale = learning.intervals()
        self._balanced_s = times.balanced_s(self.batches)
        # Seconds per row at each candidate without the worth of a row; all else is a product with it.
        self._raw_s = self._balanced_s / self.batches

    @property
    def oracle_s(self) -> float:
        """Seconds to the target at the best goodput of every moment, under the exact split."""
        return self._shortest_s(np.ones(self.batches.size, dtype=np.bool_))

    @property
    def oracle_by_doubling_s(self) -> float:
        """The same for someone who may only double the reference batch, or go to the largest."""
        doubled = self.reference_batch_size * 2 ** np.arange(GROWTH_CAP.bit_length())
        return self._shortest_s(np.isin(self.batches, [*doubled, self.largest_batch]))

    def best_batch(self, noise_scale: float) -> int:
        """Return the batch of the best goodput at a noise scale, in rows."""
        return int(self.batches[np.argmin(self._raw_s / self._learning.efficiency(self.batches, noise_scale))])

    @property
    def oracle_batches(self) -> tuple[int, int]:
        """The oracle's smallest and largest global batch on its way to the target."""
        used = [self.best_batch(float(phi)) for phi in self._noise_scale]
        return min(used), max(used)

    def bsp_s(self, global_batch_size: int) -> float:
        """Return the seconds to the target at a fixed batch in equal shares.

        Raises:
            InfeasibleError: an equal share does not fit the smallest worker.
        """
        batch = np.array([global_batch_size])
        return float(self._fixed_s(batch, self._times.equal_s(batch))[0])

    def balanced_s(self, global_batch_size: int) -> float:
        """Return the seconds to the target at a fixed batch under the exact split."""
        batch = np.array([global_batch_size])
        return float(self._fixed_s(batch, self._times.balanced_s(batch))[0])

    @property
    def best_fixed_equal(self) -> FixedBatch:
        """The best fixed batch in equal shares: what a sweep finds that needs no method.

        Raises:
            InfeasibleError: not even the reference batch fits in equal shares.
        """
        batches = self.batches[self.batches <= self._times.most_equal_rows]
        if batches.size == 0:
            raise InfeasibleError(
                f"equal shares of {self.reference_batch_size} rows do not fit the smallest of "
                f"{self._times.num_workers} workers: at most {self._times.most_equal_rows} rows together"
            )
        return self._best(batches, self._times.equal_s(batches))

    @property
    def best_fixed_filled(self) -> FixedBatch:
        """The best fixed batch in equal shares where full workers leave their rest to the others, as ``bsp`` does."""
        return self._best(self.batches, self._times.filled_s(self.batches))

    @property
    def best_fixed_balanced(self) -> FixedBatch:
        """The best fixed batch under the exact split."""
        return self._best(self.batches, self._balanced_s)

    def _shortest_s(self, allowed: np.typing.NDArray[np.bool_]) -> float:
        worth = self._learning.efficiency(self.batches[allowed], self._noise_scale[:, None])
        return float(np.sum(self._parts * (self._raw_s[allowed] / worth).min(axis=1)))

    def _best(self, batches: IntArray, step_s: FloatArray) -> FixedBatch:
        times_s = self._fixed_s(batches, step_s)
        best = int(times_s.argmin())
        return FixedBatch(global_batch_size=int(batches[best]), time_s=float(times_s[best]))

    def _fixed_s(self, batches: IntArray, step_s: FloatArray) -> FloatArray:
        rows = np.sum(self._parts[:, None] / self._learning.efficiency(batches, self._noise_scale[:, None]), axis=0)
        result: FloatArray = rows * step_s / batches
        return result


def _candidates(smallest: int, largest: int) -> IntArray:
    if largest - smallest < _MAX_CANDIDATES:
        return np.arange(smallest, largest + 1)
    doubled = smallest * 2 ** np.arange(GROWTH_CAP.bit_length())
    spaced = np.geomspace(smallest, largest, _MAX_CANDIDATES).round().astype(np.int64)
    return np.unique(np.concatenate([spaced, doubled[doubled <= largest]]))

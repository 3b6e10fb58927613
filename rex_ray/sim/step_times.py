"""A cluster's step time at every global batch at once: what a sweep over batches asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rex_ray.core.apportion import in_units
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import FloatArray, IntArray, read_only
from rex_ray.scenario.network import NetworkModel
from rex_ray.scenario.profiles import DeviceProfile

__all__ = ["StepTimes"]


class StepTimes:
    """Seconds per step at any global batch from one row per worker to all that the workers' memory holds.

    The least slowest time over all splits of ``B`` rows is an order statistic: give every worker its first row, then
    take rows in the order in which they would be finished; the ``B``-th is the last. So one sort answers for all
    batches what ``core.split.exact_split`` answers for one.

    Args:
        profiles: one per rank.
        network: the reduction's time, and how it joins the slowest worker's.
        scales: present factor on each rank's times (a slowdown), default 1.
        multiple: what every share is a multiple of; all of the above then holds of as many rows at a time.
    """

    def __init__(
        self,
        profiles: Sequence[DeviceProfile],
        network: NetworkModel,
        scales: Sequence[float] | None = None,
        multiple: int = 1,
    ) -> None:
        self.num_workers = len(profiles)
        self.multiple = multiple
        self._network = network
        factors = [1.0] * len(profiles) if scales is None else scales
        ranks = [(id(profile), factor) for profile, factor in zip(profiles, factors, strict=True)]
        counts = Counter(ranks)
        kinds = {id(profile): profile for profile in profiles}
        own = {(key, factor): factor * _own_s(kinds[key])[multiple - 1 :: multiple] for key, factor in counts}
        self._own_s = [own[rank] for rank in ranks]
        self._caps = np.array([times.size for times in self._own_s])  # in multiples, as all below
        if not self._caps.all():
            raise InfeasibleError(f"some worker holds no {multiple} rows, which every share is a multiple of")
        self._firsts_s = max(float(times[0]) for times in own.values())
        further_s = np.concatenate([times[1:] for times in own.values()])
        order = np.argsort(further_s, kind="stable")
        self._further_s = np.concatenate([[0.0], further_s[order]])
        weights = np.concatenate([np.full(times.size - 1, counts[rank]) for rank, times in own.items()])[order]
        self._further_rows = np.concatenate([[0], np.cumsum(weights)])

    @property
    def most_rows(self) -> int:
        """Rows that all workers hold together."""
        return int(self._caps.sum()) * self.multiple

    @property
    def most_equal_rows(self) -> int:
        """Rows that fit in equal shares: the smallest worker's, times all of them."""
        return int(self._caps.min()) * self.num_workers * self.multiple

    def balanced_s(self, global_batch_size: IntArray) -> FloatArray:
        """Return the step time under the exact split, same shape.

        Raises:
            InfeasibleError: a batch with less than a row per worker, or with more rows than fit.
        """
        self._check_all(global_batch_size)
        last = np.searchsorted(self._further_rows, global_batch_size // self.multiple - self.num_workers)
        slowest_s: FloatArray = np.maximum(self._firsts_s, self._further_s[last])
        return self._network.step_of_slowest_s(slowest_s, self.num_workers)

    def equal_s(self, global_batch_size: IntArray) -> FloatArray:
        """Return the step time under equal shares, same shape; rows that do not divide go to the lower ranks.

        Raises:
            InfeasibleError: an equal share that does not fit the smallest worker.
        """
        if int(global_batch_size.max()) > self.most_equal_rows:
            raise InfeasibleError(
                f"a global batch of {int(global_batch_size.max())} rows does not fit {self.num_workers} workers in "
                f"equal shares: the smallest holds {int(self._caps.min()) * self.multiple} rows"
            )
        return self.filled_s(global_batch_size)

    def filled_s(self, global_batch_size: IntArray) -> FloatArray:
        """Return the step time of equal shares where a full worker leaves its rest to the others, same shape."""
        self._check_all(global_batch_size)
        kinds, counts = np.unique(self._caps, return_counts=True)
        filled = np.minimum(np.arange(kinds[-1] + 1)[:, None], kinds) @ counts
        units = global_batch_size // self.multiple
        level = np.searchsorted(filled, units, side="right") - 1
        rest = units - filled[level]
        slowest = np.zeros(global_batch_size.shape)
        for cap, own_s in zip(self._caps, self._own_s, strict=True):
            extra = (rest > 0) & (level < cap)
            rest = rest - extra
            slowest = np.maximum(slowest, own_s[np.minimum(level + extra, cap) - 1])
        return self._network.step_of_slowest_s(slowest, self.num_workers)

    def check(self, global_batch_size: int) -> None:
        """Raise InfeasibleError unless every worker can have a row, or a multiple, and all rows fit."""
        in_units(global_batch_size, self.multiple)
        if not self.num_workers * self.multiple <= global_batch_size <= self.most_rows:
            least = "a row" if self.multiple == 1 else f"{self.multiple} rows"
            raise InfeasibleError(
                f"a global batch of {global_batch_size} rows does not fit: {self.num_workers} workers take at least "
                f"{least} each and hold {self.most_rows} together"
            )

    def _check_all(self, global_batch_size: IntArray) -> None:
        self.check(int(global_batch_size.min()))
        self.check(int(global_batch_size.max()))
        if (odd := global_batch_size % self.multiple).any():
            in_units(int(global_batch_size[odd > 0][0]), self.multiple)


@lru_cache(maxsize=64)
def _own_s(profile: DeviceProfile) -> FloatArray:
    """Return the own time at 1, 2, ... rows up to the memory cap, read-only."""
    return read_only(profile.own_time_s(np.arange(1, profile.max_local_batch_size + 1)), np.float64)

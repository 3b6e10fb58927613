"""One worker's life: its own time at every step, a pure function of (seed, rank, step, rows).

The simulator reads it in virtual time and the emulation sleeps it away in real time; because neither keeps state
here, both see the same world, in whatever order they ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rex_ray.core.types import FloatArray
from rex_ray.scenario.episodes import Episode, Script
from rex_ray.scenario.noise import NoiseModel, RecordedNoise
from rex_ray.scenario.profiles import DeviceProfile
from rex_ray.scenario.shapes import StepTimeShape

__all__ = ["OwnTime", "WorkerTimeline", "own_times"]

_QUIET = NoiseModel.quiet()
_PLAIN = StepTimeShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTime:
    """A worker's own time in its two parts: waiting for data, then computing."""

    data_s: float = 0.0
    compute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both."""
        return self.data_s + self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeline:
    """What one worker's steps take.

    Attributes:
        profile: its device and workload.
        rank: its rank, which picks its noise and its episodes.
        seed: the scenario's seed.
        noise: step-to-step noise.
        episodes: slowdowns of the whole cluster's script; those of other ranks are left out. They slow computing,
            not the loader.
        speed_factor: lasting difference from its kind, e.g. 1.1 for a device that is always 10 % slower.
        time_scale: unit of the emulated world in real seconds, e.g. 0.1 plays it ten times as fast.
        shape: structure that the profile's smooth curve lacks; with contention every call needs ``all_rows``.
    """

    profile: DeviceProfile
    rank: int
    seed: int
    noise: NoiseModel | RecordedNoise = _QUIET
    episodes: tuple[Episode, ...] = ()
    speed_factor: float = 1.0
    time_scale: float = 1.0
    shape: StepTimeShape = _PLAIN
    _script: Script = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        mine = tuple(episode for episode in self.episodes if episode.rank in (None, self.rank))
        object.__setattr__(self, "episodes", mine)
        object.__setattr__(self, "_script", Script.of(mine, self.rank))

    def own_time(self, step: int, num_rows: int, all_rows: Sequence[int] | None = None) -> OwnTime:
        """Return the own time of optimizer step ``step`` with ``num_rows`` rows; none take no time.

        Args:
            step: optimizer step.
            num_rows: this worker's rows.
            all_rows: every rank's rows, needed under contention only.
        """
        if num_rows <= 0:
            return OwnTime()
        noise = self.noise.factor(self.seed, self.rank, step)
        compute_s = noise * self.slowdown(step) * self._compute_s(num_rows, all_rows)
        return OwnTime(data_s=max(noise * self._loader_s(num_rows) - compute_s, 0.0), compute_s=compute_s)

    def own_times(
        self, start: int, stop: int, num_rows: int, all_rows: Sequence[int] | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return waiting for data and computing in steps ``start`` to ``stop - 1``, in seconds, as ``own_time`` does.

        Args:
            start: first optimizer step.
            stop: the step after the last.
            num_rows: this worker's rows in each.
            all_rows: every rank's rows, needed under contention only.
        """
        if num_rows <= 0:
            return np.zeros(stop - start), np.zeros(stop - start)
        noise = self.noise.factors(self.seed, self.rank, start, stop)
        compute_s: FloatArray = noise * self.slowdowns(start, stop) * self._compute_s(num_rows, all_rows)
        loader_s = self._loader_s(num_rows)
        data_s = np.maximum(noise * loader_s - compute_s, 0.0) if loader_s else np.zeros(stop - start)
        return data_s, compute_s

    def own_time_s(self, step: int, num_rows: int, all_rows: Sequence[int] | None = None) -> float:
        """Return the sum of ``own_time``'s parts."""
        return self.own_time(step, num_rows, all_rows).total_s

    def quiet_time_s(self, num_rows: int, all_rows: Sequence[int] | None = None, slowdown: float = 1.0) -> float:
        """Return the own time without noise and episodes: the truth that a planner is judged by.

        Args:
            num_rows: this worker's rows.
            all_rows: every rank's rows, needed under contention only.
            slowdown: factor of an episode that is known to last.
        """
        if num_rows <= 0:
            return 0.0
        return max(slowdown * self._compute_s(num_rows, all_rows), self._loader_s(num_rows))

    def slowdown(self, step: int) -> float:
        """Return the factor of the episodes alone at ``step``."""
        return self._script.factor(step)

    def slowdowns(self, start: int, stop: int) -> FloatArray:
        """Return the factors of the episodes alone in steps ``start`` to ``stop - 1``, shape ``[stop - start]``."""
        return self._script.factors(start, stop)

    def _compute_s(self, num_rows: int, all_rows: Sequence[int] | None) -> float:
        alone_s = _alone_s(self.profile, self.shape, num_rows) * self.speed_factor * self.time_scale
        return alone_s * self.shape.contended(self.rank, all_rows)

    def _loader_s(self, num_rows: int) -> float:
        rate = self.shape.loader_rows_per_s
        return num_rows / rate * self.time_scale if rate else 0.0


def own_times(
    timelines: Sequence[WorkerTimeline], start: int, stop: int, num_rows: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """Return every worker's wait for data and its computing in seconds, both of shape ``[stop - start, n]``.

    Args:
        timelines: one per rank.
        start: first optimizer step.
        stop: the step after the last.
        num_rows: rows per rank in each.
    """
    data_s = np.empty((stop - start, len(num_rows)))
    compute_s = np.empty_like(data_s)
    for rank, (line, mine) in enumerate(zip(timelines, num_rows, strict=True)):
        data_s[:, rank], compute_s[:, rank] = line.own_times(start, stop, mine, num_rows)
    return data_s, compute_s


# A simulation asks for the same few sizes thousands of times, and interpolating costs more than all else here.
@lru_cache(maxsize=4096)
def _alone_s(profile: DeviceProfile, shape: StepTimeShape, num_rows: int) -> float:
    return float(profile.own_time_s(shape.tiled(num_rows)))

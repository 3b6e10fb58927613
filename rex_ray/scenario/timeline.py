"""One worker's life: its own time at every step, a pure function of (seed, rank, step, rows).

The simulator reads it in virtual time and the emulation sleeps it away in real time; because neither keeps state
here, both see the same world, in whatever order they ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.scenario.episodes import Episode, slowdown_factor
from rex_ray.scenario.noise import NoiseModel
from rex_ray.scenario.profiles import DeviceProfile

__all__ = ["WorkerTimeline"]

_QUIET = NoiseModel.quiet()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeline:
    """What one worker's steps take.

    Attributes:
        profile: its device and workload.
        rank: its rank, which picks its noise and its episodes.
        seed: the scenario's seed.
        noise: step-to-step noise.
        episodes: slowdowns of the whole cluster's script; those of other ranks are left out.
        speed_factor: lasting difference from its kind, e.g. 1.1 for a device that is always 10 % slower.
        time_scale: unit of the emulated world in real seconds, e.g. 0.1 plays it ten times as fast.
    """

    profile: DeviceProfile
    rank: int
    seed: int
    noise: NoiseModel = _QUIET
    episodes: tuple[Episode, ...] = ()
    speed_factor: float = 1.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        mine = tuple(episode for episode in self.episodes if episode.rank in (None, self.rank))
        object.__setattr__(self, "episodes", mine)

    def own_time_s(self, step: int, num_rows: int) -> float:
        """Return the own time of optimizer step ``step`` with ``num_rows`` rows; none take no time."""
        if num_rows <= 0:
            return 0.0
        return self.slowdown(step) * self.noise.factor(self.seed, self.rank, step) * self.quiet_time_s(num_rows)

    def quiet_time_s(self, num_rows: int) -> float:
        """Return the own time without noise and episodes: the truth that a planner is judged by."""
        return float(self.profile.own_time_s(num_rows)) * self.speed_factor * self.time_scale if num_rows > 0 else 0.0

    def slowdown(self, step: int) -> float:
        """Return the factor of the episodes alone at ``step``."""
        return slowdown_factor(self.episodes, self.rank, step)

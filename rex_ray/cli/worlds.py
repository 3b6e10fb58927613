"""A cluster in virtual time as a command line describes it: devices, network, noise and whoever disturbs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rex_ray.cli.words import misfit_text
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.scenario import (
    Episode,
    LearningCurve,
    NoiseModel,
    WorkerTimeline,
    load_learning,
    load_profile,
    parse_cluster,
    random_episodes,
    rotating_episodes,
)
from rex_ray.sim import Scenario, problem_of
from rex_ray.sim.limits import network_model

__all__ = ["World"]

_NOISE: Mapping[str, Callable[[], NoiseModel]] = {
    "quiet": NoiseModel.quiet,
    "dedicated": NoiseModel.dedicated,
    "shared": NoiseModel.shared,
}
_DISTURBANCES = ("none", "random", "lbb")
_MOST_PER_1000 = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a simulation plays, by names.

    Attributes:
        cluster: as ``scenario.parse_cluster`` reads it.
        workload: see ``scenario.learning_names``.
        global_batch_size: the user's reference batch ``M0``; None: the source's own, or a row per worker.
        network: kind of device whose measured all-reduce times count, or ``"none"``.
        noise: ``"quiet"``, ``"dedicated"`` (sd 1 %) or ``"shared"`` (sd 4 %, spikes).
        disturbance: ``"none"``, ``"random:RATE"`` (episodes per 1,000 worker-steps, lengths and factors as measured on
            production clusters) or ``"lbb"`` (one worker after the other, 30 steps each).
    """

    cluster: str
    workload: str
    global_batch_size: int | None = None
    network: str = "T4"
    noise: str = "dedicated"
    disturbance: str = "none"

    @property
    def learning(self) -> LearningCurve:
        """How the workload's noise scale goes.

        Raises:
            ConfigError: unknown workload, or no source measured it.
        """
        return load_learning(self.workload)

    @property
    def devices(self) -> tuple[str, ...]:
        """Kind of device per rank.

        Raises:
            ConfigError: see ``parse_cluster``.
        """
        return parse_cluster(self.cluster)

    @property
    def reference_batch_size(self) -> int:
        """``M0`` in rows."""
        return self.global_batch_size or max(self.learning.reference_batch_size, len(self.devices))

    @property
    def num_steps(self) -> int:
        """Steps that the reference batch takes to the target; whoever grows it takes fewer."""
        rows = self.learning.epochs_to_target(self.reference_batch_size) * self.learning.dataset_size
        return math.ceil(rows / self.reference_batch_size)

    def scenario(self, seed: int) -> Scenario:
        """Return the world of one seed.

        Raises:
            ConfigError: a name that there is not, or a reference batch that does not fit.
        """
        profiles = [load_profile(device, self.workload) for device in self.devices]
        caps = [profile.max_local_batch_size for profile in profiles]
        batch = self.reference_batch_size
        if not len(profiles) <= batch <= sum(caps):
            raise ConfigError(misfit_text(batch, self.cluster, len(profiles), sum(caps)))
        episodes = self._episodes(seed)
        noise = self._noise_model()
        return Scenario(
            problem=problem_of(
                self.devices, profiles, global_batch_size=batch, dataset_size=self.learning.dataset_size
            ),
            timelines=tuple(
                WorkerTimeline(profile=profile, rank=rank, seed=seed, noise=noise, episodes=episodes)
                for rank, profile in enumerate(profiles)
            ),
            network=network_model(self.workload, self.network),
        )

    def _noise_model(self) -> NoiseModel:
        if self.noise not in _NOISE:
            raise ConfigError(f"unknown noise {self.noise!r}{nearest_name_hint(self.noise, _NOISE)}")
        return _NOISE[self.noise]()

    def _episodes(self, seed: int) -> tuple[Episode, ...]:
        kind, _, argument = self.disturbance.partition(":")
        match kind:
            case "none" if not argument:
                return ()
            case "lbb" if not argument:
                return rotating_episodes(num_workers=len(self.devices), num_steps=self.num_steps)
            case "random":
                return random_episodes(
                    num_workers=len(self.devices),
                    num_steps=self.num_steps,
                    per_1000_worker_steps=_rate(self.disturbance, argument),
                    seed=seed,
                )
            case _:
                hint = nearest_name_hint(kind, _DISTURBANCES)
                raise ConfigError(f"unknown disturbance {self.disturbance!r}{hint}; write none, random:1 or lbb")


def _rate(disturbance: str, argument: str) -> float:
    try:
        rate = float(argument)
    except ValueError:
        rate = math.nan
    if not 0 <= rate <= _MOST_PER_1000:
        raise ConfigError(
            f"disturbance {disturbance!r} needs its episodes per 1,000 worker-steps, 0 to {_MOST_PER_1000:.0f}: "
            "write for example random:1"
        )
    return rate

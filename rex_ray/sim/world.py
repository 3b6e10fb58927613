"""A cluster in virtual time: who works, how fast, and how long a change of shares takes to arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rex_ray.core.errors import ConfigError
from rex_ray.core.measuring import NormSchedule
from rex_ray.core.types import Problem, WorkerSpec
from rex_ray.scenario import (
    DeviceProfile,
    Episode,
    NetworkModel,
    NoiseModel,
    StepTimeShape,
    WorkerTimeline,
    load_profile,
)
from rex_ray.sim.charges import FREE, Charges
from rex_ray.sim.oracle import largest_batch

__all__ = ["Scenario", "mixed_cluster", "problem_of"]

_NO_NETWORK = NetworkModel()
_NORMS = NormSchedule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What the engine plays.

    Attributes:
        problem: the group and its limits.
        timelines: each rank's own times.
        network: time of the all-reduce.
        switch_lag_steps: steps from a published allocation to the first one under it: telemetry, polling, the
            control boundary and what the loaders have drawn ahead.
        warm_up_steps: first steps, whose times the workers flag.
        settle_steps: first steps after a switch, flagged likewise.
        tick_interval_s: virtual time between two ticks.
        charges: what control costs beside the steps.
        norm_schedule: at which steps gradient norms are taken.
        generation: identity of the group.
    """

    problem: Problem
    timelines: tuple[WorkerTimeline, ...]
    network: NetworkModel = _NO_NETWORK
    switch_lag_steps: int = 10
    warm_up_steps: int = 3
    settle_steps: int = 1
    tick_interval_s: float = 1.0
    charges: Charges = FREE
    norm_schedule: NormSchedule = _NORMS
    generation: str = "simulated"

    def __post_init__(self) -> None:
        if len(self.timelines) != self.problem.num_workers:
            raise ConfigError(
                f"{len(self.timelines)} timelines for {self.problem.num_workers} workers: give one per worker"
            )
        if self.switch_lag_steps < 1:
            raise ConfigError(f"switch_lag_steps must be at least 1, got {self.switch_lag_steps}")


def problem_of(
    devices: Sequence[str],
    profiles: Sequence[DeviceProfile],
    *,
    global_batch_size: int,
    dataset_size: int,
    max_global_batch_size: int | None = None,
    local_batch_multiple: int = 1,
) -> Problem:
    """Return the problem of a group of devices, one worker each, that hold what their profiles say.

    Args:
        devices: kind of device per rank.
        profiles: of each rank.
        global_batch_size: the reference batch in rows.
        dataset_size: rows per epoch.
        max_global_batch_size: default: see ``sim.oracle.largest_batch``.
        local_batch_multiple: what every share is a multiple of.
    """
    caps = [profile.max_local_batch_size for profile in profiles]
    return Problem(
        workers=tuple(
            WorkerSpec(rank=rank, device=device, max_local_batch_size=cap)
            for rank, (device, cap) in enumerate(zip(devices, caps, strict=True))
        ),
        global_batch_size=global_batch_size,
        max_global_batch_size=max_global_batch_size or largest_batch(global_batch_size, dataset_size, sum(caps)),
        dataset_size=dataset_size,
        local_batch_multiple=local_batch_multiple,
    )


def mixed_cluster(
    devices: Sequence[str],
    workload: str,
    *,
    global_batch_size: int,
    steps_per_epoch: int = 100,
    noise: NoiseModel | None = None,
    episodes: tuple[Episode, ...] = (),
    shape: StepTimeShape | None = None,
    seed: int = 0,
) -> Scenario:
    """Return the scenario of a cluster with these devices, one worker each, at the public profiles' speeds.

    Args:
        devices: kind of device per rank.
        workload: what they train, see ``scenario.workload_names``.
        global_batch_size: rows per step.
        steps_per_epoch: size of the data set in global batches.
        noise: step-to-step noise, default that of dedicated machines.
        episodes: scripted slowdowns.
        shape: structure that the profiles' smooth curves lack, default none.
        seed: of noise and episodes.
    """
    profiles = [load_profile(device, workload) for device in devices]
    problem = problem_of(
        devices,
        profiles,
        global_batch_size=global_batch_size,
        max_global_batch_size=8 * global_batch_size,
        dataset_size=steps_per_epoch * global_batch_size,
    )
    timelines = tuple(
        WorkerTimeline(
            profile=profile,
            rank=rank,
            seed=seed,
            noise=noise or NoiseModel.dedicated(),
            episodes=episodes,
            shape=shape or StepTimeShape(),
        )
        for rank, profile in enumerate(profiles)
    )
    return Scenario(problem=problem, timelines=timelines)

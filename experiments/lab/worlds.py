"""Where a cell runs: its cluster in virtual time, with noise and whoever disturbs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.lab.alibaba import replay_job
from experiments.lab.cells import Cell
from rex_ray.core.errors import ConfigError
from rex_ray.scenario import (
    DeviceProfile,
    Episode,
    NoiseModel,
    RecordedNoise,
    StepTimeShape,
    WorkerTimeline,
    load_profile,
    parse_cluster,
    random_episodes,
    rotating_episodes,
    sleeping_epochs,
)
from rex_ray.sim import Charges, Scenario, charges_of, problem_of
from rex_ray.sim.limits import network_model

__all__ = ["scenario_of"]

_NOISE = {"quiet": NoiseModel.quiet, "dedicated": NoiseModel.dedicated, "shared": NoiseModel.shared}


def scenario_of(cell: Cell, dataset_size: int, num_steps: int) -> Scenario:
    """Return the world of a cell.

    Args:
        cell: the run.
        dataset_size: rows per epoch.
        num_steps: most steps that any method needs; disturbances last as long.

    Raises:
        ConfigError: a name that there is not.
    """
    devices = parse_cluster(cell.cluster)
    profiles = [load_profile(device, cell.workload) for device in devices]
    if cell.noise not in _NOISE:
        raise ConfigError(f"noise must be one of {', '.join(_NOISE)}, got {cell.noise!r}")
    disturbances = _disturbances(cell, profiles, dataset_size, num_steps)
    shape = _shape(cell, len(devices))
    problem = problem_of(devices, profiles, global_batch_size=cell.global_batch_size, dataset_size=dataset_size)
    lines = tuple(
        WorkerTimeline(
            profile=profile, rank=rank, seed=cell.seed, noise=disturbed.noise, episodes=disturbed.episodes, shape=shape
        )
        for rank, (profile, disturbed) in enumerate(zip(profiles, disturbances, strict=True))
    )
    network = network_model(cell.workload, cell.network)
    return Scenario(problem=problem, timelines=lines, network=network, charges=_charges(cell))


@dataclass(frozen=True, slots=True)
class _Disturbed:
    """What disturbs a worker, step by step and for a while."""

    noise: NoiseModel | RecordedNoise
    episodes: tuple[Episode, ...] = ()


def _disturbances(cell: Cell, profiles: Sequence[DeviceProfile], dataset_size: int, num_steps: int) -> list[_Disturbed]:
    kind, _, argument = cell.disturbance.partition(":")
    if kind == "alibaba":
        if cell.noise != "quiet":
            raise ConfigError(f"replayed workers bring their own noise: set noise to 'quiet', not {cell.noise!r}")
        replayed = replay_job(argument, num_workers=len(profiles), num_steps=num_steps, seed=cell.seed)
        return [_Disturbed(worker.noise, worker.episodes) for worker in replayed]
    episodes = _episodes(cell, profiles, dataset_size, num_steps)
    return [_Disturbed(_NOISE[cell.noise](), episodes)] * len(profiles)


def _episodes(cell: Cell, profiles: Sequence[DeviceProfile], dataset_size: int, num_steps: int) -> tuple[Episode, ...]:
    kind, _, argument = cell.disturbance.partition(":")
    match kind:
        case "none":
            return ()
        case "random":
            rate = float(argument)
            return random_episodes(
                num_workers=len(profiles), num_steps=num_steps, per_1000_worker_steps=rate, seed=cell.seed
            )
        case "lbb":
            return rotating_episodes(num_workers=len(profiles), num_steps=num_steps)
        case "dlb":
            equal = cell.global_batch_size / len(profiles)
            return sleeping_epochs(
                own_s=[float(profile.own_time_s(equal)) for profile in profiles],
                steps_per_epoch=math.ceil(dataset_size / cell.global_batch_size),
                num_steps=num_steps,
                seed=cell.seed,
            )
        case _:
            raise ConfigError(f"disturbance {cell.disturbance!r} is none of none, random:RATE, lbb, dlb, alibaba:JOB")


def _charges(cell: Cell) -> Charges:
    """A fixed batch in equal shares is run without measuring anything."""
    charges = charges_of(cell.charges)
    return replace(charges, measuring_factor=1.0, measuring_s=0.0) if cell.method == "bsp" else charges


def _shape(cell: Cell, num_workers: int) -> StepTimeShape:
    kind, _, argument = cell.shape.partition(":")
    match kind:
        case "plain":
            return StepTimeShape()
        case "tiles":
            return StepTimeShape(tile_rows=int(argument))
        case "contention":
            return StepTimeShape(contention=float(argument), hosts=tuple(rank // 2 for rank in range(num_workers)))
        case _:
            raise ConfigError(f"shape {cell.shape!r} is none of plain, tiles:ROWS, contention:FACTOR")

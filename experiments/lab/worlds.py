"""Where a cell runs: its cluster in virtual time, with noise and whoever disturbs it."""

from __future__ import annotations

from experiments.lab.cells import Cell
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import Problem, WorkerSpec
from rex_ray.scenario import (
    Episode,
    NoiseModel,
    StepTimeShape,
    WorkerTimeline,
    load_profile,
    parse_cluster,
    random_episodes,
)
from rex_ray.scenario.episodes import rotating_episodes
from rex_ray.sim import Scenario
from rex_ray.sim.limits import network_model
from rex_ray.sim.oracle import largest_batch

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
    episodes = _episodes(cell, len(devices), num_steps)
    shape = _shape(cell, len(devices))
    caps = [profile.max_local_batch_size for profile in profiles]
    problem = Problem(
        workers=tuple(
            WorkerSpec(rank=rank, device=device, max_local_batch_size=cap)
            for rank, (device, cap) in enumerate(zip(devices, caps, strict=True))
        ),
        global_batch_size=cell.global_batch_size,
        max_global_batch_size=largest_batch(cell.global_batch_size, dataset_size, sum(caps)),
        dataset_size=dataset_size,
    )
    lines = tuple(
        WorkerTimeline(
            profile=profile, rank=rank, seed=cell.seed, noise=_NOISE[cell.noise](), episodes=episodes, shape=shape
        )
        for rank, profile in enumerate(profiles)
    )
    return Scenario(problem=problem, timelines=lines, network=network_model(cell.workload, cell.network))


def _episodes(cell: Cell, num_workers: int, num_steps: int) -> tuple[Episode, ...]:
    kind, _, argument = cell.disturbance.partition(":")
    match kind:
        case "none":
            return ()
        case "random":
            rate = float(argument)
            return random_episodes(
                num_workers=num_workers, num_steps=num_steps, per_1000_worker_steps=rate, seed=cell.seed
            )
        case "lbb":
            return rotating_episodes(num_workers=num_workers, num_steps=num_steps)
        case _:
            raise ConfigError(f"disturbance {cell.disturbance!r} is none of none, random:RATE, lbb")


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

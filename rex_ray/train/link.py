"""A worker's connection to the control actor."""

from __future__ import annotations

from typing import Any

from ray.util.queue import Queue

from rex_ray.hosting.carried_link import CarriedLink
from rex_ray.train.telemetry import RayTransport

__all__ = ["RayLink"]


class RayLink(CarriedLink):
    """One rank's connection to the controller, over Ray.

    Args:
        control: handle of the control actor.
        queue: the run's telemetry queue.
        rank: this worker's rank.
        world_size: number of workers.
    """

    def __init__(self, control: Any, queue: Queue, rank: int, world_size: int) -> None:
        super().__init__(RayTransport(queue, control), rank, world_size)

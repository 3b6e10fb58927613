"""What a smooth curve per worker cannot say: tiles, contention between workers, a loader that cannot keep up.

Every planner here fits one curve per worker and splits exactly on it, so it can only be wrong where the truth has
another structure. A shape puts such a structure on top of a device profile, for the simulator and the emulation
alike: what a planner is told by it is the same truth in virtual and in real time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray

__all__ = ["StepTimeShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeShape:
    """How a worker's own time departs from its profile. The default departs nowhere.

    Attributes:
        tile_rows: the device computes whole tiles of so many rows: a step takes as long as one of
            ``ceil(b / tile_rows) * tile_rows`` rows (a kernel's tile and wave quantisation).
        contention: workers of one host share its memory, bus and cores: a worker's computing takes
            ``1 + contention * sum_j b_j / B`` times as long, ``j`` its neighbours and ``B`` the step's rows.
        hosts: host of each rank; empty: all ranks share one.
        loader_rows_per_s: most rows per second that a worker's loader prepares, beside the step before: an own time is
            at least ``b / loader_rows_per_s``, what is missing being the wait for data. None: no limit.
    """

    tile_rows: int = 1
    contention: float = 0.0
    hosts: tuple[int, ...] = ()
    loader_rows_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.tile_rows < 1:
            raise ConfigError(f"tile_rows must be a whole number of at least 1, got {self.tile_rows}")
        if not 0 <= self.contention < math.inf:
            raise ConfigError(f"contention must be zero or more, and finite, got {self.contention}")
        if self.loader_rows_per_s is not None and not 0 < self.loader_rows_per_s < math.inf:
            raise ConfigError(f"loader_rows_per_s must be positive and finite, or None, got {self.loader_rows_per_s}")

    def tiled(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Return the rows that a device computes for each count of rows, any shape."""
        whole: FloatArray = np.ceil(np.asarray(num_rows, dtype=np.float64) / self.tile_rows) * self.tile_rows
        return whole

    def neighbours(self, rank: int, num_workers: int) -> tuple[int, ...]:
        """Return the ranks that share ``rank``'s host, without itself.

        Raises:
            ConfigError: ``hosts`` does not name a host for each of so many workers.
        """
        if self.hosts and len(self.hosts) != num_workers:
            raise ConfigError(f"the shape names {len(self.hosts)} hosts for {num_workers} workers: give one per worker")
        hosts = self.hosts or (0,) * num_workers
        return tuple(other for other in range(num_workers) if other != rank and hosts[other] == hosts[rank])

    def contended(self, rank: int, all_rows: Sequence[int] | None) -> float:
        """Return the factor that the neighbours' rows put on ``rank``'s computing.

        Args:
            rank: who computes.
            all_rows: rows of every rank in this step; may be None where there is no contention.

        Raises:
            ConfigError: they are missing, or ``hosts`` does not fit them.
        """
        if self.contention == 0:
            return 1.0
        if all_rows is None:
            raise ConfigError("contention depends on the rows of every rank: pass all_rows")
        beside = sum(all_rows[other] for other in self.neighbours(rank, len(all_rows)))
        return 1.0 + self.contention * beside / max(sum(all_rows), 1)

    def loader_s(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Return how long the loader needs for each count of rows in seconds, any shape; 0 without a limit."""
        rows = np.asarray(num_rows, dtype=np.float64)
        needed: FloatArray = rows / self.loader_rows_per_s if self.loader_rows_per_s else 0.0 * rows
        return needed

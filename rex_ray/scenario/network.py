"""How long an all-reduce takes among ``n`` workers, and how it joins their own times to a step's.

What a step takes is defined here and nowhere else: the engine and every oracle ask for it.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.core.types import FloatArray
from rex_ray.scenario.profiles import Source, shipped_tables

__all__ = ["MeasuredShapes", "NetworkModel", "Overlap", "load_network", "load_shapes", "measured_networks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How far a reduction runs beside the backward pass, after Cannikin (arXiv:2402.05302).

    Buckets of gradients are reduced while earlier layers still compute. A worker's reduction of all buckets but the
    last can begin once its first bucket is full; the last bucket waits for all of its gradients. So with ``T_u`` the
    last bucket's time and ``T_o`` that of the others, a worker is done at
    ``max(compute_end + T_u, sync_start + T_o + T_u)``, and the step with its slowest worker. Like the paper's, this
    leaves out that the buckets in between wait for the slowest worker, too.

    Attributes:
        first_bucket: part of a worker's computing after which its first bucket is full. A backward pass takes about
            twice as long as the forward one, so .5 is a quarter of the way back (an assumption).
        last_bucket: part of the reduction that the last bucket takes. ResNet-50's 97 MB are four of PyTorch's 25 MB
            buckets.
    """

    first_bucket: float = 0.5
    last_bucket: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.first_bucket <= 1 and 0 <= self.last_bucket <= 1):
            raise ConfigError(f"an overlap's buckets are parts of a whole, between 0 and 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShapes:
    """Seconds of a reduction by shape: so many nodes with so many GPUs each.

    Attributes:
        num_nodes: measured counts of nodes, increasing from 1.
        gpus_per_node: measured counts of GPUs per node, increasing.
        reduce_s: seconds as published, a row per count of GPUs, a column per count of nodes.
        source: where they come from.
    """

    num_nodes: tuple[int, ...]
    gpus_per_node: tuple[int, ...]
    reduce_s: tuple[tuple[float, ...], ...]
    source: Source

    def all_reduce_s(self, num_workers: int, gpus_per_node: int) -> float:
        """Return the seconds among so many workers on nodes that are filled up one after the other.

        Published times are made non-decreasing in nodes (isotonic regression). Between shapes they are linear in the
        logarithms of nodes and of GPUs per node; beyond the most nodes they go on as between the last two, and beyond
        the most GPUs per node they stay. Where a node is filled in part, fewer GPUs per node would often make more
        workers quicker, which is the noise of measured shapes: there, too, times are made non-decreasing in workers,
        and whole nodes keep theirs.
        """
        return _level_s(self, num_workers, gpus_per_node) if num_workers > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """The reduction's time, ``base_s + per_worker_s (n - 2)`` seconds for two workers or more, nothing for one.

    Without an overlap the whole of it is counted after the last gradient, so it adds the same time to every split and
    never favours one. With one it still favours none: a worker that computes longer is done later.

    Attributes:
        base_s: seconds between two workers.
        per_worker_s: further seconds per further worker.
        shapes: measured times that take the straight line's place.
        gpus_per_node: workers on each node, for the shapes.
        overlap: how far the reduction runs beside the backward pass; None: not at all.
    """

    base_s: float = 0.0
    per_worker_s: float = 0.0
    shapes: MeasuredShapes | None = None
    gpus_per_node: int = 1
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node must be at least 1, got {self.gpus_per_node}")

    def all_reduce_s(self, num_workers: int) -> float:
        """Return the seconds that one reduction of the gradient takes."""
        if self.shapes is not None:
            return self.shapes.all_reduce_s(num_workers, self.gpus_per_node)
        return 0.0 if num_workers < 2 else self.base_s + self.per_worker_s * (num_workers - 2)

    def step_s(self, data_s: npt.ArrayLike, compute_s: npt.ArrayLike) -> FloatArray:
        """Return the duration of each step, shape ``[...]``.

        Args:
            data_s: every worker's wait for data in seconds, shape ``[..., n]``.
            compute_s: its computing after that, same shape.
        """
        waits, computes = np.asarray(data_s, dtype=np.float64), np.asarray(compute_s, dtype=np.float64)
        num_workers = computes.shape[-1]
        ready_s = self._ready_s(waits + computes, computes, num_workers)
        result: FloatArray = ready_s.max(axis=-1) + self._last_s(num_workers)
        return result

    def step_of_slowest_s(self, slowest_s: FloatArray, num_workers: int) -> FloatArray:
        """Return the duration of steps whose slowest worker computes so long and waits for no data, same shape."""
        return self._ready_s(slowest_s, slowest_s, num_workers) + self._last_s(num_workers)

    def _ready_s(self, own_s: FloatArray, compute_s: FloatArray, num_workers: int) -> FloatArray:
        """Return when each worker is ready for the part of the reduction that nothing hides."""
        if self.overlap is None:
            return own_s
        first_full_s = own_s - (1.0 - self.overlap.first_bucket) * compute_s
        others_s = self.all_reduce_s(num_workers) - self._last_s(num_workers)
        result: FloatArray = np.maximum(own_s, first_full_s + others_s)
        return result

    def _last_s(self, num_workers: int) -> float:
        hidden_by_none = 1.0 if self.overlap is None else self.overlap.last_bucket
        return hidden_by_none * self.all_reduce_s(num_workers)


@lru_cache(maxsize=1024)
def _level_s(shapes: MeasuredShapes, num_workers: int, gpus_per_node: int) -> float:
    """Return the most seconds of as many workers or fewer from the last whole nodes on, never above the next ones'."""
    nodes = math.ceil(num_workers / gpus_per_node)

    def shape_s(workers: int) -> float:
        hosts = math.ceil(workers / gpus_per_node)
        return _interpolated(shapes, math.log2(hosts), math.log2(workers / hosts))

    fewer = range(max(2, (nodes - 1) * gpus_per_node), num_workers + 1)
    return min(max(map(shape_s, fewer)), shape_s(nodes * gpus_per_node))


@lru_cache(maxsize=1024)
def _interpolated(shapes: MeasuredShapes, log_nodes: float, log_gpus: float) -> float:
    nodes, gpus = np.log2(shapes.num_nodes), np.log2(shapes.gpus_per_node)
    by_gpus = []
    for measured in shapes.reduce_s:
        level = isotonic_regression(np.asarray(measured, dtype=np.float64)).x
        slope = (level[-1] - level[-2]) / (nodes[-1] - nodes[-2])
        beyond = slope * max(log_nodes - nodes[-1], 0.0)
        by_gpus.append(float(np.interp(log_nodes, nodes, level)) + beyond)
    return float(np.interp(log_gpus, gpus, by_gpus))


def load_network(workload: str, device: str = "T4") -> NetworkModel:
    """Return the model fitted to a public cluster of one kind of device; a mixed cluster runs at its slowest link.

    Raises:
        ConfigError: no such cluster was measured; names those that were.
    """
    for row in shipped_tables()["networks"]:
        if (row["device"], row["workload"]) == (device, workload):
            return NetworkModel(base_s=row["base_s"], per_worker_s=row["per_worker_s"])
    known = [f"{row['workload']} on {row['device']}" for row in shipped_tables()["networks"]]
    name = f"{workload} on {device}"
    raise ConfigError(f"no measured all-reduce times for {name!r}{nearest_name_hint(name, known)}")


def load_shapes(workload: str, device: str = "T4") -> MeasuredShapes:
    """Return the reduction's times by shape on a public cluster of one kind of device.

    Raises:
        ConfigError: no such cluster was measured by shape; names those that were.
    """
    known = _shapes()
    if (device, workload) not in known:
        names = [f"{kind} on {host}" for host, kind in known]
        name = f"{workload} on {device}"
        raise ConfigError(f"no all-reduce times by shape for {name!r}{nearest_name_hint(name, names)}")
    return known[device, workload]


def measured_networks() -> tuple[tuple[str, str], ...]:
    """Return every (device, workload) whose all-reduce was measured."""
    return tuple((row["device"], row["workload"]) for row in shipped_tables()["networks"])


@cache
def _shapes() -> dict[tuple[str, str], MeasuredShapes]:
    text = resources.files("rex_ray.scenario").joinpath("network.toml").read_text(encoding="utf-8")
    return {(row["device"], row["workload"]): _table(row) for row in tomllib.loads(text)["shapes"]}


def _table(row: dict[str, Any]) -> MeasuredShapes:
    return MeasuredShapes(
        num_nodes=tuple(row["num_nodes"]),
        gpus_per_node=tuple(row["gpus_per_node"]),
        reduce_s=tuple(map(tuple, row["reduce_s"])),
        source=Source(**row["source"]),
    )

"""How far a step brings training: gradient noise scales over a training run, as a public source measured them.

Times alone say how fast rows go by. What they are worth depends on the noise scale ``phi``: a step of ``B`` rows is
worth ``B (phi + M0) / (phi + B)`` rows at the reference batch ``M0`` (McCandlish et al. 2018, arXiv:1812.06162;
AdaScale, arXiv:2007.05105; Pollux, OSDI'21). Progress is counted in such *reference rows*.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.core.types import FloatArray, read_only
from rex_ray.scenario.profiles import Source, workload_names

__all__ = ["LearningCurve", "learning_names", "load_learning"]

_INTERVALS = 400  # of progress, for integrals: halving them moves no epoch count by more than 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearningCurve:
    """One workload's way to its target.

    Attributes:
        workload: e.g. ``"resnet50"``.
        target: the validation metric that ends training, in words.
        dataset_size: rows per epoch.
        reference_batch_size: ``M0`` of the source, in rows.
        progress_rows: reference rows made at the knots, from 0 to the target, shape ``[k]``.
        noise_scale: ``phi`` in rows at the knots, positive, shape ``[k]``.
        measured_batch_sizes: global batches that the source trained at.
        measured_epochs: epochs to the target that it needed at each.
        source: where the figures come from.
    """

    workload: str
    target: str
    dataset_size: int
    reference_batch_size: int
    progress_rows: FloatArray
    noise_scale: FloatArray
    measured_batch_sizes: tuple[int, ...]
    measured_epochs: tuple[float, ...]
    source: Source

    @property
    def target_rows(self) -> float:
        """Reference rows to the target: the rows that the reference batch needs."""
        return float(self.progress_rows[-1])

    def noise_scale_at(self, progress_rows: npt.ArrayLike) -> FloatArray:
        """Return ``phi`` after so much progress (any shape): log phi is linear between knots, constant beyond."""
        at = np.asarray(progress_rows, dtype=np.float64)
        result: FloatArray = np.exp(np.interp(at, self.progress_rows, np.log(self.noise_scale)))
        return result

    def efficiency(self, global_batch_size: npt.ArrayLike, noise_scale: npt.ArrayLike) -> FloatArray:
        """Return what a row of a batch is worth in reference rows, ``(phi + M0) / (phi + B)``; broadcasts."""
        phi = np.asarray(noise_scale, dtype=np.float64)
        result: FloatArray = (phi + self.reference_batch_size) / (phi + np.asarray(global_batch_size))
        return result

    def intervals(self) -> tuple[FloatArray, FloatArray]:
        """Return the way to the target in equal parts: reference rows of each, and ``phi`` at its middle."""
        edges = np.linspace(0.0, self.target_rows, _INTERVALS + 1)
        return np.diff(edges), self.noise_scale_at((edges[1:] + edges[:-1]) / 2)

    def epochs_to_target(self, global_batch_size: int) -> float:
        """Return the epochs that a fixed global batch needs, by efficiency alone."""
        rows, phi = self.intervals()
        return float(np.sum(rows / self.efficiency(global_batch_size, phi))) / self.dataset_size


def load_learning(workload: str) -> LearningCurve:
    """Return a workload's curve.

    Raises:
        ConfigError: unknown workload, or one whose noise scale no source measured; names the nearest.
    """
    known = _curves()
    if workload in known:
        return known[workload]
    if workload in workload_names():
        raise ConfigError(f"no public source measured the noise scale of {workload!r} (measured: {', '.join(known)})")
    raise ConfigError(f"unknown workload {workload!r}{nearest_name_hint(workload, known)}")


def learning_names() -> tuple[str, ...]:
    """Return the workloads that have a curve."""
    return tuple(_curves())


@cache
def _curves() -> dict[str, LearningCurve]:
    text = resources.files("rex_ray.scenario").joinpath("learning.toml").read_text(encoding="utf-8")
    return {row["workload"]: _curve(row) for row in tomllib.loads(text)["learning"]}


def _curve(row: dict[str, Any]) -> LearningCurve:
    return LearningCurve(
        workload=row["workload"],
        target=row["target"],
        dataset_size=row["dataset_size"],
        reference_batch_size=row["reference_batch_size"],
        progress_rows=read_only(np.array(row["progress_epochs"]) * row["dataset_size"], np.float64),
        noise_scale=read_only(row["noise_scale"], np.float64),
        measured_batch_sizes=tuple(row["measured_batch_sizes"]),
        measured_epochs=tuple(row["measured_epochs"]),
        source=Source(**row["source"]),
    )

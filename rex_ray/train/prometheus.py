"""Metrics for Prometheus, by Ray: ``rexray_*``, which Ray exports on the actor's node as ``ray_rexray_*``.

One process emits them, the control actor, at most once a second: workers pay nothing, and a rank is a tag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ray.util.metrics import Gauge

from rex_ray.watch.seams import Progress

__all__ = ["METRICS", "Exporter"]

_RUN: Final = ("run",)
_RANK: Final = ("run", "rank", "device")

METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "rexray_own_seconds": ("A rank's own time of a step: data and compute, without the wait for others.", _RANK),
    "rexray_local_batch_size": ("Rows of a rank's share of a step.", _RANK),
    "rexray_share": ("A rank's part of the global batch, 0 to 1.", _RANK),
    "rexray_step_seconds": ("Wall time of a step, the median of the newest.", _RUN),
    "rexray_rows_per_second": ("Rows per second of all ranks, over the newest steps.", _RUN),
    "rexray_step": ("Newest complete step.", _RUN),
    "rexray_global_batch_size": ("Rows per optimizer step.", _RUN),
    "rexray_imbalance": ("Longest own time over the mean, less 1.", _RUN),
    "rexray_noise_scale": ("Gradient noise scale in rows.", _RUN),
    "rexray_lr_factor": ("What the global batch multiplies the learning rate by.", _RUN),
    "rexray_learning_rate": ("The learning rate that updates use, that factor included.", _RUN),
    "rexray_left_seconds": ("Estimated time to the end of the last epoch.", _RUN),
    "rexray_changes": ("Allocations that took effect after the first of a group.", _RUN),
    "rexray_lost_ranks": ("Ranks lost so far.", _RUN),
    "rexray_incidents": ("Things that went wrong on a rank and were dealt with so far.", _RUN),
    "rexray_controller_fault": ("1 where nothing is decided any more, else 0.", _RUN),
}
"""What is emitted: a description, and its tags. Counts are gauges: they are the run's own, and outlive the process."""


class Exporter:
    """Sets a run's gauges.

    What is not known, or no longer there (a rank after a resize, everything after the run), is set to NaN, which
    draws no line: Ray's metrics cannot be taken back.

    Args:
        run: name of the run, the tag of all its metrics.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {
            name: Gauge(name, description=description, tag_keys=tags) for name, (description, tags) in METRICS.items()
        }
        self._ranks: set[tuple[int, str]] = set()

    def export(self, progress: Progress) -> None:
        """Show where the run stands."""
        rate = progress.learning_rate
        figures = {
            "rexray_step_seconds": progress.step_s,
            "rexray_rows_per_second": progress.rows_per_s,
            "rexray_step": progress.step,
            "rexray_global_batch_size": progress.global_batch_size,
            "rexray_imbalance": progress.imbalance,
            "rexray_noise_scale": progress.noise_scale,
            "rexray_lr_factor": progress.lr_factor,
            "rexray_learning_rate": None if rate is None else rate * progress.lr_factor,
            "rexray_left_seconds": progress.left_s,
            "rexray_changes": progress.num_changes,
            "rexray_lost_ranks": progress.num_lost,
            "rexray_incidents": progress.num_incidents,
            "rexray_controller_fault": float(progress.fault is not None),
        }
        for name, value in figures.items():
            self._set(name, value, {})
        ranks = {(worker.rank, worker.device) for worker in progress.workers}
        for worker in progress.workers:
            share = worker.local_batch_size / max(progress.global_batch_size, 1)
            self._set_rank(worker.rank, worker.device, (worker.own_s, worker.local_batch_size, share))
        self._forget(self._ranks - ranks)
        self._ranks = ranks

    def end(self) -> None:
        """Leave nothing standing that is no longer so."""
        self._forget(self._ranks)
        self._ranks = set()
        for name, (_, tags) in METRICS.items():
            if tags == _RUN:
                self._set(name, math.nan, {})

    def _forget(self, ranks: set[tuple[int, str]]) -> None:
        for rank, device in ranks:
            self._set_rank(rank, device, (math.nan, math.nan, math.nan))

    def _set_rank(self, rank: int, device: str, figures: tuple[float, float, float]) -> None:
        tags = {"rank": str(rank), "device": device}
        names = ("rexray_own_seconds", "rexray_local_batch_size", "rexray_share")
        for name, value in zip(names, figures, strict=True):
            self._set(name, value, tags)

    def _set(self, name: str, value: float | None, tags: Mapping[str, str]) -> None:
        self._gauges[name].set(math.nan if value is None else value, tags={"run": self._run, **tags})

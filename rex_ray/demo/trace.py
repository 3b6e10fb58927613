"""A run as arrays, from the events of its journal alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rex_ray.control.events import Event, GroupStarted, MetricReported, StepObserved
from rex_ray.core.types import BoolArray, FloatArray, IntArray, StepFlag

__all__ = ["MetricPoint", "RunTrace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """Metrics that the loop reported, and when."""

    elapsed_s: float
    epoch: int
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunTrace:
    """The steps of one run in order, and the metrics beside them.

    Attributes:
        devices: kind of device per rank.
        steps: step number, shape ``[k]``.
        versions: allocation version per step, shape ``[k]``.
        num_rows: real rows, shape ``[k, n]``.
        own_s: data + compute, shape ``[k, n]``.
        step_s: wall time of the step, shape ``[k]``, the mean over ranks: a synchronous step is common to all, what
            differs is the jitter of its ends.
        partial: whether the step was an epoch's last, smaller batch, shape ``[k]``.
        metrics: in the order of their reports.
    """

    devices: tuple[str, ...]
    steps: IntArray
    versions: IntArray
    num_rows: IntArray
    own_s: FloatArray
    step_s: FloatArray
    partial: BoolArray
    metrics: tuple[MetricPoint, ...]

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> RunTrace:
        """Collect the trace of a run's last worker group.

        Raises:
            ValueError: the events hold no complete step.
        """
        devices: tuple[str, ...] = ()
        observed: list[StepObserved] = []
        metrics: list[MetricPoint] = []
        for event in events:
            match event:
                case GroupStarted(problem=problem):
                    devices = tuple(worker.device for worker in problem.workers)
                    observed = []
                case StepObserved():
                    observed.append(event)
                case MetricReported():
                    metrics.append(
                        MetricPoint(
                            elapsed_s=event.elapsed_us / 1e6,
                            epoch=event.epoch,
                            step=event.step,
                            metrics=event.metrics,
                        )
                    )
                case _:
                    pass
        if not observed:
            raise ValueError("the journal holds no complete step: nothing to summarise")
        return cls(
            devices=devices,
            steps=np.array([o.step for o in observed], dtype=np.int64),
            versions=np.array([o.allocation_version for o in observed], dtype=np.int64),
            num_rows=np.stack([o.num_rows for o in observed]),
            own_s=np.stack([o.own_us for o in observed]) / 1e6,
            step_s=np.stack([o.step_us for o in observed]).mean(axis=1) / 1e6,
            partial=np.array([bool(o.flags & StepFlag.PARTIAL) for o in observed]),
            metrics=tuple(metrics),
        )

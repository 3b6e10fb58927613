"""What a run gained, computed from its journal alone. Pure.

A run is judged against the emulated cluster's own truth: the profiles that its workers were stretched to. Only the
events of the journal go in, so the same figures come out of a run of today and of one read back in a year.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.control.events import Event, GroupStarted, MetricReported, StepObserved
from rex_ray.core.types import FloatArray, IntArray, StepFlag

__all__ = ["MetricPoint", "RunSummary", "RunTrace", "Truth", "summarise"]

NEAR_OPTIMUM = 1.10
"""A split counts as found while its exact step time is within this factor of the optimum's."""


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
    partial: np.ndarray[tuple[int], np.dtype[np.bool_]]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """What the emulated cluster really does, in the run's (scaled) seconds.

    Attributes:
        own_s: exact own time per rank for rows per rank, ``[n] -> [n]``, without noise and episodes.
        all_reduce_s: emulated time of one reduction.
        optimum: the exact min-max split of the global batch.
        peak_rows_per_s: ``sum_i max_b b / t_i(b)``, the rate of the cluster if nobody ever waited.
    """

    own_s: Callable[[Sequence[int]], FloatArray]
    all_reduce_s: float
    optimum: tuple[int, ...]
    peak_rows_per_s: float

    @property
    def optimum_step_s(self) -> float:
        """Step time of the optimum."""
        return float(self.own_s(self.optimum).max()) + self.all_reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One row of the demo's table; every figure is of the whole run unless its name says ``settled``.

    Attributes:
        policy: name of the policy.
        time_to_target_s: time from the start of the first step until the metric first reached the target,
            evaluations and reports included; None if it never did.
        start_up_s: time from the session's opening to the first step: imports, loading data, joining the controller.
        median_step_s: median wall time of a step with a whole global batch.
        settled_median_step_s: the same over the second half of those steps.
        imbalance: median over those steps of ``max_i t_i / mean_i t_i - 1``, ``t_i`` the workers' own times.
        settled_imbalance: the same over the second half.
        rii: share of the cluster's peak rate that went unused,
            ``1 - sum_k B_k / (sum_k T_k * sum_i max_b b / t_i(b))`` over all steps k.
        rii_wait: share of worker time spent not working, ``sum (T_k - t_ik) / (n sum T_k)`` over all steps.
        local_batch_sizes: rows per rank of the last whole global batch.
        reallocations: how often the shares in use changed.
        steps_to_split: first step from which the exact step time of the shares in use stays within 10 % of the
            optimum's until the end; None if it does not at the end.
        optimum_local_batch_sizes: the emulated cluster's exact optimum.
        optimum_step_s: its step time.
        ratio_to_optimum: ``settled_median_step_s / optimum_step_s``; what exceeds 1 is the split, the noise, and all
            that a real step does beside computing.
        emulation_error: median of the slowest worker's own time over its exact value, minus 1: how far the machine
            kept up with the emulation. More than some percent means that the machine was too slow for it.
        rows_seen_exactly_once: whether every epoch's report said that each row was seen once over all workers.
        final_accuracy: the last reported accuracy.
        num_steps: steps in the journal.
        num_epochs: epochs reported.
    """

    policy: str
    time_to_target_s: float | None
    start_up_s: float
    median_step_s: float
    settled_median_step_s: float
    imbalance: float
    settled_imbalance: float
    rii: float
    rii_wait: float
    local_batch_sizes: tuple[int, ...]
    reallocations: int
    steps_to_split: int | None
    optimum_local_batch_sizes: tuple[int, ...]
    optimum_step_s: float
    ratio_to_optimum: float
    emulation_error: float
    rows_seen_exactly_once: bool
    final_accuracy: float | None
    num_steps: int
    num_epochs: int


def summarise(policy: str, trace: RunTrace, truth: Truth, *, target_accuracy: float) -> RunSummary:
    """Judge a run against the cluster's truth.

    Args:
        policy: name for the row.
        trace: what happened.
        truth: what was possible.
        target_accuracy: value of the metric ``accuracy`` that counts as trained.

    Raises:
        ValueError: the trace holds no step with a whole global batch.
    """
    whole = np.flatnonzero(~trace.partial)
    if whole.size == 0:
        raise ValueError("no step with a whole global batch: the data set is smaller than the global batch")
    settled = whole[whole.size // 2 :]
    imbalance = trace.own_s.max(axis=1) / trace.own_s.mean(axis=1) - 1.0
    exact_s = np.stack([truth.own_s(tuple(rows)) for rows in trace.num_rows.tolist()])
    accuracies = [point.metrics["accuracy"] for point in trace.metrics if "accuracy" in point.metrics]
    start_up_s = _start_up_s(trace)
    settled_step_s = float(np.median(trace.step_s[settled]))
    wall_s = float(trace.step_s.sum())
    return RunSummary(
        policy=policy,
        time_to_target_s=_time_to(trace.metrics, target_accuracy, start_up_s),
        start_up_s=start_up_s,
        median_step_s=float(np.median(trace.step_s[whole])),
        settled_median_step_s=settled_step_s,
        imbalance=float(np.median(imbalance[whole])),
        settled_imbalance=float(np.median(imbalance[settled])),
        rii=1.0 - float(trace.num_rows.sum()) / (wall_s * truth.peak_rows_per_s),
        rii_wait=1.0 - float(trace.own_s.sum()) / (len(trace.devices) * wall_s),
        local_batch_sizes=tuple(trace.num_rows[whole[-1]].tolist()),
        reallocations=int(np.count_nonzero(np.diff(trace.versions))),
        steps_to_split=_steps_to_split(trace.steps[whole], exact_s[whole].max(axis=1), truth),
        optimum_local_batch_sizes=truth.optimum,
        optimum_step_s=truth.optimum_step_s,
        ratio_to_optimum=settled_step_s / truth.optimum_step_s,
        emulation_error=float(np.median(trace.own_s[whole].max(axis=1) / exact_s[whole].max(axis=1))) - 1.0,
        rows_seen_exactly_once=_every_row_once(trace.metrics),
        final_accuracy=accuracies[-1] if accuracies else None,
        num_steps=int(trace.steps.size),
        num_epochs=len(accuracies),
    )


def _start_up_s(trace: RunTrace) -> float:
    """What the first report's time leaves beside the steps before it."""
    if not trace.metrics:
        return 0.0
    first = trace.metrics[0]
    return max(first.elapsed_s - float(trace.step_s[trace.steps < first.step].sum()), 0.0)


def _time_to(metrics: Sequence[MetricPoint], target: float, start_up_s: float) -> float | None:
    reached = (point for point in metrics if point.metrics.get("accuracy", -np.inf) >= target)
    return next((point.elapsed_s - start_up_s for point in reached), None)


def _steps_to_split(steps: IntArray, exact_max_s: FloatArray, truth: Truth) -> int | None:
    near = exact_max_s <= NEAR_OPTIMUM * float(truth.own_s(truth.optimum).max())
    if not near[-1]:
        return None
    far = np.flatnonzero(~near)
    return int(steps[far[-1] + 1]) if far.size else int(steps[0])


def _every_row_once(metrics: Sequence[MetricPoint]) -> bool:
    shares = [point.metrics["rows_seen_exactly_once"] for point in metrics if "rows_seen_exactly_once" in point.metrics]
    return bool(shares) and all(share == 1.0 for share in shares)

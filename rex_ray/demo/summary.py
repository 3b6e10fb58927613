"""What a run gained, computed from its journal alone. Pure.

A run is judged against the emulated cluster's own truth: the profiles that its workers were stretched to. Only the
journal goes in, so the same figures come out of a run of today and of one read back in a year.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rex_ray.control.journal import Entry
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.demo.adaptation import BatchChange, SearchOutcome, batch_changes, search_outcome
from rex_ray.demo.reactions import (
    NEAR_OPTIMUM,
    EventOutcome,
    false_reallocations,
    first_reaction_steps,
    judge_events,
)
from rex_ray.demo.script import ScriptedEvent
from rex_ray.demo.trace import MetricPoint, RunTrace
from rex_ray.demo.truth import Truth
from rex_ray.report.reading.build import build_run

__all__ = ["RunSummary", "summarise"]


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
        exact_step_s: exact step time of ``local_batch_sizes``, without noise and slowdowns.
        ratio_to_optimum: median over the second half of a step's time over that of the optimum at that step, for its
            rows and under its slowdowns; what exceeds 1 is the split, the noise, and all that a real step does beside
            computing.
        emulation_error: median of the slowest worker's own time over its exact value, minus 1: how far the machine
            kept up with the emulation. More than some percent means that the machine was too slow for it.
        rows_seen_exactly_once: whether every epoch's report said that each row was seen once over all workers.
        final_accuracy: the last reported accuracy.
        num_steps: steps in the journal.
        num_epochs: epochs reported.
        full_time_s: wall time of all steps, whatever was learnt in them; reports and evaluations are not in it.
        oracle_s: the same for an oracle that knows every curve and the script, and has the best shares of the run's
            own rows at every step; noise-free, see ``Truth.oracle_s``.
        gap_to_oracle_pct: ``100 (full_time_s / oracle_s - 1)``, at the run's own number of rows per step.
        shares_gap_pct: the part of it that is the shares' doing: the same with every step at its exact time, so without
            noise and all that a real step does beside computing.
        first_reaction_steps: slowest first answer to a scripted slowdown of one worker, in steps from its onset to the
            newest step known at the decision; None without such a slowdown, or if one was not answered.
        false_reallocations: switches that the truth does not justify, see ``reactions.false_reallocations``.
        events: what became of each scripted event.
        batch_changes: changes of the global batch.
        searches: what became of searches for better shares.
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
    exact_step_s: float
    ratio_to_optimum: float
    emulation_error: float
    rows_seen_exactly_once: bool
    final_accuracy: float | None
    num_steps: int
    num_epochs: int
    full_time_s: float
    oracle_s: float
    gap_to_oracle_pct: float
    shares_gap_pct: float
    first_reaction_steps: int | None
    false_reallocations: int
    events: tuple[EventOutcome, ...] = ()
    batch_changes: tuple[BatchChange, ...] = ()
    searches: SearchOutcome = field(default_factory=SearchOutcome)


def summarise(
    policy: str,
    entries: Sequence[Entry],
    truth: Truth,
    *,
    target_accuracy: float,
    script: Sequence[ScriptedEvent] = (),
) -> RunSummary:
    """Judge a run against the cluster's truth.

    Args:
        policy: name for the row.
        entries: the run's journal.
        truth: what was possible.
        target_accuracy: value of the metric ``accuracy`` that counts as trained.
        script: what happened to the workers.

    Raises:
        ValueError: the journal holds no step with a whole global batch.
    """
    trace = RunTrace.from_events(entry.event for entry in entries)
    whole = np.flatnonzero(~trace.partial)
    if whole.size == 0:
        raise ValueError("no step with a whole global batch: the data set is smaller than the global batch")
    decisions = build_run("", policy, {}, entries).decisions
    settled = whole[whole.size // 2 :]
    imbalance = trace.own_s.max(axis=1) / trace.own_s.mean(axis=1) - 1.0
    exact_s = _exact_own_s(trace, truth)
    best_s = truth.oracle_s(trace)
    accuracies = [point.metrics["accuracy"] for point in trace.metrics if "accuracy" in point.metrics]
    start_up_s = _start_up_s(trace)
    wall_s, oracle_s = float(trace.step_s.sum()), float(best_s.sum())
    last_rows = tuple(trace.num_rows[whole[-1]].tolist())
    outcomes = judge_events(script, decisions, truth, trace.devices)
    return RunSummary(
        policy=policy,
        time_to_target_s=_time_to(trace.metrics, target_accuracy, start_up_s),
        start_up_s=start_up_s,
        median_step_s=float(np.median(trace.step_s[whole])),
        settled_median_step_s=float(np.median(trace.step_s[settled])),
        imbalance=float(np.median(imbalance[whole])),
        settled_imbalance=float(np.median(imbalance[settled])),
        rii=1.0 - float(trace.num_rows.sum()) / (wall_s * truth.peak_rows_per_s),
        rii_wait=1.0 - float(trace.own_s.sum()) / (len(trace.devices) * wall_s),
        local_batch_sizes=last_rows,
        reallocations=int(np.count_nonzero(np.diff(trace.versions))),
        steps_to_split=_steps_to_split(trace, whole, truth),
        optimum_local_batch_sizes=truth.optimum,
        optimum_step_s=truth.optimum_step_s,
        exact_step_s=truth.step_s(last_rows),
        ratio_to_optimum=float(np.median(trace.step_s[settled] / best_s[settled])),
        emulation_error=float(np.median(trace.own_s[whole].max(axis=1) / exact_s[whole].max(axis=1))) - 1.0,
        rows_seen_exactly_once=_every_row_once(trace.metrics),
        final_accuracy=accuracies[-1] if accuracies else None,
        num_steps=int(trace.steps.size),
        num_epochs=len(accuracies),
        full_time_s=wall_s,
        oracle_s=oracle_s,
        gap_to_oracle_pct=100.0 * (wall_s / oracle_s - 1.0),
        shares_gap_pct=100.0 * (float((exact_s.max(axis=1) + truth.all_reduce_s).sum()) / oracle_s - 1.0),
        first_reaction_steps=first_reaction_steps(outcomes),
        false_reallocations=false_reallocations(decisions, truth),
        events=outcomes,
        batch_changes=batch_changes(decisions),
        searches=search_outcome(entries),
    )


def _exact_own_s(trace: RunTrace, truth: Truth) -> FloatArray:
    """Return what every own time would be without noise, shape ``[k, n]``."""
    pairs = zip(trace.num_rows.tolist(), trace.steps.tolist(), strict=True)
    return np.stack([truth.own_s(rows, truth.slowdowns(step)) for rows, step in pairs])


def _start_up_s(trace: RunTrace) -> float:
    """What the first report's time leaves beside the steps before it."""
    if not trace.metrics:
        return 0.0
    first = trace.metrics[0]
    return max(first.elapsed_s - float(trace.step_s[trace.steps < first.step].sum()), 0.0)


def _time_to(metrics: Sequence[MetricPoint], target: float, start_up_s: float) -> float | None:
    reached = (point for point in metrics if point.metrics.get("accuracy", -np.inf) >= target)
    return next((point.elapsed_s - start_up_s for point in reached), None)


def _steps_to_split(trace: RunTrace, whole: IntArray, truth: Truth) -> int | None:
    """As if nothing were ever slow: shares that answer a slowdown leave the neighbourhood, and come back."""
    ratios = []
    for rows in trace.num_rows[whole].tolist():
        best = truth.best_split(sum(rows))
        ratios.append(float(truth.own_s(rows).max() / truth.own_s(best).max()))
    near = np.array(ratios) <= NEAR_OPTIMUM
    if not near[-1]:
        return None
    far = np.flatnonzero(~near)
    return int(trace.steps[whole[far[-1] + 1 if far.size else 0]])


def _every_row_once(metrics: Sequence[MetricPoint]) -> bool:
    shares = [point.metrics["rows_seen_exactly_once"] for point in metrics if "rows_seen_exactly_once" in point.metrics]
    return bool(shares) and all(share == 1.0 for share in shares)

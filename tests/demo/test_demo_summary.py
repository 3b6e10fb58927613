from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, StepObserved
from rex_ray.core.types import Problem, StepFlag, WorkerSpec
from rex_ray.demo.summary import MetricPoint, RunTrace, Truth, summarise

PER_ROW_S = np.array([0.004, 0.001])
TRUTH = Truth(
    own_s=lambda rows: PER_ROW_S * np.asarray(rows, dtype=np.float64),
    all_reduce_s=0.01,
    optimum=(20, 80),
    peak_rows_per_s=float((1.0 / PER_ROW_S).sum()),
)


def make_trace(splits, *, rest_s=0.01, partial=None, metrics=()) -> RunTrace:
    """A run without noise: own times are the truth's, a step ends ``rest_s`` after the slowest."""
    num_rows = np.array(splits, dtype=np.int64)
    own_s = num_rows * PER_ROW_S
    changed = np.any(np.diff(num_rows, axis=0) != 0, axis=1)
    return RunTrace(
        devices=("T4", "V100"),
        steps=np.arange(len(splits)),
        versions=np.concatenate([[0], np.cumsum(changed)]),
        num_rows=num_rows,
        own_s=own_s,
        step_s=own_s.max(axis=1) + rest_s,
        partial=np.zeros(len(splits), bool) if partial is None else np.array(partial),
        metrics=tuple(metrics),
    )


def test_the_optimum_from_the_first_step_is_what_a_perfect_run_scores():
    summary = summarise("x", make_trace([(20, 80)] * 10), TRUTH, target_accuracy=0.9)
    assert summary.ratio_to_optimum == pytest.approx(1.0)
    assert summary.imbalance == pytest.approx(0.0)
    assert summary.steps_to_split == 0
    assert summary.reallocations == 0
    assert summary.emulation_error == pytest.approx(0.0)
    # Nobody waits but for the reduction: 10 of 90 ms.
    assert summary.rii == pytest.approx(1 / 9)
    assert summary.rii_wait == pytest.approx(1 / 9)


def test_equal_shares_score_their_exact_imbalance_and_rii():
    summary = summarise("x", make_trace([(50, 50)] * 4), TRUTH, target_accuracy=0.9)
    assert summary.imbalance == pytest.approx(200 / 125 - 1)
    assert summary.rii == pytest.approx(1 - 100 / (0.21 * 1250))
    assert summary.rii_wait == pytest.approx(1 - 0.25 / (2 * 0.21))
    assert summary.steps_to_split is None
    assert summary.ratio_to_optimum == pytest.approx(0.21 / 0.09)


def test_steps_to_split_is_the_first_step_of_the_last_stay_near_the_optimum():
    splits = [(50, 50)] * 5 + [(20, 80)] * 3 + [(40, 60)] * 2 + [(21, 79)] * 6
    summary = summarise("x", make_trace(splits), TRUTH, target_accuracy=0.9)
    assert summary.steps_to_split == 10
    assert summary.reallocations == 3
    assert summary.local_batch_sizes == (21, 79)


def test_a_partial_batch_counts_for_rii_only():
    splits = [(20, 80)] * 4 + [(2, 8)]
    whole = summarise("x", make_trace(splits[:4]), TRUTH, target_accuracy=0.9)
    both = summarise("x", make_trace(splits, partial=[False] * 4 + [True]), TRUTH, target_accuracy=0.9)
    assert both.median_step_s == whole.median_step_s
    assert both.local_batch_sizes == (20, 80)
    assert both.rii > whole.rii


def test_median_of_the_whole_run_and_of_its_second_half_differ_when_the_split_came_late():
    summary = summarise("x", make_trace([(50, 50)] * 6 + [(20, 80)] * 6), TRUTH, target_accuracy=0.9)
    assert summary.settled_median_step_s == pytest.approx(0.09)
    assert summary.median_step_s == pytest.approx((0.09 + 0.21) / 2)
    assert summary.settled_imbalance == pytest.approx(0.0)


def point(elapsed_s: float, step: int = 0, **metrics: float) -> MetricPoint:
    return MetricPoint(elapsed_s=elapsed_s, epoch=0, step=step, metrics=metrics)


def test_time_to_target_is_the_first_report_that_reaches_it_and_none_is_none():
    accuracies = {5.18: 0.5, 6.0: 0.9, 7.0: 0.8, 8.0: 0.95}
    reports = [point(seconds, step=2, accuracy=accuracy) for seconds, accuracy in accuracies.items()]
    trace = make_trace([(20, 80)] * 4, metrics=reports)
    # Two steps of 90 ms came before the first report: the 5 s before them were no training.
    assert summarise("x", trace, TRUTH, target_accuracy=0.9).start_up_s == pytest.approx(5.0)
    assert summarise("x", trace, TRUTH, target_accuracy=0.9).time_to_target_s == pytest.approx(1.0)
    assert summarise("x", trace, TRUTH, target_accuracy=0.99).time_to_target_s is None
    assert summarise("x", trace, TRUTH, target_accuracy=0.9).final_accuracy == 0.95


@pytest.mark.parametrize(("shares", "expected"), [([1.0, 1.0], True), ([1.0, 0.999], False), ([], False)])
def test_rows_seen_exactly_once_needs_every_epoch_to_say_so_and_one_to_say_it(shares, expected):
    reports = [point(1.0, rows_seen_exactly_once=share) for share in shares]
    summary = summarise("x", make_trace([(20, 80)], metrics=reports), TRUTH, target_accuracy=0.9)
    assert summary.rows_seen_exactly_once is expected


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_no_split_beats_the_optimum_and_every_share_of_waste_is_a_share(first_shares):
    trace = make_trace([(b, 100 - b) for b in first_shares])
    summary = summarise("x", trace, TRUTH, target_accuracy=0.9)
    assert summary.ratio_to_optimum >= 1.0 - 1e-12
    assert 0.0 <= summary.rii <= 1.0
    assert 0.0 <= summary.rii_wait <= 1.0
    assert 0.0 <= summary.imbalance <= 1.0


def step(number: int, rows=(20, 80), flags=StepFlag.NONE) -> StepObserved:
    return StepObserved(
        generation="g",
        epoch=0,
        step=number,
        allocation_version=1,
        num_rows=np.array(rows),
        data_us=np.array([1000, 2000]),
        compute_us=np.array([80_000, 70_000]),
        sync_us=np.array([0, 0]),
        step_us=np.array([90_000, 92_000]),
        flags=flags,
    )


def started() -> GroupStarted:
    workers = (WorkerSpec(rank=0, device="T4"), WorkerSpec(rank=1, device="V100"))
    problem = Problem(workers=workers, global_batch_size=100, max_global_batch_size=800, dataset_size=1000)
    return GroupStarted(generation="g", problem=problem)


def test_trace_holds_what_the_events_say_of_the_last_group():
    metric = MetricReported(generation="g", epoch=3, step=2, elapsed_us=1_500_000, metrics={"accuracy": 0.5})
    events = [
        started(),
        step(0),
        started(),
        step(1),
        step(2, flags=StepFlag.PARTIAL),
        metric,
        RunEnded(reason="finished"),
    ]
    trace = RunTrace.from_events(events)
    assert trace.devices == ("T4", "V100")
    assert trace.steps.tolist() == [1, 2]
    assert trace.partial.tolist() == [False, True]
    assert trace.own_s.tolist() == [[0.081, 0.072]] * 2
    assert trace.step_s.tolist() == [0.091] * 2
    assert trace.metrics == (MetricPoint(elapsed_s=1.5, epoch=3, step=2, metrics={"accuracy": 0.5}),)


def test_a_journal_without_a_whole_step_is_refused():
    with pytest.raises(ValueError, match="no complete step"):
        RunTrace.from_events([started()])
    trace = dataclasses.replace(make_trace([(2, 8)]), partial=np.array([True]))
    with pytest.raises(ValueError, match="smaller than the global batch"):
        summarise("x", trace, TRUTH, target_accuracy=0.9)

"""What a run is said to have gained follows from its journal by definitions that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, StepObserved
from rex_ray.control.journal import Entry
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.types import Problem, StepFlag, WorkerSpec, read_only
from rex_ray.demo.summary import RunSummary, summarise
from rex_ray.demo.trace import MetricPoint, RunTrace
from rex_ray.demo.truth import Truth
from rex_ray.scenario import DeviceProfile, Episode, Source, WorkerTimeline

PER_ROW_S = np.array([0.004, 0.001])


def linear_profile(device: str, per_row_s: float) -> DeviceProfile:
    """A device whose time is all in its rows."""
    curve = StepTimeCurve(
        knot_rows=read_only([0.0, 1000.0], np.float64),
        knot_s=read_only([0.0, 1000.0 * per_row_s], np.float64),
        max_trusted_rows=1000,
    )
    source = Source(repo="", commit="", path="")
    return DeviceProfile(
        device=device,
        workload="w",
        local_batch_sizes=(1000,),
        step_time_s=(1000.0 * per_row_s,),
        max_local_batch_size=1000,
        source=source,
        curve=curve,
    )


def make_truth(episodes: tuple[Episode, ...] = ()) -> Truth:
    profiles = (linear_profile("T4", 0.004), linear_profile("V100", 0.001))
    return Truth(
        timelines=tuple(
            WorkerTimeline(profile=profile, rank=rank, seed=0, episodes=episodes)
            for rank, profile in enumerate(profiles)
        ),
        all_reduce_s=0.01,
        global_batch_size=100,
    )


TRUTH = make_truth()


def make_entries(splits, *, rest_s=0.01, partial=None, metrics=()) -> list[Entry]:
    """A run without noise: own times are the truth's, a step ends ``rest_s`` after the slowest."""
    events: list = [started()]
    version, before = 0, None
    for number, rows in enumerate(splits):
        version += rows != before
        before = rows
        own_us = np.round(1e6 * PER_ROW_S * np.array(rows)).astype(np.int64)
        flags = StepFlag.PARTIAL if partial is not None and partial[number] else StepFlag.NONE
        events.append(
            StepObserved(
                generation="g",
                epoch=0,
                step=number,
                allocation_version=version,
                num_rows=np.array(rows),
                data_us=0 * own_us,
                compute_us=own_us,
                sync_us=0 * own_us,
                step_us=0 * own_us + int(own_us.max()) + round(1e6 * rest_s),
                flags=flags,
            )
        )
    events += [
        MetricReported(
            generation="g",
            epoch=point.epoch,
            step=point.step,
            elapsed_us=round(1e6 * point.elapsed_s),
            metrics=dict(point.metrics),
        )
        for point in metrics
    ]
    return [Entry(number=k, event=event, commands=(), notes=()) for k, event in enumerate(events)]


def summary_of(splits, *, target_accuracy=0.9, truth=TRUTH, **options) -> RunSummary:
    return summarise("x", make_entries(splits, **options), truth, target_accuracy=target_accuracy)


def test_the_optimum_from_the_first_step_is_what_a_perfect_run_scores():
    summary = summary_of([(20, 80)] * 10)
    assert summary.ratio_to_optimum == pytest.approx(1.0)
    assert summary.imbalance == pytest.approx(0.0)
    assert summary.steps_to_split == 0
    assert summary.reallocations == 0
    assert summary.emulation_error == pytest.approx(0.0)
    # Nobody waits but for the reduction: 10 of 90 ms.
    assert summary.rii == pytest.approx(1 / 9)
    assert summary.rii_wait == pytest.approx(1 / 9)


def test_equal_shares_score_their_exact_imbalance_and_rii():
    summary = summary_of([(50, 50)] * 4)
    assert summary.imbalance == pytest.approx(200 / 125 - 1)
    assert summary.rii == pytest.approx(1 - 100 / (0.21 * 1250))
    assert summary.rii_wait == pytest.approx(1 - 0.25 / (2 * 0.21))
    assert summary.steps_to_split is None
    assert summary.ratio_to_optimum == pytest.approx(0.21 / 0.09)


def test_steps_to_split_is_the_first_step_of_the_last_stay_near_the_optimum():
    splits = [(50, 50)] * 5 + [(20, 80)] * 3 + [(40, 60)] * 2 + [(21, 79)] * 6
    summary = summary_of(splits)
    assert summary.steps_to_split == 10
    assert summary.reallocations == 3
    assert summary.local_batch_sizes == (21, 79)


def test_a_partial_batch_counts_for_rii_only():
    splits = [(20, 80)] * 4 + [(2, 8)]
    whole = summary_of(splits[:4])
    both = summary_of(splits, partial=[False] * 4 + [True])
    assert both.median_step_s == whole.median_step_s
    assert both.local_batch_sizes == (20, 80)
    assert both.rii > whole.rii


def test_median_of_the_whole_run_and_of_its_second_half_differ_when_the_split_came_late():
    summary = summary_of([(50, 50)] * 6 + [(20, 80)] * 6)
    assert summary.settled_median_step_s == pytest.approx(0.09)
    assert summary.median_step_s == pytest.approx((0.09 + 0.21) / 2)
    assert summary.settled_imbalance == pytest.approx(0.0)


def point(elapsed_s: float, step: int = 0, **metrics: float) -> MetricPoint:
    return MetricPoint(elapsed_s=elapsed_s, epoch=0, step=step, metrics=metrics)


def test_time_to_target_is_the_first_report_that_reaches_it_and_none_is_none():
    accuracies = {5.18: 0.5, 6.0: 0.9, 7.0: 0.8, 8.0: 0.95}
    reports = [point(seconds, step=2, accuracy=accuracy) for seconds, accuracy in accuracies.items()]
    run = summary_of([(20, 80)] * 4, metrics=reports)
    # Two steps of 90 ms came before the first report: the 5 s before them were no training.
    assert run.start_up_s == pytest.approx(5.0)
    assert run.time_to_target_s == pytest.approx(1.0)
    assert run.final_accuracy == 0.95
    assert summary_of([(20, 80)] * 4, metrics=reports, target_accuracy=0.99).time_to_target_s is None


@pytest.mark.parametrize(("shares", "expected"), [([1.0, 1.0], True), ([1.0, 0.999], False), ([], False)])
def test_rows_seen_exactly_once_needs_every_epoch_to_say_so_and_one_to_say_it(shares, expected):
    reports = [point(1.0, rows_seen_exactly_once=share) for share in shares]
    summary = summary_of([(20, 80)], metrics=reports)
    assert summary.rows_seen_exactly_once is expected


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_no_split_beats_the_optimum_and_every_share_of_waste_is_a_share(first_shares):
    summary = summary_of([(b, 100 - b) for b in first_shares])
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
    with pytest.raises(ValueError, match="smaller than the global batch"):
        summary_of([(2, 8)], partial=[True])

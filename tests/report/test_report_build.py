"""A report says what the journal says: every step, every decision once, with what became of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rex_ray.control.commands import CancelSearch, Command, StartSearch, TellTrial
from rex_ray.control.events import (
    Event,
    GroupStarted,
    MetricReported,
    RunEnded,
    SearchFailed,
    SearchFinished,
    StepObserved,
    TrialProposed,
    WorkerLost,
)
from rex_ray.control.journal import Entry
from rex_ray.control.notes import Applied, Decided, Dropped, Found, Measured, Note, Refused, Withdrawn
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Problem, StepFlag, WorkerSpec
from rex_ray.policies.base import Finding, Proposal
from rex_ray.report.reading.build import build_run
from rex_ray.report.reading.noise import noise_series
from rex_ray.report.reading.schema import RunData
from rex_ray.scenario import load_profile


def group(generation: str, devices: tuple[str, ...], step: int = 0) -> GroupStarted:
    workers = tuple(WorkerSpec(rank=rank, device=device, node=f"node-{rank}") for rank, device in enumerate(devices))
    problem = Problem(workers=workers, global_batch_size=32, max_global_batch_size=256, dataset_size=1000)
    return GroupStarted(generation=generation, problem=problem, step=step)


def step(
    generation: str, number: int, version: int, rows: tuple[int, ...], flags: StepFlag = StepFlag.NONE
) -> StepObserved:
    times = np.array(rows) * 1000
    return StepObserved(
        generation=generation,
        epoch=0,
        step=number,
        allocation_version=version,
        num_rows=np.array(rows),
        data_us=times * 0 + 500,
        compute_us=times,
        sync_us=times.max() - times,
        step_us=times * 0 + int(times.max()) + 1500,
        flags=flags,
    )


def build(*entries: tuple[Event, tuple[Note, ...]]) -> RunData:
    journal = [
        Entry(number=number, event=event, commands=(), notes=notes) for number, (event, notes) in enumerate(entries)
    ]
    return build_run("run", "rex", {"seed": "0"}, journal)


FIRST = Decided(step=-1, kind="first", reason="equal", version=1, proposal=Proposal(local_batch_sizes=(16, 16)))
BETTER = Decided(
    step=4,
    kind="reallocate",
    reason="faster",
    version=2,
    proposal=Proposal(local_batch_sizes=(8, 24)),
    predicted_gain=0.3,
)


def test_steps_become_arrays_in_seconds_with_what_is_evidence_marked() -> None:
    run = build(
        (group("g", ("T4", "V100")), ()),
        (step("g", 0, 1, (16, 16), StepFlag.WARM_UP), ()),
        (step("g", 1, 1, (16, 16)), ()),
        (step("g", 2, 1, (3, 3), StepFlag.PARTIAL), ()),
        (step("stale", 9, 1, (3, 3)), ()),
    )
    (only,) = run.groups
    assert only.devices == ("T4", "V100")
    assert only.nodes == ("node-0", "node-1")
    assert only.steps.tolist() == [0, 1, 2]
    assert only.steady.tolist() == [False, True, False]
    assert only.partial.tolist() == [False, False, True]
    assert np.allclose(only.own_s[1], 0.0165)
    assert np.allclose(only.step_s[1], 0.0175)


def test_a_decision_gathers_what_became_of_it() -> None:
    run = build(
        (group("g", ("T4", "V100")), (FIRST,)),
        (step("g", 0, 1, (16, 16)), (Applied(step=0, version=1, local_batch_sizes=(16, 16), lag_steps=1),)),
        (step("g", 4, 1, (16, 16)), (BETTER,)),
        (step("g", 7, 2, (8, 24)), (Applied(step=7, version=2, local_batch_sizes=(8, 24), lag_steps=3),)),
        (
            step("g", 30, 2, (8, 24)),
            (Measured(step=30, version=2, before_us=16000, after_us=12000, gain=0.25, predicted_gain=0.3),),
        ),
    )
    first, better = run.decisions
    assert (first.number, first.before, first.after, first.applied_at_step) == (1, (), (16, 16), 0)
    assert (better.before, better.after, better.decided_at_step, better.applied_at_step) == ((16, 16), (8, 24), 4, 7)
    assert (better.predicted_gain, better.measured_gain) == (0.3, 0.25)


def test_a_decision_that_never_took_effect_says_so_and_so_does_its_withdrawal() -> None:
    withdrawn = Withdrawn(step=90, version=2, by_version=3, waited_us=30_000_000)
    run = build((group("g", ("T4", "V100")), (FIRST,)), (step("g", 4, 1, (16, 16)), (BETTER, withdrawn)))
    assert run.decisions[1].applied_at_step is None
    assert any("version 2 withdrawn" in notice and "30 s" in notice for notice in run.notices)


def test_a_resize_starts_another_group_and_a_notice() -> None:
    run = build(
        (group("a", ("T4", "V100")), ()),
        (step("a", 0, 1, (16, 16)), ()),
        (WorkerLost(generation="a", rank=1, reason="node died"), ()),
        (group("b", ("T4",), step=1), ()),
        (step("b", 1, 2, (32,)), ()),
        (RunEnded(reason="finished"), ()),
    )
    assert [g.num_workers for g in run.groups] == [2, 1]
    assert run.outcome == "finished"
    assert run.notices == ("rank 1 was lost: node died", "step 1: a new group of 1 workers started")


def test_a_group_without_a_complete_step_is_left_out_and_the_run_is_unfinished() -> None:
    run = build((group("g", ("T4",)), ()))
    assert run.groups == ()
    assert run.outcome == "unfinished"


def test_metrics_keep_their_times_and_other_notes_become_notices() -> None:
    metric = MetricReported(generation="g", epoch=2, step=40, elapsed_us=2_500_000, metrics={"accuracy": 0.5})
    refused = Refused(step=3, reason="shares sum to 31", proposal=Proposal(local_batch_sizes=(15, 16)))
    run = build(
        (group("g", ("T4", "V100")), ()),
        (metric, (refused, Dropped(step=5, reason="stale generation", count=1))),
        (metric, (Dropped(step=9, reason="stale generation", count=8),)),
    )
    assert run.metrics[0].elapsed_s == 2.5
    assert run.notices == ("step 3: refused, shares sum to 31", "left out, stale generation: 8 or more")


def test_findings_keep_what_a_part_said_and_would_have_asked_for() -> None:
    finding = Finding(
        part="split",
        verdict="advised",
        reason="faster",
        evidence={"effect": 0.5},
        proposal=Proposal(local_batch_sizes=(8, 24)),
        predicted_gain=0.2,
    )
    run = build((group("g", ("T4", "V100")), (Found(step=3, finding=finding, count=4),)))
    (row,) = run.findings
    assert (row.part, row.step, row.verdict, row.count, row.asks_for) == ("split", 3, "advised", 4, (8, 24))
    assert (row.predicted_gain, row.evidence) == (0.2, {"effect": 0.5})


def search(search_id: str) -> StartSearch:
    problem = SearchProblem(
        kind="measured",
        plan=(16, 16),
        incumbent=(16, 16),
        lower=(1, 1),
        upper=(31, 31),
        shapes=(load_profile("T4", "resnet50").curve,),
        shape_of=(0, 0),
        scales=(1.0, 1.0),
        max_trials=3,
    )
    return StartSearch(search_id=search_id, seed=1, problem=problem)


def test_searches_gather_their_trials_and_their_first_end() -> None:
    script: list[tuple[Event, tuple[Command, ...]]] = [
        (group("g", ("T4", "V100")), ()),
        (step("g", 4, 1, (16, 16)), (search("a"),)),
        (TrialProposed(search_id="a", trial=0, local_batch_sizes=(8, 24)), ()),
        (step("g", 5, 1, (8, 24)), (TellTrial(search_id="a", trial=0, objective=-3.0, own_s=(0.02, 0.05)),)),
        (TrialProposed(search_id="unknown", trial=0, local_batch_sizes=(9, 23)), ()),
        (SearchFinished(search_id="a", local_batch_sizes=(8, 24), objective=-3.0), ()),
        (step("g", 6, 1, (8, 24)), (CancelSearch(search_id="a", reason="the shares change"), search("b"))),
        (SearchFailed(search_id="b", reason="no helper"), ()),
        (step("g", 7, 1, (8, 24)), (search("c"), CancelSearch(search_id="c", reason="another search begins"))),
    ]
    entries = [Entry(number=k, event=event, commands=commands, notes=()) for k, (event, commands) in enumerate(script)]
    first, second, third = build_run("run", "rex", {}, entries).searches
    assert (first.started_at_step, first.outcome, first.result) == (4, "finished", (8, 24))
    (trial,) = first.trials
    assert (trial.asked_at_step, trial.local_batch_sizes, trial.objective, trial.slowest_s) == (4, (8, 24), -3.0, 0.05)
    assert second.outcome == "failed: no helper"
    assert third.outcome == "called off: another search begins"


def measured_steps(rows: tuple[int, int], phi: float, count: int) -> list[StepObserved]:
    """Steps whose norms are exactly what |G|^2 = 1 and tr(S) = ``phi`` make one expect."""
    weighted = np.array(rows) * (1.0 + phi / np.array(rows))
    reduced = 1.0 + phi / sum(rows)
    return [
        replace(step("g", k, 1, rows), weighted_sq_norm=weighted, num_groups=np.array([1, 1]), global_sq_norm=reduced)
        for k in range(count)
    ]


def test_the_noise_scale_of_a_run_is_that_of_its_norms_and_unknown_without_them() -> None:
    series = noise_series(measured_steps((8, 24), 400.0, 40))
    assert series is not None
    assert series.steps.tolist() == [31, 35, 39]
    assert series.noise_scale == pytest.approx(400.0)
    assert (series.p_value < 0.05).all(), "400 rows are above twice 32"
    large = noise_series(measured_steps((128, 384), 400.0, 40))
    assert large is not None
    assert large.noise_scale == pytest.approx(400.0)
    assert (large.p_value > 0.5).all(), "and not above twice 512"
    assert noise_series(measured_steps((8, 24), 400.0, 31)) is None
    assert noise_series(step("g", k, 1, (8, 24)) for k in range(40)) is None


def test_no_window_of_the_noise_scale_is_over_two_sets_of_parameters() -> None:
    before, after = measured_steps((8, 24), 400.0, 34), measured_steps((8, 24), 100.0, 70)[34:]
    after[0] = replace(after[0], flags=StepFlag.OTHER_PARAMETERS)
    series = noise_series([*before, *after])
    assert series is not None
    assert series.steps.tolist() == [31, 65, 69]
    assert series.noise_scale == pytest.approx([400.0, 100.0, 100.0])
    assert noise_series([*before[:20], *after[:31]]) is None

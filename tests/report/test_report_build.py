"""A report says what the journal says: every step, every decision once, with what became of it."""

from __future__ import annotations

import numpy as np

from rex_ray.control.events import Event, GroupStarted, MetricReported, RunEnded, StepObserved, WorkerLost
from rex_ray.control.notes import Applied, Decided, Dropped, Measured, Note, Refused, Withdrawn
from rex_ray.core.types import Problem, StepFlag, WorkerSpec
from rex_ray.policies.base import Proposal
from rex_ray.report.build import build_run
from rex_ray.report.schema import RunData


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
    return build_run("run", "rex", {"seed": "0"}, entries)


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

"""Only whole, sound, current steps leave the assembler, in order, whatever arrives in whatever order."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from control_worlds import record_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.control.assembly import StepAssembler, TelemetryWatch, quantise_norm
from rex_ray.core.types import StepFlag


def numbers(steps) -> list[int]:
    return [step.step for step in steps]


@given(order=st.randoms(use_true_random=False), num_workers=st.integers(1, 4), num_steps=st.integers(1, 30))
def test_any_order_of_arrival_gives_every_step_once_in_order(order: random.Random, num_workers, num_steps):
    records = [record_of(rank, step) for rank in range(num_workers) for step in range(num_steps)]
    order.shuffle(records)
    assembler = StepAssembler("g", num_workers)
    out = []
    while records:
        size = order.randint(1, 5)
        batch, records = records[:size], records[size:]
        out += numbers(assembler.add(batch))
    assert out == list(range(num_steps))
    assert assembler.dropped == {}


@settings(max_examples=25)
@given(
    order=st.randoms(use_true_random=False),
    lost=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 199)), max_size=20),
    repeated=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 199)), max_size=20),
)
def test_what_is_lost_is_given_up_and_counted_and_what_is_repeated_is_ignored(order, lost, repeated):
    sent = [(rank, step) for step in range(200) for rank in range(2) if (rank, step) not in lost]
    sent += [pair for pair in repeated if pair not in lost]
    # Batches jitter by less than the lag, as pumps do.
    sent.sort(key=lambda pair: pair[1] + order.uniform(0, 14))
    assembler = StepAssembler("g", 2)
    out = [number for rank, step in sent for number in numbers(assembler.add([record_of(rank, step)]))]
    broken = {step for _, step in lost}
    due = [step for step in range(200) if step not in broken]
    newest = max(due)
    settled = [step for step in due if not any(gone <= step and gone > newest - 32 for gone in broken)]
    assert out == settled
    given_up = assembler.dropped.get("incomplete step", 0)
    assert given_up == len([step for step in broken if step <= newest - 32])


def test_a_step_is_given_up_32_behind_the_newest_complete_one_and_not_before():
    assembler = StepAssembler("g", 2)
    assembler.add([record_of(0, 0)])
    out = []
    for step in range(1, 32):
        out += numbers(assembler.add([record_of(0, step), record_of(1, step)]))
    assert out == []
    out += numbers(assembler.add([record_of(0, 32), record_of(1, 32)]))
    assert out == list(range(1, 33))
    assert assembler.dropped == {"incomplete step": 1}
    assembler.add([record_of(1, 0)])
    assert assembler.dropped == {"incomplete step": 1, "late": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute_s": math.nan}, "impossible time step"),
        ({"data_s": math.inf}, "impossible time step"),
        ({"sync_s": -0.001}, "impossible time step"),
        ({"step_s": 1e12}, "impossible time step"),
        ({"num_rows": -1}, "negative rows step"),
        ({"allocation_version": 2}, "mixed versions step"),
    ],
)
def test_an_unsound_record_costs_its_step_and_holds_up_no_other(changes, reason):
    assembler = StepAssembler("g", 2)
    out = assembler.add([record_of(0, 0), record_of(1, 0, **changes), record_of(0, 1), record_of(1, 1)])
    assert numbers(out) == [1]
    assert assembler.dropped == {reason: 1}


def test_stale_unknown_and_duplicate_records_are_counted_by_name():
    assembler = StepAssembler("g", 2)
    assembler.publish(4)
    assembler.publish(6)
    records = [
        record_of(0, 0, generation="older"),
        record_of(7, 0),
        record_of(0, 0, allocation_version=3),
        record_of(1, 0, allocation_version=3),
        record_of(0, 1, allocation_version=5),
        record_of(0, 1, allocation_version=5),
        record_of(1, 1, allocation_version=5),
    ]
    assert numbers(assembler.add(records)) == [1]
    assert assembler.dropped == {
        "stale generation": 1,
        "unknown rank": 1,
        "unknown version": 2,
        "unknown version step": 1,
        "duplicate": 1,
    }


def test_memory_is_bounded_when_one_rank_falls_silent():
    assembler = StepAssembler("g", 2)
    for step in range(20_000):
        assert assembler.add([record_of(0, step)]) == []
    assert len(assembler._pending) <= assembler.max_pending_steps + 1
    # And it recovers by itself.
    out = [
        number
        for step in range(20_000, 20_100)
        for number in numbers(assembler.add([record_of(0, step), record_of(1, step)]))
    ]
    assert out[-1] == 20_099


def test_a_group_that_was_first_seen_late_or_far_ahead_is_not_waited_for():
    assembler = StepAssembler("g", 1)
    out = [number for step in range(1_000_000, 1_000_040) for number in numbers(assembler.add([record_of(0, step)]))]
    assert out == list(range(1_000_000, 1_000_040))


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-30, 1e30))
def test_quantised_to_microseconds_and_nine_digits(data_s, compute_s, norm):
    first, second = (
        StepAssembler("g", 1).add(
            [record_of(0, 0, data_s=data_s, compute_s=compute_s, weighted_sq_norm=norm * wobble, global_sq_norm=norm)]
        )[0]
        for wobble in (1.0, 1.0)
    )
    assert first.own_us[0] == round(data_s * 1e6) + round(compute_s * 1e6)
    assert first.weighted_sq_norm[0] == pytest.approx(norm, rel=1e-8)
    assert quantise_norm(first.weighted_sq_norm[0]) == first.weighted_sq_norm[0] == second.weighted_sq_norm[0]
    assert first.compute_us.dtype == np.int64


def test_columns_are_whole_or_absent_and_read_only():
    (step,) = StepAssembler("g", 2).add(
        [
            record_of(
                0, 0, weighted_sq_norm=1.0, global_sq_norm=math.nan, loss=1.0, num_rows=30, flags=StepFlag.WARM_UP
            ),
            record_of(1, 0, loss=3.0, num_rows=10, peak_memory_bytes=7, flags=StepFlag.PARTIAL),
        ]
    )
    assert step.weighted_sq_norm is None
    assert step.num_groups is None
    assert step.global_sq_norm is None
    assert step.loss == 1.5
    assert step.peak_memory_bytes.tolist() == [-1, 7]
    assert step.flags == StepFlag.WARM_UP | StepFlag.PARTIAL
    for column in (step.num_rows, step.data_us, step.compute_us, step.sync_us, step.step_us):
        assert not column.flags.writeable


def test_a_loss_that_is_not_finite_or_not_known_everywhere_is_no_loss():
    def loss_of(*losses):
        records = [
            record_of(rank, 0, loss=loss, num_rows=0 if loss == "empty" else 8) for rank, loss in enumerate(losses)
        ]
        return StepAssembler("g", len(losses)).add(records)[0].loss

    assert loss_of(1.0, math.nan) is None
    assert loss_of(1.0, None) is None
    assert loss_of(1.0, "empty") == 1.0


def test_a_gap_is_told_after_ten_seconds_without_a_complete_step_and_again_after_ten_more():
    watch = TelemetryWatch()
    assert [t for t in range(31) if watch.look(t * 1_000_000, "g", 0)] == [10, 20, 30]
    assert watch.look(31_000_000, "g", 1) is None
    assert watch.look(40_000_000, "g", 1) is None
    gap = watch.look(41_000_000, "g", 1)
    assert (gap.generation, gap.last_step, gap.waited_us) == ("g", 1, 10_000_000)
    assert watch.look(42_000_000, "another", 1) is None


def test_an_estimate_over_two_steps_is_told_from_one_of_a_single_step():
    pair = record_of(0, 0, weighted_sq_norm=1.0, num_groups=2, num_norm_steps=2, global_sq_norm=0.5)
    both, none = StepAssembler("g", 1).add([pair, record_of(0, 1, num_norm_steps=2)])
    assert (both.num_norm_steps, both.num_groups.tolist()) == (2, [2])
    assert none.num_norm_steps == 1, "without norms there is nothing to tell apart"

"""Mirrored probes before the first plan, and limits of memory that a split learns while it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_worlds import group, live, observed, shares_run

from rex_ray.core.observations import AllocationApplied
from rex_ray.core.types import Allocation, Problem, WorkerSpec
from rex_ray.policies.base import Reallocate
from rex_ray.policies.limits import equal_shares
from rex_ray.policies.registry import make_policy
from rex_ray.policies.split.probing import ProbingSplit, mirrored_probes
from rex_ray.policies.split.spline import SplineSplit

MIB = 2**20


def smooth(step: int, sizes: tuple[int, ...]) -> list[float]:
    """Two slow workers, two fast ones with a dearer start, in microseconds."""
    del step
    return [20_000 + 4_500 * rows if rank < 2 else 60_000 + 1_200 * rows for rank, rows in enumerate(sizes)]


# ------------------------------------------------------------------ probes


@given(
    devices=st.lists(st.sampled_from(["T4", "V100"]), min_size=1, max_size=9),
    rows=st.integers(1, 600),
    most=st.none() | st.integers(80, 200),
)
def test_two_probes_mirror_each_other_keep_the_batch_and_the_bounds(devices, rows, most):
    if most is not None and most * len(devices) < rows:
        return
    problem = group(devices, rows, upper=most)
    shares = equal_shares(problem, rows)
    probes = mirrored_probes(problem, shares)
    assert len(probes) in (0, 2)
    for probe in probes:
        assert sum(probe) == rows
        assert min(probe) >= min(1, *shares)
        assert most is None or max(probe) <= most
    if probes:
        assert [a + b for a, b in zip(*probes, strict=True)] == [2 * share for share in shares]


def test_probes_come_first_and_give_every_kind_three_sizes():
    problem = group(["T4", "T4", "V100", "V100"], 256)
    policy = make_policy("rex", {"probe": True, "trigger": "off", "search": "off", "growth": "off"})
    plans = [sizes for _, sizes in shares_run(live(policy, problem, smooth, num_steps=200))]
    assert plans[:3] == [(64, 64, 64, 64), (32, 96, 32, 96), (96, 32, 96, 32)]
    assert len(plans) == 4, "and the first plan after them is the last"
    best = min(max(smooth(0, (a, a, 128 - a, 128 - a))) for a in range(1, 128))
    assert max(smooth(0, plans[3])) <= 1.01 * best


def test_known_kinds_and_resumed_shares_are_not_probed():
    problem = group(["T4", "V100"], 128)
    split = ProbingSplit(inner=SplineSplit())
    shares, state = split.init(problem, None, None, 128)
    assert state.probes
    resumed = Allocation(version=3, local_batch_sizes=(40, 88))
    assert not split.init(problem, None, resumed, 128)[1].probes
    for version, sizes in enumerate([shares, (32, 96), (96, 32)], start=1):
        state = split.applied(
            state, AllocationApplied(allocation=Allocation(version=version, local_batch_sizes=sizes), step=version)
        )
        for step in range(8):
            state = split.observe(state, observed(10 * version + step, sizes, smooth(0, (1, 1, *sizes))[2:]))
    assert not split.init(problem, state, None, 128)[1].probes


def test_probes_that_nobody_runs_do_not_keep_the_plan_back():
    """A split that advises is never applied: what it has to say is the exact split, not the first probe for ever."""
    problem = group(["T4", "T4", "V100", "V100"], 256)
    split = ProbingSplit(inner=SplineSplit())
    shares, state = split.init(problem, None, None, 256)
    applied = AllocationApplied(allocation=Allocation(version=1, local_batch_sizes=shares), step=0)
    state, said = split.applied(state, applied), []
    for step in range(200):
        state = split.observe(state, observed(step, shares, smooth(0, shares)))
        offer = split.propose(state)
        said.append(offer.search_id if isinstance(offer, Reallocate) else None)
    assert said[10:40] == ["probe"] * 30
    last = split.propose(state)
    assert isinstance(last, Reallocate)
    assert last.search_id is None
    assert last.predicted_gain is not None
    assert last.predicted_gain > 0.1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.sampled_from([1, 3, 8]))
def test_in_multiples_probes_are_multiples(units, multiple):
    shares = tuple(multiple * unit for unit in units)
    problem = group(["T4", "V100", "T4", "A100", "V100", "T4", "T4"][: len(units)], max(sum(shares), multiple))
    for probe in mirrored_probes(replace(problem, local_batch_multiple=multiple), shares):
        assert sum(probe) == sum(shares)
        assert all(rows % multiple == 0 for rows in probe)


# ------------------------------------------------------------------ memory


def limited(memory_mib: tuple[int | None, ...], rows: int, device: str = "A") -> Problem:
    workers = tuple(
        WorkerSpec(rank=rank, device=f"{device}{rank}", memory_bytes=None if m is None else m * MIB)
        for rank, m in enumerate(memory_mib)
    )
    return Problem(workers=workers, global_batch_size=rows, max_global_batch_size=8 * rows, dataset_size=100 * rows)


def run_split(problem: Problem, peak_mib: float | None, num_steps: int = 120):
    """Rank 1 is five times as fast, so that speed alone would give it nearly all rows; a row takes ``peak_mib``."""
    split = SplineSplit()
    sizes, state = split.init(problem, None, None, problem.global_batch_size)
    plans, version = [sizes], 1
    state = split.applied(state, AllocationApplied(allocation=Allocation(version=1, local_batch_sizes=sizes), step=0))
    for step in range(num_steps):
        rows = np.array(sizes)
        shown = observed(step, sizes, [5_000.0 * rows[0], 1_000.0 * rows[1]], version=version)
        if peak_mib is not None:
            peaks = (100 * MIB + rows * peak_mib * MIB).astype(np.int64)
            shown = type(shown)(
                **{name: getattr(shown, name) for name in type(shown).__slots__ if name != "peak_memory_bytes"},
                peak_memory_bytes=peaks,
            )
        state = split.observe(state, shown)
        offer = split.propose(state)
        if isinstance(offer, Reallocate):
            sizes, version = offer.proposal.local_batch_sizes, version + 1
            plans.append(sizes)
            allocation = Allocation(version=version, local_batch_sizes=sizes)
            state = split.applied(state, AllocationApplied(allocation=allocation, step=step + 1))
    return split, state, plans


def test_d9_later_plans_keep_off_a_limit_that_was_learnt_from_peaks():
    """Rank 1 holds (0.85 x 1,300 - 100) / 50 = 20 rows; by its speed it would be given 30 of 36."""
    free = run_split(limited((None, None), 36), None)[2]
    assert free[-1] == (6, 30)
    split, state, plans = run_split(limited((4_000, 1_300), 36), 50.0)
    assert all(sizes[1] <= 20 for sizes in plans)
    assert plans[-1][1] == 20
    assert split.model(state).max_rows().tolist()[1] == 20


def test_d9_the_limit_serves_growth_search_and_the_next_group():
    split, state, _ = run_split(limited((4_000, 1_300), 36), 50.0)
    assert split.plan(state, 50).local_batch_sizes[1] <= 20
    problem = split.model(state).search_problem("measured", (16, 20), 10)
    assert problem.upper[1] == 20
    shares, later = split.init(limited((4_000, 1_300), 36), state, None, 36)
    assert shares[1] <= 20
    assert later.memory.max_rows(limited((4_000, 1_300), 36).workers).tolist()[1] == 20


@pytest.mark.parametrize("peak_mib", [None, 1.0])
def test_without_a_known_memory_only_the_reach_of_what_ran_limits(peak_mib):
    split, state, plans = run_split(limited((None, None), 36), peak_mib)
    assert plans[-1] == (6, 30)
    limits = split.model(state).max_rows()
    assert (limits is None) == (peak_mib is None)
    if limits is not None:
        assert limits.tolist()[1] == 2 * max(sizes[1] for sizes in plans)

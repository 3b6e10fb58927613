"""The sampler's laws, without processes: every rank can compute every rank's rows, and together they are the epoch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.types import Allocation
from rex_ray.worker.data.sampler import ElasticSampler, Position, batch_rows, epoch_order, plan_step
from rex_ray.worker.data.schedule import Schedule

shares = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


def allocation(version: int, sizes: list[int]) -> Allocation:
    return Allocation(version=version, local_batch_sizes=tuple(sizes))


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[tuple[int, Allocation]]]:
    """Number of ranks, and allocations that take effect at growing steps."""
    num_ranks = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks).filter(lambda s: sum(s) > 0)
    steps = sorted(draw(st.lists(st.integers(0, 30), max_size=4)))
    return num_ranks, [(step, allocation(k, draw(sizes))) for k, step in enumerate([0, *steps])]


def samplers(script: list[tuple[int, Allocation]], num_ranks: int, num_rows: int) -> list[ElasticSampler]:
    schedule = Schedule(script[0][1])
    for step, changed in script[1:]:
        schedule.add(step, changed)
    return [ElasticSampler(dataset_size=num_rows, rank=rank, seed=4, schedule=schedule) for rank in range(num_ranks)]


@given(scripts(), st.integers(1, 150), st.integers(0, 3))
def test_every_row_comes_once_per_epoch_whatever_the_shares_become(
    ranks_and_script: tuple[int, list[tuple[int, Allocation]]], num_rows: int, epoch: int
) -> None:
    num_ranks, script = ranks_and_script
    seen: list[tuple[int, int]] = []
    plans = []
    for rank, sampler in enumerate(samplers(script, num_ranks, num_rows)):
        sampler.rewind(Position(epoch=epoch, cursor=0, step=0))
        batches = list(sampler)
        drawn = list(sampler.drawn)
        plans.append(drawn)
        for batch, plan in zip(batches, drawn, strict=True):
            assert len(batch) == max(plan.num_rows[rank], 1)
            seen += batch if plan.num_rows[rank] else []
    assert sorted(seen) == [(epoch, row) for row in range(num_rows)]
    assert all(plan == plans[0] for plan in plans)


@given(scripts(), scripts(), st.integers(1, 150), st.integers(0, 12))
def test_another_number_of_ranks_goes_on_at_the_same_sample(
    before: tuple[int, list[tuple[int, Allocation]]],
    after: tuple[int, list[tuple[int, Allocation]]],
    num_rows: int,
    stop_after: int,
) -> None:
    seen: list[tuple[int, int]] = []
    position = Position()
    for rank, sampler in enumerate(samplers(before[1], before[0], num_rows)):
        sampler.rewind(Position())
        for batch, _ in zip(sampler, range(stop_after), strict=False):
            plan = sampler.drawn.pop()
            seen += batch if plan.num_rows[rank] else []
            position = plan.after
    for rank, sampler in enumerate(samplers(after[1], after[0], num_rows)):
        sampler.rewind(position)
        for batch in sampler:
            seen += batch if sampler.drawn.pop().num_rows[rank] else []
    assert sorted(seen) == [(0, row) for row in range(num_rows)]


@given(st.integers(1, 500), st.integers(1, 100), st.integers(1, 16))
def test_a_tail_too_small_for_the_ranks_is_absorbed_and_no_other(
    remaining: int, global_batch_size: int, num_ranks: int
) -> None:
    rows = batch_rows(remaining, global_batch_size, num_ranks)
    left = remaining - rows
    assert 0 < rows <= remaining
    assert left == 0 or left >= min(num_ranks, global_batch_size)
    assert rows < global_batch_size + num_ranks
    assert rows == global_batch_size or left == 0


def test_a2_last_partial_batch_is_split_by_the_current_shares() -> None:
    position, plans = Position(), []
    while position.cursor < 1000:
        plans.append(plan_step(position, allocation(0, [8, 24, 64]), 1000))
        position = plans[-1].after
    assert len(plans) == 11
    assert sum(plans[-1].num_rows) == 40
    assert plans[-1].partial
    assert not any(plan.partial for plan in plans[:-1])


@given(st.integers(0, 2**40), st.integers(0, 50))
def test_orders_are_permutations_and_depend_on_seed_and_epoch(seed: int, epoch: int) -> None:
    order = epoch_order(seed, epoch, 64)
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(order, epoch_order(seed, epoch, 64))
    assert not torch.equal(order, epoch_order(seed, epoch + 1, 64))
    assert not torch.equal(order, epoch_order(seed + 1, epoch, 64))


def test_an_iterator_of_an_earlier_pass_draws_nothing_after_a_rewind() -> None:
    (sampler,) = samplers([(0, allocation(0, [4]))], 1, 20)
    sampler.rewind(Position())
    old = iter(sampler)
    first = next(old)
    sampler.rewind(Position())
    assert next(old, None) is None
    assert next(iter(sampler)) == first
    assert len(sampler.drawn) == 1


@given(st.lists(st.tuples(st.integers(0, 40), shares), max_size=6), st.integers(0, 45))
def test_the_schedule_answers_with_the_newest_allocation_in_force(
    entries: list[tuple[int, list[int]]], step: int
) -> None:
    schedule = Schedule(allocation(0, [1]))
    in_force = allocation(0, [1])
    for version, (effective, sizes) in enumerate(sorted(entries, key=lambda entry: entry[0]), start=1):
        schedule.add(effective, allocation(version, sizes))
        if effective <= step:
            in_force = allocation(version, sizes)
    assert schedule.at(step) == in_force
    schedule.forget_before(step)
    assert schedule.at(step) == in_force

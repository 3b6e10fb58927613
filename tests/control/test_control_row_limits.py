"""D9: what a worker ran out of memory at, no later group of its kind is given, whatever the policy would like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from control_worlds import allocations_in, step_of

from rex_ray.control.commands import Command
from rex_ray.control.events import GroupStarted, MemoryLimited, StepObserved, WorkerLost
from rex_ray.control.journalled import JournalledController
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import Allocation, Problem, WorkerSpec

DEVICES = ("V100", "T4", "V100")
POLICIES = ("bsp", "rex", "dlb", "lb_bsp", "omnilearn", "pollux", "growth10", "cannikin")
OWN_US_PER_ROW = {"T4": 200, "V100": 1000}
"""The kind that is short of memory is the fast one, so that every balancing policy wants to fill it."""


def group(generation: str, *, step: int = 0, rows: int = 60, resumed: Allocation | None = None) -> GroupStarted:
    workers = tuple(WorkerSpec(rank=rank, device=device) for rank, device in enumerate(DEVICES))
    problem = Problem(workers=workers, global_batch_size=rows, max_global_batch_size=8 * rows, dataset_size=10_000)
    return GroupStarted(generation=generation, problem=problem, step=step, allocation=resumed)


def out_of_memory(num_rows: int, device: str = "T4") -> MemoryLimited:
    return MemoryLimited(generation="g", rank=1, step=3, device=device, num_rows=num_rows)


class Driver:
    """A controller with its journal, in memory."""

    def __init__(self, policy: str = "bsp") -> None:
        self.files: dict[str, bytes] = {}
        self.journalled, chunks = JournalledController.begin(policy=policy)
        self._keep(chunks)

    def restart(self) -> None:
        self.journalled, turn = JournalledController.resume(self.files)
        self._keep(turn.chunks)

    def handle(self, event: Any) -> tuple[Command, ...]:
        turn = self.journalled.handle(event)
        self._keep(turn.chunks)
        return turn.commands

    def begin(self, event: GroupStarted) -> Allocation:
        return allocations_in(self.handle(event))[-1]

    def run(self, generation: str, first: Allocation, steps: range) -> list[Allocation]:
        """Run steps that take as long as their rows, each allocation from the step after it was published."""
        running, seen = first, [first]
        for step in steps:
            sizes = running.local_batch_sizes
            own = [2000 + OWN_US_PER_ROW[device] * rows for device, rows in zip(DEVICES, sizes, strict=True)]
            event: StepObserved = step_of(
                step, running.version, generation=generation, rows=sizes, own_us=own, epoch=step // 12
            )
            for published in allocations_in(self.handle(event)):
                running = published
                seen.append(published)
        return seen

    @property
    def limits(self) -> Mapping[str, int]:
        return self.journalled.controller.state.row_limits.most

    def _keep(self, chunks: Any) -> None:
        for name, data in chunks:
            self.files[name] = self.files.get(name, b"") + data


@pytest.mark.parametrize("policy", POLICIES)
def test_d9_later_plans_keep_off_the_limit(policy: str) -> None:
    driver = Driver(policy)
    first = driver.begin(group("g"))
    driver.run("g", first, range(6))
    failed = 40
    driver.handle(out_of_memory(failed))
    driver.handle(WorkerLost(generation="g", rank=1, reason="CUDA out of memory"))
    limit = driver.limits["T4"]
    assert failed // 2 <= limit < failed
    again = driver.begin(group("h", step=3, resumed=first))
    planned = driver.run("h", again, range(3, 240))
    assert {allocation.global_batch_size for allocation in planned} >= {60}
    assert max(allocation.local_batch_sizes[1] for allocation in planned) <= limit
    if policy in ("rex", "dlb", "lb_bsp", "omnilearn"):
        unlimited = Driver(policy)
        free = unlimited.run("g", unlimited.begin(group("g")), range(240))
        assert max(allocation.local_batch_sizes[1] for allocation in free) > limit, "it would have gone there"


def test_d9_a_limit_outlives_the_control_actor_and_whoever_told_it() -> None:
    driver = Driver()
    driver.handle(out_of_memory(40))  # before any group, as from one that is long gone
    driver.begin(group("g"))
    driver.restart()
    assert driver.limits == {"T4": 20}
    driver.handle(out_of_memory(20))
    driver.restart()
    assert driver.begin(group("h")).local_batch_sizes == (25, 10, 25)


def test_d9_a_batch_that_grew_beyond_what_fits_is_cut_and_one_that_never_fits_is_refused_in_words() -> None:
    driver = Driver()
    for device in DEVICES:
        driver.handle(out_of_memory(60, device))
    grown = Allocation(version=4, local_batch_sizes=(60, 60, 60), lr_factor=3.0)
    first = driver.begin(group("g", resumed=grown))
    assert max(first.local_batch_sizes) <= 30
    assert first.global_batch_size == 90
    assert first.lr_factor == pytest.approx(1.5)
    for device in DEVICES:
        driver.handle(out_of_memory(30, device))
    # Each rank's failure halves its kind once more, and two V100 told it twice.
    before = driver.journalled.controller.state
    with pytest.raises(InfeasibleError, match=r"60 rows does not fit.*T4 is given at most 15.*session\.train_step"):
        driver.handle(group("h"))
    assert driver.journalled.controller.state is before


@pytest.mark.parametrize("policy", POLICIES)
def test_d9_a_limit_between_two_multiples_is_kept_in_multiples(policy: str) -> None:
    driver = Driver(policy)
    driver.handle(out_of_memory(25))
    event = group("g", rows=64)
    first = driver.begin(replace(event, problem=replace(event.problem, local_batch_multiple=8)))
    for allocation in driver.run("g", first, range(60)):
        assert allocation.local_batch_sizes[1] == 8
        assert not any(rows % 8 for rows in allocation.local_batch_sizes)

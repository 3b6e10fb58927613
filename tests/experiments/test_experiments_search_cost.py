from __future__ import annotations

from pathlib import Path

import pytest

from experiments._search_cost_workers import Workers
from experiments._search_problems import SPEEDS, search_problem
from rex_ray.search.space import SplitSpace


@pytest.mark.dist
def test_workers_run_blocks_while_something_else_is_done_and_are_gone_afterwards(tmp_path: Path) -> None:
    calls: list[None] = []
    with Workers(tmp_path / "store", sleep_s=0.05) as workers:
        step_s = [workers.run(3, lambda: calls.append(None)) for _ in range(2)]
        processes = workers._processes
    assert all(seconds >= 0.05 for seconds in step_s)
    assert calls
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize(("speeds", "num_shifts"), [("two speeds", 1), ("four speeds", 3)])
def test_problems_have_the_speeds_that_their_names_say(speeds: str, num_shifts: int) -> None:
    assert len(SPEEDS[speeds]) == num_shifts + 1
    for num_workers in (4, 16):
        problem = search_problem(num_workers, speeds)
        assert SplitSpace(problem).num_shifts == num_shifts
        assert sum(problem.plan) == 96 * num_workers

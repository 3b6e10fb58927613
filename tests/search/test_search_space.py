"""Laws of the space of splits and of a search in it, with a proposer that is not Ax."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import FAST, SLOW, mixed, problem_of, problems, tiled_s, tiny

from rex_ray.core.search_problem import SearchProblem, group_by_speed, objective_of
from rex_ray.search.dialogue import Result, SplitSearch, run_on_curves
from rex_ray.search.protocol import decode, encode, problem_from, problem_to
from rex_ray.search.space import MAX_SHIFT, LocalBatchSizes, Point, SplitSpace


class Wanderer:
    """Proposes points of a seed's choice, and remembers what it was told."""

    def __init__(self, space: SplitSpace, quantum: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_shifts, self._quantum = space.num_shifts, quantum
        self.told: list[tuple[Point, float]] = []

    def propose(self) -> Point:
        shifts = self._rng.uniform(-MAX_SHIFT, MAX_SHIFT, self._num_shifts)
        return Point(shifts=tuple(shifts.tolist()), quantum=self._quantum)

    def tell(self, point: Point, objective: float) -> None:
        self.told.append((point, objective))


def fits(problem: SearchProblem, sizes: LocalBatchSizes) -> bool:
    within = all(lo <= b <= hi for lo, b, hi in zip(problem.lower, sizes, problem.upper, strict=True))
    is_whole = all(rows % problem.local_batch_multiple == 0 for rows in sizes)
    return within and is_whole and sum(sizes) == problem.global_batch_size


def slowest_s(problem: SearchProblem, sizes: LocalBatchSizes) -> float:
    return float(SplitSpace(problem).own_s(sizes).max())


def dialogue(search: SplitSearch, own_s: object) -> tuple[Result | None, list[LocalBatchSizes]]:
    """Carry a measured search out; ``own_s(sizes)`` is what running a split shows, None that it cannot be run."""
    asked = []
    while (trial := search.ask()) is not None:
        asked.append(trial.local_batch_sizes)
        times = own_s(trial.local_batch_sizes)  # type: ignore[operator]
        if times is None:
            search.tell(trial.number, math.inf)
        else:
            search.tell(trial.number, objective_of(times), tuple(times))
    return search.result(), asked


@given(problems("measured"), st.data())
@settings(max_examples=60)
def test_every_point_is_a_whole_split_within_bounds(problem: SearchProblem, data: st.DataObject) -> None:
    space = SplitSpace(problem)
    shifts = tuple(data.draw(st.floats(-MAX_SHIFT, MAX_SHIFT)) for _ in range(space.num_shifts))
    for quantum in space.quanta:
        sizes = space.split(Point(shifts=shifts, quantum=quantum))
        assert fits(problem, sizes)
    assert space.split(Point(shifts=(0.0,) * space.num_shifts, quantum=space.finest)) == problem.plan
    assert all(fits(problem, sizes) for sizes in space.seeds())
    assert space.seeds()[0] == problem.plan


@pytest.mark.parametrize(("total", "num_workers"), [(64, 3), (7, 5), (8, 5), (1024, 16)])
def test_d4_the_sum_is_exact_whatever_is_proposed(total: int, num_workers: int) -> None:
    problem = problem_of([(SLOW, FAST)[rank % 2] for rank in range(num_workers)], total)
    space = SplitSpace(problem)
    for shift in np.linspace(-MAX_SHIFT, MAX_SHIFT, 41):
        sizes = space.split(Point(shifts=(float(shift),) * space.num_shifts))
        assert fits(problem, sizes)
        assert sizes == SplitSpace(problem).split(Point(shifts=(float(shift),) * space.num_shifts))


@given(problems(), st.integers(0, 100))
@settings(max_examples=60)
def test_a_search_on_curves_never_ends_slower_than_the_exact_split(problem: SearchProblem, seed: int) -> None:
    results = []
    for _ in range(2):
        search = SplitSearch(problem, lambda space, quantum: Wanderer(space, quantum, seed))
        results.append(run_on_curves(search))
    result = results[0]
    assert result is not None
    assert results[1] == result, "and the same question has the same answer"
    assert fits(problem, result.local_batch_sizes)
    assert slowest_s(problem, result.local_batch_sizes) <= slowest_s(problem, problem.plan)
    assert result.num_trials <= max(problem.max_trials, 64 + 2)


@given(problems("measured"), st.integers(0, 100))
@settings(max_examples=40)
def test_a_measured_search_keeps_its_limits_and_never_ends_slower_than_trial_zero(
    problem: SearchProblem, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    search = SplitSearch(problem, lambda space, quantum: Wanderer(space, quantum, seed))
    result, asked = dialogue(search, lambda sizes: search.space.own_s(sizes) * rng.uniform(0.8, 1.2, len(sizes)))
    assert result is not None
    assert asked[0] == problem.plan
    assert len(asked) == len(set(asked)) == result.num_trials <= problem.max_trials, "no split is asked for twice"


def test_what_runs_is_looked_at_only_where_it_may_run() -> None:
    fitting = problem_of([SLOW, FAST], 96, upper=70)
    assert (48, 48) in SplitSpace(fitting).seeds()
    for incumbent in ((40, 40), (90, 6)):  # of another batch; above a limit learnt since
        assert incumbent not in SplitSpace(replace(fitting, incumbent=incumbent)).seeds()


def test_workers_of_one_speed_move_together() -> None:
    curves = [SLOW, FAST, SLOW.scaled(1.05), FAST.scaled(1.5), SLOW.scaled(1.1)]
    groups = group_by_speed(curves, 64)
    assert groups[0] == groups[2] == groups[4]
    assert sorted({*groups.tolist()}) == [0, 1, 2]
    assert groups[1] < groups[3] < groups[0]
    many = [SLOW.scaled(1.3**k) for k in range(8)]
    assert group_by_speed(many, 64).max() == 3


def test_where_tiles_are_a_tile_plan_is_found_and_the_search_goes_on_in_its_tiles() -> None:
    problem = mixed(rows_each=96, kind="measured", max_trials=10)
    search = SplitSearch(problem, Wanderer)
    result, asked = dialogue(search, lambda sizes: tiled_s(problem, sizes))
    assert result is not None
    gain = tiled_s(problem, result.local_batch_sizes).max() / tiled_s(problem, problem.plan).max()
    assert gain < 0.9
    assert all(size % 32 == 0 for size in asked[-1])


def test_where_workers_hold_one_another_up_splitting_again_finds_the_better_split() -> None:
    """Two slow workers share a host: each takes 1.5 times as long once both have more than 40 rows."""
    problem = problem_of([SLOW, SLOW, FAST, FAST], 400, "measured", max_trials=10)

    def own_s(sizes: LocalBatchSizes) -> np.ndarray:
        times = SplitSpace(problem).own_s(sizes)
        return times * np.where(np.arange(4) < 2, 1.0 + 0.5 * (min(sizes[:2]) > 40), 1.0)

    result, asked = dialogue(SplitSearch(problem, Wanderer), own_s)
    assert result is not None
    assert objective_of(own_s(result.local_batch_sizes)) < objective_of(own_s(problem.plan)) - 0.05
    assert len(asked) <= 10


def test_a_refused_trial_is_no_answer_and_no_trial_at_all_is_none() -> None:
    problem = mixed(kind="measured", max_trials=6)
    limit = max(problem.plan) - 8
    search = SplitSearch(problem, Wanderer)
    result, _ = dialogue(search, lambda s: None if max(s) > limit else search.space.own_s(s))
    assert result is not None
    assert max(result.local_batch_sizes) <= limit
    assert dialogue(SplitSearch(problem, Wanderer), lambda _: None)[0] is None


def test_a_tiny_space_is_looked_at_in_full_without_a_proposer() -> None:
    def nobody(*_: object) -> Wanderer:
        raise AssertionError("asked for a proposer")

    for kind in ("model", "measured"):
        problem = tiny(kind)  # type: ignore[arg-type]
        search = SplitSearch(problem, nobody)
        assert not search.needs_proposer
        result, asked = dialogue(search, search.space.own_s)
        assert result is not None
        assert {*(search.space.all_splits(1, 15) or ())} <= {*asked}
    # By hand: every split of the plan's neighbourhood is there.
    plan = tiny().plan
    assert {(plan[0] + d, plan[1] - d) for d in (-1, 0, 1)} <= {*asked}


def test_the_proposer_is_told_what_is_known_and_every_answer() -> None:
    made: list[Wanderer] = []

    def make(space: SplitSpace, quantum: int) -> Wanderer:
        made.append(Wanderer(space, quantum))
        return made[-1]

    problem = mixed(8)
    search = SplitSearch(problem, make)
    result = run_on_curves(search)
    assert result is not None
    assert len(made) == 1
    first, objective = made[0].told[0]
    assert search.space.split(first) == problem.plan
    assert objective == objective_of(search.space.own_s(problem.plan))
    assert len(made[0].told) >= 6, "the plan and five proposals that gained nothing"


def test_means_that_are_used_up_end_a_search_with_the_best_so_far() -> None:
    spent = itertools.count()
    search = SplitSearch(mixed(8), Wanderer, lambda: next(spent) >= 2)
    result = run_on_curves(search)
    assert result is not None
    assert result.num_trials == 3


def test_trials_are_told_once_and_in_turn() -> None:
    search = SplitSearch(mixed(kind="measured"), Wanderer)
    trial = search.ask()
    assert trial is not None
    with pytest.raises(ValueError, match="not asked for"):
        search.tell(trial.number + 1, 0.0)
    search.tell(trial.number, 0.0)
    with pytest.raises(ValueError, match="not asked for"):
        search.tell(trial.number, 0.0)


@given(problems("measured"))
@settings(max_examples=30)
def test_a_problem_crosses_the_pipe_bit_by_bit(problem: SearchProblem) -> None:
    there = problem_from(decode(encode({"problem": problem_to(problem)}))["problem"])
    for name in ("kind", "plan", "incumbent", "lower", "upper", "shape_of", "scales", "max_trials"):
        assert getattr(there, name) == getattr(problem, name)
    rows = np.arange(1, 300)
    for one, other in zip(problem.curves(), there.curves(), strict=True):
        assert (one.predict_s(rows) == other.predict_s(rows)).all()
        assert one.max_trusted_rows == other.max_trusted_rows

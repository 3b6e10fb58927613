"""What the published methods promise, each as its source has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_worlds import RNG, Judged, group, live, observed, shares_run

from rex_ray.core.errors import ConfigError
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.split import CurveSet, exact_split
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import ChangeGlobalBatch, Policy, Reallocate
from rex_ray.policies.registry import make_policy
from rex_ray.policies.split.affine import AffineModel
from rex_ray.policies.split.runs import RunLog, ShareRun
from rex_ray.sim.gradients import NoisyGradients

NOISE = NoisyGradients(seed=0, num_dims=256)
OwnTimes = Callable[[int, Sequence[int]], list[float]]


def affine(fixed_us: Sequence[float], row_us: Sequence[float]) -> OwnTimes:
    return lambda step, sizes: [
        fixed + per_row * rows for fixed, per_row, rows in zip(fixed_us, row_us, sizes, strict=True)
    ]


def noisy_norms(phi: Callable[[StepObserved], float]) -> Callable[[StepObserved], StepObserved]:
    """Adds the norms of a noise scale to a step."""

    def measure(step: StepObserved) -> StepObserved:
        weighted, reduced = NOISE.draw(step.step, phi(step), step.num_rows.tolist())
        groups = (step.num_rows > 0).astype(np.int64)
        return replace(step, weighted_sq_norm=weighted, num_groups=groups, global_sq_norm=reduced, loss=2.0)

    return measure


def final_shares(history: Sequence[Judged]) -> tuple[int, ...]:
    return shares_run(history)[-1][1]


def batches_of(history: Sequence[Judged]) -> list[int]:
    """Every global batch in order, without changes of shares or of the learning rate alone."""
    return [rows for rows, _ in itertools.groupby(sum(sizes) for _, sizes in shares_run(history))]


workers = st.lists(st.tuples(st.floats(0, 60_000), st.floats(200, 4_000)), min_size=2, max_size=6)


# LB-BSP


@settings(max_examples=6, deadline=None)
@given(laws=workers, rows_each=st.integers(32, 96))
def test_lb_bsp_balances_affine_workers_and_loses_no_row(laws, rows_each):
    own_us = affine(*zip(*laws, strict=True))
    problem = group(["T4"] * len(laws), rows_each * len(laws))
    history = live(make_policy("lb_bsp"), problem, own_us, num_steps=1500)
    plans = [sizes for _, sizes in shares_run(history)]
    for before, after in itertools.pairwise(plans):
        moved = np.subtract(after, before)
        assert sum(after) == problem.global_batch_size
        assert np.count_nonzero(moved) == 2, "one gives, one takes"
        assert max(after) - max(before) <= rows_each // 8 + 1
    times = np.array(own_us(0, plans[-1]))
    row_us = max(per_row for _, per_row in laws)
    movable = np.array(plans[-1]) > 1
    gap = times[movable].max(initial=0.0) - times.min()
    # Within the gap that is left alone, or what a row to and fro is worth.
    assert not movable.any() or times.argmax() not in movable.nonzero()[0] or gap <= 0.05 * times.max() + 2 * row_us


def test_lb_bsp_moves_the_first_time_from_the_slowest_to_the_fastest():
    history = live(
        make_policy("lb_bsp"), group(["T4"] * 4, 256), affine([0] * 4, [1000, 3000, 2000, 500]), num_steps=30
    )
    (_, first), (step, second), *_ = shares_run(history)
    assert first == (64, 64, 64, 64)
    assert second == (64, 56, 64, 72)
    assert step == 10


def test_lb_bsp_halves_its_move_where_rows_go_to_and_fro_and_comes_to_rest():
    history = live(make_policy("lb_bsp"), group(["T4", "V100"], 128), affine([0, 0], [2000, 1000]), num_steps=1500)
    moves = [abs(after[0] - before[0]) for (_, before), (_, after) in itertools.pairwise(shares_run(history))]
    assert moves[0] == 8
    assert moves == sorted(moves, reverse=True)
    assert shares_run(history)[-1][0] < 500
    assert abs(final_shares(history)[0] - 128 / 3) <= 2


def test_lb_bsp_answers_a_worker_that_slows_down_with_whole_moves_again():
    quick, slow = affine([0, 0], [1000, 1000]), affine([0, 0], [1000, 3000])
    history = live(
        make_policy("lb_bsp"),
        group(["T4", "T4"], 128),
        lambda step, sizes: (slow if 300 <= step < 800 else quick)(step, sizes),
        num_steps=1300,
    )
    plans = shares_run(history)
    answered = [sizes for step, sizes in plans if 300 < step < 800]
    assert answered[0] == (72, 56)
    assert abs(answered[-1][0] - 96) <= 3
    assert abs(plans[-1][1][0] - 64) <= 3


# OmniLearn


@settings(max_examples=10, deadline=None)
@given(factors=st.lists(st.floats(0.9, 1.1), min_size=2, max_size=6))
def test_omnilearn_never_moves_inside_its_dead_band(factors):
    """``|mean(t) / t_i - 1| <= .2`` for all: within 10 % of one another it always is."""
    own_us = affine([0.0] * len(factors), [1000 * factor for factor in factors])
    history = live(make_policy("omnilearn"), group(["T4"] * len(factors), 64 * len(factors)), own_us, num_steps=200)
    assert len(shares_run(history)) == 1


@settings(max_examples=10, deadline=None)
@given(laws=workers)
def test_omnilearn_follows_its_controller_and_ends_within_the_dead_band(laws):
    own_us = affine(*zip(*laws, strict=True))
    problem = group(["T4"] * len(laws), 64 * len(laws))
    plans = [sizes for _, sizes in shares_run(live(make_policy("omnilearn"), problem, own_us, num_steps=600))]
    for before, after in itertools.pairwise(plans):
        times = np.array(own_us(0, before))
        asked = np.array(before) * times.mean() / times
        assert np.abs(times.mean() / times - 1).max() > 0.2
        assert sum(after) == problem.global_batch_size
        if asked.min() > 1:  # no bound is in the way, and only the sum has to be made exact
            assert np.array(after) == pytest.approx(asked * sum(after) / asked.sum(), abs=1.0)
    if min(plans[-1]) > 8:
        times = np.array(own_us(0, plans[-1]))
        assert np.abs(times.mean() / times - 1).max() <= 0.3


def test_omnilearn_comes_to_rest_where_a_bound_keeps_it_from_more():
    """A worker whose time does not depend on its rows gives all but one, and the others' noise moves nothing."""
    rng = np.random.default_rng(0)

    def own_us(step: int, sizes: Sequence[int]) -> list[float]:
        times = [1000.0 * sizes[0], 1000.0 * sizes[1], 200_000.0]
        return [value * (1 + 0.02 * rng.standard_normal()) for value in times]

    plans = shares_run(live(make_policy("omnilearn"), group(["T4", "T4", "V100"], 96), own_us, num_steps=600))
    assert plans[-1][1][2] == 1
    assert plans[-1][0] < 150


@pytest.mark.parametrize(("smoothing", "num_shares"), [(0.2, 1), (1.0, 3)])
def test_omnilearn_forgets_a_single_pause_and_would_not_without_its_smoothing(smoothing, num_shares):
    """A step of twice its usual length, the last of its window, moves nothing; alone, it moves rows there and back."""
    quiet = affine([0, 0], [1000, 1000])

    def own_us(step: int, sizes: Sequence[int]) -> list[float]:
        return [times * (2.2 if step == 59 and rank == 0 else 1) for rank, times in enumerate(quiet(step, sizes))]

    policy = make_policy("omnilearn", {"smoothing": smoothing})
    assert len(shares_run(live(policy, group(["T4"] * 2, 128), own_us, num_steps=300))) == num_shares


# Pollux


def many_rows_pay(step: int, sizes: Sequence[int]) -> list[float]:
    return [150_000 + rows * (900 if rank < 2 else 300) for rank, rows in enumerate(sizes)]


def grown(name: str, phi: float, **options: Any) -> list[Judged]:
    problem = replace(group(["T4", "T4", "V100", "V100"], 256), dataset_size=10**6)
    return live(
        make_policy(name, options),
        problem,
        many_rows_pay,
        num_steps=400,
        steps_per_epoch=80,
        measure=noisy_norms(lambda step: phi),
    )


@pytest.mark.parametrize("name", ["pollux", "growth10"])
@pytest.mark.parametrize("phi", [50.0, 1500.0, 20_000.0])
def test_equal_shares_are_never_left(name, phi):
    for _, sizes in shares_run(grown(name, phi)):
        assert max(sizes) - min(sizes) <= 1


def test_pollux_takes_the_batch_of_the_best_goodput_once_per_pass():
    history = grown("pollux", 1500.0)
    decided = [judged.observation for judged in history if isinstance(judged.decision, ChangeGlobalBatch)]
    batches = batches_of(history)
    candidates = np.unique(np.rint(np.geomspace(256, 2048, 50)).astype(int))
    slowest_us = 150_000 + 900 * -(-candidates // 4)
    goodput = candidates / slowest_us / (1500.0 + candidates)
    best = int(candidates[goodput.argmax()])
    assert batches[0] == 256
    reached = [goodput[candidates == rows].item() / goodput.max() for rows in batches[1:]]
    assert reached[-1] > 0.95, f"{batches}, the best is {best}"
    changes = [step.epoch for step in decided if isinstance(step, StepObserved)]
    assert changes
    assert len(batches) - 1 <= len(set(changes))


def test_pollux_stays_where_no_batch_gains_five_per_cent():
    """Without noise a larger batch is worth nothing."""
    assert len(shares_run(grown("pollux", 1.0))) == 1


def test_pollux_decides_at_the_period_that_it_is_told():
    problem = replace(group(["T4", "T4", "V100", "V100"], 256), dataset_size=10**6)
    rising = noisy_norms(lambda step: 1500.0 + 40.0 * step.step)

    def run(decide_steps: int) -> list[Judged]:
        policy = make_policy("pollux", {"decide_steps": decide_steps})
        return live(policy, problem, many_rows_pay, num_steps=400, steps_per_epoch=400, measure=rising)

    slow, quick = run(0), run(30)
    assert shares_run(quick)[1] == shares_run(slow)[1], "the first decision waits for the noise scale alone"
    assert len(batches_of(slow)) == 2, "one pass, one decision"
    assert len(batches_of(quick)) > 2
    changes = [next(same)[0] for _, same in itertools.groupby(shares_run(quick), key=lambda run: sum(run[1]))][1:]
    assert len({(step - 1) // 30 for step in changes}) == len(changes)


def test_each_decision_of_pollux_rests_on_the_times_of_its_own_pass():
    """Where passes are short, a forecast that stands for some looks would be that of several decisions."""
    problem = replace(group(["T4", "T4", "V100", "V100"], 256), dataset_size=10**6)
    history = live(
        make_policy("pollux"),
        problem,
        lambda step, sizes: [own_us * 1.1 ** (step // 24) for own_us in many_rows_pay(step, sizes)],
        num_steps=240,
        steps_per_epoch=24,
        keep_states=True,
        measure=noisy_norms(lambda step: 50.0),
    )
    growths = [judged.state.growth for judged in history]
    foreseen_s = {growth.epoch: growth.forecast[256] for growth in growths if 256 in growth.forecast}
    assert list(foreseen_s) == list(range(1, 10))
    assert len(set(foreseen_s.values())) == len(foreseen_s)


def test_a_batch_that_does_not_fit_the_smallest_worker_is_no_candidate_of_pollux():
    problem = group(["T4", "V100"], 128, steps_per_epoch=400)
    small = replace(problem.workers[0], max_local_batch_size=100)
    problem = replace(problem, workers=(small, problem.workers[1]))
    policy = make_policy("pollux")
    own_us = affine([200_000, 200_000], [100, 100])
    history = live(policy, problem, own_us, num_steps=300, measure=noisy_norms(lambda step: 1e5))
    for _, sizes in shares_run(history):
        assert max(sizes) <= 100
    assert sum(final_shares(history)) > 150


# Growth by a tenth


@settings(max_examples=4, deadline=None)
@given(phi=st.floats(10.0, 10_000.0))
def test_growth10_grows_by_at_most_a_tenth_and_never_shrinks(phi):
    batches = batches_of(grown("growth10", phi))
    for before, after in itertools.pairwise(batches):
        assert before < after <= round(1.1 * before)
    assert batches[-1] == 2048 or batches[-1] <= max(256, 1.6 * phi)


def test_growth10_stops_at_the_noise_scale():
    batches = batches_of(grown("growth10", 600.0))
    assert 450 <= batches[-1] <= 900


# Cannikin


@settings(max_examples=10, deadline=None)
@given(laws=workers, steps_per_epoch=st.integers(12, 30))
def test_cannikin_ends_at_the_exact_split_of_its_lines(laws, steps_per_epoch):
    own_us = affine(*zip(*laws, strict=True))
    problem = group(["T4"] * len(laws), 64 * len(laws))
    policy: Any = make_policy("cannikin")
    history = live(policy, problem, own_us, num_steps=8 * steps_per_epoch, steps_per_epoch=steps_per_epoch)
    sizes = final_shares(history)
    model = policy.split.model(history[-1].state.split)
    lines = model.lines
    assert isinstance(lines, CurveSet)
    exact = exact_split(lines, problem.global_batch_size)
    assert float(lines.own_s(np.array(sizes)).max()) <= 1.02 * exact.step_time_s
    assert sum(sizes) == problem.global_batch_size


def test_cannikin_runs_equal_then_proportional_then_exact_shares():
    fixed_us, row_us = (60_000.0, 10_000.0, 30_000.0), (1_000.0, 3_000.0, 500.0)
    own_us = affine(fixed_us, row_us)
    history = live(make_policy("cannikin"), group(["T4"] * 3, 192), own_us, num_steps=200, steps_per_epoch=40)
    plans = shares_run(history)
    assert [step for step, _ in plans] == [0, 41, 81]
    times = np.array(own_us(0, (64, 64, 64)))
    assert np.array(plans[1][1]) == pytest.approx(192 / times / (1 / times).sum(), abs=1.0)
    last = own_us(0, plans[2][1])
    assert max(last) - min(last) <= max(row_us)


def test_cannikin_grows_and_balances():
    history = grown("cannikin", 6000.0)
    sizes = final_shares(history)
    assert sum(sizes) > 512
    times = many_rows_pay(0, sizes)
    assert max(times) <= 1.05 * min(times)


@settings(max_examples=30)
@given(
    runs=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 0.5)), min_size=1, max_size=5),
    slowest_s=st.floats(0.01, 2.0),
)
def test_no_measured_step_of_cannikin_is_shorter_than_its_model_says(runs, slowest_s):
    log = RunLog(
        runs=tuple(
            ShareRun(
                local_batch_sizes=(index + 1,),
                epoch=0,
                num_steps=1,
                own_us=np.array([own_s * 1e6]).astype(np.int64),
                slowest_us=int(own_s * 1e6),
                sync_us=int(sync_s * 1e6),
            )
            for index, (own_s, sync_s) in enumerate(runs)
        )
    )
    model = AffineModel(problem=group(["T4"], 8), memory=MemoryBook.empty(["T4"]), log=log)
    for run in log.runs:
        assert model.whole_s(run.slowest_s) <= run.step_s * (1 + 1e-9)
    assert model.whole_s(slowest_s) >= slowest_s
    assert model.whole_s(slowest_s * 1.1) >= model.whole_s(slowest_s)


# All of them


PUBLISHED = ("lb_bsp", "omnilearn", "pollux", "growth10", "cannikin")


def peaks(step: StepObserved) -> StepObserved:
    """A device of 100 units of memory, one per row."""
    return replace(step, peak_memory_bytes=step.num_rows.astype(np.int64))


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    return replace(problem, workers=tuple(replace(worker, memory_bytes=memory_bytes) for worker in problem.workers))


@pytest.mark.parametrize("name", ["dlb", "lb_bsp", "omnilearn", "cannikin"])
def test_no_worker_is_given_more_rows_than_its_memory_has_shown_to_hold(name):
    problem = with_memory(group(["T4", "V100"], 128, steps_per_epoch=20), 100)
    own_us = affine([0, 0], [1000, 50])
    history = live(make_policy(name), problem, own_us, num_steps=800, steps_per_epoch=20, measure=peaks)
    assert max(final_shares(history)) == 85


@pytest.mark.parametrize(
    ("name", "options"),
    [("pollux", {}), ("cannikin", {}), ("growth10", {}), ("rex", {"growth_rule": "growth10", "search": "off"})],
)
def test_no_batch_is_tried_that_the_memories_have_not_shown_to_hold(name, options):
    problem = with_memory(replace(group(["T4", "T4", "V100", "V100"], 256), dataset_size=10**6), 100)
    noisy = noisy_norms(lambda step: 20_000.0)
    policy = make_policy(name, options)
    history = live(policy, problem, many_rows_pay, num_steps=400, measure=lambda step: peaks(noisy(step)))
    assert max(max(sizes) for _, sizes in shares_run(history)) <= 85
    assert sum(final_shares(history)) > 300


@pytest.mark.parametrize("name", ["dlb", "lb_bsp", "omnilearn", "pollux", "growth10", "cannikin"])
def test_a_smaller_group_begins_within_the_memories_that_the_larger_one_has_shown(name):
    """Equal shares of 90 rows would not fit the first worker, of which 85 are known to: a restart would fail again."""
    memories = {"T4": 100, "V100": 1000}

    def on(devices: Sequence[str]) -> Problem:
        problem = group(devices, 180)
        sized = tuple(replace(worker, memory_bytes=memories[worker.device]) for worker in problem.workers)
        return replace(problem, workers=sized)

    policy: Policy[Any] = make_policy(name)
    own_us = affine([0] * 3, [1000, 300, 300])
    history = live(policy, on(["T4", "V100", "V100"]), own_us, num_steps=200, measure=peaks)
    current = Allocation(version=9, local_batch_sizes=final_shares(history))
    proposal, _ = policy.init(on(["T4", "V100"]), history[-1].state, current)
    assert proposal.local_batch_sizes == (85, 95)


def split_alone(name: str) -> Policy[Any]:
    """A method, its batch left as it is."""
    return make_policy(name, {"growth": "off", "search": "off"} if name == "rex" else {})


@pytest.mark.parametrize("name", ["dlb", "lb_bsp", "omnilearn", "cannikin", "rex"])
def test_shares_are_not_resumed_by_kinds_of_device_whose_memories_do_not_hold_them(name):
    """A group that comes back in another order: what the large device held, the small one would not."""
    memories = {"T4": 100, "V100": 1000}

    def on(devices: Sequence[str]) -> Problem:
        problem = group(devices, 180)
        sized = tuple(replace(worker, memory_bytes=memories[worker.device]) for worker in problem.workers)
        return replace(problem, workers=sized)

    policy = split_alone(name)
    history = live(policy, on(["T4", "V100"]), affine([0] * 2, [1000, 200]), num_steps=200, measure=peaks)
    shares = final_shares(history)
    assert shares[1] > 100
    current = Allocation(version=9, local_batch_sizes=shares)
    same, _ = policy.init(on(["T4", "V100"]), history[-1].state, current)
    assert same.local_batch_sizes == shares
    turned, _ = policy.init(on(["V100", "T4"]), history[-1].state, current)
    assert turned.global_batch_size == 180
    assert turned.local_batch_sizes[1] <= 90, "what ran fits, and no more is known to"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_group_that_lost_a_worker_goes_on_from_its_batch(name):
    policy: Policy[Any] = make_policy(name)
    history = grown(name, 2000.0)
    sizes = final_shares(history)
    rows = sum(sizes)
    current = Allocation(version=9, local_batch_sizes=sizes, lr_factor=1.5)
    proposal, state = policy.init(replace(group(["T4", "V100", "V100"], 256)), history[-1].state, current)
    assert len(proposal.local_batch_sizes) == 3
    assert proposal.global_batch_size == rows
    assert proposal.lr_factor == 1.5
    applied = AllocationApplied(allocation=Allocation(version=10, local_batch_sizes=proposal.local_batch_sizes), step=9)
    _, state = policy.decide(state, applied, RNG)
    for step in range(40):
        shown = observed(step, proposal.local_batch_sizes, many_rows_pay(step, proposal.local_batch_sizes), version=10)
        decision, state = policy.decide(state, shown, RNG)
        if isinstance(decision, Reallocate | ChangeGlobalBatch):
            assert len(decision.proposal.local_batch_sizes) == 3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lb_bsp", {"window": 0}, ["window", "0"]),
        ("lb_bsp", {"first_share": 0.0}, ["first_share", "0.0"]),
        ("lb_bsp", {"min_gap": 1.0}, ["min_gap", "1.0"]),
        ("omnilearn", {"dead_band": -0.1}, ["dead_band", "-0.1"]),
        ("omnilearn", {"smoothing": 2.0}, ["smoothing", "2.0"]),
        ("pollux", {"num_points": 1}, ["num_points", "1"]),
        ("pollux", {"min_gain": -1.0}, ["min_gain", "-1.0"]),
        ("pollux", {"decide_steps": -1}, ["decide_steps", "-1"]),
        ("growth10", {"factor": 1.0}, ["factor", "1.0"]),
        ("cannikin", {"lr_rule": "cubic"}, ["lr_rule", "cubic"]),
        ("cannikin", {"min_gian": 0.1}, ["min_gian", "min_gain"]),
    ],
)
def test_an_option_that_cannot_work_is_named(name, options, words):
    with pytest.raises(ConfigError) as caught:
        make_policy(name, options)
    assert all(word in str(caught.value) for word in words)

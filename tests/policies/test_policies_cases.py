"""rex and dlb on the public cases that fall to a policy, and what each promises beyond the contract."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_worlds import ALWAYS_EQUAL, RNG, group, live, observed, shares_run

from rex_ray.control.decisions import fault_of
from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.core.observations import AllocationApplied, SearchResult
from rex_ray.core.types import Allocation, StepFlag
from rex_ray.policies.base import Keep, Proposal, Reallocate
from rex_ray.policies.bsp import FixedBatch
from rex_ray.policies.registry import make_policy, policy_names, policy_options
from rex_ray.policies.wrappers import Cooldown


def noisy(truth: Callable[[int, int], float], sd: float, seed: int) -> Callable[[int, Sequence[int]], list[float]]:
    """Own times ``truth(rank, rows)`` in microseconds with independent noise."""
    rng = np.random.default_rng(seed)
    return lambda step, sizes: [truth(rank, rows) * (1 + sd * rng.standard_normal()) for rank, rows in enumerate(sizes)]


def slow_last(factor: float, num_workers: int) -> Callable[[int, int], float]:
    return lambda rank, rows: (2_000 + 1_000 * rows) * (factor if rank == num_workers - 1 else 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sd", [0.01, 0.04])
def test_d8_two_equal_workers_one_three_times_slower(seed, sd):
    problem = group(["T4"] * 3, 210)
    truth = slow_last(3.0, 3)
    history = live(make_policy("rex"), problem, noisy(truth, sd, seed), num_steps=400, lag_steps=10, warm_up_steps=3)
    plans = shares_run(history)
    first, second, slow = plans[-1][1]
    assert len(plans) - 1 <= 3
    assert abs(first - second) <= 1
    assert 2.6 <= first / slow <= 3.6
    optimum_us = min(max(truth(0, fast), truth(2, 210 - 2 * fast)) for fast in range(1, 105))
    assert max(truth(rank, rows) for rank, rows in enumerate(plans[-1][1])) <= 1.1 * optimum_us


@pytest.mark.parametrize("seed", range(5))
def test_d8_equal_workers_stay_equal(seed):
    problem = group(["T4"] * 3, 100)
    history = live(
        make_policy("rex"), problem, noisy(slow_last(1.0, 3), 0.04, seed), num_steps=1000, lag_steps=10, warm_up_steps=3
    )
    for _, sizes in shares_run(history):
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", policy_names())
def test_e7_warm_up_steps_of_twenty_times_are_left_out(name):
    """The same decisions with and without the outliers, at the start and after each switch."""

    def plans(factor: float) -> list[tuple[int, tuple[int, ...]]]:
        policy, problem = make_policy(name), group(["T4", "V100"], 128)
        first, state = policy.init(problem)
        sizes, seen, wait = first.local_batch_sizes, [], 3
        applied = AllocationApplied(allocation=Allocation(version=1, local_batch_sizes=sizes), step=0)
        _, state = policy.decide(state, applied, RNG)
        for step in range(300):
            # The slow start is rank 0's alone: it would look like a slow worker.
            own = [(9_000 + 1_000 * sizes[0]) * (factor if wait else 1), 9_000 + 400 * sizes[1]]
            flags = StepFlag.WARM_UP if wait else StepFlag.NONE
            wait = max(0, wait - 1)
            shown = observed(step, sizes, own, epoch=step // 50, flags=flags)
            decision, state = policy.decide(state, shown, RNG)
            if isinstance(decision, Reallocate):
                sizes, wait = decision.proposal.local_batch_sizes, 3
                seen.append((step, sizes))
                applied = AllocationApplied(allocation=Allocation(version=2, local_batch_sizes=sizes), step=step + 1)
                _, state = policy.decide(state, applied, RNG)
        return seen

    assert plans(20.0) == plans(1.0)
    assert name in ALWAYS_EQUAL or len(plans(20.0)) >= 1


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_e8_a_gc_pause_every_hundred_steps_moves_nothing(rank, seed):
    quiet = noisy(slow_last(1.0, 4), 0.01, seed)

    def own_us(step: int, sizes: Sequence[int]) -> list[float]:
        times = quiet(step, sizes)
        if step % 100 == 4:  # early enough to hit the first review as well
            times[rank] += 400_000.0
        return times

    history = live(make_policy("rex"), group(["T4"] * 4, 200), own_us, num_steps=2000, lag_steps=10, warm_up_steps=3)
    assert len(shares_run(history)) == 1


def test_rex_never_asks_for_more_than_twice_what_a_rank_has_run():
    """The extrapolation limit: a worker a hundred times faster still doubles at most from round to round."""
    problem = group(["T4", "T4", "T4", "V100"], 200)
    truth = lambda rank, rows: 1_000.0 * rows / (100.0 if rank == 3 else 1.0)  # noqa: E731
    plans = [sizes for _, sizes in shares_run(live(make_policy("rex"), problem, noisy(truth, 0.0, 0), num_steps=200))]
    assert len(plans) > 1
    for before, after in itertools.pairwise(plans):
        assert all(new <= 2 * old for old, new in zip(before, after, strict=True))


def test_rex_begins_a_new_group_at_what_it_learnt_per_kind():
    truth = lambda rank, rows: 5_000 + (3_000.0 if rank == 0 else 1_000.0) * rows  # noqa: E731
    policy = make_policy("rex")
    history = live(policy, group(["T4", "V100"], 120), noisy(truth, 0.0, 0), num_steps=100)
    proposal, _ = policy.init(group(["V100", "T4", "V100"], 210), history[-1].state)
    fast, slow, fast_too = proposal.local_batch_sizes
    assert abs(fast - fast_too) <= 1
    assert fast == pytest.approx(3 * slow, rel=0.1)
    # A kind that nobody has measured leaves nothing to plan with.
    assert policy.init(group(["A100", "T4"], 100), history[-1].state)[0].local_batch_sizes == (50, 50)


def test_dlb_follows_its_formula_once_per_epoch():
    """p_i' = (p_i / t_i) / sum_j (p_j / t_j), from the times of the epoch that ended."""
    truth = lambda rank, rows: 10_000 + (1_000, 2_000, 500)[rank] * rows  # noqa: E731
    history = live(make_policy("dlb"), group(["T4"] * 3, 120), noisy(truth, 0.0, 0), num_steps=149, steps_per_epoch=50)
    plans = shares_run(history)
    assert [step for step, _ in plans] == [0, 51, 101]
    sizes = np.array(plans[0][1])
    rate = sizes / [truth(rank, rows) for rank, rows in enumerate(sizes)]
    assert np.abs(np.array(plans[1][1]) - 120 * rate / rate.sum()).max() <= 1.0


def test_bsp_never_proposes():
    history = live(make_policy("bsp"), group(["T4", "V100"], 101), noisy(slow_last(9.0, 2), 0.0, 0), num_steps=200)
    assert all(isinstance(judged.decision, Keep) for judged in history)
    assert shares_run(history) == [(0, (51, 50))]


def test_cooldown_waits_between_changes_and_hysteresis_refuses_small_gains():
    problem = group(["T4", "T4", "T4", "V100"], 200)
    truth = lambda rank, rows: 1_000.0 * rows / (100.0 if rank == 3 else 1.0)  # noqa: E731
    free = shares_run(live(make_policy("rex"), problem, noisy(truth, 0.0, 0), num_steps=300))
    cooled = shares_run(live(make_policy("rex", {"cooldown_steps": 40}), problem, noisy(truth, 0.0, 0), num_steps=300))
    stiff = shares_run(live(make_policy("rex", {"hysteresis_gain": 0.9}), problem, noisy(truth, 0.0, 0), num_steps=300))
    assert len(free) >= 3
    assert free[2][0] - free[1][0] < 40 <= cooled[2][0] - cooled[1][0]
    assert cooled[1] == free[1], "the first change waits for nothing"
    assert len(stiff) == 1


def test_cooldown_also_holds_back_what_a_search_found():
    class Eager:
        """Proposes whatever it is shown."""

        name = "eager"

        def init(self, problem, prior=None, current=None):
            return Proposal(local_batch_sizes=(4, 4)), None

        def decide(self, state, observation, rng):
            return Reallocate(proposal=Proposal(local_batch_sizes=(5, 3)), reason="found"), state

    policy = Cooldown(Eager(), 10)
    _, state = policy.init(group(["T4"] * 2, 8))
    for version, step in ((1, 0), (2, 20)):
        applied = AllocationApplied(allocation=Allocation(version=version, local_batch_sizes=(4, 4)), step=step)
        _, state = policy.decide(state, applied, RNG)
    result = SearchResult(search_id="s", local_batch_sizes=(5, 3), objective=0.1, reason="done")
    for step, kind in ((25, Keep), (29, Keep), (30, Reallocate)):
        _, state = policy.decide(state, observed(step, (4, 4), (9.0, 9.0)), RNG)
        assert isinstance(policy.decide(state, result, RNG)[0], kind)


@pytest.mark.parametrize("rows", range(4, 9))
@pytest.mark.parametrize("name", policy_names())
def test_b10_a_batch_too_small_for_every_minimum_stays_in_equal_parts(name, rows):
    """BatchNorm wants two rows of every rank; where they are not there, none is robbed of its last one for speed."""
    problem = group(["T4", "T4", "V100", "V100"], rows, lower=2)
    history = live(make_policy(name), problem, noisy(slow_last(5.0, 4), 0.01, 0), num_steps=150)
    assert {tuple(sorted(sizes)) for _, sizes in shares_run(history)} == {
        tuple(sorted(rows // 4 + (rank < rows % 4) for rank in range(4)))
    }


def test_a_group_that_cannot_hold_the_batch_is_told_the_remedy():
    with pytest.raises(InfeasibleError, match=r"100 rows .* 2 workers that hold 80 together: lower global_batch_size"):
        make_policy("rex").init(group(["T4"] * 2, 100, upper=40))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rexx", {}, ["'rexx'", "did you mean 'rex'"]),
        ("rex", {"min_gian": 0.1}, ["'min_gian'", "did you mean 'min_gain'"]),
        ("rex", {"min_gain": 3}, ["min_gain", "3"]),
        ("rex", {"min_steps": 2.5}, ["min_steps", "whole number", "2.5"]),
        ("rex", {"min_steps": 0}, ["min_steps", "0"]),
        ("rex", {"min_gain": "much"}, ["min_gain", "number", "'much'"]),
        ("bsp", {"min_gain": 0.1}, ["'bsp'", "'min_gain'", "cooldown_steps"]),
        ("dlb", {"cooldown_steps": -1}, ["cooldown_steps", "-1"]),
        ("dlb", {"hysteresis_gain": 1.0}, ["hysteresis_gain", "1.0"]),
    ],
)
def test_a_mistyped_policy_or_option_is_named_with_its_remedy(name, options, words):
    with pytest.raises(ConfigError) as caught:
        make_policy(name, options)
    assert all(word in str(caught.value) for word in words)


def test_every_default_option_is_accepted():
    for name in policy_names():
        assert make_policy(name, policy_options(name)).name == name


def test_shares_set_by_hand_are_run_as_they_are_and_follow_another_batch_in_proportion():
    policy = make_policy("bsp", {"local_batch_sizes": {"T4": 33, "V100": 95}})
    problem = group(["V100", "T4", "T4", "V100"], 256)
    proposal, state = policy.init(problem)
    assert proposal.local_batch_sizes == (95, 33, 33, 95)
    decision, _ = policy.decide(state, observed(0, (95, 33, 33, 95), [1e5, 1e4, 1e4, 1e5]), RNG)
    assert isinstance(decision, Keep)
    assert policy.split.plan(state.split, 512).local_batch_sizes == (190, 66, 66, 190)


def test_shares_set_by_hand_that_fit_no_group_are_refused_when_it_forms():
    policy = make_policy("bsp", {"local_batch_sizes": {"T4": 33, "V100": 95}})
    with pytest.raises(InfeasibleError, match="sum to 194 rows over 4 workers"):
        policy.init(group(["V100", "T4", "T4", "T4"], 256))
    with pytest.raises(InfeasibleError, match="no share for a worker on 'A100'"):
        policy.init(group(["A100", "T4"], 128))


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize(("upper", "cap", "fits"), [(200, 2048, 400), (None, 300, 300)])
def test_a_batch_that_grew_beyond_what_this_group_can_run_is_cut_and_not_refused(name, upper, cap, fits):
    """A run that ``rex`` grew on four workers is resumed on two, by whatever policy."""
    policy = make_policy(name)
    problem = replace(group(["T4", "V100"], 128, upper=upper), max_global_batch_size=cap)
    grown = Allocation(version=7, local_batch_sizes=(128, 128, 256, 256), lr_factor=3.0)
    proposal, state = policy.init(problem, None, grown)
    assert proposal.global_batch_size == fits
    assert fault_of(proposal, problem) is None
    assert 1.0 <= proposal.lr_factor <= 3.0
    applied = AllocationApplied(allocation=Allocation(version=8, local_batch_sizes=proposal.local_batch_sizes), step=0)
    policy.decide(state, applied, RNG)


@settings(max_examples=50)
@given(rows=st.integers(129, 1024), most=st.integers(128, 1024), lr_factor=st.floats(0.2, 8.0))
def test_a_fixed_batch_that_is_cut_keeps_a_rate_between_the_users_and_the_grown_one(rows, most, lr_factor):
    problem = replace(group(["T4", "V100"], 128), max_global_batch_size=most)
    grown = Allocation(version=7, local_batch_sizes=(rows // 2, rows - rows // 2), lr_factor=lr_factor)
    plan, _ = FixedBatch().init(problem, None, grown)
    assert plan.global_batch_size == min(rows, most)
    assert min(1.0, lr_factor) <= plan.lr_factor <= lr_factor
    assert plan.lr_factor == lr_factor or plan.global_batch_size < rows

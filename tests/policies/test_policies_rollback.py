"""Shares that measure worse are taken back; what made them look worse from outside is not their fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from policy_worlds import group, live, shares_run

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import StepObserved
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Keep, Proposal, Reallocate
from rex_ray.policies.rollback import RollBack
from rex_ray.policies.wrappers import Hysteresis

OLD, NEW, OTHER = (20, 12), (12, 20), (16, 16)


class Insistent:
    """Wants certain shares from a step on, for ever, and runs ``first`` until then."""

    name = "insistent"

    def __init__(self, wanted=NEW, *, from_step=20, search_id=None, first=OLD):
        self.wanted, self.from_step, self.search_id, self.first = wanted, from_step, search_id, first

    def init(self, problem, prior=None, current=None):
        return Proposal(local_batch_sizes=self.first), 0

    def decide(self, state, observation, rng) -> tuple[Decision, int]:
        if not isinstance(observation, StepObserved) or observation.step < self.from_step:
            return Keep(reason="not yet"), state
        if tuple(observation.num_rows.tolist()) == self.wanted:
            return Keep(reason="there"), state
        if sum(self.wanted) != int(observation.num_rows.sum()):
            proposal = Proposal(local_batch_sizes=self.wanted, lr_factor=2.0)
            return ChangeGlobalBatch(proposal=proposal, reason="more"), state
        proposal = Proposal(local_batch_sizes=self.wanted)
        return Reallocate(proposal=proposal, reason="I insist", search_id=self.search_id), state


def times(slow_under_new: float, *, sd: float = 0.02, seed: int = 0, event: Callable[[int], float] = lambda step: 1.0):
    """Own times: the last rank's depends on the shares by ``slow_under_new``, the first one's on an event."""
    rng = np.random.default_rng(seed)

    def own_us(step: int, sizes: Sequence[int]) -> list[float]:
        last = 100_000 * (slow_under_new if tuple(sizes) == NEW else 1.0)
        noise = 1 + sd * rng.standard_normal(2)
        return [90_000 * event(step) * noise[0], last * noise[1]]

    return own_us


def plans(policy, own_us, num_steps=120, **options):
    return shares_run(live(RollBack(policy), group(["T4", "V100"], 32), own_us, num_steps=num_steps, **options))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lag_steps", [1, 10])
def test_shares_that_measure_worse_are_taken_back_and_banned_ever_longer(seed, lag_steps):
    history = plans(Insistent(), times(1.2, seed=seed), num_steps=700, lag_steps=lag_steps)
    assert [sizes for _, sizes in history[:5]] == [OLD, NEW, OLD, NEW, OLD]
    starts = [step for step, _ in history]
    assert starts[2] - starts[1] <= 16 + lag_steps + 1
    stays = [after - before for before, after in zip(starts[2::2], starts[3::2], strict=False)]
    assert all(later > earlier for earlier, later in itertools.pairwise(stays))
    assert 64 <= stays[0] <= 64 + lag_steps + 2


class Slewing(Insistent):
    """Asks for another learning rate at every eighth step besides."""

    def decide(self, state, observation, rng) -> tuple[Decision, int]:
        decision, state = super().decide(state, observation, rng)
        if isinstance(decision, Keep) and isinstance(observation, StepObserved) and observation.step % 8 == 7:
            shares = tuple(observation.num_rows.tolist())
            proposal = Proposal(local_batch_sizes=shares, lr_factor=1 + observation.step / 100)
            return ChangeGlobalBatch(proposal=proposal, reason="another rate"), state
        return decision, state


def test_a_learning_rate_that_moves_keeps_no_shares_from_being_judged():
    history = plans(Slewing(), times(1.2))
    distinct = [sizes for (_, sizes), before in zip(history, [(0, ()), *history], strict=False) if sizes != before[1]]
    assert distinct[:3] == [OLD, NEW, OLD]


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.01])
@pytest.mark.parametrize("seed", range(5))
def test_shares_that_are_no_worse_stay(factor, seed):
    assert [sizes for _, sizes in plans(Insistent(), times(factor, seed=seed))] == [OLD, NEW]


def test_a_rank_that_got_slower_on_fewer_rows_condemns_nothing():
    # The first rank has rows taken away and slows down all the same: something from outside.
    history = plans(Insistent(), times(1.0, event=lambda step: 1.0 if step < 24 else 1.6))
    assert [sizes for _, sizes in history] == [OLD, NEW]


def test_a_rank_that_is_slower_on_fewer_rows_from_the_first_step_on_condemns_them():
    # A size that is a slow one, such as no multiple of a kernel's tile: the first rank's 12 rows take longer than 20.
    def own_us(step, sizes):
        return [130_000.0 if sizes[0] == 12 else 90_000.0, 100_000.0]

    assert [sizes for _, sizes in plans(Insistent(), own_us, num_steps=60)] == [OLD, NEW, OLD]


def test_bad_shares_that_follow_bad_ones_are_judged_against_what_was_before_both():
    class Wandering(Insistent):
        def decide(self, state, observation, rng):
            is_late = isinstance(observation, StepObserved) and observation.step >= 28
            self.wanted = OTHER if is_late else NEW
            return super().decide(state, observation, rng)

    def own_us(step, sizes):
        return [90_000.0, 100_000.0 if tuple(sizes) == OLD else 125_000.0]

    assert [sizes for _, sizes in plans(Wandering(), own_us, num_steps=80)][:4] == [OLD, NEW, OTHER, OLD]


def test_a_slowdown_that_the_switch_answers_is_not_held_against_it():
    # Slow before and after: better than the last steps before the switch, worse than the healthy ones.
    def own_us(step, sizes):
        slow = 2.0 if step >= 10 else 1.0
        return [90_000 * slow * sizes[0] / 20, 100_000.0]

    history = plans(Insistent(from_step=20), own_us)
    assert [sizes for _, sizes in history] == [OLD, NEW]


def test_a_trial_is_the_searchs_to_judge_and_a_batch_the_growths():
    assert [sizes for _, sizes in plans(Insistent(search_id="s"), times(1.5))] == [OLD, NEW]
    assert [sizes for _, sizes in plans(Insistent((30, 34)), lambda step, sizes: [1e3 * sum(sizes)] * 2)] == [
        OLD,
        (30, 34),
    ]


def test_other_shares_are_free_during_a_ban():
    class Wandering(Insistent):
        def decide(self, state, observation, rng):
            self.wanted = NEW if not isinstance(observation, StepObserved) or observation.step < 60 else OTHER
            return super().decide(state, observation, rng)

    assert [sizes for _, sizes in plans(Wandering(), times(1.2), num_steps=100)] == [OLD, NEW, OLD, OTHER]


@pytest.mark.parametrize("sd", [0.01, 0.04, 0.08])
def test_noise_alone_hardly_ever_takes_shares_back(sd):
    taken_back = sum(len(plans(Insistent(), times(1.0, sd=sd, seed=seed), num_steps=60)) > 2 for seed in range(100))
    assert taken_back <= 2


def test_the_inner_policy_is_told_only_what_is_applied():
    seen = []

    class Watching(Insistent):
        def decide(self, state, observation, rng):
            seen.append(observation)
            return super().decide(state, observation, rng)

    history = live(RollBack(Watching()), group(["T4", "V100"], 32), times(1.2), num_steps=60)
    assert [judged.observation for judged in history] == seen


def test_shares_that_nobody_takes_back_do_not_keep_other_decisions_waiting_for_ever():
    class Fickle(Insistent):
        def decide(self, state, observation, rng):
            wanted = OTHER if isinstance(observation, StepObserved) and observation.step >= 60 else NEW
            return Insistent(wanted).decide(state, observation, rng)

    policy = Hysteresis(RollBack(Fickle()), 0.9)
    history = shares_run(live(policy, group(["T4", "V100"], 32), times(1.2), num_steps=300))
    assert [sizes for _, sizes in history] == [OLD, NEW, OTHER]
    assert history[-1][0] < 120


def test_a_loss_that_is_no_fraction_is_refused():
    with pytest.raises(ConfigError, match="min_loss"):
        RollBack(Insistent(), min_loss=1.5)

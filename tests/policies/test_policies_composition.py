"""The composition alone: whose word counts when several parts speak at the same step, and that none is lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from policy_worlds import group, observed

from rex_ray.core.observations import AllocationApplied
from rex_ray.core.types import Allocation
from rex_ray.policies.base import ChangeGlobalBatch, Finding, Keep, Proposal, Reallocate, TellTrial
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.registry import make_policy
from rex_ray.policies.seams import Alarm, BatchPlan
from rex_ray.policies.split.fixed import FixedSplit

RNG = np.random.default_rng(0)
PROBLEM = group(["T4"] * 2, 32)
OFFER = Reallocate(proposal=Proposal(local_batch_sizes=(12, 20)), reason="the split's offer")
SEARCHED = Reallocate(proposal=Proposal(local_batch_sizes=(14, 18)), reason="the search's", search_id="s")
ALARM = Alarm(factors={0: 2.0}, verdict="slow", reason="rank 0 is slow")
PLAN = BatchPlan(global_batch_size=64, lr_factor=1.5, reason="grow")


def said(part: Any) -> Finding:
    return Finding(part=part, verdict="keep", reason=f"{part} keeps")


SEARCHED = replace(SEARCHED, findings=(said("search"),))
TOLD = TellTrial(search_id="s", trial=0, objective=-1.0, reason="timed", findings=(said("search"),))


@dataclass(frozen=True)
class Growing(FixedBatch):
    answer: Any = None

    def observe(self, state, step, model):
        return self.answer, state


@dataclass(frozen=True)
class Splitting(FixedSplit):
    answer: Any = "nothing better"
    told: list = field(default_factory=list)

    def propose(self, state):
        return self.answer

    def rescale(self, state, factors):
        self.told.append(dict(factors))
        return state


@dataclass(frozen=True)
class Watching(NoTrigger):
    answer: Any = None

    def observe(self, state, step, model):
        return self.answer, state


@dataclass(frozen=True)
class Searching(NoSearch):
    answer: Any = None
    is_busy: bool = False

    def busy(self, state):
        return self.is_busy

    def observe(self, state, step, model, look):
        return self.answer, state


def decide(growth=None, split="nothing better", trigger=None, search=None, busy=False, advising=()):
    policy = Composition(
        name="test",
        growth=Growing(answer=growth),
        split=Splitting(answer=split),
        trigger=Watching(answer=trigger),
        search=Searching(answer=search, is_busy=busy),
        advising=frozenset(advising),
    )
    _, state = policy.init(PROBLEM)
    allocation = Allocation(version=1, local_batch_sizes=(16, 16), lr_factor=0.5)
    _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=0), RNG)
    decision, _ = policy.decide(state, observed(0, (16, 16), (1e5, 1e5)), RNG)
    return decision, policy


def parts_of(decision) -> list[str]:
    return [finding.part for finding in decision.findings]


def test_every_part_that_keeps_is_heard():
    decision, _ = decide(said("growth"), said("split"), said("trigger"), said("search"))
    assert isinstance(decision, Keep)
    assert sorted(parts_of(decision)) == ["growth", "search", "split", "trigger"]


@pytest.mark.parametrize("growth", [PLAN, said("growth"), None])
@pytest.mark.parametrize("split", [OFFER, said("split")])
@pytest.mark.parametrize("search", [TOLD, SEARCHED, said("search"), None])
@pytest.mark.parametrize("trigger", [ALARM, said("trigger"), None])
@pytest.mark.parametrize("busy", [True, False])
def test_no_finding_is_lost_whoever_decides(growth, split, search, trigger, busy):
    if busy and trigger is not None:
        return  # a trigger is not asked while candidates run
    decision, _ = decide(growth, split, trigger, search, busy)
    for answer in (growth, split, search, trigger):
        for finding in (answer,) if isinstance(answer, Finding) else getattr(answer, "findings", ()):
            assert finding in decision.findings


def test_growth_goes_first_then_an_alarm_then_a_search_that_measures_then_the_split():
    decision, _ = decide(PLAN, OFFER, ALARM, SEARCHED)
    assert isinstance(decision, ChangeGlobalBatch)
    decision, policy = decide(None, OFFER, ALARM, SEARCHED)
    assert decision.proposal.local_batch_sizes == (12, 20)
    assert decision.reason.startswith("rank 0 is slow; ")
    assert policy.split.told == [{0: 2.0}]
    decision, _ = decide(None, OFFER, None, SEARCHED, busy=True)
    assert decision.proposal.local_batch_sizes == (14, 18)
    decision, _ = decide(None, OFFER, None, SEARCHED)
    assert decision.proposal.local_batch_sizes == (12, 20)
    decision, _ = decide(None, OFFER, None, None, busy=True)
    assert isinstance(decision, Keep)


def test_a_re_split_leaves_the_learning_rate_as_it_is():
    assert decide(split=OFFER)[0].proposal.lr_factor == 0.5
    assert decide(search=SEARCHED)[0].proposal.lr_factor == 0.5
    assert decide(growth=PLAN)[0].proposal.lr_factor == 1.5


RATE = BatchPlan(global_batch_size=32, lr_factor=0.7, reason="the noise scale has risen")


def test_another_learning_rate_keeps_the_shares_that_run_and_gives_way_to_others():
    alone, _ = decide(growth=RATE)
    assert alone.proposal == Proposal(local_batch_sizes=(16, 16), lr_factor=0.7)
    along, _ = decide(growth=RATE, split=OFFER, trigger=ALARM)
    assert isinstance(along, Reallocate)
    assert along.proposal == Proposal(local_batch_sizes=(12, 20), lr_factor=0.7)
    assert isinstance(decide(growth=RATE, busy=True)[0], Keep)
    advised, _ = decide(growth=RATE, split=OFFER, advising=["growth"])
    assert advised.proposal == Proposal(local_batch_sizes=(12, 20), lr_factor=0.5)


def test_another_learning_rate_alone_leaves_all_that_is_known_of_times():
    policy = make_policy("rex", {"rollback": False})
    first, state = policy.init(PROBLEM)
    shares = first.local_batch_sizes
    allocation = Allocation(version=1, local_batch_sizes=shares)
    _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=0), RNG)
    for step in range(30):
        _, state = policy.decide(state, observed(step, shares, (1e5, 1e5)), RNG)
    rate = Allocation(version=2, local_batch_sizes=shares, lr_factor=1.2)
    _, after = policy.decide(state, AllocationApplied(allocation=rate, step=30), RNG)
    assert (after.split, after.trigger, after.search) == (state.split, state.trigger, state.search)
    assert after.allocation == rate
    assert after.growth.lr_factor == 1.2


@pytest.mark.parametrize(
    ("part", "speaks"),
    [("growth", {"growth": PLAN}), ("split", {"split": OFFER}), ("search", {"search": SEARCHED})],
)
def test_a_part_that_advises_is_noted_and_not_followed(part, speaks):
    decision, _ = decide(**speaks, advising=[part])
    assert isinstance(decision, Keep)
    (advice,) = [finding for finding in decision.findings if finding.verdict == "advises"]
    assert advice.part == part
    assert advice.proposal is not None
    assert part != "search" or said("search") in decision.findings


def test_an_alarm_that_only_advises_reaches_nobody():
    decision, policy = decide(split=OFFER, trigger=ALARM, advising=["trigger"])
    assert parts_of(decision) == ["trigger"]
    assert decision.reason == OFFER.reason
    assert policy.split.told == []


@dataclass(frozen=True)
class CountingSplit(Splitting):
    planned: list = field(default_factory=list)

    def plan(self, state, global_batch_size):
        self.planned.append(global_batch_size)
        return super().plan(state, global_batch_size)


def unheeded(split: Any, num_steps: int, plan: Any = PLAN):
    """Decisions of so many steps in which nothing that is asked for is ever applied."""
    policy = Composition(name="test", growth=Growing(answer=plan), split=split, trigger=NoTrigger(), search=NoSearch())
    _, state = policy.init(PROBLEM)
    allocation = Allocation(version=1, local_batch_sizes=(16, 16), lr_factor=0.5)
    _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=0), RNG)
    for step in range(num_steps):
        decision, state = policy.decide(state, observed(step, (16, 16), (1e5, 1e5)), RNG)
        yield decision


def test_a_batch_that_nobody_takes_up_is_asked_for_for_ever_and_lets_the_others_have_their_say():
    asked = list(unheeded(Splitting(answer=OFFER), 400))
    grows = [step for step, decision in enumerate(asked) if isinstance(decision, ChangeGlobalBatch)]
    splits = [step for step, decision in enumerate(asked) if isinstance(decision, Reallocate)]
    assert grows[:60] == list(range(60))
    assert splits[0] < 80
    assert len(splits) > 300
    assert grows[-1] > 380


def test_another_learning_rate_does_not_wait_for_ever_for_shares_that_are_held_back():
    """A wrapper may veto the offer for as long as it stands; the rate that it would take along needs no shares."""
    asked = list(unheeded(Splitting(answer=OFFER), 120, RATE))
    rates = [step for step, decision in enumerate(asked) if isinstance(decision, ChangeGlobalBatch)]
    assert rates
    assert 60 <= rates[0] < 80
    assert asked[rates[0]].proposal == Proposal(local_batch_sizes=(16, 16), lr_factor=0.7)
    assert asked[rates[0] + 1].proposal == Proposal(local_batch_sizes=(12, 20), lr_factor=0.7)


def test_an_exact_split_is_not_made_again_at_every_step_of_the_asking():
    split = CountingSplit()
    assert len({decision.proposal for decision in unheeded(split, 60) if isinstance(decision, ChangeGlobalBatch)}) == 1
    assert split.planned == [64]


def test_a_batch_grown_by_more_workers_is_cut_to_the_memories_that_were_learnt():
    def of(num_workers: int):
        problem = group(["T4"] * num_workers, 128)
        return replace(problem, workers=tuple(replace(w, memory_bytes=1_000_000) for w in problem.workers))

    policy = make_policy("rex", {"rollback": False})
    four, two = of(4), of(2)
    _, state = policy.init(four)
    for version, share in ((1, 32), (2, 128)):
        allocation = Allocation(version=version, local_batch_sizes=(share,) * 4, lr_factor=share / 32)
        _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=10 * version), RNG)
        step = observed(10 * version, (share,) * 4, (1e3 * share,) * 4, version=version)
        step = replace(step, peak_memory_bytes=np.full(4, 100_000 + 5_000 * share))
        _, state = policy.decide(state, step, RNG)
    proposal, resumed = policy.init(two, state, allocation)
    assert proposal.local_batch_sizes == (150, 150), "85 % of the memory"
    assert proposal.lr_factor <= 4
    assert resumed.growth.num_rows == 300
    assert resumed.growth.problem == two
    assert sum(policy.init(four, state, allocation)[0].local_batch_sizes) == 512

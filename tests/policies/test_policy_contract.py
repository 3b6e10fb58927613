"""What holds for every policy, wrapped or not, whatever it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_worlds import GROWING, RNG, group, live, observed, shares_run

from rex_ray.control.vocabulary import CODEC
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.observations import (
    AllocationApplied,
    Observation,
    SearchResult,
    StepObserved,
    TelemetryGap,
    TrialRequested,
)
from rex_ray.core.types import Allocation, Problem, StepFlag
from rex_ray.policies.base import ChangeGlobalBatch, Policy, Proposal, Reallocate
from rex_ray.policies.bsp import FixedBatch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.registry import make_policy, policy_names
from rex_ray.policies.search.beyond_curves import AxSearch
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.split.spline import SplineSplit
from rex_ray.sim.gradients import NoisyGradients

POLICIES = [
    (name, options)
    for name in policy_names()
    for options in (
        {},
        {"cooldown_steps": 15},
        {"hysteresis_gain": 0.1},
        {"cooldown_steps": 5, "hysteresis_gain": 0.02},
    )
]
POLICIES.append(("searching", {}))
HASTY = {"growth_window": 5, "growth_min_gain": 0.0}
GROWTHS = [
    HASTY,
    HASTY | {"growth_jump": False, "cooldown_steps": 5, "lr_rule": "linear"},
    HASTY | {"growth_test": "eprocess"},
    HASTY | {"growth_statistic": "log", "growth": "advise"},
    HASTY | {"growth_rule": "growth10"},
    HASTY | {"growth_rule": "goodput"},
]
POLICIES.extend(("rex", options) for options in GROWTHS)
NOISE = NoisyGradients(seed=0, num_dims=256)
every_policy = pytest.mark.parametrize(("name", "options"), POLICIES, ids=[f"{n}-{o}" for n, o in POLICIES])


def build(name: str, options: dict[str, Any]) -> Policy[Any]:
    """A policy by name; ``"searching"`` is rex's split with a search so hasty that short streams see all of it."""
    if name != "searching":
        return make_policy(name, options)
    rules = SearchRules(watch_steps=2, settle_steps=3, trial_steps=2, hopeless_steps=2, patience_steps=6, patience_s=0)
    return Composition(
        name=name,
        growth=FixedBatch(),
        split=SplineSplit(),
        trigger=NoTrigger(),
        search=AxSearch(rules=replace(rules, distance_steps=4, model_distance_steps=2, ask_again_steps=3)),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    devices = draw(st.lists(st.sampled_from(["T4", "V100"]), min_size=1, max_size=5))
    multiple = draw(st.sampled_from([1, 1, 3, 8]))
    units = draw(st.integers(1, 300 // multiple))
    least = draw(st.integers(1, 4))
    spare = draw(st.none() | st.integers(0, 40))
    most = None if spare is None else max(least, multiple * -(-units // len(devices)) + spare)
    problem = group(devices, multiple * units, lower=least, upper=most)
    cap = problem.max_global_batch_size + draw(st.integers(0, multiple - 1))
    return replace(problem, local_batch_multiple=multiple, max_global_batch_size=cap)


own_times = st.sampled_from([0.0, 1.0, 40_000.0, 50_000.0, 55_000.0, 300_000.0, 1e12])
step_specs = st.lists(
    st.tuples(
        st.sampled_from(["clean", "clean", "clean", "warm", "partial", "gap", "result", "failed", "trial"]),
        st.lists(own_times, min_size=5, max_size=5),
        st.booleans(),
    ),
    min_size=1,
    max_size=45,
)


def stream(policy: Policy[Any], problem: Problem, specs: list[Any]) -> Iterator[tuple[Any, Observation, Any, Any]]:
    """Show a policy a drawn stream; yield (state before, observation, decision, state after)."""
    proposal, state = policy.init(problem)
    sizes, version, epoch = proposal.local_batch_sizes, 1, 0

    def show(observation: Observation) -> tuple[Any, Observation, Any, Any]:
        nonlocal state
        before = state
        decision, state = policy.decide(before, observation, RNG)
        return before, observation, decision, state

    yield show(AllocationApplied(allocation=Allocation(version=1, local_batch_sizes=sizes), step=0))
    for step, (kind, times, apply) in enumerate(specs):
        if kind == "gap":
            yield show(TelemetryGap(generation="g", last_step=step - 1, waited_us=10_000_000))
            continue
        if kind == "result":
            yield show(SearchResult(search_id="s", local_batch_sizes=sizes, objective=0.1, reason="done"))
            continue
        if kind == "failed":
            yield show(SearchResult(search_id="s", local_batch_sizes=None, objective=None, reason="lost"))
            continue
        if kind == "trial":
            candidate = (*sizes[1:], sizes[0]) if step % 3 else (sum(sizes) + 1,) * len(sizes)
            shown = show(TrialRequested(search_id="s", trial=step, local_batch_sizes=candidate))
            yield shown
            if not (apply and isinstance(shown[2], Reallocate)):
                continue
            version, sizes = version + 1, shown[2].proposal.local_batch_sizes
            yield show(AllocationApplied(allocation=Allocation(version=version, local_batch_sizes=sizes), step=step))
            continue
        partial = kind == "partial"
        rows = rows_per_rank(max(1, sum(sizes) // 3), sizes) if partial else sizes
        flags = {"warm": StepFlag.WARM_UP, "partial": StepFlag.PARTIAL}.get(kind, StepFlag.NONE)
        shown = show(measured(observed(step, rows, times[: len(sizes)], version=version, epoch=epoch, flags=flags)))
        yield shown
        epoch += partial
        if apply and isinstance(shown[2], Reallocate | ChangeGlobalBatch):
            version, sizes = version + 1, shown[2].proposal.local_batch_sizes
            yield show(
                AllocationApplied(allocation=Allocation(version=version, local_batch_sizes=sizes), step=step + 1)
            )


def measured(step: StepObserved) -> StepObserved:
    """The step with the gradient norms of a noise scale far above its batch, and with a loss."""
    weighted, reduced = NOISE.draw(step.step, 20.0 * step.num_rows.sum(), step.num_rows.tolist())
    groups = (step.num_rows > 0).astype(np.int64)
    return replace(step, weighted_sq_norm=weighted, num_groups=groups, global_sq_norm=reduced, loss=2.0)


def unmeasured(step: StepObserved) -> StepObserved:
    return step


def frozen(state: Any) -> str:
    return json.dumps(CODEC.encode(state))


def assert_fits(proposal: Proposal, problem: Problem, rows: int) -> None:
    sizes = proposal.local_batch_sizes
    assert len(sizes) == problem.num_workers
    assert sum(sizes) == rows
    multiple = problem.local_batch_multiple
    least = [-(-worker.min_local_batch_size // multiple) * multiple for worker in problem.workers]
    for size, worker in zip(sizes, problem.workers, strict=True):
        assert size % multiple == 0
        some = multiple * min(1, rows // multiple // len(sizes))
        assert size >= (worker.min_local_batch_size if sum(least) <= rows else some)
        assert worker.max_local_batch_size is None or size <= worker.max_local_batch_size


@every_policy
@settings(max_examples=20)
@given(problem=problems(), specs=step_specs)
def test_proposals_sum_exactly_keep_the_bounds_and_have_a_reason(name, options, problem, specs):
    policy = build(name, options)
    assert_fits(policy.init(problem)[0], problem, problem.global_batch_size)
    rows = problem.global_batch_size
    for _, observation, decision, _ in stream(policy, problem, specs):
        assert decision.reason
        if isinstance(observation, AllocationApplied):
            rows = observation.allocation.global_batch_size
        if isinstance(decision, ChangeGlobalBatch):
            assert 0 < decision.proposal.global_batch_size <= problem.max_global_batch_size
            assert decision.proposal.lr_factor > 0
            assert_fits(decision.proposal, problem, decision.proposal.global_batch_size)
        if isinstance(decision, Reallocate):
            assert_fits(decision.proposal, problem, rows)
            assert decision.predicted_gain is None or np.isfinite(decision.predicted_gain)


@pytest.mark.parametrize("options", GROWTHS, ids=str)
def test_the_streams_of_this_suite_lead_to_growth(options):
    """What is drawn here would else say nothing of growth."""
    policy, problem = build("rex", options), group(["T4"] * 4, 128, steps_per_epoch=200)
    specs = [("partial" if step == 36 else "clean", [50_000.0] * 5, True) for step in range(45)]
    shown = list(stream(policy, problem, specs))
    changes = [decision for _, _, decision, _ in shown if isinstance(decision, ChangeGlobalBatch)]
    advice = [f for _, _, decision, _ in shown for f in getattr(decision, "findings", ()) if f.verdict == "advises"]
    assert bool(advice) == (options.get("growth") == "advise")
    assert changes or advice


@every_policy
@settings(max_examples=20)
@given(problem=problems(), specs=step_specs)
def test_decide_is_pure(name, options, problem, specs):
    policy = build(name, options)
    for before, observation, decision, after in stream(policy, problem, specs):
        again = policy.decide(before, observation, RNG)
        assert (repr(again[0]), frozen(again[1])) == (repr(decision), frozen(after))


@every_policy
@settings(max_examples=20)
@given(problem=problems(), specs=step_specs)
def test_states_survive_the_journal_and_hold_nothing_that_is_not_finite(name, options, problem, specs):
    policy = build(name, options)
    for before, observation, decision, after in stream(policy, problem, specs):
        written = frozen(before)
        assert '"float"' not in written  # how the codec writes nan and inf
        revived = CODEC.decode(json.loads(written))
        assert (revived is None) == (before is None)
        again = policy.decide(revived, observation, RNG)
        assert (repr(again[0]), frozen(again[1])) == (repr(decision), frozen(after))
        assert_finite(after)


def assert_finite(value: Any) -> None:
    if isinstance(value, np.ndarray):
        assert np.isfinite(value).all()
        return
    for name in getattr(value, "__dataclass_fields__", ()):
        assert_finite(getattr(value, name))


def speeds(step: int, sizes: tuple[int, ...]) -> list[float]:
    """A quiet world: two slow workers, two fast ones with a dearer start."""
    return [20_000 + 4_500 * rows if rank < 2 else 60_000 + 1_200 * rows for rank, rows in enumerate(sizes)]


def cheap_rows(step: int, sizes: tuple[int, ...]) -> list[float]:
    """The same order of speeds where the largest batch is the best."""
    return [400_000 + (450 if rank < 2 else 120) * rows for rank, rows in enumerate(sizes)]


@every_policy
def test_in_multiples_nothing_else_is_ever_proposed(name, options):
    """Over hundreds of steps, in which shares come to and fro and the batch grows."""
    policy, multiple = build(name, options), 6
    problem = group(["T4", "T4", "V100", "V100"], 97 * multiple)
    problem = replace(problem, max_global_batch_size=291 * multiple + 3, local_batch_multiple=multiple)
    own_us = cheap_rows if name in GROWING else speeds
    measure = measured if name in GROWING or options else unmeasured
    history = live(policy, problem, own_us, num_steps=400, lag_steps=2, measure=measure)
    asked = [judged.proposal for judged in history if judged.proposal is not None]
    for proposal in asked:
        assert_fits(proposal, problem, proposal.global_batch_size)
        assert proposal.global_batch_size <= problem.max_global_batch_size
    assert asked or name == "bsp"


@every_policy
@pytest.mark.parametrize("delay", [3, 12])
def test_a_veto_only_delays(name, options, delay):
    """A proposal that is held back for a while leads to the same shares in the same order as one applied at once."""
    policy = build(name, options)
    problem = replace(group(["T4", "T4", "V100", "V100"], 256), max_global_batch_size=768)
    measure = measured if name in GROWING else unmeasured
    own_us = cheap_rows if name in GROWING else speeds
    prompt = shares_run(live(policy, problem, own_us, num_steps=400, lag_steps=1, measure=measure))
    late = shares_run(live(policy, problem, own_us, num_steps=400, lag_steps=delay, measure=measure))
    if name in GROWING:  # by then they have seen other norms, but the noise leaves no doubt about the batch
        assert sum(late[-1][1]) == sum(prompt[-1][1]) == problem.max_global_batch_size
    else:
        assert [sizes for _, sizes in late] == [sizes for _, sizes in prompt]
    if name != "bsp":
        assert len(prompt) > 1, "a law about vetoes says nothing of a policy that proposes nothing"


@every_policy
def test_what_is_never_applied_is_proposed_again(name, options):
    """State presumes nothing: without an AllocationApplied the policy goes on asking for the same."""
    policy = build(name, options)
    problem = group(["T4", "T4", "V100", "V100"], 256)
    measure = measured if name in GROWING else unmeasured
    history = live(policy, problem, speeds, num_steps=140, lag_steps=10_000, measure=measure)
    asked = [judged.proposal for judged in history if judged.proposal is not None]
    if name != "bsp":
        assert len(asked) > 30
        # A batch that is not taken up for long is asked for at every 16th step, so that others need not wait for it.
        assert any(judged.proposal is not None for judged in history[-16 if name in GROWING else -1 :])
        newest = {proposal.global_batch_size: proposal.local_batch_sizes for proposal in asked}
        assert len(newest) <= (3 if name in GROWING else 1)
        for proposal in asked:
            assert np.abs(np.subtract(proposal.local_batch_sizes, newest[proposal.global_batch_size])).max() <= 1


@every_policy
@settings(max_examples=20)
@given(before=problems(), after=problems(), specs=step_specs)
def test_a_prior_carries_over_to_another_world_size(name, options, before, after, specs):
    policy = build(name, options)
    *_, (_, _, _, prior) = stream(policy, before, specs)
    proposal, state = policy.init(after, prior)
    assert_fits(proposal, after, after.global_batch_size)
    applied = AllocationApplied(allocation=Allocation(version=9, local_batch_sizes=proposal.local_batch_sizes), step=0)
    policy.decide(state, applied, RNG)


@every_policy
@settings(max_examples=20)
@given(problem=problems(), rows=st.integers(1, 300), lr_factor=st.floats(0.5, 4.0))
def test_a_resumed_allocation_keeps_its_global_batch_and_learning_rate(name, options, problem, rows, lr_factor):
    policy = build(name, options)
    n = problem.num_workers
    sizes = tuple(rows // n + (rank < rows % n) for rank in range(n))
    if any(w.max_local_batch_size is not None and w.max_local_batch_size < max(sizes) for w in problem.workers):
        return
    # What is beyond the cap no controller takes; growth cuts it, the others are told to.
    problem = replace(problem, max_global_batch_size=max(problem.max_global_batch_size, rows))
    multiple = problem.local_batch_multiple
    whole = multiple * max(rows // multiple, 1)
    most = [w.max_local_batch_size for w in problem.workers]
    if None not in most and sum(size // multiple * multiple for size in most) < whole:
        return
    proposal, _ = policy.init(problem, None, Allocation(version=7, local_batch_sizes=sizes, lr_factor=lr_factor))
    assert_fits(proposal, problem, whole)
    assert proposal.lr_factor == lr_factor if whole == rows else 0 < proposal.lr_factor <= lr_factor


@every_policy
def test_a3_fewer_rows_than_workers_leaves_ranks_without_rows_and_no_trace_in_the_times(name, options):
    policy = build(name, options)
    problem = group(["T4"] * 3, 2)
    history = live(policy, problem, lambda step, sizes: [1000.0 * rows for rows in sizes], num_steps=150)
    for _, sizes in shares_run(history):
        assert sum(sizes) == 2
        assert min(sizes) >= 0
    assert_finite(history[-1].state)
    assert all(isinstance(judged.observation, StepObserved | AllocationApplied) for judged in history)

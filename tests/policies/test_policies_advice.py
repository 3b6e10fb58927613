"""A part that only advises says what it would do, and the others go on as if it were left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from policy_worlds import RNG, group, observed

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import AllocationApplied
from rex_ray.core.types import Allocation
from rex_ray.policies.base import Decision, Finding, Policy, Reallocate
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.registry import make_policy
from rex_ray.policies.seams import Alarm, BatchPlan
from rex_ray.policies.split.spline import SplineSplit


class GrowAtThirty(FixedBatch):
    def observe(self, state, step, model):
        grows = step.step >= 30 and step.num_rows.sum() == 64
        plan = BatchPlan(global_batch_size=128, lr_factor=1.5, reason="it pays", evidence={"p_value": 0.01})
        return (plan if grows else None), state


class AlarmAtThirty(NoTrigger):
    def observe(self, state, step, model):
        alarm = Alarm(factors={0: 2.0}, verdict="slow", reason="rank 0 is slow", evidence={"effect": 0.69})
        return (alarm if step.step == 30 else None), state


def decisions(policy: Policy, num_steps: int = 60, *, own_us=lambda sizes: [1000.0 * b for b in sizes]) -> Iterator:
    """Show 64 rows in equal shares and apply whatever is asked for at once."""
    first, state = policy.init(group(["T4", "V100"], 64))
    allocation = Allocation(version=1, local_batch_sizes=first.local_batch_sizes)
    _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=0), RNG)
    for step in range(num_steps):
        sizes = allocation.local_batch_sizes
        shown = observed(step, sizes, own_us(sizes), version=allocation.version)
        decision, state = policy.decide(state, shown, RNG)
        yield step, allocation, decision
        proposal = getattr(decision, "proposal", None)
        if proposal is not None:
            allocation = Allocation(
                version=allocation.version + 1,
                local_batch_sizes=proposal.local_batch_sizes,
                lr_factor=proposal.lr_factor,
            )
            _, state = policy.decide(state, AllocationApplied(allocation=allocation, step=step + 1), RNG)


def compose(*advising: str, growth=None, trigger=None) -> Composition:
    return Composition(
        name="composed",
        growth=growth or FixedBatch(),
        split=SplineSplit(),
        trigger=trigger or NoTrigger(),
        search=NoSearch(),
        advising=frozenset(advising),
    )


def findings_of(run: list[tuple[int, Allocation, Decision]], part: str) -> list[Finding]:
    return [finding for _, _, decision in run for finding in decision.findings if finding.part == part]


def test_growth_that_advises_names_batch_shares_and_rate_and_changes_nothing():
    run = list(decisions(compose("growth", growth=GrowAtThirty())))
    assert {allocation.global_batch_size for _, allocation, _ in run} == {64}
    advice = findings_of(run, "growth")
    assert len(advice) == 30
    assert (advice[0].verdict, advice[0].evidence) == ("advises", {"p_value": 0.01})
    assert (sum(advice[0].proposal.local_batch_sizes), advice[0].proposal.lr_factor) == (128, 1.5)
    followed = list(decisions(compose(growth=GrowAtThirty())))
    assert followed[-1][1].global_batch_size == 128


def uneven(sizes):
    return [3000.0 * sizes[0], 1000.0 * sizes[1]]


def test_a_split_that_advises_keeps_equal_shares_and_the_others_grow_them_alike():
    run = list(decisions(compose("split", growth=GrowAtThirty()), own_us=uneven))
    assert {allocation.local_batch_sizes for _, allocation, _ in run} == {(32, 32), (64, 64)}
    advice = [finding for finding in findings_of(run, "split") if finding.verdict == "advises"]
    assert advice
    assert all(finding.predicted_gain > 0.2 for finding in advice)
    followed = list(decisions(compose(), own_us=uneven))
    assert followed[-1][1].local_batch_sizes[0] < 20


def test_a_trigger_that_advises_leaves_the_curves_alone():
    run = list(decisions(compose("trigger", trigger=AlarmAtThirty())))
    assert [finding.verdict for finding in findings_of(run, "trigger")] == ["slow"]
    assert {allocation.local_batch_sizes for _, allocation, _ in run} == {(32, 32)}
    followed = list(decisions(compose(trigger=AlarmAtThirty())))
    (moved,) = [decision for step, _, decision in followed if step == 30]
    assert isinstance(moved, Reallocate)
    assert moved.reason.startswith("rank 0 is slow; ")
    assert {"effect", "step_time_s", "planned_step_time_s"} <= moved.evidence.keys()
    assert moved.proposal.local_batch_sizes[0] < 32


def test_every_review_that_keeps_leaves_a_finding():
    run = list(decisions(compose(), num_steps=60))
    kept = findings_of(run, "split")
    assert [finding.verdict for finding in kept] == ["keep"] * 4, "reviews after 6, 12, 24 and 48 clean steps"
    assert all({"gain", "needed_gain", "num_clean_steps"} <= finding.evidence.keys() for finding in kept)


@pytest.mark.parametrize("part", ["growth", "split", "trigger", "search"])
def test_an_unknown_mode_of_a_part_is_refused(part):
    with pytest.raises(ConfigError, match=f"{part}.*'auto', 'advise' or 'off'.*'on'"):
        make_policy("rex", {part: "on"})


def test_a_split_that_is_off_is_equal_shares_for_ever():
    options = {"split": "off", "growth": "off", "search": "off"}
    run = list(decisions(make_policy("rex", options), own_us=uneven))
    assert {allocation.local_batch_sizes for _, allocation, _ in run} == {(32, 32)}

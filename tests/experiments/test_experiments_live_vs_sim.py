"""Comparing two runs' changes: what counts as the same; a simulation agrees with itself and not with others."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from experiments.live_vs_sim import MAX_ONSET_STEPS, changes, match_changes
from rex_ray.control.controller import Controller
from rex_ray.control.notes import Decided
from rex_ray.policies.base import Proposal
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import Episode
from rex_ray.sim import mixed_cluster, simulate

SLOW = (Episode(rank=2, start_step=80, num_steps=60, factor=2.0),)


def decided(step: int, *shares: int, kind: str = "reallocate") -> Decided:
    return Decided(step=step, kind=kind, reason="", version=2, proposal=Proposal(local_batch_sizes=shares))


def run(policy: str = "rex", lag: int = 4, episodes=SLOW):
    world = mixed_cluster(
        ("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=256, steps_per_epoch=400, episodes=episodes
    )
    return simulate(Controller(make_policy(policy)), replace(world, switch_lag_steps=lag), num_steps=220)


@given(st.integers(0, 50), st.integers(0, 50))
def test_onsets_may_differ_by_a_few_steps_and_shares_by_a_row_or_three_per_cent(apart, moved):
    found = match_changes([decided(100, 100, 100)], [decided(100 + apart, 100 + moved, 100 - moved)])
    assert found.worst_onset_steps == apart
    assert found.holds == (apart <= MAX_ONSET_STEPS and moved <= 3)
    assert match_changes([decided(0, 2, 8)], [decided(0, 3, 7)]).holds


def test_a_missing_change_and_another_kind_are_no_agreement():
    one = decided(10, 4, 4)
    assert not match_changes([one], []).holds
    assert not match_changes([one], [replace(one, kind="change_global_batch")]).holds
    assert match_changes([], []).holds


def test_a_simulation_agrees_with_itself_and_not_with_one_in_another_world():
    found = changes(run().notes)
    assert len(found) >= 3
    assert match_changes(found, changes(run().notes)).holds
    assert not match_changes(found, changes(run(episodes=()).notes)).holds
    assert not match_changes(found, changes(run("bsp").notes)).holds

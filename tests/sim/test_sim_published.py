"""The published methods in virtual time, on the cluster of the paper: two T4 and two V100 that train ResNet-18."""

from __future__ import annotations

from functools import cache

import pytest

from rex_ray.control.controller import Controller
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import load_learning
from rex_ray.scenario.network import load_network
from rex_ray.sim import Scenario, SimulatedRun, TraceLearner, mixed_cluster, simulate
from rex_ray.sim.gradients import NoisyGradients

NUM_STEPS = 900


@cache
def trained(name: str) -> tuple[SimulatedRun, float]:
    """Return a run of some epochs from the reference batch of 256, and its progress in reference rows per second."""
    learning = load_learning("resnet18")
    cluster = mixed_cluster(["T4", "T4", "V100", "V100"], "resnet18", global_batch_size=256, steps_per_epoch=195)
    scenario = Scenario(problem=cluster.problem, timelines=cluster.timelines, network=load_network("resnet18"))
    learner = TraceLearner(learning=learning, reference_batch_size=256, gradients=NoisyGradients(seed=0))
    run = simulate(Controller(make_policy(name)), scenario, num_steps=NUM_STEPS, learner=learner)
    return run, learner.progress_rows / run.total_s


@pytest.mark.parametrize("name", ["lb_bsp", "omnilearn"])
def test_who_splits_alone_saves_time_at_the_same_batch(name):
    run, _ = trained(name)
    bsp, _ = trained("bsp")
    assert {allocation.global_batch_size for _, allocation in run.allocations} == {256}
    assert len(run.allocations) > 1
    assert run.total_s < 0.99 * bsp.total_s
    own_s = run.own_s[-150:]
    imbalance = float((own_s.max(axis=1) / own_s.mean(axis=1) - 1).mean())
    assert imbalance < 0.6 * float((bsp.own_s.max(axis=1) / bsp.own_s.mean(axis=1) - 1).mean())


@pytest.mark.parametrize("name", ["pollux", "growth10"])
def test_who_grows_in_equal_shares_makes_more_progress_than_bsp(name):
    run, progress = trained(name)
    _, bsp = trained("bsp")
    assert run.allocations[-1][1].global_batch_size > 400
    for _, allocation in run.allocations:
        assert max(allocation.local_batch_sizes) - min(allocation.local_batch_sizes) <= 1
    assert progress > 1.02 * bsp, "in the first epochs, where noise is least"


def test_who_grows_and_splits_makes_more_progress_than_who_does_one_of_them():
    _, cannikin = trained("cannikin")
    assert cannikin > 1.1 * max(trained(name)[1] for name in ("pollux", "growth10", "lb_bsp", "omnilearn"))

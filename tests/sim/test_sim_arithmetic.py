"""One definition of a step's time: the engine, the scripted oracle and the closed forms agree on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rex_ray.control.controller import Controller
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import Episode, NetworkModel, NoiseModel, Overlap, StepTimeShape, load_profile
from rex_ray.sim import ScriptedOracle, StepTimes, mixed_cluster, simulate
from rex_ray.sim.limits import network_model

DEVICES = ("T4", "T4", "V100", "V100")
NETWORKS = {
    "none": NetworkModel(),
    "line": network_model("resnet50", "T4"),
    "shapes": network_model("resnet50", "T4:2"),
    "overlap": network_model("resnet50", "T4:1+overlap"),
    "hidden": NetworkModel(base_s=0.3, overlap=Overlap(first_bucket=0.2, last_bucket=0.1)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [StepTimeShape(), StepTimeShape(loader_rows_per_s=300.0, contention=0.2)])
def test_the_engine_and_the_oracle_say_the_same_of_the_same_shares(name, shape):
    """Equal workers with a script that nobody reacts to: bsp runs what an oracle that knows nothing runs."""
    episodes = (
        Episode(rank=1, start_step=20, num_steps=15, factor=2.0),
        Episode(rank=None, start_step=30, num_steps=None, factor=1.3),
    )
    scenario = mixed_cluster(
        ("T4",) * 4, "resnet50", global_batch_size=128, noise=NoiseModel.shared(), episodes=episodes, shape=shape
    )
    scenario = replace(scenario, network=NETWORKS[name])
    run = simulate(Controller(make_policy("bsp")), scenario, num_steps=80)
    oracle = ScriptedOracle(timelines=scenario.timelines, network=scenario.network, num_steps=80, delay_steps=None)
    assert oracle.shares(128, 0) == run.allocations[0][1].local_batch_sizes
    assert oracle.step_s(128).tolist() == run.step_s.tolist()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_engine_and_the_closed_forms_say_the_same_of_equal_shares(name):
    scenario = replace(
        mixed_cluster(DEVICES, "resnet50", global_batch_size=256, noise=NoiseModel.quiet()), network=NETWORKS[name]
    )
    times = StepTimes([load_profile(device, "resnet50") for device in DEVICES], NETWORKS[name])
    run = simulate(Controller(make_policy("bsp")), scenario, num_steps=3)
    assert run.step_s == pytest.approx(float(times.equal_s(np.array([256]))[0]), rel=1e-12)
    oracle = ScriptedOracle(timelines=scenario.timelines, network=NETWORKS[name], num_steps=3)
    assert oracle.step_s(256) == pytest.approx(float(times.balanced_s(np.array([256]))[0]), rel=1e-12)


def test_the_measured_reduction_hides_behind_the_backward_pass():
    plain, hidden = (network_model("resnet50", name) for name in ("T4", "T4+overlap"))
    compute_s = np.full(4, 0.5)
    assert float(hidden.step_s(0.0 * compute_s, compute_s)) < float(plain.step_s(0.0 * compute_s, compute_s))
    assert hidden.all_reduce_s(4) == plain.all_reduce_s(4)

"""A learner by trace: progress adds up, follows the learning rate, and takes a simulation to the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.controller import Controller
from rex_ray.core.errors import ConfigError
from rex_ray.core.lr_scaling import adascale_gain
from rex_ray.core.noise_scale import estimate_gradient_moments
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import NoiseModel, load_learning, load_network
from rex_ray.sim import mixed_cluster, simulate
from rex_ray.sim.gradients import NoisyGradients
from rex_ray.sim.learners import TraceLearner
from rex_ray.sim.oracle import Limits
from rex_ray.sim.step_times import StepTimes

LEARNING = load_learning("resnet18")
batches = st.integers(1, 8192)
progress = st.floats(0, LEARNING.target_rows)


def learner(reference=256, **options):
    return TraceLearner(learning=LEARNING, reference_batch_size=reference, **options)


@given(progress, batches, st.integers(64, 512))
def test_at_adascales_gain_a_step_makes_all_that_its_rows_are_worth(start, batch, reference):
    mine = learner(reference, progress_rows=start)
    worth = batch * float(LEARNING.efficiency(batch, mine.noise_scale))
    mine.advance(batch, adascale_gain(batch / reference, mine.noise_scale, reference))
    assert mine.progress_rows - start == pytest.approx(worth, rel=1e-6, abs=1e-6)


@given(progress, batches, st.floats(0.01, 64), st.floats(0.01, 64))
def test_progress_never_falls_with_the_rate_and_saturates_at_the_gain(start, batch, factor, more):
    lower, higher, plenty = (learner(progress_rows=start) for _ in range(3))
    lower.advance(batch, factor)
    higher.advance(batch, factor + more)
    plenty.advance(batch, 1e6)
    assert start < lower.progress_rows <= higher.progress_rows <= plenty.progress_rows
    assert plenty.progress_rows - start <= batch * (1 + 1e-9) or batch < LEARNING.reference_batch_size


def test_a_larger_batch_at_an_unchanged_rate_is_worth_one_reference_step():
    small, large = learner(), learner()
    small.advance(256, 1.0)
    large.advance(2048, 1.0)
    assert large.progress_rows == pytest.approx(small.progress_rows)


def test_progress_is_additive_while_the_noise_scale_holds():
    constant = replace(LEARNING, noise_scale=np.full(LEARNING.noise_scale.size, 3000.0))
    many = TraceLearner(learning=constant, reference_batch_size=128)
    for _ in range(50):
        many.advance(512, 8.0)
    one = TraceLearner(learning=constant, reference_batch_size=128)
    one.advance(512, 8.0)
    assert many.progress_rows == pytest.approx(50 * one.progress_rows)
    assert one.progress_rows == pytest.approx(512 * 3128 / 3512)


def test_norms_carry_the_noise_scale_of_the_present_progress():
    mine = learner(gradients=NoisyGradients(seed=4), progress_rows=0.5 * LEARNING.target_rows)
    rows = np.array([100, 200, 300, 400])
    trace = sq_norm = 0.0
    for step in range(3000):
        norms = mine.norms(step, rows.tolist())
        weighted, reduced = norms.weighted_sq_norm, norms.global_sq_norm
        moments = estimate_gradient_moments(weighted / rows, rows, reduced)
        trace, sq_norm = trace + moments.noise_trace, sq_norm + moments.sq_norm
    assert trace / sq_norm == pytest.approx(mine.noise_scale, rel=0.15)


def test_norms_are_drawn_where_there_are_gradients():
    assert learner(gradients=NoisyGradients()).norms(0, [8, 8]) is not None
    assert learner().norms(0, [8, 8]) is None


def test_a_learner_without_a_reference_is_refused():
    with pytest.raises(ConfigError, match="at least 1 row"):
        learner(reference=0)


@pytest.mark.parametrize("batch", [1024, 2048])
def test_bsp_in_the_simulator_takes_the_closed_form(batch):
    scenario = mixed_cluster(
        ["T4", "T4", "V100", "V100"], "resnet18", global_batch_size=batch, noise=NoiseModel.quiet()
    )
    scenario = replace(scenario, network=load_network("resnet18"))
    # Half of the way: the whole of it takes twice as long to play and says no more.
    half = replace(LEARNING, progress_rows=LEARNING.progress_rows / 2)
    mine = TraceLearner(learning=half, reference_batch_size=batch, gradients=NoisyGradients())
    run = simulate(Controller(make_policy("bsp"), seed=0), scenario, num_steps=5000, learner=mine)
    assert mine.is_done
    times = StepTimes([line.profile for line in scenario.timelines], scenario.network)
    assert run.total_s == pytest.approx(Limits(half, times, batch).bsp_s(batch), rel=1e-3)
    assert run.steps[0].global_sq_norm is not None
    assert run.steps[41].global_sq_norm is None

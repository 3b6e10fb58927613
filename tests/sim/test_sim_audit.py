"""Permuted copies of a run's own times: what they keep, what they break, and what a trigger raises on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.control.controller import Controller
from rex_ray.policies.registry import make_policy
from rex_ray.policies.trigger.two_level import TwoLevelTrigger
from rex_ray.scenario import Episode, NoiseModel
from rex_ray.sim import mixed_cluster, simulate
from rex_ray.sim.audit import LASTING, MIN_STEPS, OwnTimes, audit, count_alarms, noise_alone, own_times, permuted

DEVICES = ("T4", "T4", "V100")
ROWS = np.array([64, 64, 128])


def noisy(num_steps: int, *, sd: float = 0.03, rho: float = 0.6, seed: int = 0) -> OwnTimes:
    rng = np.random.default_rng(seed)
    wander = rng.standard_normal((num_steps, len(DEVICES)))
    for step in range(1, num_steps):
        wander[step] = rho * wander[step - 1] + np.sqrt(1 - rho**2) * wander[step]
    usual_us = np.array([200_000.0, 200_000.0, 150_000.0])
    return OwnTimes(devices=DEVICES, factors=np.exp(sd * wander), usual_us=usual_us, num_rows=ROWS)


def slowed(times: OwnTimes, rank: int, start: int, length: int, factor: float = 1.5) -> OwnTimes:
    factors = times.factors.copy()
    factors[start : start + length, rank] *= factor
    return replace(times, factors=factors)


@settings(max_examples=25)
@given(num_steps=st.integers(2, 90), block=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_copy_has_the_same_times_of_each_kind_and_no_others(num_steps, block, seed):
    times = noisy(num_steps)
    copy = permuted(times, block, np.random.default_rng(seed))
    for members in ([0, 1], [2]):
        assert sorted(copy.factors[:, members].ravel()) == sorted(times.factors[:, members].ravel())


def test_steps_of_a_block_stay_together_and_blocks_do_not():
    times = noisy(400)
    order = np.arange(400)
    times = replace(times, factors=np.stack([order, order + 1000, order + 2000], axis=1).astype(float))
    copy = permuted(times, 20, np.random.default_rng(1)).factors
    follows = (np.diff(copy[:, 2]) == 1) | (np.diff(copy[:, 2]) == -399)
    assert 10 <= np.count_nonzero(~follows) <= 19  # 20 blocks have 19 joints, some of which may still fit
    assert set((copy[:, 0] // 1000).astype(int)) == {0, 1}  # names are dealt anew within the kind


def test_what_lasts_is_divided_out_and_what_passes_stays():
    times = noisy(600, sd=0.01)
    long = slowed(times, 0, 200, 5 * LASTING).passing.factors
    assert np.log(long[:, 0]).std() < 0.02
    short = slowed(times, 0, 200, LASTING - 4).passing.factors
    assert np.median(short[200 : 200 + LASTING - 4, 0]) > 1.4


def test_slow_noise_within_eight_per_cent_is_left_alone():
    times = noisy(600, sd=0.02, rho=0.95)
    np.testing.assert_array_equal(times.passing.factors, np.exp(np.log(times.factors)))


def test_slowdowns_that_last_raise_alarms_that_no_copy_raises():
    times = noisy(1200)
    for rank, start in ((0, 200), (2, 420), (1, 650), (0, 900)):
        times = slowed(times, rank, start, 60)
    found = audit(TwoLevelTrigger(), [times], block_steps=32, num_copies=19, seed=0)
    assert found is not None
    assert found.measured.num_alarms >= 8  # to and fro
    assert found.false.num_alarms <= 2
    assert found.p_value == pytest.approx(1 / 20)


def test_noise_alone_raises_as_much_in_any_order():
    """Strong enough for alarms, and blocks keep its memory: the measured order is one among its copies."""
    trigger = TwoLevelTrigger()
    groups = [noisy(600, sd=0.1, rho=0.8, seed=seed) for seed in range(4)]
    found = audit(trigger, groups, block_steps=32, num_copies=9, seed=0)
    assert found is not None
    raised = sorted(copy.num_alarms for copy in found.copies)
    assert found.measured.num_alarms > 0
    assert raised[0] <= found.measured.num_alarms <= raised[-1]
    assert found.p_value > 0.1


@pytest.mark.parametrize(("rho", "sd"), [(0.0, 0.04), (0.6, 0.02), (0.9, 0.08)])
def test_noise_is_known_by_its_strength_and_memory_also_with_slowdowns_in_it(rho, sd):
    times = noisy(3000, sd=sd, rho=rho)
    for start in range(200, 2800, 400):
        times = slowed(times, start % 3, start, 60)
    memory, sds = times.noise
    assert memory == pytest.approx(rho, abs=0.15)
    assert sds == pytest.approx(sd, rel=0.3)
    alone = noise_alone(times, memory, sds, np.random.default_rng(0))
    assert np.log(alone.factors).std(axis=0) == pytest.approx(sds, rel=0.3)
    assert np.abs(np.median(np.log(alone.factors), axis=0)).max() < 1e-9


def test_alarms_that_noise_which_wanders_raises_by_itself_are_not_believed():
    """Its copies lose what passes for a change that lasted, and raise fewer: alone they would call the noise one."""
    alarmed = audit(TwoLevelTrigger(), [noisy(640, sd=0.1, rho=0.9, seed=2)], block_steps=32, num_copies=19, seed=0)
    assert alarmed is not None
    assert alarmed.measured.num_alarms > 0
    assert alarmed.measured.num_alarms > max(copy.num_alarms for copy in alarmed.copies)
    assert alarmed.p_value > 0.1


def test_an_alarm_for_everyone_is_no_resplit():
    times = noisy(500, sd=0.01)
    times = replace(times, factors=times.factors * np.where(np.arange(500) >= 300, 1.6, 1.0)[:, None])
    found = count_alarms(TwoLevelTrigger(), times)
    assert found.num_alarms > found.num_resplits == 0


def test_the_same_seed_gives_the_same_audit():
    times = slowed(noisy(700, sd=0.06, rho=0.8), 1, 300, 12)
    one, same, other = (
        audit(TwoLevelTrigger(), [times], block_steps=16, num_copies=5, seed=seed) for seed in (4, 4, 5)
    )
    assert one == same
    first, second = (permuted(times, 16, np.random.default_rng(seed)).factors for seed in (4, 5))
    assert (first != second).any()
    assert other is not None


def test_groups_that_are_too_short_say_nothing():
    assert audit(TwoLevelTrigger(), [noisy(MIN_STEPS - 1)], block_steps=8, num_copies=3, seed=0) is None
    assert audit(TwoLevelTrigger(), [], block_steps=8, num_copies=3, seed=0) is None


def test_times_of_a_run_are_freed_from_what_its_shares_explain():
    world = mixed_cluster(
        ("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=256, noise=NoiseModel(sd=0.01), seed=1
    )
    controller = Controller(make_policy("rex", {"growth": "off"}))
    run = simulate(controller, world, num_steps=400)
    assert len(run.allocations) > 1
    book = controller.state.policy_state.inner.split.book
    (times,) = own_times(run.events, book)
    assert times.devices == ("T4", "T4", "V100", "V100")
    assert len(times.factors) < 400  # warm-up and partial steps are no evidence
    assert np.abs(np.median(np.log(times.factors), axis=0)).max() < 1e-9
    assert np.log(times.factors).std() < 0.03
    own_s = np.median(run.own_s[-100:], axis=0)
    assert times.usual_us * 1e-6 == pytest.approx(own_s, rel=0.05)


def test_a_slowdown_shows_in_the_times_whatever_the_shares_became():
    episode = Episode(rank=0, start_step=200, num_steps=100, factor=1.6)
    world = mixed_cluster(
        ("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=256, noise=NoiseModel(sd=0.01), episodes=(episode,)
    )
    controller = Controller(make_policy("rex", {"growth": "off"}))
    run = simulate(controller, world, num_steps=500)
    (times,) = own_times(run.events, controller.state.policy_state.inner.split.book)
    slow = np.log(times.factors[:, 0]) > np.log(1.3)
    assert 80 <= slow.sum() <= 105

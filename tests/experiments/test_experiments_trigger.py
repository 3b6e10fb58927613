"""What the trigger is measured with: noise as stated, comparators that detect, an oracle that is worth its name."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.calibration import _detectors as detectors
from experiments.calibration._own_times import NOISES, draw
from experiments.calibration._short_events import CASES, play_known, scenario
from experiments.calibration._watching import resplits
from rex_ray.policies.trigger.two_level import TwoLevelTrigger


@pytest.mark.parametrize("name", ["iid", "ar05", "ar07", "ar07_8"])
def test_noise_has_the_spread_and_the_memory_that_are_stated(name):
    noise = NOISES[name]
    series = np.log(draw(noise, 20_000, 4, np.random.default_rng(0)))
    assert series.std() == pytest.approx(noise.sd, rel=0.1)
    lagged = np.mean([np.corrcoef(series[1:, k], series[:-1, k])[0, 1] for k in range(4)])
    assert lagged == pytest.approx(noise.rho, abs=0.05)


def test_spikes_bursts_and_modes_come_as_often_as_is_stated():
    rng = np.random.default_rng(1)
    assert (draw(NOISES["spike10"], 5_000, 4, rng) > 1.6).mean() == pytest.approx(0.1, abs=0.01)
    assert (draw(NOISES["bimodal"], 5_000, 4, rng) > 1.1).mean() == pytest.approx(0.3, abs=0.03)
    assert (draw(NOISES["burst"], 20_000, 4, rng) > 1.25).mean() == pytest.approx(3 / 300, abs=0.004)


@pytest.mark.parametrize("detector", detectors.DETECTORS, ids=lambda detector: detector.name)
def test_a_comparator_is_quiet_at_a_high_threshold_and_sees_a_large_change(detector):
    times = draw(NOISES["iid"], 400, 20, np.random.default_rng(2))
    times[350:] *= 1.6
    samples = detectors.standardise(np.log(times))
    raised = detectors.alarms(detector, samples, detector.textbook)
    assert raised[350:].any(axis=0).all()
    assert not detectors.alarms(detector, samples, 1e9).any()
    gaps = [np.diff(np.flatnonzero(raised[:, k])) for k in range(20)]
    assert all((gap > detectors.REFRACTORY).all() for gap in gaps)


def test_tuning_takes_the_least_threshold_that_is_quiet_enough_or_none():
    cusum = detectors.DETECTORS[0]
    samples = detectors.standardise(np.log(draw(NOISES["ar07"], 600, 20, np.random.default_rng(3))))
    threshold = detectors.tune(cusum, samples, 2.0)
    assert threshold is not None
    assert detectors.alarms(cusum, samples, threshold).sum() <= 2
    lower = [value for value in cusum.thresholds if value < threshold]
    assert detectors.alarms(cusum, samples, lower[-1]).sum() > 2
    assert detectors.tune(cusum, samples, -1.0) is None


def test_knowing_sooner_is_never_worse_and_shares_that_never_move_are_worst():
    world, count = scenario(CASES[0], 900, seed=0)
    assert count > 2
    still, late, at_once, foreseen = (
        play_known(world, 900, None).seconds,
        play_known(world, 900, 10).seconds,
        play_known(world, 900, 0).seconds,
        play_known(world, 900, 10, back_at_once=True).seconds,
    )
    assert at_once < foreseen < late < still


def test_a_slowdown_of_all_is_no_resplit_and_one_of_a_single_worker_is():
    trigger = TwoLevelTrigger()
    factors = draw(NOISES["iid"], 160, 3, np.random.default_rng(4))
    factors[100:] *= 2.0
    assert resplits(trigger, factors) == []
    factors[130:, 0] *= 2.0
    assert len(resplits(trigger, factors)) == 1

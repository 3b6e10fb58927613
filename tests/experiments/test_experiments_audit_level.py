from __future__ import annotations

import numpy as np
import pytest

from experiments.audit_level import NUM_STEPS, level_row, noisy_times


@pytest.mark.parametrize(("rho", "sd"), [(0.0, 0.04), (0.9, 0.08)])
def test_noise_is_as_strong_and_remembers_as_long_as_it_is_told_to(rho, sd):
    logs = np.concatenate([np.log(noisy_times(rho, sd, 0, seed).factors) for seed in range(8)], axis=1)
    centred = logs - logs.mean(axis=0)
    assert logs.shape == (NUM_STEPS, 32)
    assert centred.std() == pytest.approx(sd, rel=0.15)
    assert float((centred[1:] * centred[:-1]).mean() / (centred**2).mean()) == pytest.approx(rho, abs=0.05)


def test_slowdowns_are_believed_and_quiet_runs_raise_nothing():
    quiet, slowed = level_row(0.0, 0.01, 0, range(2)), level_row(0.0, 0.01, 3, range(1))
    assert (quiet["alarms_per_run"], quiet["p_05_pct"], quiet["runs"]) == (0.0, 0.0, 2)
    assert slowed["alarms_per_run"] >= 5
    assert slowed["p_05_pct"] == 100.0

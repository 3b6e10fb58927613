"""Laws of the drawn norms: the noise scale that was asked for, whatever shares, tails and memory."""

from __future__ import annotations

import numpy as np
import pytest

from rex_ray.core.errors import ConfigError
from rex_ray.core.noise_scale import moments_from_groups
from rex_ray.sim.gradients import NoisyGradients

SHARES = (16, 16, 112, 112)


def averages(gradients: NoisyGradients, phi: float, num_runs: int = 200) -> tuple[float, float]:
    weighted, reduced = gradients.draw_runs(num_runs, 50, phi, SHARES)
    moments = [
        moments_from_groups(w, [1] * 4, SHARES, float(g))
        for w, g in zip(weighted.reshape(-1, 4), reduced.reshape(-1), strict=True)
    ]
    return float(np.mean([m.noise_trace for m in moments])), float(np.mean([m.sq_norm for m in moments]))


@pytest.mark.parametrize(("tail", "rho"), [(None, 0.0), (5.0, 0.0), (None, 0.7)])
def test_the_moments_average_to_what_was_asked_for(tail, rho):
    trace, sq_norm = averages(NoisyGradients(seed=3, num_dims=32, tail=tail, rho=rho), 512.0)
    assert trace == pytest.approx(512.0, rel=0.02)
    assert sq_norm == pytest.approx(1.0, abs=0.08)


def test_single_steps_and_many_runs_follow_the_same_law():
    gradients = NoisyGradients(seed=5, num_dims=16)
    single = np.array([gradients.draw(step, 256.0, SHARES)[1] for step in range(4000)])
    _, many = gradients.draw_runs(80, 50, 256.0, SHARES)
    assert single.mean() == pytest.approx(many.mean(), rel=0.05)
    assert single.std() == pytest.approx(many.std(), rel=0.1)


def test_a_step_does_not_depend_on_what_else_was_asked_for():
    gradients = NoisyGradients(seed=9, rho=0.8)
    forwards = [gradients.draw(step, 100.0, SHARES)[1] for step in range(100)]
    backwards = [NoisyGradients(seed=9, rho=0.8).draw(step, 100.0, SHARES)[1] for step in reversed(range(100))]
    assert forwards == backwards[::-1]
    assert forwards != [NoisyGradients(seed=10, rho=0.8).draw(step, 100.0, SHARES)[1] for step in range(100)]


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_noise_remembers_as_much_as_it_should_also_across_blocks(rho):
    gradients = NoisyGradients(seed=1, num_dims=1, rho=rho)
    # With one dimension and little noise, |g|^2 - 1 is twice the noise along G.
    noise = np.array([gradients.draw(step, 1e-4, (64,))[1] - 1.0 for step in range(6400)])
    pairs = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    borders = np.corrcoef(noise[31:-1:32], noise[32::32])[0, 1]
    assert pairs == pytest.approx(rho, abs=0.05)
    assert borders == pytest.approx(rho, abs=0.2)


def test_a_rank_without_rows_has_no_gradient_and_changes_nothing():
    weighted, reduced = NoisyGradients(seed=2).draw(0, 300.0, (0, 32, 32))
    assert weighted[0] == 0.0
    assert np.isfinite(weighted).all()
    assert reduced > 0


@pytest.mark.parametrize("bad", [{"num_dims": 0}, {"rho": 0.95}, {"tail": 2.0}])
def test_noise_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="gradient noise"):
        NoisyGradients(**bad)

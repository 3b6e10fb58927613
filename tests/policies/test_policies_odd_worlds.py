"""Worlds that no profile shows: what the whole of rex makes of them, against equal shares and against the best ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from policy_worlds import group, live, shares_run

from rex_ray.policies.registry import make_policy

_STEPS = 1500


def step_us(
    devices: Sequence[str],
    own_us: Callable[[int, int, int], float],
    seed: int,
    noise: Callable[[np.random.Generator], np.ndarray] | None = None,
) -> tuple[list[tuple[int, tuple[int, ...]]], np.ndarray]:
    """Run rex, and return the shares that ran with the noiseless time of every step."""
    rng = np.random.default_rng(seed)
    quiet = []

    def world(step: int, sizes: Sequence[int]) -> list[float]:
        times = [own_us(step, rank, rows) for rank, rows in enumerate(sizes)]
        quiet.append(max(times))
        factors = 1 + 0.02 * rng.standard_normal(len(sizes)) if noise is None else noise(rng)
        return (np.array(times) * factors).tolist()

    problem = group(devices, 256)
    history = live(make_policy("rex", {"growth": "off"}), problem, world, num_steps=_STEPS, lag_steps=10)
    return shares_run(history), np.array(quiet[-_STEPS:])


@pytest.mark.parametrize("factor", [1.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_size_beyond_which_a_kind_is_slow_is_found_and_kept_away_from(factor, seed):
    def own_us(step: int, rank: int, rows: int) -> float:
        if rank >= 2:
            return 10_000 + 1_200 * rows
        return (10_000 + 500 * rows) * (factor if rows > 80 else 1.0)

    shares, times = step_us(("A", "A", "B", "B"), own_us, seed)
    best_us = 10_000 + 1_200 * 48
    assert times[-500:].mean() <= 1.05 * best_us
    assert len(shares) <= 40
    # Equal shares take 86,800; what is lost on the way is less than what is won.
    assert times.mean() < 0.9 * (10_000 + 1_200 * 64)


@pytest.mark.parametrize("seed", range(3))
def test_a_card_that_throttles_over_a_thousand_steps_is_followed(seed):
    def own_us(step: int, rank: int, rows: int) -> float:
        slow = 1 + 0.5 * min(max(step - 200, 0) / 1000, 1.0)
        return (10_000 + 500 * rows) * (slow if rank == 0 else 1.0)

    shares, times = step_us(("A", "A", "B", "B"), own_us, seed)
    # The best shares are (41, 72, 72, 71), equal ones take 63,000.
    assert times[-200:].mean() <= 1.06 * 46_000
    assert len(shares) <= 12

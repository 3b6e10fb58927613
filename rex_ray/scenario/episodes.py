"""Transient slowdowns: scripted, or drawn from what was measured on production clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray, IntArray, frozen

__all__ = ["Episode", "Script", "random_episodes", "rotating_episodes", "sleeping_epochs", "slowdown_factor"]

_EPISODE_STREAM, _EPOCH_STREAM = 4, 3  # apart from 1 and 2 of noise and gradients: numpy pads seeds with zeros
# Lognormal length with median 12 and 90th percentile 100 steps (443 episodes of the Alibaba Cluster Trace Program).
_MEDIAN_STEPS, _P90_STEPS = 12.0, 100.0
_LENGTH_SIGMA = math.log(_P90_STEPS / _MEDIAN_STEPS) / 1.2816
# Seconds per epoch, and epochs, that a worker sleeps in the DLB experiments.
_SLEEP_S, _SLEEP_EPOCHS = (5.0, 10.0), (4, 20)
# Probability and range of the factor: mostly mild, rarely several-fold.
_FACTORS = ((0.85, 1.2, 1.5), (0.10, 1.5, 2.2), (0.05, 2.5, 4.3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A slowdown of one worker, or of all of them.

    Attributes:
        rank: who is slow; None slows the whole cluster.
        start_step: first slow optimizer step.
        num_steps: how many steps it lasts; None is for ever.
        factor: how many times as long a slow step takes, e.g. 1.5.
    """

    rank: int | None
    start_step: int
    num_steps: int | None
    factor: float

    def __post_init__(self) -> None:
        if self.start_step < 0 or (self.num_steps is not None and self.num_steps < 1) or not 0 < self.factor < math.inf:
            raise ConfigError(f"an episode needs start_step >= 0, num_steps >= 1 and a positive factor, got {self}")

    def slows(self, rank: int, step: int) -> bool:
        """Return whether ``rank`` is slow at ``step``."""
        return (
            self.rank in (None, rank)
            and step >= self.start_step
            and (self.num_steps is None or step < self.start_step + self.num_steps)
        )


def slowdown_factor(episodes: Sequence[Episode], rank: int, step: int) -> float:
    """Return the product of the factors of all episodes that slow ``rank`` at ``step``; 1 without any."""
    factor = 1.0
    for episode in episodes:
        if episode.slows(rank, step):
            factor *= episode.factor
    return factor


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One rank's slowdowns as pieces of constant factor: what is asked for at every step costs no search for it.

    Attributes:
        starts: first step of each piece, increasing from 0, shape ``[pieces]``.
        values: factor in each piece, shape ``[pieces]``.
    """

    starts: IntArray
    values: FloatArray

    @classmethod
    def of(cls, episodes: Sequence[Episode], rank: int) -> Script:
        """Return the script of a rank; its factors are those of ``slowdown_factor``, bit by bit."""
        spans = [
            (e.start_step, None if e.num_steps is None else e.start_step + e.num_steps, e.factor)
            for e in episodes
            if e.rank in (None, rank)
        ]
        borders = {0, *(start for start, _, _ in spans), *(stop for _, stop, _ in spans if stop is not None)}
        starts = np.array(sorted(borders), dtype=np.int64)
        values = np.ones(starts.size)
        for start, stop, factor in spans:
            end = starts.size if stop is None else int(np.searchsorted(starts, stop))
            values[int(np.searchsorted(starts, start)) : end] *= factor
        return cls(frozen(starts), frozen(values))

    def factor(self, step: int) -> float:
        """Return the factor at a step."""
        return float(self.values[np.searchsorted(self.starts, step, side="right") - 1])

    def factors(self, start: int, stop: int) -> FloatArray:
        """Return the factors of steps ``start`` to ``stop - 1``, shape ``[stop - start]``."""
        first, last = self.starts.searchsorted((start, stop - 1), side="right") - 1
        if first == last:
            return np.full(stop - start, self.values[first])
        borders = np.concatenate([[start], self.starts[first + 1 : last + 1], [stop]])
        return np.repeat(self.values[first : last + 1], np.diff(borders))


def random_episodes(
    *, num_workers: int, num_steps: int, per_1000_worker_steps: float, seed: int
) -> tuple[Episode, ...]:
    """Draw independent episodes per worker from the measured lengths and factors.

    Args:
        num_workers: ranks ``0 .. num_workers - 1`` may be hit.
        num_steps: steps in which an episode may begin.
        per_1000_worker_steps: expected episodes per 1,000 steps of one worker; measured by job: 0 to 2.4.
        seed: the same seed gives the same episodes.

    Returns:
        Episodes ordered by start, then rank.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _EPISODE_STREAM))))
    count = int(generator.poisson(per_1000_worker_steps * num_workers * num_steps / 1000))
    chance = [probability for probability, _, _ in _FACTORS]
    drawn = []
    for _ in range(count):
        _, low, high = _FACTORS[int(generator.choice(len(_FACTORS), p=chance))]
        drawn.append(
            Episode(
                rank=int(generator.integers(num_workers)),
                start_step=int(generator.integers(num_steps)),
                num_steps=max(1, round(float(generator.lognormal(math.log(_MEDIAN_STEPS), _LENGTH_SIGMA)))),
                factor=float(generator.uniform(low, high)),
            )
        )
    return tuple(sorted(drawn, key=lambda episode: (episode.start_step, episode.rank)))


def rotating_episodes(
    *, num_workers: int, num_steps: int, period_steps: int = 30, factor: float = 1.33
) -> tuple[Episode, ...]:
    """Slow one worker after the other, ``period_steps`` each: the disturbance of the LBB experiments."""
    return tuple(
        Episode(rank=index % num_workers, start_step=start, num_steps=period_steps, factor=factor)
        for index, start in enumerate(range(0, num_steps, period_steps))
    )


def sleeping_epochs(*, own_s: Sequence[float], steps_per_epoch: int, num_steps: int, seed: int) -> tuple[Episode, ...]:
    """Draw the disturbance of the DLB experiments: a worker loses 5 to 10 s in each of 4 to 20 epochs.

    The paper (Ye et al. 2022, arXiv:2007.11831) does not say how often. Here one worker after the other sleeps, and
    after each of them none does for another 4 to 20 epochs (an assumption). Its seconds are spread over the epoch's
    steps and written as a factor on its own time, so that shares matter to it as they do to any slowdown.

    Args:
        own_s: every worker's own time per step at the shares that the factor is taken at, in seconds.
        steps_per_epoch: optimizer steps of an epoch there.
        num_steps: steps in which an episode may begin.
        seed: the same seed gives the same episodes.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _EPOCH_STREAM))))
    drawn: list[Episode] = []
    start = 0
    while start < num_steps:
        rank, (sleep_s, epochs) = int(generator.integers(len(own_s))), _sleep(generator)
        length = epochs * steps_per_epoch
        factor = 1.0 + sleep_s / (steps_per_epoch * own_s[rank])
        drawn.append(Episode(rank=rank, start_step=start, num_steps=length, factor=factor))
        start += length + _sleep(generator)[1] * steps_per_epoch
    return tuple(drawn)


def _sleep(generator: np.random.Generator) -> tuple[float, int]:
    """Draw seconds per epoch, and epochs."""
    return float(generator.uniform(*_SLEEP_S)), int(generator.integers(*_SLEEP_EPOCHS, endpoint=True))

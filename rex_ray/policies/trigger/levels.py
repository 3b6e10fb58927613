"""The two-level rank test of the newest samples, and by how much each rank has changed once a test has hit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.median import median
from rex_ray.core.rank_tests import compare_ranks
from rex_ray.core.types import BoolArray, FloatArray, IntArray
from rex_ray.policies.trigger.baseline import NUM_BLOCKS, Baseline
from rex_ray.policies.trigger.memory import LONG, SHORT, Limits, TriggerState, Watch

__all__ = ["Changes", "find_changes", "run_lengths", "two_level_signs"]

_MIN_JOINT, _FEW = 3, 6
"""Fewest samples from which a rank is said to have moved along with another, and from which its noise counts less."""

_FEW_SDS = 2.5
"""How far in sds of a sample such a rank must have moved while there are few."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """How every rank's time has changed, and whose change counts; every array has shape ``[n]``.

    Attributes:
        effect: log factor.
        num_samples: samples behind it.
        is_known: the rank is armed and has that many.
        is_sure: a test raised it for this rank.
        joins: it moved along with one that was sure.
    """

    effect: FloatArray
    num_samples: IntArray
    is_known: BoolArray
    is_sure: BoolArray
    joins: BoolArray

    @property
    def moved(self) -> BoolArray:
        """Whose change counts."""
        moved: BoolArray = self.is_sure | self.joins
        return moved

    def clearest(self, ranks: BoolArray) -> int:
        """Return the one of these ranks whose change is the most certain and the largest."""
        return int(np.argmax(np.where(ranks, np.abs(self.effect) + 100.0 * self.is_sure, -1.0)))


def run_lengths(run: IntArray, deviation: FloatArray, limit: FloatArray) -> IntArray:
    """Return the length of the run of consecutive samples beyond a limit, negative below it, shape ``[n]``."""
    sign = (deviation > limit).astype(np.int64) - (deviation < -limit)
    result: IntArray = np.where(sign == 0, 0, np.where(run * sign > 0, run + sign, sign))
    return result


def two_level_signs(
    watch: Watch, baseline: Baseline, limits: Limits, ranks: BoolArray, *, min_z: float, min_delta: float
) -> IntArray:
    """Return the direction in which both levels and both effect sizes agree that a rank has changed, shape ``[n]``.

    Args:
        watch: the newest samples.
        baseline: what is normal.
        limits: what is not.
        ranks: whom to test, shape ``[n]``; the others get 0.
        min_z: least statistic of both levels.
        min_delta: least Cliff's delta of the short one.
    """
    signs = np.zeros(ranks.size, dtype=np.int64)
    who = ranks.nonzero()[0]
    short = watch.recent[-SHORT:, 0, who]
    ordered = np.sort(short, axis=0) - baseline.centre[who]
    effect = (ordered[SHORT // 2 - 1] + ordered[SHORT // 2]) / 2
    limit = limits.off[who]
    # A change moves all samples, a cluster of spikes does not: all but one have to be half-way there.
    hindmost = np.where(effect > 0, ordered[1], -ordered[-2])
    who = who[(np.abs(effect) > limit) & (hindmost > limit / 2)]
    blocks, longs = np.minimum(baseline.num_blocks[who], NUM_BLOCKS), np.minimum(watch.num_recent[who], LONG)
    for num_blocks, num_long in {*zip(blocks.tolist(), longs.tolist(), strict=True)}:
        group = who[(blocks == num_blocks) & (longs == num_long)]
        window = baseline.samples[group, :num_blocks].reshape(group.size, -1)
        first = compare_ranks(watch.recent[-SHORT:, 0, group].T, window)
        second = compare_ranks(watch.recent[-num_long:, 0, group].T, window)
        sign = np.sign(first.z).astype(np.int64)
        hit = (np.minimum(sign * first.z, sign * second.z) > min_z) & (sign * first.cliffs_delta > min_delta)
        signs[group] = np.where(hit, sign, 0)
    return signs


def find_changes(state: TriggerState, sure: IntArray, num_samples: IntArray) -> Changes:
    """Return how every rank has changed since the first sample that made a test sure of one.

    Args:
        state: the memory.
        sure: direction of the changes that a test raised, shape ``[n]``, at least one of them not 0.
        num_samples: samples that it rested on, shape ``[n]``.
    """
    watch, baseline = state.watch, state.baseline
    is_sure = sure != 0
    least = int(num_samples[is_sure].min())
    counts = np.minimum(np.where(is_sure, num_samples, least), watch.num_recent)
    effect = median(watch.recent[-least:, 0]) - baseline.centre
    for rank in (is_sure & (counts != least)).nonzero()[0]:
        effect[rank] = median(watch.recent[-counts[rank] :, 0, rank]) - baseline.centre[rank]
    is_known = baseline.is_armed & (counts >= min(least, _MIN_JOINT))
    directions = np.unique(sure[is_sure])
    enough = np.maximum(state.limits.off, np.where(counts < _FEW, _FEW_SDS * baseline.spread, 0.0))
    joins = is_known & ~is_sure & np.isin(np.sign(effect), directions) & (np.abs(effect) > enough)
    return Changes(
        effect=np.where(is_known, effect, 0.0),
        num_samples=counts,
        is_known=is_known,
        is_sure=is_sure & is_known,
        joins=joins,
    )

"""Separate the shape of a kind's curve from the scales of its workers.

Medians of own time per (worker ``r``, size ``b``) follow ``log t = scale_r + shape(b) + noise``. Workers of one kind
seldom run the same sizes once shares have moved (the fast one has many rows, the slow one few), so shape and
scale are estimated jointly: fitted one after the other, the slow worker would pass for a flat curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rex_ray.core.curves import FIXED_SHARE, StepTimeCurve, fit_curve
from rex_ray.core.median import median
from rex_ray.core.types import BoolArray, FloatArray, IntArray, LearntShape, read_only

__all__ = ["KindFit", "LearntShape", "SizeMedians", "distinct_sizes", "fit_kind"]

# Sizes within 5 % say nothing about a slope: 1 % of noise on each would swing it by half its range.
_SAME_SIZE = 1.05
# Unless one worker's own times at them differ by more than noise and rows explain: a memory that spills between them.
_OTHER_TIME = np.log(1.5)
_MAX_SIZES = 8
# Relative sd before any data: of one sample, of a worker's scale, and of the elasticity dlog t / dlog b.
_SAMPLE_SD, _SCALE_SD, _ELASTICITY_SD = 0.04, 0.3, 0.3
# How many samples the prior of the noise is worth.
_NOISE_PRIOR_COUNT = 8.0
# A scale counts once it is this many standard errors, and this far, from its kind's middle.
_MIN_Z, _MIN_LOG_SCALE = 3.0, 0.015
# A shape from an earlier group: evidence, but never worth more than these samples per size.
_LEARNT_WEIGHT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeMedians:
    """Evidence on one kind, an entry per (worker, size); a learnt shape joins as worker number ``num_members``.

    Attributes:
        num_members: workers of the kind.
        who: worker of each entry, ``0 .. num_members``, shape ``[e]``.
        num_rows: size of each entry, shape ``[e]``.
        weight: samples that the entry counts for, shape ``[e]``.
        log_s: log of the median own time, shape ``[e]``.
        noise_sd: relative sd of one sample, pooled over the entries.
    """

    num_members: int
    who: IntArray
    num_rows: FloatArray
    weight: FloatArray
    log_s: FloatArray
    noise_sd: float

    @classmethod
    def condense(
        cls,
        *,
        members: int,
        who: IntArray,
        num_rows: IntArray,
        weight: FloatArray,
        log_samples: FloatArray,
        known: LearntShape | None,
    ) -> SizeMedians:
        """Take medians of ``log_samples`` (shape ``[e, window]``, NaN where empty) and append a learnt shape."""
        # NaN sorts last, so the median of the first `filled` values needs no masked reduction.
        ordered = np.sort(log_samples, axis=1)
        filled = np.count_nonzero(~np.isnan(ordered), axis=1)
        entry = np.arange(filled.size)
        medians = (ordered[entry, (filled - 1) // 2] + ordered[entry, filled // 2]) / 2
        deviations = np.abs(ordered - medians[:, None])[filled > 2]
        deviations = deviations[~np.isnan(deviations)]
        spread = 1.4826 * float(median(deviations)) if deviations.size else 0.0
        variance = (_NOISE_PRIOR_COUNT * _SAMPLE_SD**2 + deviations.size * spread**2) / (
            _NOISE_PRIOR_COUNT + deviations.size
        )
        extra = known if known is not None else LearntShape(device="", num_rows=(), own_s=(), weights=())
        return cls(
            num_members=members,
            who=np.concatenate([who, np.full(len(extra.num_rows), members, dtype=np.int64)]),
            num_rows=np.concatenate([num_rows.astype(np.float64), extra.num_rows]),
            weight=np.concatenate([weight, extra.weights]),
            log_s=np.concatenate([medians, np.log(np.asarray(extra.own_s, dtype=np.float64))]),
            noise_sd=float(np.sqrt(variance)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindFit:
    """A kind's shape and its workers' scales around it (shape ``[num_members]``, 1 where nothing speaks against it)."""

    shape: StepTimeCurve
    scales: FloatArray
    num_rows: FloatArray
    own_s: FloatArray
    weight: FloatArray

    def as_learnt(self, device: str) -> LearntShape:
        """Return what the next worker group should inherit."""
        return LearntShape(
            device=device,
            num_rows=tuple(self.num_rows.tolist()),
            own_s=tuple(self.own_s.tolist()),
            weights=tuple(np.minimum(self.weight, _LEARNT_WEIGHT).tolist()),
        )


def distinct_sizes(
    num_rows: FloatArray, weight: FloatArray, apart: frozenset[float] = frozenset()
) -> tuple[FloatArray, IntArray]:
    """Group sizes that are nearly the same, into 8 groups at most.

    Args:
        num_rows: size of each entry, shape ``[e]``.
        weight: samples that it counts for, shape ``[e]``.
        apart: sizes that are not the same as the next smaller one, however near.

    Returns:
        The groups' weighted mean sizes, increasing, shape ``[k]``, and each entry's group, shape ``[e]``.
    """
    if num_rows.size == 0:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    sizes, entry_size = np.unique(num_rows, return_inverse=True)
    groups: list[list[int]] = []
    for index, size in enumerate(sizes):
        if groups and size <= _SAME_SIZE * sizes[groups[-1][0]] and float(size) not in apart:
            groups[-1].append(index)
        else:
            groups.append([index])
    while len(groups) > _MAX_SIZES:
        gaps = [sizes[right[0]] / sizes[left[-1]] for left, right in pairwise(groups)]
        nearest = int(np.argmin(gaps))
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    group_of_size = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    group = group_of_size[entry_size]
    total = np.bincount(group, weights=weight)
    return np.bincount(group, weights=weight * num_rows) / total, group


def fit_kind(evidence: SizeMedians) -> KindFit | None:
    """Fit one kind's shape and scales; None without evidence."""
    if evidence.num_rows.size == 0:
        return None
    apart = _apart(evidence)
    centres, group = distinct_sizes(evidence.num_rows, evidence.weight, apart)
    begins_apart = group[np.isin(evidence.num_rows, [*apart])]
    prior = _elasticity_prior(centres, np.isin(np.arange(1, centres.size), begins_apart))
    # Before anything is known, sizes within a group are reduced to its centre along the one-size rule.
    at_entry = FIXED_SHARE + (1 - FIXED_SHARE) * evidence.num_rows / centres[group]
    log_s = evidence.log_s - np.log(at_entry)
    for _ in range(3):
        log_scales, log_shape = _separate(evidence, log_s, prior, group)
        total: FloatArray = np.bincount(group, weights=evidence.weight).astype(np.float64)
        curve = fit_curve(centres, np.exp(log_shape), total)
        # The fitted curve reduces better than the rule did; with one entry per group there is nothing to reduce.
        refined = evidence.log_s + np.log(curve.predict_s(centres)[group] / curve.predict_s(evidence.num_rows))
        if np.max(np.abs(refined - log_s)) < 1e-3:
            break
        log_s = refined
    return KindFit(
        shape=curve,
        scales=read_only(np.exp(log_scales), np.float64),
        num_rows=centres,
        own_s=np.exp(log_shape),
        weight=total,
    )


def _apart(evidence: SizeMedians) -> frozenset[float]:
    """Return sizes at which some worker takes a time quite other than at a slightly smaller one."""
    order = np.lexsort((evidence.num_rows, evidence.who))
    who, rows, log_s = evidence.who[order], evidence.num_rows[order], evidence.log_s[order]
    is_near = (np.diff(who) == 0) & (rows[1:] <= _SAME_SIZE * rows[:-1])
    found = rows[1:][is_near & (np.abs(np.diff(log_s)) > _OTHER_TIME)]
    return frozenset(found.tolist())


def _separate(
    evidence: SizeMedians, log_s: FloatArray, prior: tuple[FloatArray, FloatArray], group: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Solve ``log_s = scale[who] + shape[group]`` by weighted least squares with weak priors.

    Returns:
        Log scales of the members, shape ``[num_members]``, shrunk to exactly 0 where the evidence is thin, and the
        log shape at the group centres, shape ``[k]``.
    """
    smooth, smooth_target = prior
    k, num_who = smooth_target.size, evidence.num_members + 1
    weight = np.zeros((num_who, k))
    np.add.at(weight, (evidence.who, group), evidence.weight)
    weighted_log_s = np.zeros((num_who, k))
    np.add.at(weighted_log_s, (evidence.who, group), evidence.weight * log_s)
    # Scales are eliminated first: what is left is a k x k system, however many workers there are.
    per_who = weight.sum(axis=1) + (_SAMPLE_SD / _SCALE_SD) ** 2
    normal = np.diag(weight.sum(axis=0)) - weight.T @ (weight / per_who[:, None]) + smooth
    target = weighted_log_s.sum(axis=0) - weight.T @ (weighted_log_s.sum(axis=1) / per_who) + smooth_target
    shape = np.linalg.solve(normal, target)
    scales = (weighted_log_s.sum(axis=1) - weight @ shape) / per_who
    scales = _shrink(scales, weight.sum(axis=1), evidence)
    shape = np.linalg.solve(
        np.diag(weight.sum(axis=0)) + smooth, (weighted_log_s - weight * scales[:, None]).sum(axis=0) + smooth_target
    )
    return scales[: evidence.num_members], shape


def _elasticity_prior(centres: FloatArray, is_free: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return the normal matrix and right side of "neighbouring sizes differ as the one-size rule says".

    Args:
        centres: the sizes, shape ``[k]``.
        is_free: whether that is not to be thought of a size and the next, shape ``[k - 1]``.
    """
    k = centres.size
    steps = np.diff(np.log(centres))
    precision = (_SAMPLE_SD / (_ELASTICITY_SD * np.maximum(steps, 1e-3))) ** 2
    precision[is_free] *= 1e-3
    difference = np.diff(np.eye(k), axis=0)
    matrix: FloatArray = difference.T @ (precision[:, None] * difference)
    return matrix, difference.T @ (precision * (1 - FIXED_SHARE) * steps)


def _shrink(scales: FloatArray, weights: FloatArray, evidence: SizeMedians) -> FloatArray:
    """Centre log scales on the kind's median worker and pull what is not significant to 0.

    The pull is the non-negative garrote ``s (1 - (threshold / s)^2)``: continuous, exactly 0 inside the
    threshold, and next to nothing for a scale that is plainly real. Without it two equal workers would swap rows
    for ever on noise alone. Own times are autocorrelated (about .6 on shared clusters), hence the factor 2.
    """
    members = (np.arange(scales.size) < evidence.num_members) & (weights > 0)
    centre = float(median(scales[members])) if members.any() else float(scales[-1])
    centred = np.where(weights > 0, scales - centre, 0.0)
    error = 2.0 * 1.25 * evidence.noise_sd / np.sqrt(np.maximum(weights, 1.0))
    threshold = np.maximum(_MIN_Z * error, _MIN_LOG_SCALE)
    with np.errstate(divide="ignore"):
        kept = np.maximum(1.0 - (threshold / np.abs(centred)) ** 2, 0.0)
    # The learnt shape has no worker behind it: its level is free to follow the present group's.
    kept[-1] = 1.0
    shrunk: FloatArray = centred * kept
    return shrunk

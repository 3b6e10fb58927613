"""The step-time curves of a run, fitted to all that it measured, and every worker's speed around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.kind_fit import KindFit, SizeMedians, fit_kind
from rex_ray.core.types import BoolArray, FloatArray, IntArray
from rex_ray.report.computing.quantiles import Quartiles, quartiles_by
from rex_ray.report.computing.speeds import Pieces, cut_pieces
from rex_ray.report.computing.spells import log_slowdowns
from rex_ray.report.reading.schema import GroupData, RunData

__all__ = ["GroupTimes", "KindEvidence", "RunCurves", "fit_run"]

# As ``core.kind_fit``: the sd of a sample before any data, the samples that this prior is worth, the most that count.
_SAMPLE_SD, _PRIOR_COUNT, _MAX_WEIGHT = 0.04, 8.0, 50.0
_BLOCK = 16
_SHORTEST_S, _LONGEST_S = 1e-6, 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindEvidence:
    """What a run measured of one kind of device, slowdowns divided out.

    Attributes:
        device: kind of device.
        medians: a median per worker and size, what the curve is fitted to; workers of all groups, one after another.
        counts: steps behind each of them, shape ``[e]``.
        sizes: quartiles of own time in seconds per size, workers of the kind together.
        block_sd: sd of the log median of ``_BLOCK`` consecutive steps: noise that remembers weighs more than its
            steps one by one.
        fit: the fit.
        has_slowdowns: whether some worker of the kind was slower, or faster, than usual for a while.
    """

    device: str
    medians: SizeMedians
    counts: IntArray
    sizes: Quartiles
    block_sd: float
    fit: KindFit
    has_slowdowns: bool

    @property
    def log_se(self) -> FloatArray:
        """Standard error of every median's log, shape ``[e]``."""
        single = 1.2533 * self.medians.noise_sd
        blocks: FloatArray = self.block_sd * np.sqrt(_BLOCK / self.counts)
        result: FloatArray = np.maximum(np.minimum(blocks, single), single / np.sqrt(self.counts))
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTimes:
    """A worker group's steps beside its curves; ``k`` steps, ``n`` ranks.

    Attributes:
        data: the group.
        curves: every rank's curve at its usual speed.
        kinds: index of every rank's kind in ``RunCurves.kinds``, shape ``[n]``.
        level: factor on the curve by a slowdown that lasts, shape ``[k, n]``; 1 at the usual speed.
        ratio: own time over the curve at the rows of the step, noise and all, shape ``[k, n]``; ``level`` for a rank
            without rows, and in the first steps under new shares, whose times are those of the change.
        rest_s: what a step took beyond its slowest worker's own time, shape ``[k]``: the reduction, the optimizer.
        is_switch: the first steps under new shares, whose times are no evidence, shape ``[k]``.
    """

    data: GroupData
    curves: tuple[StepTimeCurve, ...]
    kinds: IntArray
    level: FloatArray
    ratio: FloatArray
    rest_s: FloatArray
    is_switch: BoolArray

    def own_s(self, num_rows: IntArray, steps: slice | IntArray = slice(None)) -> FloatArray:
        """Return what ranks would have taken with other rows, in seconds, shape ``[steps, n]``; no rows take no time.

        Args:
            num_rows: rows per rank, the same in all steps (shape ``[n]``) or not (``[steps, n]``).
            steps: which steps, whose speeds count.
        """
        base = np.stack([curve.predict_s(num_rows[..., rank]) for rank, curve in enumerate(self.curves)], axis=-1)
        result: FloatArray = self.ratio[steps] * np.where(num_rows > 0, base, 0.0)
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunCurves:
    """A run's curves.

    Attributes:
        kinds: by name of the device.
        groups: one per worker group with steps, in order.
    """

    kinds: tuple[KindEvidence, ...]
    groups: tuple[GroupTimes, ...]

    @property
    def run_s(self) -> float:
        """Time of all steps in seconds."""
        return float(sum(group.data.step_s.sum() for group in self.groups))


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """One rank's clean steps: their places among all steps of its group, and what was measured in them."""

    device: str
    places: IntArray
    num_rows: IntArray
    log_s: FloatArray
    pieces: Pieces
    log_slowdown: FloatArray  # of each piece

    @classmethod
    def of(cls, group: GroupData, rank: int) -> _Worker:
        rows, own_s = group.num_rows[:, rank], group.own_s[:, rank]
        places = np.flatnonzero(group.steady & (rows > 0) & (own_s >= _SHORTEST_S) & (own_s <= _LONGEST_S))
        log_s = np.log(own_s[places])
        pieces = cut_pieces(rows[places], log_s)
        return cls(
            device=group.devices[rank],
            places=places,
            num_rows=rows[places],
            log_s=log_s,
            pieces=pieces,
            log_slowdown=np.zeros(len(pieces.counts)),
        )

    def level(self, num_steps: int) -> FloatArray:
        """Return the factor of lasting slowdowns at all steps of the group: that of the newest clean one."""
        if self.places.size == 0:
            return np.ones(num_steps)
        newest = np.maximum(np.searchsorted(self.places, np.arange(num_steps), side="right") - 1, 0)
        level: FloatArray = np.exp(self.log_slowdown[self.pieces.of_step[newest]])
        return level


def fit_run(run: RunData) -> RunCurves | None:
    """Fit a run's curves; None where some kind of device has no clean step."""
    groups = [[_Worker.of(group, rank) for rank in range(group.num_workers)] for group in run.groups]
    by_kind: dict[str, list[_Worker]] = {}
    for worker in (worker for group in groups for worker in group):
        by_kind.setdefault(worker.device, []).append(worker)
    if not by_kind or not all(any(worker.places.size for worker in workers) for workers in by_kind.values()):
        return None
    for workers in by_kind.values():
        measured = [worker for worker in workers if worker.places.size]
        for worker, slowdown in zip(measured, log_slowdowns([one.pieces for one in measured]), strict=True):
            worker.log_slowdown = slowdown
    kinds = [_evidence(device, by_kind[device]) for device in sorted(by_kind)]
    index = {kind.device: at for at, kind in enumerate(kinds)}
    taken = dict.fromkeys(index, 0)
    found = tuple(
        _group_times(data, workers, kinds, index, taken) for data, workers in zip(run.groups, groups, strict=True)
    )
    return RunCurves(kinds=tuple(kinds), groups=found)


def _evidence(device: str, workers: Sequence[_Worker]) -> KindEvidence:
    rows = np.concatenate([worker.num_rows for worker in workers])
    slowdown = np.concatenate([worker.log_slowdown[worker.pieces.of_step] for worker in workers])
    log_s = np.concatenate([worker.log_s for worker in workers]) - slowdown
    who, num_members = _members(workers, slowdown)
    width = int(rows.max()) + 1
    key = who * width + rows
    per_entry = quartiles_by(key, log_s)
    misses = log_s - per_entry.middle[np.searchsorted(per_entry.keys, key)]
    crowded = per_entry.counts[np.searchsorted(per_entry.keys, key)] > 2
    spread = 1.4826 * float(np.median(np.abs(misses[crowded]))) if crowded.any() else 0.0
    num = int(crowded.sum())
    variance = (_PRIOR_COUNT * _SAMPLE_SD**2 + num * spread**2) / (_PRIOR_COUNT + num)
    medians = SizeMedians(
        num_members=num_members,
        who=per_entry.keys // width,
        num_rows=(per_entry.keys % width).astype(np.float64),
        weight=np.minimum(per_entry.counts, _MAX_WEIGHT),
        log_s=per_entry.middle,
        noise_sd=float(np.sqrt(variance)),
    )
    fit = fit_kind(medians)
    assert fit is not None, "there is evidence"
    sizes = quartiles_by(rows, log_s)
    return KindEvidence(
        device=device,
        medians=medians,
        counts=per_entry.counts,
        sizes=replace(sizes, low=np.exp(sizes.low), middle=np.exp(sizes.middle), high=np.exp(sizes.high)),
        block_sd=_block_sd(key, misses, medians.noise_sd),
        fit=fit,
        has_slowdowns=bool((slowdown != 0).any()),
    )


def _members(workers: Sequence[_Worker], slowdown: FloatArray) -> tuple[IntArray, int]:
    """Return whose scale each step is at, and of how many: a worker's, or that of one slowdown of it.

    A slowdown's own factor is known no better than its steps say, so it has a scale of its own in the fit.
    """
    worker = np.repeat(np.arange(len(workers)), [one.places.size for one in workers])
    begins = (np.diff(slowdown, prepend=0.0) != 0) | (np.diff(worker, prepend=0) != 0)
    stretch = np.cumsum(begins)
    is_slow = slowdown != 0
    found, index = np.unique(stretch[is_slow], return_inverse=True)
    who = worker.copy()
    who[is_slow] = len(workers) + index
    return who, len(workers) + found.size


def _block_sd(key: IntArray, misses: FloatArray, sample_sd: float) -> float:
    """Return the sd of the mean of blocks of consecutive steps of one worker and size, from blocks of such steps.

    Where too few are whole, noise is taken to remember as on shared clusters (``core.kind_fit`` has the same factor).
    """
    guess = 2.0 * 1.2533 * sample_sd / np.sqrt(_BLOCK)
    num_blocks = misses.size // _BLOCK
    if num_blocks == 0:
        return float(guess)
    keys = key[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK)
    blocks = np.median(misses[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK), axis=1)[keys[:, 0] == keys[:, -1]]
    if blocks.size == 0:
        return float(guess)
    prior = 8.0
    variance = (prior * guess**2 + blocks.size * (1.4826 * np.median(np.abs(blocks))) ** 2) / (prior + blocks.size)
    return float(np.sqrt(variance))


def _group_times(
    data: GroupData,
    workers: Sequence[_Worker],
    kinds: Sequence[KindEvidence],
    index: Mapping[str, int],
    taken: dict[str, int],
) -> GroupTimes:
    curves = []
    for worker in workers:
        fit, member = kinds[index[worker.device]].fit, taken[worker.device]
        taken[worker.device] += 1
        curves.append(replace(fit.shape, scale=float(fit.scales[member])))
    level = np.stack([worker.level(len(data.steps)) for worker in workers], axis=1)
    base = np.stack([curve.predict_s(data.num_rows[:, rank]) for rank, curve in enumerate(curves)], axis=1)
    is_switch = _first_under_new_shares(data)
    usable = (data.num_rows > 0) & (data.own_s >= _SHORTEST_S) & ~is_switch[:, None]
    return GroupTimes(
        data=data,
        curves=tuple(curves),
        kinds=np.array([index[device] for device in data.devices]),
        level=level,
        ratio=np.where(usable, data.own_s / base, level),
        rest_s=data.step_s - data.own_s.max(axis=1),
        is_switch=is_switch,
    )


def _first_under_new_shares(data: GroupData) -> BoolArray:
    """Return which steps are among the unsteady first ones of an allocation that another one came before."""
    begins = np.concatenate([[False], np.diff(data.versions) != 0])
    if not begins.any():
        return begins
    at = np.arange(len(begins))
    begun = np.maximum.accumulate(np.where(begins, at, -1))
    # The last step before each that is steady or of the first allocation ends what the change had caused.
    settled = np.maximum.accumulate(np.where(data.steady | (begun < 0), at, -1))
    result: BoolArray = (begun >= 0) & (settled < begun) & ~data.partial
    return result

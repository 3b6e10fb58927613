"""Spells: stretches in which a worker's speed stays the same, told apart from what its rows explain.

A worker that is slowed down and then given fewer rows would pass for one on a flat curve: its time hardly changes while
its rows halve. But a switch moves rows, not the speed of a device. So what happens to the time at a switch is the
curve's doing, and what happens where rows stay is the speed's; and where a switch and a change of speed fall together,
the time's jump there is not what the jumps at all other switches of the kind say of the curve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rex_ray.core.kind_fit import SizeMedians, fit_kind
from rex_ray.core.types import BoolArray, FloatArray, IntArray
from rex_ray.report.computing.speeds import Pieces

__all__ = ["log_slowdowns"]

_LEAST_JUMP, _NUM_SES = float(np.log(1.12)), 4.5
_BENT = 0.25
"""How far the elasticity of a real curve may be from that of a straight line."""
_USUAL = float(np.log(1.08))
_FIXED_SHARES = np.linspace(0.0, 0.98, 50)
_MAX_WEIGHT = 50.0
_ROUNDS = 3


def log_slowdowns(workers: Sequence[Pieces]) -> list[FloatArray]:
    """Return the log factor of every piece on its worker's usual own time, one array per worker, 0 where it is usual.

    Args:
        workers: all workers of one kind with clean steps.
    """
    kind = _Kind(workers)
    spell = kind.spells(kind.is_broken(kind.line(), _BENT))
    # A curve with bends sees what a straight line had to forgive, and joins what only the line had broken.
    for _ in range(_ROUNDS):
        spell = kind.spells(kind.is_broken(kind.fitted(spell), 0.0))
    log_scale = kind.log_scales(spell, kind.fitted(spell))
    return np.split(kind.from_usual(spell, log_scale), kind.borders)


class _Kind:
    """The pieces of all workers of a kind, one worker after the other, ``p`` in all."""

    def __init__(self, workers: Sequence[Pieces]) -> None:
        sizes = [len(pieces.counts) for pieces in workers]
        self.borders = np.cumsum(sizes)[:-1]
        self._worker = np.repeat(np.arange(len(workers)), sizes)
        self._rows = np.concatenate([pieces.num_rows for pieces in workers])
        self._counts = np.concatenate([pieces.counts for pieces in workers])
        self._log_s = np.concatenate([pieces.log_s for pieces in workers])
        self._changes: BoolArray = np.concatenate([pieces.begins_by_change for pieces in workers])
        self._sd = max(0.01, float(np.median([pieces.sample_sd for pieces in workers])))
        # Own times remember, hence the factor 2, as in ``core.kind_fit``.
        self._se = 1.2533 * self._sd * np.minimum(1.0, 2.0 / np.sqrt(self._counts))

    def spells(self, begins: BoolArray) -> IntArray:
        """Return the spell of every piece, rising from 0, given which pieces begin one beside those known to."""
        spell: IntArray = np.cumsum(begins | self._changes) - 1
        return spell

    def line(self) -> FloatArray:
        """Return the log of the straight line that most jumps at switches agree with, at the rows of every piece.

        Its one parameter is the part of the time that does not depend on rows. The sum of absolute misses is least for
        a line that half of the jumps may contradict.
        """
        rows = self._rows / float(np.median(np.repeat(self._rows, np.minimum(self._counts, _MAX_WEIGHT).astype(int))))
        after = np.flatnonzero(~self._changes)
        if after.size == 0:
            return np.log(0.3 + 0.7 * rows)
        shapes = np.log(_FIXED_SHARES[:, None] + (1 - _FIXED_SHARES[:, None]) * rows)
        said = shapes[:, after] - shapes[:, after - 1]
        jump = self._log_s[after] - self._log_s[after - 1]
        weight = 1.0 / np.hypot(np.hypot(self._se[after], self._se[after - 1]), 0.02)
        best = int(np.argmin((weight * np.abs(said - jump)).sum(axis=1)))
        line: FloatArray = shapes[best]
        return line

    def is_broken(self, log_shape: FloatArray, bent: float) -> BoolArray:
        """Return which pieces begin with a jump that the curve does not explain.

        Args:
            log_shape: log of the curve at the rows of every piece.
            bent: how much further a jump may miss per change of log rows.
        """
        missed = np.abs(np.diff(self._log_s - log_shape, prepend=0.0))
        moved = np.abs(np.diff(np.log(self._rows), prepend=0.0))
        ses = np.hypot(self._se, np.concatenate([[0.0], self._se[:-1]]))
        broken: BoolArray = missed > np.maximum(np.maximum(_LEAST_JUMP, _NUM_SES * ses), bent * moved)
        return broken

    def fitted(self, spell: IntArray) -> FloatArray:
        """Return the log of the kind's curve, spells being free in their scale, at the rows of every piece."""
        width = int(self._rows.max()) + 1
        keys, entry = np.unique(spell * width + self._rows, return_inverse=True)
        counts = np.bincount(entry, weights=self._counts)
        log_s = np.bincount(entry, weights=self._counts * self._log_s) / counts
        fit = fit_kind(
            SizeMedians(
                num_members=int(spell[-1]) + 1,
                who=keys // width,
                num_rows=(keys % width).astype(np.float64),
                weight=np.minimum(counts, _MAX_WEIGHT),
                log_s=log_s,
                noise_sd=self._sd,
            )
        )
        assert fit is not None, "there are pieces"
        shape: FloatArray = np.log(fit.shape.predict_s(self._rows))
        return shape

    def log_scales(self, spell: IntArray, log_shape: FloatArray) -> FloatArray:
        """Return the mean log of own time over the curve's per spell, shape ``[spells]``."""
        total = np.bincount(spell, weights=self._counts * (self._log_s - log_shape))
        scale: FloatArray = total / np.bincount(spell, weights=self._counts)
        return scale

    def from_usual(self, spell: IntArray, log_scale: FloatArray) -> FloatArray:
        """Return how far every piece's spell is from its worker's usual speed: that of its median step."""
        far = log_scale[spell]
        for worker in range(int(self._worker[-1]) + 1):
            mine = np.flatnonzero(self._worker == worker)
            order = mine[np.argsort(far[mine], kind="stable")]
            passed = np.cumsum(self._counts[order])
            usual = far[order[int(np.searchsorted(passed, passed[-1] / 2))]]
            far[mine] -= usual
        slowdown: FloatArray = np.where(np.abs(far) < _USUAL, 0.0, far)
        return slowdown

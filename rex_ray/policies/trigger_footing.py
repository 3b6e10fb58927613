"""What samples are measured against while shares change under the trigger's feet.

At one size a rank's time is compared with its own earlier times, and no model is needed. At a new size the model says
what the same speed would take there. The reference is frozen until the next change: a model that goes on learning
would learn the slowdown, too. What the model got wrong about the new size shows in the first samples there, and is
taken into the reference unless it is too large to be the model's error.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.types import BoolArray, FloatArray, IntArray
from rex_ray.policies.seams import Model
from rex_ray.policies.trigger_memory import SHORT, Baseline, Footing, Limits, TriggerState, Watch, frozen

__all__ = ["GRACE", "MOVED", "advance", "rebase"]

MOVED = math.log(1.1)
"""Change of a rank's rows from which on its time at the new size is the model's word."""

GRACE = 24
"""Clean samples after a move during which it may still be the model that was wrong."""

REACH = math.log(1.25)
"""Sizes up to so far (log) beyond those that a rank has run are read off its curve, others are guessed."""

GUESSED_SLOPE = 0.6
"""How wrong a guess may be, per log of the distance: a time grows with its rows by a power between 0 and 1.2."""


def rebase(state: TriggerState, step: StepObserved, model: Model | None) -> tuple[TriggerState, Footing]:
    """Measure from now on against what the step's allocation should take at the speed known so far."""
    rows = step.num_rows
    old = state.footing
    ratio = None if old is None else _expected_ratio(model, old.sizes, rows)
    if old is None or ratio is None:
        return _afresh(state, step)
    moved = np.abs(np.log(np.maximum(rows, 1) / np.maximum(old.sizes, 1))) > MOVED
    unknown = (rows == 0) | (old.sizes == 0)
    settled = ~moved
    smallest = np.where(settled | (old.unsettled == 0), np.minimum(old.smallest, old.sizes), old.smallest)
    largest = np.where(settled | (old.unsettled == 0), np.maximum(old.largest, old.sizes), old.largest)
    known = np.clip(rows, smallest, largest)
    beyond = np.abs(np.log(np.maximum(rows, 1) / np.maximum(known, 1)))
    guess = np.where(moved & (beyond > REACH), REACH + GUESSED_SLOPE * beyond, 0.0)
    footing = Footing(
        version=step.allocation_version,
        sizes=frozen(rows.copy()),
        reference=frozen(np.where(unknown, _log_us(step), old.reference + ratio)),
        smallest=frozen(smallest),
        largest=frozen(largest),
        unsettled=frozen(np.where(moved, SHORT, old.unsettled)),
        guess=frozen(guess),
        grace=GRACE if moved.any() else old.grace,
    )
    baseline = state.baseline
    if unknown.any():
        baseline = replace(baseline, num_blocks=frozen(np.where(unknown, 0, baseline.num_blocks)))
    watch = state.watch.forget(moved | unknown)
    return replace(state, footing=footing, watch=watch, baseline=baseline), footing


def advance(footing: Footing, watch: Watch, baseline: Baseline, limits: Limits) -> tuple[Footing, Watch]:
    """Count a sample under new shares; centre a rank at its new size once it has had enough of them."""
    due = (footing.unsettled == 1) & (watch.num_recent >= SHORT)
    unsettled = np.maximum(footing.unsettled - 1, due * 0)
    unsettled = np.where((footing.unsettled == 1) & ~due, 1, unsettled)
    footing = replace(footing, unsettled=frozen(unsettled), grace=footing.grace - 1)
    if not due.any():
        return footing, watch
    ordered = np.sort(watch.recent[-SHORT:, 0], axis=0)
    residual = ordered[SHORT // 2 - 1 : SHORT // 2 + 1].mean(axis=0) - baseline.centre
    shift = np.where(due & (np.abs(residual) <= limits.off), residual, 0.0)
    recent = watch.recent.copy()
    recent[:, 0] -= shift
    footing = replace(footing, reference=frozen(footing.reference + shift))
    return footing, replace(watch, recent=frozen(recent))


def _afresh(state: TriggerState, step: StepObserved) -> tuple[TriggerState, Footing]:
    """Begin where nothing is known of how the new shares compare with the old ones."""
    n = step.num_rows.size
    rows, zeros = frozen(step.num_rows.copy()), frozen(np.zeros(n, dtype=np.int64))
    footing = Footing(
        version=step.allocation_version,
        sizes=rows,
        reference=frozen(_log_us(step)),
        smallest=rows,
        largest=rows,
        unsettled=zeros,
        guess=frozen(np.zeros(n)),
    )
    return replace(state, footing=footing, watch=Watch.empty(n), baseline=Baseline.empty(n)), footing


def _expected_ratio(model: Model | None, old: IntArray, new: IntArray) -> FloatArray | None:
    """Return the log ratio of the expected times at the new and the old sizes, shape ``[n]``; None if unknown."""
    if np.array_equal(old, new):
        return np.zeros(len(new))
    if model is None:
        return None
    before, after = model.own_s(old), model.own_s(new)
    if before is None or after is None:
        return None
    known: BoolArray = (before > 0) & (after > 0)
    result: FloatArray = np.where(known, np.log(np.where(known, after, 1.0) / np.where(known, before, 1.0)), 0.0)
    return result


def _log_us(step: StepObserved) -> FloatArray:
    result: FloatArray = np.log(np.maximum(step.own_us, 1).astype(np.float64))
    return result

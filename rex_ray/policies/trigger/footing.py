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

from rex_ray.core.changed import changed
from rex_ray.core.median import median
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import BoolArray, FloatArray, IntArray, frozen
from rex_ray.policies.seams import Model
from rex_ray.policies.trigger.baseline import Baseline
from rex_ray.policies.trigger.memory import (
    NUM_VISITED,
    SETTLING,
    SHORT,
    Footing,
    Limits,
    TriggerState,
    Watch,
)

__all__ = ["FIRST", "MOVED", "advance", "meet_curve", "rebase"]

MOVED = math.log(1.1)
"""Change of a rank's rows from which on its time at the new size is the model's word."""

FIRST = 3
"""Samples at a new size that replace a guess."""

_SAME = math.log(1.15)
"""Speeds within this factor are the same one."""

BEND = math.log(1.5)
"""Least factor by which a time that changes with a switch has met a bend; a smaller one may be a mild slowdown."""

REACH = math.log(1.25)
"""Sizes up to so far (log) from one that a rank has run are read off its curve, others are guessed."""

BEYOND, BETWEEN = 0.6, 0.3
"""How wrong an expected time may be, per log of the distance to the nearest size that was run: a time grows with its
rows by a power between 0 and 1.2; between two sizes it is held from both sides."""


def rebase(state: TriggerState, step: StepObserved, model: Model | None) -> tuple[TriggerState, Footing]:
    """Measure from now on against what the step's allocation should take at the speed known so far."""
    rows = step.num_rows
    old = state.footing
    ratio = None if old is None else _expected_ratio(model, old.sizes, rows)
    if old is None or ratio is None:
        return _afresh(state, step)
    moved = np.abs(np.log(np.maximum(rows, 1) / np.maximum(old.sizes, 1))) > MOVED
    unknown = (rows == 0) | (old.sizes == 0)
    visited = _visit(old.visited, old.sizes, old.unsettled <= SETTLING - SHORT)
    guess = np.where(moved, _guess(visited, rows), 0.0)
    footing = Footing(
        version=step.allocation_version,
        sizes=frozen(rows.copy()),
        reference=frozen(np.where(unknown, _log_us(step), old.reference + ratio)),
        visited=frozen(visited),
        unsettled=frozen(np.where(moved, SETTLING, old.unsettled)),
        guess=frozen(guess),
        given=frozen(np.where(state.watch.suspect | unknown, 0, np.sign(rows - old.sizes))),
        was_falling=frozen(moved & (state.watch.off < 0)),
        since=state.num_clean,
    )
    baseline = state.baseline
    if unknown.any():
        baseline = replace(baseline, num_blocks=frozen(np.where(unknown, 0, baseline.num_blocks)))
    watch = state.watch.forget(moved | unknown)
    return replace(state, footing=footing, watch=watch, baseline=baseline), footing


def advance(
    footing: Footing, watch: Watch, baseline: Baseline, limits: Limits, level: FloatArray
) -> tuple[Footing, Watch]:
    """Count a sample at a new size or speed; centre a rank there after 3, 8 and 24 of them.

    Where the expected time was a guess, three samples replace it, so that a change of speed just after the move is not
    taken for an error of the guess. An error as large as the rank's ``level`` is the end of a slowdown if the rank was
    getting faster just before the move or is within these samples. Eight samples that remember have an error of their
    own; until 24 have mended it, limits are wider.
    """
    age = np.where(footing.unsettled > 0, SETTLING + 1 - footing.unsettled, 0)
    is_full = watch.num_recent >= age
    due = (((age == FIRST) & (footing.guess > 0)) | (age == SHORT) | (age == SETTLING)) & is_full
    footing = changed(footing, unsettled=frozen(np.maximum(footing.unsettled - 1, (age == SETTLING) & ~is_full)))
    if not due.any():
        return footing, watch
    shift = np.zeros(age.size)
    for count in (FIRST, SHORT, SETTLING):
        ranks = due & (age == count)
        if ranks.any():
            residual = median(watch.recent[-count:, 0]) - baseline.centre
            fell = footing.was_falling | (watch.recent[-count, 0] - watch.recent[-1, 0] > level / 2)
            is_over = fell & (level > 2 * _SAME) & (np.abs(level + residual) < _SAME)
            shift = np.where(ranks & ~is_over & (np.abs(residual) <= limits.off), residual, shift)
    recent = watch.recent.copy()
    recent[:, 0] -= shift
    footing = changed(
        footing, reference=frozen(footing.reference + shift), guess=frozen(np.where(due, 0.0, footing.guess))
    )
    return footing, changed(watch, recent=frozen(recent))


def meet_curve(footing: Footing, watch: Watch, baseline: Baseline, limits: Limits) -> tuple[Footing, Watch]:
    """Take into the reference what came with the rows and with the very switch; to be asked after ``FIRST`` samples.

    A rank that was given rows and is slower from the first step under them on has met a bend of its curve (a memory
    that spills, another kernel), and so has one that lost rows and is faster; a change of speed has no reason to begin
    at that very step. Believed for one, it would rescale the curve at every size, and shares would go to and fro.
    """
    residual = watch.recent[-FIRST:, 0] - baseline.centre
    met = (footing.given != 0) & (residual * footing.given > np.maximum(limits.off, BEND)).all(axis=0)
    if not met.any():
        return footing, watch
    shift = np.where(met, median(residual), 0.0)
    recent = watch.recent.copy()
    recent[:, 0] -= shift
    watch = replace(watch.forget(met), recent=frozen(recent), num_recent=frozen(np.where(met, FIRST, watch.num_recent)))
    return replace(
        footing,
        reference=frozen(footing.reference + shift),
        unsettled=frozen(np.where(met, SETTLING - FIRST + 1, footing.unsettled)),
        guess=frozen(np.where(met, 0.0, footing.guess)),
    ), watch


def _afresh(state: TriggerState, step: StepObserved) -> tuple[TriggerState, Footing]:
    """Begin where nothing is known of how the new shares compare with the old ones."""
    n = step.num_rows.size
    rows, zeros = frozen(step.num_rows.copy()), frozen(np.zeros(n, dtype=np.int64))
    footing = Footing(
        version=step.allocation_version,
        sizes=rows,
        reference=frozen(_log_us(step)),
        visited=frozen(np.zeros((n, NUM_VISITED), dtype=np.int64)),
        unsettled=zeros,
        guess=frozen(np.zeros(n)),
        given=zeros,
        was_falling=frozen(np.zeros(n, dtype=np.bool_)),
        since=state.num_clean,
    )
    return replace(state, footing=footing, watch=Watch.empty(n), baseline=Baseline.empty(n)), footing


def _visit(visited: IntArray, sizes: IntArray, ranks: BoolArray) -> IntArray:
    """Return the newest sizes that each rank has settled on, shape ``[n, NUM_VISITED]``, with these in front."""
    is_new = ranks & (sizes > 0) & ~(visited == sizes[:, None]).any(axis=1)
    return np.where(is_new[:, None], np.concatenate([sizes[:, None], visited[:, :-1]], axis=1), visited)


def _guess(visited: IntArray, rows: IntArray) -> FloatArray:
    """Return by how much (log) the expected times at ``rows`` may be wrong, ``[n]``; 0 near a size that was run."""
    distance = np.log(np.maximum(rows, 1))[:, None] - np.log(np.maximum(visited, 1))
    known = visited > 0
    nearest = np.where(known, np.abs(distance), np.inf).min(axis=1)
    nearest = np.where(np.isfinite(nearest), nearest, 0.0)
    is_between = (known & (distance >= 0)).any(axis=1) & (known & (distance <= 0)).any(axis=1)
    error = REACH + np.where(is_between, BETWEEN, BEYOND) * nearest
    result: FloatArray = np.where(nearest > REACH, error, 0.0)
    return result


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

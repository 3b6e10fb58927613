"""Whether what runs takes as long as the curves said it would: where it does not, they lack a structure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, IntArray, read_only
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import ShareWatch

__all__ = ["hope", "watched"]


def watched(rules: SearchRules, watch: ShareWatch, step: StepObserved) -> ShareWatch:
    """Take a clean step in; judge the prediction once there are enough."""
    if watch.slowest_s is not None:
        return replace(watch, num_clean=watch.num_clean + 1)
    newest = step.own_us[None] * 1e-6
    own_s = read_only(newest if watch.own_s is None else np.concatenate([watch.own_s, newest]), np.float64)
    watch = replace(watch, num_clean=watch.num_clean + 1, own_s=own_s)
    return watch if len(own_s) < rules.watch_steps else _judged(rules, watch, own_s)


def _judged(rules: SearchRules, watch: ShareWatch, own_s: FloatArray) -> ShareWatch:
    """Compare medians *per rank* with the prediction: the slowest of many noisy ranks is slower than any of them.

    The standard error is that of a median of steps that remember, as ``SplineSplit`` reckons it.
    """
    typical = np.median(own_s, axis=0)
    spread = 1.4826 * np.median(np.abs(own_s - typical), axis=0) / np.maximum(typical, 1e-6)
    rho = rules.autocorrelation
    doubt = 1.25 * float(spread.max()) / math.sqrt(len(own_s) * (1 - rho) / (1 + rho))
    slowest_s = max(float(typical.max()), 1e-6)
    mismatch, distortion = None, None
    if watch.predicted_own_s is not None:
        predicted = np.maximum(watch.predicted_own_s, 1e-9)
        mismatch = abs(slowest_s / float(predicted.max()) - 1.0)
        distortion = float(np.abs(typical / predicted - 1.0)[watch.predicted_own_s > 0].max(initial=0.0))
    return replace(
        watch,
        own_s=None,
        typical_s=read_only(typical, np.float64),
        slowest_s=max(float(np.median(own_s.max(axis=1))), 1e-6),
        doubt=doubt,
        mismatch=mismatch,
        distortion=distortion,
    )


def hope(typical_s: FloatArray, num_rows: IntArray, lower: IntArray, upper: IntArray) -> float:
    """Return the most that other shares could save of the step time, as a fraction.

    Where own times only grow with own rows, no split is faster than the fastest rank that could take more rows: to
    finish before it, every such rank would have to give rows away, and nobody would be left to take them. So shares
    whose ranks take equally long are as good as any, however wrong the curves were about that time.

    Args:
        typical_s: every rank's own time, shape ``[n]``.
        num_rows: its rows.
        lower: fewest rows per rank; the step is no faster than a rank that cannot give any away.
        upper: most rows per rank.
    """
    slowest_s = float(typical_s.max())
    stuck = typical_s[(num_rows <= lower) & (num_rows > 0)]
    takers = typical_s[num_rows < upper]
    if takers.size == 0 or slowest_s <= 0:
        return 0.0
    bound_s = max(float(takers.min()), float(stuck.max()) if stuck.size else 0.0)
    return max(1.0 - bound_s / slowest_s, 0.0)

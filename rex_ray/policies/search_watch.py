"""Whether what runs takes as long as the curves said it would: where it does not, they lack a structure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, read_only
from rex_ray.policies.search_rules import SearchRules
from rex_ray.policies.search_state import ShareWatch

__all__ = ["watched"]


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
    return replace(
        watch,
        own_s=None,
        slowest_s=max(float(np.median(own_s.max(axis=1))), 1e-6),
        doubt=doubt,
        mismatch=None if watch.predicted_s is None else abs(slowest_s / watch.predicted_s - 1.0),
    )

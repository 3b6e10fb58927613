"""The gradient noise scale of a run, read off the norms in its journal: the same question at every block's end.

Growth asks it only where it may grow, and remembers only its verdicts. The journal holds every measured norm, so the
report can ask it throughout, of a run without growth as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rex_ray.control.events import StepObserved
from rex_ray.core.noise_scale import GradientMoments, read_moments
from rex_ray.core.types import FloatArray, StepFlag, read_only
from rex_ray.core.wilcoxon import signed_rank
from rex_ray.policies.growth.blocks import BLOCK_STEPS, block_statistic
from rex_ray.policies.growth.egmd import Egmd
from rex_ray.report.reading.schema import NoiseSeries

__all__ = ["noise_series"]


def noise_series(steps: Iterable[StepObserved]) -> NoiseSeries | None:
    """Return the noise scale over steps with gradient norms; None with less than one window of them.

    No window is over two sets of parameters: another set's gradient has a noise scale of its own.
    """
    ends: list[int] = []
    batches: list[int] = []
    moments: list[tuple[float, float]] = []
    num_before: list[int] = []  # blocks of the present parameters before each
    open_steps: list[GradientMoments] = []
    first = 0
    for step in steps:
        if step.flags & StepFlag.OTHER_PARAMETERS:
            first, open_steps = len(ends), []
        if step.flags & (StepFlag.PARTIAL | StepFlag.SKIPPED):
            continue
        read = read_moments(step)
        if not isinstance(read, GradientMoments):
            continue
        open_steps.append(read)
        if len(open_steps) == BLOCK_STEPS:
            ends.append(step.step)
            num_before.append(len(batches) - first)
            batches.append(int(step.num_rows.sum()))
            moments.append((sum(m.noise_trace for m in open_steps), sum(m.sq_norm for m in open_steps)))
            open_steps = []
    window = Egmd().window
    is_whole = np.array(num_before[window - 1 :], dtype=np.int64) >= window - 1
    if not is_whole.any():
        return None
    pairs = np.lib.stride_tricks.sliding_window_view(np.array(moments), window, axis=0)[is_whole]
    noise, signal = pairs[:, 0, :], pairs[:, 1, :]
    batch = np.array(batches[window - 1 :], dtype=np.int64)[is_whole]
    above = block_statistic(noise, signal, 1.0, "linear") - (2.0 * batch - 1.0)[:, None] * signal
    return NoiseSeries(
        steps=np.array(ends[window - 1 :], dtype=np.int64)[is_whole],
        batch=batch,
        noise_scale=_ratio(noise.sum(axis=1), signal.sum(axis=1)),
        p_value=read_only(signed_rank(above).p_value, np.float64),
        window=window,
        block_steps=BLOCK_STEPS,
    )


def _ratio(noise: FloatArray, signal: FloatArray) -> FloatArray:
    ratio: FloatArray = np.where(signal > 0, noise / np.where(signal > 0, signal, 1.0), np.nan)
    return ratio

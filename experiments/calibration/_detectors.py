"""Change detectors from the textbooks, as comparators of the trigger: on the same samples, at the same false alarms.

All of them watch one worker's log own time, standardised by the median and the robust sd of 96 samples that end 16
before the newest. Each has one threshold, which is set so that independent groups of four with the noise of a shared
cluster are disturbed no more often than the trigger may disturb them; then delays can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.rank_tests import compare_ranks
from rex_ray.core.types import BoolArray, FloatArray

__all__ = ["DETECTORS", "REFRACTORY", "SETTLED", "Detector", "alarms", "standardise", "tune"]

REFRACTORY = 32
"""Steps after an alarm in which a detector is silent, and after which it starts afresh."""

SETTLED = 112
"""Steps before a sample can be standardised."""

_WINDOW, _BEHIND, _REFRESH = 96, 16, 8
_SHORT = 8

Statistic = Callable[[FloatArray, "FloatArray | None"], tuple[FloatArray, FloatArray]]


@dataclass(frozen=True, slots=True)
class Detector:
    """One detector.

    Attributes:
        name: as it stands in the tables.
        thresholds: what is tried when it is tuned, increasing.
        textbook: the threshold where tuning fails.
        statistic: ``|statistic|`` per step and worker of standardised samples of shape ``[steps, workers]``, if no
            alarm sets it back; None where alarms have to be followed step by step.
        step: the recursion: ``(memory, sample) -> (statistic, memory)`` over workers, ``memory`` None at the start.
    """

    name: str
    thresholds: tuple[float, ...]
    textbook: float
    statistic: Callable[[FloatArray], FloatArray] | None = None
    step: Statistic | None = None


def standardise(log_s: FloatArray) -> FloatArray:
    """Return samples in robust sds from the median of the window behind them, shape as given; 0 before ``SETTLED``.

    Args:
        log_s: log own times, shape ``[steps, workers]``.
    """
    result = np.zeros_like(log_s)
    for first in range(SETTLED, len(log_s), _REFRESH):
        window = log_s[first - _BEHIND - _WINDOW : first - _BEHIND]
        centre = np.median(window, axis=0)
        spread = 1.4826 * np.median(np.abs(window - centre), axis=0)
        result[first : first + _REFRESH] = (log_s[first : first + _REFRESH] - centre) / np.maximum(spread, 1e-3)
    return result


def alarms(detector: Detector, samples: FloatArray, threshold: float, series: FloatArray | None = None) -> BoolArray:
    """Return at which steps the detector raises an alarm, shape ``[steps, workers]``.

    Args:
        detector: which one.
        samples: standardised samples, shape ``[steps, workers]``.
        threshold: of its statistic.
        series: the statistic, where it is known already.
    """
    raised = np.zeros(samples.shape, dtype=np.bool_)
    silent = np.zeros(samples.shape[1], dtype=np.int64)
    if series is None and detector.statistic is not None:
        series = detector.statistic(samples)
    memory: FloatArray | None = None
    for step in range(len(samples)):
        if series is not None:
            value = series[step]
        else:
            assert detector.step is not None
            value, memory = detector.step(samples[step], memory)
        raised[step] = (value > threshold) & (silent == 0)
        silent = np.where(raised[step], REFRACTORY, np.maximum(silent - 1, 0))
        if memory is not None:
            memory = np.where(silent > 0, 0.0, memory)
    return raised


def tune(detector: Detector, samples: FloatArray, most_alarms: float) -> float | None:
    """Return the least of the detector's thresholds with at most so many alarms over all workers, None if none has."""
    series = detector.statistic(samples) if detector.statistic else None
    for threshold in detector.thresholds:
        if alarms(detector, samples, threshold, series).sum() <= most_alarms:
            return threshold
    return None


def _cusum(sample: FloatArray, memory: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """Page 1954, both sides, with the reference value of a shift by one sd."""
    up, down = (np.zeros((2, *sample.shape)) if memory is None else memory)[:2]
    memory = np.maximum(np.stack([up + sample - 0.5, down - sample - 0.5]), 0.0)
    return memory.max(axis=0), memory


def _page_hinkley(sample: FloatArray, memory: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """The sum of deviations from the running mean against its extreme (Page 1954; Hinkley 1971), both sides."""
    count, mean, up, down = np.zeros((4, *sample.shape)) if memory is None else memory
    count = count + 1
    mean = mean + (sample - mean) / count
    up = np.maximum(up + sample - mean - 0.1, 0.0)
    down = np.maximum(down - sample + mean - 0.1, 0.0)
    return np.maximum(up, down), np.stack([count, mean, up, down])


def _ewma(sample: FloatArray, memory: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """Roberts 1959, weight .2, in sds of the average of independent samples."""
    weight = 0.2
    level = weight * sample + (1 - weight) * (np.zeros((1, *sample.shape)) if memory is None else memory)
    return np.abs(level[0]) / np.sqrt(weight / (2 - weight)), level


def _mann_whitney(samples: FloatArray) -> FloatArray:
    """``|z|`` of the last 8 samples against the 96 before the last 16, without effect size or repetition."""
    result = np.zeros_like(samples)
    for step in range(SETTLED + _SHORT, len(samples)):
        window = samples[step - _BEHIND - _WINDOW + 1 : step - _BEHIND + 1]
        result[step] = np.abs(compare_ranks(samples[step - _SHORT + 1 : step + 1].T, window.T).z)
    return result


DETECTORS: Sequence[Detector] = (
    Detector("cusum", tuple(np.geomspace(5, 320, 31).tolist()), 5.0, step=_cusum),
    Detector("page_hinkley", tuple(np.geomspace(10, 640, 31).tolist()), 50.0, step=_page_hinkley),
    Detector("ewma", tuple(np.geomspace(3, 96, 31).tolist()), 3.0, step=_ewma),
    Detector("mann_whitney", tuple(np.linspace(2.3, 4.9, 27).tolist()), 3.09, statistic=_mann_whitney),
)

BY_NAME: Mapping[str, Detector] = {detector.name: detector for detector in DETECTORS}

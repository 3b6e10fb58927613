"""Own times to test a trigger with: noise of several kinds, drawn at once, and slowdowns put into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from rex_ray.core.types import BoolArray, FloatArray

__all__ = ["NOISES", "Noise", "draw", "traces"]

_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
"""Where the production traces lie if they are at hand; see their attribution in the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Factor on an own time, by step and worker, independent between workers.

    Attributes:
        sd: marginal relative sd of an AR(1) process.
        rho: its lag-1 correlation.
        spike_probability: chance that a step takes ``spike_factor`` times as long, independent between steps.
        spike_factor: how long a spike is.
        burst_probability: chance that a burst begins at a step.
        burst_factor: how much longer its steps take.
        burst_steps: mean of its geometric length.
        mode_probability: chance that a step is of the slower of two modes, independent between steps.
        mode_factor: how much slower that mode is.
    """

    sd: float = 0.04
    rho: float = 0.0
    spike_probability: float = 0.0
    spike_factor: float = 2.0
    burst_probability: float = 0.0
    burst_factor: float = 1.5
    burst_steps: float = 3.0
    mode_probability: float = 0.0
    mode_factor: float = 1.2


NOISES: Mapping[str, Noise] = {
    "iid": Noise(),
    "ar05": Noise(rho=0.5),
    "ar07": Noise(rho=0.7),
    "ar09": Noise(rho=0.9),
    "iid_8": Noise(sd=0.08),
    "ar05_8": Noise(sd=0.08, rho=0.5),
    "ar07_8": Noise(sd=0.08, rho=0.7),
    "ar09_8": Noise(sd=0.08, rho=0.9),
    "spike2": Noise(rho=0.6, spike_probability=0.02),
    "spike10": Noise(rho=0.6, spike_probability=0.10),
    "burst": Noise(rho=0.6, burst_probability=1 / 300),
    "bimodal": Noise(rho=0.6, mode_probability=0.3),
}
"""The disturbances under which no worker has changed."""


def draw(noise: Noise, num_steps: int, num_workers: int, rng: np.random.Generator) -> FloatArray:
    """Return factors on own times, shape ``[num_steps, num_workers]``."""
    warm_up = 64
    innovations = rng.standard_normal((warm_up + num_steps, num_workers))
    wander = lfilter([np.sqrt(1 - noise.rho**2)], [1.0, -noise.rho], innovations, axis=0)[warm_up:]
    factor = 1.0 + noise.sd * np.maximum(wander, -3.0)
    if noise.spike_probability:
        factor *= np.where(rng.random(factor.shape) < noise.spike_probability, noise.spike_factor, 1.0)
    if noise.mode_probability:
        factor *= np.where(rng.random(factor.shape) < noise.mode_probability, noise.mode_factor, 1.0)
    if noise.burst_probability:
        starts = np.argwhere(rng.random(factor.shape) < noise.burst_probability)
        lengths = rng.geometric(1 / noise.burst_steps, size=len(starts))
        slow = np.zeros(factor.shape, dtype=np.bool_)
        for (step, worker), length in zip(starts, lengths, strict=True):
            slow[step : step + length, worker] = True
        factor = np.where(slow, noise.burst_factor, 1.0) * factor
    result: FloatArray = factor
    return result


def traces() -> Iterator[tuple[str, FloatArray, BoolArray]]:
    """Yield the recorded series that are at hand: name, times of shape ``[steps, workers]``, steps in an episode.

    A step counts as within an episode from its listed start until 32 steps after its end, when an alarm for the
    recovery may still be due.
    """
    listed = _TRACES / "alibaba_episodes.csv"
    if not listed.exists():
        return
    episodes = pd.read_csv(listed)
    for path in sorted(_TRACES.glob("alibaba_pai_minibatch_job*.csv.gz")):
        job = int(path.name.removeprefix("alibaba_pai_minibatch_job").removesuffix(".csv.gz"))
        series = (
            pd.read_csv(path).pivot_table(index="time", columns="worker", values="batch_time_norm").ffill().dropna()
        )
        inside = np.zeros(len(series), dtype=np.bool_)
        for episode in episodes[episodes["job"] == job].itertuples():
            inside[int(episode.start_iter) : int(episode.start_iter + episode.length_iters) + 32] = True
        yield f"alibaba job {job}", series.to_numpy(dtype=np.float64), inside

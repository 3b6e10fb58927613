"""Emulate devices: stretch each worker's own time to a public profile, and add the profile's all-reduce time.

This is how a laptop plays a mixed cluster. It enters a session through the same step hook that is open to anyone, so
no production path knows of it: the loop, the data, the gradients and the control plane are the real ones, only
waiting is added. At the last local gradient a worker sleeps until its own time (data and compute so far) equals the
profile's for its real rows; after the reduction it sleeps the time of an all-reduce.

What it can't do is make a machine faster. A worker that is late already never sleeps a negative time: it overruns,
which is counted, because the figures of a run with many overruns are the machine's and not the profile's. Sleeping
is ``time.sleep`` alone: spinning for the last millisecond would take the cores from the workers beside it. It wakes
late by some tenths of a millisecond, which is measured as well. On CUDA the host runs ahead of the device and these
times mean nothing: emulation is for CPU workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rex_ray.core.errors import ConfigError
from rex_ray.core.split import SplitPlan
from rex_ray.scenario import (
    DeviceProfile,
    Episode,
    NetworkModel,
    NoiseModel,
    StepTimeShape,
    WorkerTimeline,
    load_profile,
    true_optimum,
)
from rex_ray.worker.current import get_session
from rex_ray.worker.step import StepInfo

__all__ = ["EmulationMeter", "EmulationSpec", "Emulator", "emulated"]

logger = logging.getLogger(__name__)

TrainLoop = Callable[[dict[str, Any]], Any]

_TOLERATED_OVERRUNS = 0.05
"""Share of overrun steps from which a worker says that the machine is too slow for the emulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSpec:
    """Which world the workers play. Plain data: it travels to the workers with the training loop.

    Attributes:
        workload: profile of the work, e.g. ``"resnet50"``, whatever the loop really computes.
        devices: from a worker's kind of device (its node's label) to the name of a profile, where they differ.
        time_scale: real seconds per emulated second; 0.5 plays the profiles twice as fast.
        noise: step-to-step noise of own times.
        episodes: scripted slowdowns.
        network: time of the all-reduce; None adds none.
        shape: structure that the profiles' smooth curves lack. A loader's limit is played in the own time as a whole:
            it is slept at the last gradient with the rest, and so counted as computing, not as waiting for data.
        seed: seeds the noise.
    """

    workload: str
    devices: Mapping[str, str] = field(default_factory=dict)
    time_scale: float = 1.0
    noise: NoiseModel = field(default_factory=NoiseModel.quiet)
    episodes: tuple[Episode, ...] = ()
    network: NetworkModel | None = None
    shape: StepTimeShape = field(default_factory=StepTimeShape)
    seed: int = 0

    def check(self, devices: Iterable[str]) -> None:
        """Refuse what no profile answers, before anything starts.

        Args:
            devices: every kind of device that a worker may have.

        Raises:
            ConfigError: a kind or the workload has no profile (names the nearest), or the scale is not positive.
        """
        if not self.time_scale > 0:
            raise ConfigError(f"time_scale must be positive, got {self.time_scale}")
        for device in devices:
            self.profile(device)

    def profile(self, device: str) -> DeviceProfile:
        """Return the profile of a kind of device.

        Raises:
            ConfigError: there is none.
        """
        return load_profile(self.devices.get(device, device), self.workload)

    def timeline(self, device: str, rank: int) -> WorkerTimeline:
        """Return what the steps of one worker take; the same object that the simulator reads."""
        return WorkerTimeline(
            profile=self.profile(device),
            rank=rank,
            seed=self.seed,
            noise=self.noise,
            episodes=self.episodes,
            time_scale=self.time_scale,
            shape=self.shape,
        )

    def all_reduce_s(self, num_workers: int) -> float:
        """Return the real seconds that a reduction is made to take longer."""
        return 0.0 if self.network is None else self.time_scale * self.network.all_reduce_s(num_workers)

    def optimum(
        self, devices: Iterable[str], global_batch_size: int, slowdowns: Sequence[float] | None = None
    ) -> SplitPlan:
        """Return the exact optimum of the emulated cluster in real seconds, without noise.

        Args:
            devices: kind of device per rank.
            global_batch_size: rows to split.
            slowdowns: present factor of the episodes per rank, default none.
        """
        timelines = [self.timeline(device, rank) for rank, device in enumerate(devices)]
        return true_optimum(timelines, global_batch_size, slowdowns=slowdowns)


@dataclass(slots=True, kw_only=True)
class EmulationMeter:
    """How well one worker kept to its targets.

    Attributes:
        num_steps: steps emulated.
        num_overruns: steps whose real own time was beyond the target before any sleep.
        overrun_s: by how much, in all.
        overshoot_s: how much later than asked the sleeps ended, in all.
        worst_overshoot_s: the latest of them.
    """

    num_steps: int = 0
    num_overruns: int = 0
    overrun_s: float = 0.0
    overshoot_s: float = 0.0
    worst_overshoot_s: float = 0.0

    def sleep_until(self, deadline_s: float) -> None:
        """Sleep until ``time.perf_counter`` reaches ``deadline_s``, and note how well that went."""
        self.num_steps += 1
        left_s = deadline_s - time.perf_counter()
        if left_s <= 0:
            self.num_overruns += 1
            self.overrun_s -= left_s
            return
        time.sleep(left_s)
        late_s = time.perf_counter() - deadline_s
        self.overshoot_s += late_s
        self.worst_overshoot_s = max(self.worst_overshoot_s, late_s)


class Emulator:
    """The step hook of one worker.

    Args:
        timeline: what its steps take.
        all_reduce_s: added after each reduction.
    """

    def __init__(self, timeline: WorkerTimeline, all_reduce_s: float) -> None:
        self.meter = EmulationMeter()
        self._timeline = timeline
        self._all_reduce_s = all_reduce_s
        self._newest_step: int | None = None

    def last_gradient(self, info: StepInfo) -> None:
        """Stretch the step's own time to the timeline's."""
        # A step with several reductions waits for others in between; only its first part can be stretched.
        if info.step == self._newest_step:
            return
        self._newest_step = info.step
        target_s = self._timeline.own_time_s(info.step, info.num_rows, info.all_rows)
        self.meter.sleep_until(info.began_s - info.data_s + target_s)

    def reduced(self, info: StepInfo) -> None:
        """Add the all-reduce."""
        del info
        if self._all_reduce_s > 0:
            time.sleep(self._all_reduce_s)


def emulated(train_loop: TrainLoop, spec: EmulationSpec) -> TrainLoop:
    """Wrap a training loop so that each worker runs at the pace of its kind of device.

    Args:
        train_loop: any loop that uses a session.
        spec: the world to play; ``spec.check(devices)`` on the driver finds its mistakes before training starts.

    Returns:
        A loop that pickles where ``train_loop`` does.
    """
    return partial(_run_emulated, train_loop, spec)


def _run_emulated(train_loop: TrainLoop, spec: EmulationSpec, config: dict[str, Any]) -> Any:
    session = get_session()
    emulator = Emulator(spec.timeline(session.device_kind, session.rank), spec.all_reduce_s(session.world_size))
    session.add_step_hook(emulator)
    result = train_loop(config)
    meter = emulator.meter
    if meter.num_overruns > _TOLERATED_OVERRUNS * meter.num_steps:
        logger.warning(
            "rank %d was slower than its emulated %s in %d of %d steps, by %.1f ms in the mean: raise time_scale (now "
            "%g) or run fewer workers on this machine",
            session.rank,
            session.device_kind,
            meter.num_overruns,
            meter.num_steps,
            1e3 * meter.overrun_s / meter.num_overruns,
            spec.time_scale,
        )
    return result

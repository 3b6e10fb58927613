"""Whether a trigger's alarms in a run are more than its noise gives by itself: the run's own times, permuted.

Had no worker's speed ever changed for long, the order of a run's steps would mean nothing beyond the few steps for
which noise remembers, and neither would the names of workers on one kind of device. So blocks of consecutive steps are
put into another order, each with its workers' names dealt anew, and the trigger is shown the copies: what it raises
there is false. An alarm is believed as far as the order that was measured raises more of them than its copies do.

Changes that lasted are taken out of the copies, and noise that wanders slowly looks like one: a run of nothing but such
noise would be compared with copies that have less of it. So as many runs of noise alone are drawn besides, of the same
strength and memory, and an alarm is believed as far as the measured order raises more than those do, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.ndimage import median_filter
from scipy.signal import lfilter

from rex_ray.control.events import Event, GroupStarted
from rex_ray.core.observations import StepObserved
from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import BoolArray, FloatArray, IntArray, Problem, StepFlag, WorkerSpec
from rex_ray.policies.seams import Alarm, Trigger

__all__ = ["MIN_STEPS", "Alarms", "Audit", "OwnTimes", "audit", "count_alarms", "noise_alone", "own_times", "permuted"]

MIN_STEPS = 160
"""Clean steps of a group below which nothing can be said: the trigger's window is 96, and 24 arm it."""

LASTING = 16
"""Steps from which on a change of speed is one. The trigger's delay and the switch's lag take as many: whatever is
over by then is noise to whoever moves rows, although an alarm for it may have been right when it was raised."""

_LEAST, _LEAST_SDS = math.log(1.08), 1.5
_LAGS = np.array([1, 2, 4, 8, 16])
_MEMORIES = np.arange(0.0, 0.99, 0.01)
_FORGETTING = 256
_STREAM = 7
_COMMON = "cluster-wide"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTimes:
    """Own times of a group's clean steps, freed from what shares and kinds of device explain.

    Attributes:
        devices: kind of device per rank.
        factors: own time over that of the kind's curve at the rows of the step, the rank's median being 1; shape
            ``[steps, n]``.
        usual_us: own time per rank at its median rows, shape ``[n]``.
        num_rows: median rows per rank, shape ``[n]``.
    """

    devices: tuple[str, ...]
    factors: FloatArray
    usual_us: FloatArray
    num_rows: IntArray

    @property
    def correlation(self) -> float:
        """Median over ranks of the lag-1 correlation of log factors: how much the noise remembers."""
        logs = np.log(self.factors)
        centred = logs - np.median(logs, axis=0)
        scale = np.maximum((centred**2).mean(axis=0), 1e-30)
        return float(np.median((centred[1:] * centred[:-1]).mean(axis=0) / scale))

    @property
    def spread(self) -> float:
        """Median over ranks of the robust sd of log factors."""
        logs = np.log(self.factors)
        return float(1.4826 * np.median(np.abs(logs - np.median(logs, axis=0))))

    @property
    def passing(self) -> OwnTimes:
        """The same times without what lasts: changes of ``LASTING`` steps and more are divided out.

        The running median over twice as many steps keeps the edges of a change and knows nothing of a shorter one.
        Where it is within 8 % of the usual time, or 1.5 sds of the rank's noise, it is left alone, so that
        slow noise stays noise.
        """
        logs = np.log(self.factors)
        spread = 1.4826 * np.median(np.abs(logs - np.median(logs, axis=0)), axis=0)
        level = median_filter(logs, size=(2 * LASTING + 1, 1), mode="nearest")
        logs = logs - np.where(np.abs(level) > np.maximum(_LEAST, _LEAST_SDS * spread), level, 0.0)
        return replace(self, factors=np.exp(logs))

    @property
    def noise(self) -> tuple[float, FloatArray]:
        """How noise is remembered from step to step, and its sd per rank, shape ``[n]``: a first-order autoregression.

        From median differences between steps that are 1 to 16 apart: a change that lasts is in few of them.
        """
        logs = np.log(self.factors)
        moved = np.stack([np.median(np.abs(logs[lag:] - logs[:-lag]), axis=0) for lag in _LAGS])
        seen = np.log(np.maximum((1.4826 * moved) ** 2 / 2, 1e-12))
        grown = np.log(1 - _MEMORIES[:, None] ** _LAGS)
        log_var = (seen[None, :, :] - grown[:, :, None]).mean(axis=1)
        misses = ((seen[None, :, :] - grown[:, :, None] - log_var[:, None, :]) ** 2).sum(axis=(1, 2))
        best = int(np.argmin(misses))
        return float(_MEMORIES[best]), np.exp(log_var[best] / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """What a trigger raised: every alarm, and those that would have moved rows (they concern some ranks only)."""

    num_alarms: int = 0
    num_resplits: int = 0

    def __add__(self, other: Alarms) -> Alarms:
        """Count both."""
        return Alarms(
            num_alarms=self.num_alarms + other.num_alarms, num_resplits=self.num_resplits + other.num_resplits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the permutations of a run say.

    Attributes:
        num_steps: clean steps of the groups that were long enough, together.
        num_worker_steps: the same, times their workers.
        measured: alarms in the order that was measured.
        copies: alarms of every copy.
        alone: alarms of every run of noise alone.
        block_steps: length of a block.
        correlation: see ``OwnTimes``; of the longest group.
        spread: likewise.
    """

    num_steps: int
    num_worker_steps: int
    measured: Alarms
    copies: tuple[Alarms, ...]
    alone: tuple[Alarms, ...]
    block_steps: int
    correlation: float
    spread: float

    @property
    def false(self) -> Alarms:
        """All copies' alarms together."""
        return sum(self.copies, Alarms())

    @property
    def p_value(self) -> float:
        """Chance of as many alarms as the measured order raised, which counts as one more of either.

        The larger one of two: in copies, which know the run's short disturbances, and in noise alone, which knows how
        slowly it wanders.
        """

        def chance(others: tuple[Alarms, ...]) -> float:
            as_many = sum(other.num_alarms >= self.measured.num_alarms for other in others)
            return (1 + as_many) / (1 + len(others))

        return max(chance(self.copies), chance(self.alone))


def own_times(events: Iterable[Event], learnt: StepTimeBook | None = None) -> tuple[OwnTimes, ...]:
    """Return the clean own times of every worker group of a run, in order.

    Args:
        events: the run's, in order.
        learnt: what the run itself has learnt of times by kind of device, its controller's book. Kinds that it does
            not know are learnt from the group's own steps, which is as good where shares hardly moved.
    """
    found: list[OwnTimes] = []
    problem: Problem | None = None
    generation, steps = "", list[StepObserved]()
    for event in events:
        if isinstance(event, GroupStarted) and event.generation != generation:
            found += [] if problem is None else _group(problem, steps, learnt)
            problem, generation, steps = event.problem, event.generation, []
        elif isinstance(event, StepObserved) and event.generation == generation:
            steps.append(event)
    return tuple(found + ([] if problem is None else _group(problem, steps, learnt)))


def permuted(times: OwnTimes, block_steps: int, rng: np.random.Generator) -> OwnTimes:
    """Return a copy with blocks of ``block_steps`` in another order, ranks of a kind dealt anew in each.

    Blocks are counted from a random step on, the series closed to a ring, so that no block is the same in all copies.
    """
    num_steps, n = times.factors.shape
    ring = np.roll(times.factors, int(rng.integers(num_steps)), axis=0)
    kinds = np.array([times.devices.index(device) for device in times.devices])
    blocks = [ring[start : start + block_steps] for start in range(0, num_steps, block_steps)]
    dealt = []
    for index in rng.permutation(len(blocks)):
        order = np.arange(n)
        for kind in np.unique(kinds):
            members = (kinds == kind).nonzero()[0]
            order[members] = rng.permutation(members)
        dealt.append(blocks[index][:, order])
    return replace(times, factors=np.concatenate(dealt))


def noise_alone(times: OwnTimes, memory: float, sds: FloatArray, rng: np.random.Generator) -> OwnTimes:
    """Return as many steps of a group whose speeds never change.

    Args:
        times: the group's.
        memory: lag-1 correlation of its noise, see ``OwnTimes.noise``.
        sds: sd per rank, shape ``[n]``.
        rng: where it is drawn from.
    """
    num_steps, n = times.factors.shape
    news = rng.standard_normal((num_steps + _FORGETTING, n)) * sds * math.sqrt(1 - memory**2)
    logs = lfilter([1.0], [1.0, -memory], news, axis=0)[_FORGETTING:]
    return replace(times, factors=np.exp(logs - np.median(logs, axis=0)))


def count_alarms(trigger: Trigger[object], times: OwnTimes) -> Alarms:
    """Show a trigger the times one step after another, from a fresh start, and count what it raises."""
    n = len(times.devices)
    own_us = np.maximum(np.rint(times.factors * times.usual_us), 1).astype(np.int64)
    none = np.zeros(n, dtype=np.int64)
    batch = int(times.num_rows.sum())
    problem = Problem(
        workers=tuple(WorkerSpec(rank=rank, device=device) for rank, device in enumerate(times.devices)),
        global_batch_size=batch,
        max_global_batch_size=batch,
        dataset_size=batch,
    )
    state = trigger.init(problem, None)
    found = Alarms()
    for index, compute_us in enumerate(own_us):
        step = StepObserved(
            generation="audit",
            epoch=0,
            step=index,
            allocation_version=1,
            num_rows=times.num_rows,
            data_us=none,
            compute_us=compute_us,
            sync_us=none,
            step_us=compute_us,
        )
        verdict, state = trigger.observe(state, step, None)
        trigger.trusted(state)
        if isinstance(verdict, Alarm) and verdict.factors:
            found += Alarms(num_alarms=1, num_resplits=int(verdict.verdict != _COMMON))
    return found


def audit(
    trigger: Trigger[object], groups: Sequence[OwnTimes], *, block_steps: int, num_copies: int, seed: int
) -> Audit | None:
    """Compare a trigger's alarms in a run with those in permuted copies of it, and in noise alone.

    Args:
        trigger: the run's own.
        groups: the run's own times; groups of fewer than ``MIN_STEPS`` clean steps are left out.
        block_steps: steps that stay together: more than noise remembers, fewer than what should be noticed.
        num_copies: permuted copies, and runs of noise alone.
        seed: of the permutations and of the noise.

    Returns:
        The comparison, or None where no group is long enough.
    """
    long = [times for times in groups if len(times.factors) >= MIN_STEPS]
    if not long:
        return None
    passing = [times.passing for times in long]
    noises = [times.noise for times in long]
    copies, alone = [], []
    for copy in range(num_copies):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM, copy))))
        copies.append(sum((count_alarms(trigger, permuted(times, block_steps, rng)) for times in passing), Alarms()))
        drawn = (noise_alone(times, *noise, rng) for times, noise in zip(long, noises, strict=True))
        alone.append(sum((count_alarms(trigger, times) for times in drawn), Alarms()))
    longest = max(passing, key=lambda times: times.factors.size)
    return Audit(
        num_steps=sum(len(times.factors) for times in long),
        num_worker_steps=sum(times.factors.size for times in long),
        measured=sum((count_alarms(trigger, times) for times in long), Alarms()),
        copies=tuple(copies),
        alone=tuple(alone),
        block_steps=block_steps,
        correlation=longest.correlation,
        spread=longest.spread,
    )


def _group(problem: Problem, steps: Sequence[StepObserved], learnt: StepTimeBook | None) -> list[OwnTimes]:
    """Return the group's times, if it has any: steps that are clean and in which every rank has rows."""
    clean = [step for step in steps if step.flags == StepFlag.NONE and _is_whole(step.num_rows, step.own_us)]
    if not clean:
        return []
    devices = tuple(worker.device for worker in problem.workers)
    known = None if learnt is None else learnt.carry_over(devices)
    if known is None or not known.is_complete:
        book = StepTimeBook.empty(devices)
        for step in clean:
            book = book.observe(step.num_rows, step.own_us * 1e-6)
        known = book.carry_over(devices)
    shapes = known.curves()
    rows = np.array([step.num_rows for step in clean])
    own_us = np.array([step.own_us for step in clean], dtype=np.float64)
    expected = np.stack([shape.predict_s(rows[:, rank]) for rank, shape in enumerate(shapes)], axis=1) * 1e6
    level = np.median(own_us / expected, axis=0)
    usual = np.median(rows, axis=0).astype(np.int64)
    usual_us = level * np.array([float(shape.predict_s(count)) for shape, count in zip(shapes, usual, strict=True)])
    return [OwnTimes(devices=devices, factors=own_us / expected / level, usual_us=1e6 * usual_us, num_rows=usual)]


def _is_whole(num_rows: IntArray, own_us: IntArray) -> bool:
    some: BoolArray = (num_rows > 0) & (own_us > 0)
    return bool(some.all())

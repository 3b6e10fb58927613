"""The trigger alone, at full speed: the policy's very object, shown own times of a group at fixed shares."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.calibration._own_times import Noise, draw
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, Problem, WorkerSpec
from rex_ray.policies.seams import Alarm
from rex_ray.policies.trigger.memory import TriggerState
from rex_ray.policies.trigger.two_level import TwoLevelTrigger

__all__ = ["delays", "group", "resplits", "watch"]

_ROWS = 64
_STEP_US = 200_000
_WARM_UP_STEPS, _TRIALS_PER_WARM_UP = 400, 25


def group(num_workers: int) -> Problem:
    """Return a group of equal workers."""
    return Problem(
        workers=tuple(WorkerSpec(rank=rank, device="T4") for rank in range(num_workers)),
        global_batch_size=_ROWS * num_workers,
        max_global_batch_size=_ROWS * num_workers,
        dataset_size=10**9,
    )


def watch(
    trigger: TwoLevelTrigger, state: TriggerState, factors: FloatArray, first_step: int = 0
) -> Iterator[tuple[int, Alarm | None, TriggerState]]:
    """Show the trigger one step after another.

    Args:
        trigger: the trigger.
        state: its memory before the first step.
        factors: own times relative to the usual one, shape ``[steps, workers]``.
        first_step: number of the first step.

    Yields:
        The step's index, the alarm that it led to or None, and the memory after it.
    """
    own_us = np.rint(_STEP_US * factors).astype(np.int64)
    none = np.zeros(factors.shape[1], dtype=np.int64)
    rows = np.full(factors.shape[1], _ROWS, dtype=np.int64)
    for index, compute_us in enumerate(own_us):
        step = StepObserved(
            generation="g",
            epoch=0,
            step=first_step + index,
            allocation_version=1,
            num_rows=rows,
            data_us=none,
            compute_us=compute_us,
            sync_us=none,
            step_us=compute_us,
        )
        verdict, state = trigger.observe(state, step, None)
        trigger.trusted(state)
        yield index, verdict if isinstance(verdict, Alarm) else None, state


def resplits(trigger: TwoLevelTrigger, factors: FloatArray) -> list[int]:
    """Return the steps at which the group would have been split anew: every alarm but one that concerns all alike."""
    state = trigger.init(group(factors.shape[1]), None)
    steps = watch(trigger, state, factors)
    return [index for index, alarm, _ in steps if alarm is not None and _is_resplit(alarm)]


def delays(
    trigger: TwoLevelTrigger, noise: Noise, *, num_workers: int, factor: float, length: int, trials: int, seed: int
) -> FloatArray:
    """Return the slow steps that each event had lasted, the last one included, when the alarm came; ``inf``: missed.

    An event slows one worker of a group that has been watched for 400 steps; each trial begins with that memory and
    noise of its own. An alarm for another worker alone is a miss.
    """
    rng = np.random.default_rng((seed, num_workers, round(100 * factor), length))
    found = []
    for _ in range(-(-trials // _TRIALS_PER_WARM_UP)):
        factors = draw(noise, _WARM_UP_STEPS + _TRIALS_PER_WARM_UP * length, num_workers, rng)
        state = trigger.init(group(num_workers), None)
        for _, _, after in watch(trigger, state, factors[:_WARM_UP_STEPS]):
            state = after
        for trial in range(_TRIALS_PER_WARM_UP):
            first = _WARM_UP_STEPS + trial * length
            event = factors[first : first + length].copy()
            event[:, trial % num_workers] *= factor
            found.append(_first_alarm(trigger, state, event, trial % num_workers))
    return np.array(found[:trials])


def _first_alarm(trigger: TwoLevelTrigger, state: TriggerState, event: FloatArray, rank: int) -> float:
    for index, alarm, _ in watch(trigger, state, event, _WARM_UP_STEPS):
        if alarm is not None:
            return index + 1.0 if alarm.factors.get(rank, 1.0) > 1.0 else np.inf
    return np.inf


def _is_resplit(alarm: Alarm) -> bool:
    return bool(alarm.factors) and alarm.verdict != "cluster-wide"

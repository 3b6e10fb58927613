"""The oracle in a world with a script of slowdowns: the exact split of every moment, known at once or some steps late.

Between two events of the script nothing changes but noise, so a run is a few thousand pieces of whole arrays and not
a loop over its steps. The batch stays what it would be without the script: an episode is over before a change of
batch has been judged, and with the same rows in each step a late oracle is never ahead of an early one. Where the
batch fills all memory, though, a smaller one for the length of an episode is faster than any split of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.scenario.learning import LearningCurve
from rex_ray.scenario.network import NetworkModel
from rex_ray.scenario.noise import NoiseModel
from rex_ray.scenario.optimum import true_optimum
from rex_ray.scenario.profiles import optimal_split
from rex_ray.scenario.shapes import StepTimeShape
from rex_ray.scenario.timeline import WorkerTimeline, own_times
from rex_ray.sim.oracle import Limits
from rex_ray.sim.step_times import StepTimes

__all__ = ["OracleRun", "ScriptedOracle", "oracle_run"]

_PLAIN = StepTimeShape()
_QUIET = NoiseModel.quiet()
# Steps between two looks at the noise scale; halving it moves no total by more than one in a thousand.
_LOOK_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleRun:
    """A run to the target.

    Attributes:
        step_s: duration per step in seconds, shape ``[steps]``.
        global_batch_size: rows per step, shape ``[steps]``.
    """

    step_s: FloatArray
    global_batch_size: IntArray

    @property
    def total_s(self) -> float:
        """Duration in seconds."""
        return float(self.step_s.sum())


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptedOracle:
    """Step times of someone who knows every curve, and the script as far as ``delay_steps`` ago.

    Attributes:
        timelines: the workers, with episodes, noise and shapes.
        network: the reduction's time.
        num_steps: steps that the script is unrolled for.
        delay_steps: how many steps after it began or ended an episode is known; None: never.
        local_batch_multiple: what shares are multiples of, but for those of an epoch's last batch.
    """

    timelines: Sequence[WorkerTimeline]
    network: NetworkModel
    num_steps: int
    delay_steps: int | None = 0
    local_batch_multiple: int = 1
    _true: FloatArray = field(init=False)
    _known: FloatArray = field(init=False)
    _borders: IntArray = field(init=False)
    _splits: dict[tuple[int, bytes], tuple[int, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._true = np.stack([line.slowdowns(0, self.num_steps) for line in self.timelines], axis=1)
        self._known = np.ones_like(self._true)
        if self.delay_steps is not None and self.delay_steps < self.num_steps:
            self._known[self.delay_steps :] = self._true[: self.num_steps - self.delay_steps]
        changed = (np.diff(self._true, axis=0) != 0).any(axis=1) | (np.diff(self._known, axis=0) != 0).any(axis=1)
        self._borders = np.concatenate([[0], np.flatnonzero(changed) + 1, [self.num_steps]])

    def step_s(self, global_batch_size: int, first_step: int = 0, num_steps: int | None = None) -> FloatArray:
        """Return the durations of consecutive steps in seconds, shape ``[num_steps]``, default all from the first on.

        Raises:
            InfeasibleError: the batch does not fit the workers.
        """
        end = self.num_steps if num_steps is None else min(first_step + num_steps, self.num_steps)
        result = np.empty(end - first_step)
        place = int(np.searchsorted(self._borders, first_step, side="right")) - 1
        start = first_step
        while start < end:
            stop = min(int(self._borders[place + 1]), end)
            result[start - first_step : stop - first_step] = self._piece(global_batch_size, start, stop)
            start, place = stop, place + 1
        return result

    @property
    def slowdowns(self) -> FloatArray:
        """The script's true factor per step and rank, shape ``[num_steps, n]``."""
        return self._true

    def pieces(self) -> Iterator[tuple[int, list[float]]]:
        """Yield the script piece by piece: steps without an event, and the true factor per rank in them."""
        for start, stop in pairwise(self._borders.tolist()):
            yield stop - start, self._true[start].tolist()

    def shares(self, global_batch_size: int, step: int) -> tuple[int, ...]:
        """Return the rows per rank at a step."""
        known = self._known[step]
        key = (global_batch_size, known.tobytes())
        if key not in self._splits:
            multiple = 1 if global_batch_size % self.local_batch_multiple else self.local_batch_multiple
            self._splits[key] = _best_shares(self.timelines, global_batch_size, known, multiple)
        return self._splits[key]

    def _piece(self, global_batch_size: int, start: int, stop: int) -> FloatArray:
        rows = self.shares(global_batch_size, start)
        # Without noise all steps of a piece are alike.
        end = start + 1 if all(line.noise == _QUIET for line in self.timelines) else stop
        data_s, compute_s = own_times(self.timelines, start, end, rows)
        return np.broadcast_to(self.network.step_s(data_s, compute_s), stop - start)


def _best_shares(
    timelines: Sequence[WorkerTimeline], batch: int, slowdowns: FloatArray, multiple: int
) -> tuple[int, ...]:
    if batch < multiple * len(timelines):
        multiple = 1  # a short last batch that happens to be whole
    if any(line.shape != _PLAIN for line in timelines):
        return true_optimum(timelines, batch, slowdowns=slowdowns.tolist(), multiple=multiple).local_batch_sizes
    scales = [line.speed_factor * factor for line, factor in zip(timelines, slowdowns.tolist(), strict=True)]
    return optimal_split([line.profile for line in timelines], batch, scales, multiple).local_batch_sizes


def oracle_run(
    timelines: Sequence[WorkerTimeline],
    network: NetworkModel,
    learning: LearningCurve,
    reference_batch_size: int,
    *,
    delay_steps: int | None = 0,
    dataset_size: int | None = None,
    local_batch_multiple: int = 1,
) -> OracleRun:
    """Play the oracle to the target: the best batch for the noise scale of every moment, split exactly.

    Args:
        timelines: the workers, with episodes and noise.
        network: the reduction's time.
        learning: how the noise scale goes.
        reference_batch_size: ``M0``, the smallest batch.
        delay_steps: see ``ScriptedOracle``.
        dataset_size: rows of an epoch, whose last step has what is left: at 2,048 rows of CIFAR-10's 50,000 a step in
            twenty-five is a short one, which takes the reduction's time as any other. None: epochs have no ends.
        local_batch_multiple: see ``ScriptedOracle``.

    Raises:
        InfeasibleError: the reference batch does not fit the cluster.
    """
    times = StepTimes([line.profile for line in timelines], network, multiple=local_batch_multiple)
    limits = Limits(learning, times, reference_batch_size)
    worth = learning.efficiency(reference_batch_size, learning.noise_scale).min()
    longest = math.ceil(learning.target_rows / (reference_batch_size * worth)) + _LOOK_STEPS
    if dataset_size is not None:  # each epoch's last step may be worth next to nothing
        longest += math.ceil(longest * reference_batch_size / dataset_size)
    oracle = ScriptedOracle(
        timelines=timelines,
        network=network,
        num_steps=longest,
        delay_steps=delay_steps,
        local_batch_multiple=local_batch_multiple,
    )
    durations, batches = [], []
    progress, step, left = 0.0, 0, dataset_size
    while progress < learning.target_rows:
        phi = float(learning.noise_scale_at(progress))
        batch = limits.best_batch(phi)
        if left is not None and left < batch:
            batch = left
        # What a step makes is taken at the middle of the piece: phi rises tenfold within the first hundreds.
        about = _LOOK_STEPS * batch * float(learning.efficiency(batch, phi))
        made = batch * float(learning.efficiency(batch, learning.noise_scale_at(progress + about / 2)))
        count = min(_LOOK_STEPS, math.ceil((learning.target_rows - progress) / made))
        if left is not None:
            count = min(count, left // batch)
            left = left - count * batch or dataset_size
        # Fewer rows than workers are a row for each, as everywhere in what oracles know.
        durations.append(oracle.step_s(max(batch, len(timelines)), step, count))
        batches.append(np.full(count, batch))
        progress, step = progress + count * made, step + count
    return OracleRun(step_s=np.concatenate(durations), global_batch_size=np.concatenate(batches))

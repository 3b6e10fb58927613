"""How long steps take, for comparing batches: as predicted before a change, and as measured after it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rex_ray.core.changed import changed
from rex_ray.core.goodput import break_even_noise_scale, goodput
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import StepFlag
from rex_ray.policies.seams import Model

__all__ = ["BatchTimes", "BatchTrial", "Pace"]

MIN_SAMPLES = 8
"""Clean measured steps behind a step time. Every fourth is one, so that neighbours hardly remember each other."""

MAX_SAMPLES = 16

CONSTANT_SHARE = 0.3
"""Part of a step's own time that a batch does not change, where nothing but one batch was ever run and no curves are
kept. It is the step-time model's first guess as well, and the trial of the new batch corrects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of the newest clean measured steps under the present shares, in microseconds.

    Attributes:
        own_us: the slowest rank's own time per step.
        sync_us: the least time that a rank was in the reduction: what it takes without waiting for anyone.
    """

    own_us: tuple[int, ...] = ()
    sync_us: tuple[int, ...] = ()

    def take(self, step: StepObserved) -> Pace:
        """Take in a measured step, if its times are evidence."""
        if step.flags != StepFlag.NONE:
            return self
        return Pace(
            own_us=(*self.own_us[1 - MAX_SAMPLES :], int(step.own_us.max())),
            sync_us=(*self.sync_us[1 - MAX_SAMPLES :], int(step.sync_us.min())),
        )

    @property
    def is_known(self) -> bool:
        """Whether there are enough steps for a median."""
        return len(self.own_us) >= MIN_SAMPLES

    @property
    def sync_s(self) -> float:
        """The reduction's time in seconds; 0 while nothing is known."""
        return statistics.median(self.sync_us) * 1e-6 if self.sync_us else 0.0

    @property
    def step_s(self) -> float | None:
        """Measured step time in seconds, own time and reduction; None before the first clean step."""
        return max(statistics.median(self.own_us) * 1e-6 + self.sync_s, 1e-9) if self.own_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Step times of batches that may never have been run.

    Attributes:
        model: curves of the split; None where none are kept.
        pace: measured times of the present batch.
        global_batch_size: the present batch.
        largest_run: the largest batch that was ever run.
        optimism: how much of the predicted slowing is left out up to twice that, a fraction.
        forecast: own times of batches that were asked for, by their rows; filled as they are. Exact splits are dear,
            and hardly differ from one look to the next.
    """

    model: Model | None
    pace: Pace
    global_batch_size: int
    largest_run: int = 0
    optimism: float = 0.0
    forecast: dict[int, float | None] = field(default_factory=dict)

    def step_s(self, num_rows: int) -> float | None:
        """Return the step time of the best known split of ``num_rows``, with the reduction; None while unknown."""
        if self.model is not None:
            own_s = self.own_s(num_rows)
            return None if own_s is None else own_s + self.pace.sync_s
        if not self.pace.is_known:
            return None
        own_s = statistics.median(self.pace.own_us) * 1e-6
        ratio = CONSTANT_SHARE + (1 - CONSTANT_SHARE) * num_rows / self.global_batch_size
        return max(own_s * ratio + self.pace.sync_s, 1e-9)

    def own_s(self, num_rows: int) -> float | None:
        """Return the slowest own time under the best split of ``num_rows`` as the curves have it; None: unknown."""
        if self.model is None:
            return None
        if num_rows not in self.forecast:
            self.forecast[num_rows] = self.model.step_time_s(num_rows)
        own_s = self.forecast[num_rows]
        return None if own_s is None or own_s <= 0 else own_s

    def hoped_s(self, num_rows: int) -> float | None:
        """Return the step time that is worth a try: less than expected where nothing like it was ever run.

        Curves are cautious beyond what they rest on, and who believes them never learns better; the trial by the clock
        tells, once per batch.
        """
        then_s = self.step_s(num_rows)
        now_s = self.step_s(self.global_batch_size)
        if then_s is None or now_s is None or not self.largest_run < num_rows <= 2 * self.largest_run:
            return then_s
        return then_s - self.optimism * max(0.0, then_s - now_s)

    def break_even(self, num_rows: int, gain: float) -> float | None:
        """Return the noise scale from which a larger batch has ``1 + gain`` times the goodput; None: unknown."""
        now_s, then_s = self.step_s(self.global_batch_size), self.hoped_s(num_rows)
        if now_s is None or then_s is None:
            return None
        return break_even_noise_scale(self.global_batch_size, now_s, num_rows, then_s, gain)

    def goodput(self, num_rows: int, reference_batch_size: int, noise_scale: float | None) -> float | None:
        """Return reference-worth rows per second at ``num_rows``; None while the time is unknown."""
        step_s = self.hoped_s(num_rows)
        return None if step_s is None else goodput(num_rows, step_s, reference_batch_size, noise_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """A larger batch that is yet to prove itself.

    Attributes:
        before_rows: batch before.
        before_s: its step time: measured, or where other shares had just been put in place what the curves said.
        expected_s: own time that the curves gave it at the change; None without curves.
        predicted_gain: fraction of the time to a row's worth of progress that the change promised to save; None where
            it was not this method's.
        num_worse: windows of steps so far in which the new batch was the worse one.
    """

    before_rows: int
    before_s: float
    expected_s: float | None = None
    predicted_gain: float | None = None
    num_worse: int = 0

    def measured_gain(
        self, num_rows: int, times: BatchTimes, step_s: float, reference_batch_size: int, noise_scale: float | None
    ) -> float:
        """Return the fraction of the time to a row's worth of progress that ``num_rows`` saves, by the clock.

        A group that has become slower meanwhile, as the curves have it, would have at the old batch too: that is not
        the new one's fault. Only their change counts, so that what they always get wrong cancels.
        """
        before_s, expected_s = self.before_s, times.own_s(self.before_rows)
        if expected_s is not None and self.expected_s is not None:
            before_s *= max(1.0, expected_s / self.expected_s)
        before = goodput(self.before_rows, before_s, reference_batch_size, noise_scale)
        return 1.0 - before / goodput(num_rows, step_s, reference_batch_size, noise_scale)

    def found_worse(self) -> BatchTrial:
        """Count a window in which the new batch was the worse one."""
        return changed(self, num_worse=self.num_worse + 1)

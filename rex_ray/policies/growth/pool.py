"""The noise scale that is used: a ratio of fading sums, led on to the present where a trend is beyond doubt.

An average is of the past. While the noise scale rises, as it does in most of a training, every average of it is late,
and a learning rate that follows it loses what it is late by. Both moments are unbiased at every step, so a straight
line through them is unbiased, too, wherever they change evenly; it only errs by more than their mean does. So a line is
followed as far as its slope exceeds its error, and a line through the newest blocks alone only where it contradicts
the longer one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from rex_ray.core.noise_scale import MIN_BLOCKS

__all__ = ["LONG", "QUICK", "FadingLine", "NoisePool"]

LONG, QUICK = 1 - 1 / 16, 1 - 1 / 6
"""What a block counts for after one more: about 16 blocks are remembered, 64 measured steps, or about six."""

AHEAD_BLOCKS = 1.0
"""A block's middle lies half a block before the look at its end, and what is decided there takes effect some steps
later, for some blocks."""

SURE = 4.0
"""A slope counts by ``1 - SURE / t^2``, with ``t`` slopes over their standard error: not at all below two of these."""

APART = 3.0
"""The quick line is believed where it is so many of its standard errors from the long one."""

LEAST_SIGNAL = 0.25
"""A line that leads the true gradient's norm below this part of its mean is not followed: next to 0, nothing is known
of a ratio, and the mean at least is of something."""

# Squares end where numbers do; what is that large is no gradient's.
_LARGEST = 1e300

# By then the oldest block counts for 1e-11.
_MOST_BLOCKS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class FadingLine:
    """A straight line through values of which older ones count less, by sums alone.

    Attributes:
        decay: what a value counts for after one more.
        total: sum of the values.
        aged: sum of the values times their age in blocks.
        squared: sum of their squares.
    """

    decay: float = LONG
    total: float = 0.0
    aged: float = 0.0
    squared: float = 0.0

    def take(self, value: float) -> FadingLine:
        """Add a value; all others are a block older now."""
        return FadingLine(
            decay=self.decay,
            total=self.decay * self.total + value,
            aged=self.decay * (self.aged + self.total),
            squared=min(self.decay * self.squared + value * value, _LARGEST),
        )

    def mean(self, num_values: int) -> float:
        """Return the fading mean of so many values."""
        return self.total / _weights(num_values, self.decay).total

    def ahead(self, num_values: int) -> float:
        """Return the line's value ``AHEAD_BLOCKS`` after the newest, its slope counted as far as it is sure."""
        mean, slope, variance = self._fit(num_values)
        weights = _weights(num_values, self.decay)
        error = variance * weights.slope_error
        if slope * slope <= SURE * error:
            return mean
        return mean + (slope - SURE * error / slope) * (weights.mean_age + AHEAD_BLOCKS)

    def contradicts(self, num_values: int, value: float) -> float | None:
        """Return what the whole line leads to if that is beyond chance another value than this one, else None."""
        mean, slope, variance = self._fit(num_values)
        weights = _weights(num_values, self.decay)
        found = mean + slope * (weights.mean_age + AHEAD_BLOCKS)
        return found if abs(found - value) > APART * math.sqrt(variance * weights.line_error) else None

    def _fit(self, num_values: int) -> tuple[float, float, float]:
        """Return the mean, the slope per block and the variance of a value about the line; of 3 values or more."""
        weights = _weights(num_values, self.decay)
        mean = self.total / weights.total
        slope = (weights.mean_age * self.total - self.aged) / weights.spread
        rest = self.squared - mean * self.total - slope * slope * weights.spread
        return mean, slope, max(rest, 0.0) * weights.per_rest


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePool:
    """Both moments of all blocks, older ones counting less.

    Attributes:
        noise: of ``tr(S)``.
        signal: of ``|G|^2``.
        quick_noise: the same of the newest blocks.
        quick_signal: likewise.
        num_blocks: blocks taken in.
    """

    noise: FadingLine = field(default_factory=FadingLine)
    signal: FadingLine = field(default_factory=FadingLine)
    quick_noise: FadingLine = field(default_factory=lambda: FadingLine(decay=QUICK))
    quick_signal: FadingLine = field(default_factory=lambda: FadingLine(decay=QUICK))
    num_blocks: int = 0

    def take(self, noise: float, signal: float) -> NoisePool:
        """Add a block's sums."""
        return NoisePool(
            noise=self.noise.take(noise),
            signal=self.signal.take(signal),
            quick_noise=self.quick_noise.take(noise),
            quick_signal=self.quick_signal.take(signal),
            num_blocks=self.num_blocks + 1,
        )

    @property
    def noise_scale(self) -> float | None:
        """``phi`` in rows as of now: None while unknown, ``inf`` where the noise hides the gradient."""
        count = self.num_blocks
        if count < MIN_BLOCKS or self.noise.total == self.signal.total == 0:
            return None
        if self.signal.total <= 0:
            return math.inf
        noise = _present(self.noise, self.quick_noise, count)
        signal = _present(self.signal, self.quick_signal, count)
        # Written so that a line which squares beyond all numbers have made none is not followed either.
        if noise > 0 and signal >= LEAST_SIGNAL * self.signal.mean(count):
            return noise / signal
        return self.noise.total / self.signal.total


def _present(long: FadingLine, quick: FadingLine, count: int) -> float:
    value = long.ahead(count)
    newer = quick.contradicts(count, value)
    return value if newer is None else newer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Sums over the ages ``u = 0, 1, ...`` of so many blocks, each with the weight ``w = decay^u``.

    Attributes:
        total: sum of ``w``.
        mean_age: weighted mean of ``u``.
        spread: sum of ``w (u - mean)^2``.
        per_rest: a value's variance over the weighted sum of squared residuals.
        slope_error: a slope's variance over a value's.
        line_error: the same of the line's value ``AHEAD_BLOCKS`` after the newest.
    """

    total: float
    mean_age: float
    spread: float
    per_rest: float
    slope_error: float
    line_error: float


@lru_cache(maxsize=2 * _MOST_BLOCKS)
def _weights_of(count: int, decay: float) -> _Weights:
    weights = [decay**age for age in range(count)]
    total, squares = math.fsum(weights), math.fsum(weight * weight for weight in weights)
    mean_age = math.fsum(age * weight for age, weight in enumerate(weights)) / total
    spread = math.fsum(weight * (age - mean_age) ** 2 for age, weight in enumerate(weights))
    levers = [weight * (mean_age - age) / spread for age, weight in enumerate(weights)]
    reach = mean_age + AHEAD_BLOCKS
    # As many values of equal weight would be as good; a line takes two of them.
    effective = total * total / squares
    return _Weights(
        total=total,
        mean_age=mean_age,
        spread=spread,
        per_rest=effective / max(effective - 2.0, 1.0) / total,
        slope_error=math.fsum(lever * lever for lever in levers),
        line_error=math.fsum(
            (weight / total + reach * lever) ** 2 for weight, lever in zip(weights, levers, strict=True)
        ),
    )


def _weights(num_values: int, decay: float) -> _Weights:
    return _weights_of(min(num_values, _MOST_BLOCKS), decay)

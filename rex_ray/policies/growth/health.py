"""Is training still sound at this batch? Skipped steps and leaps of the loss say no, long before any test does."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, StepFlag, read_only
from rex_ray.policies.growth.blocks import BLOCK_STEPS

__all__ = ["Health"]

MAX_SKIPPED = 3
"""Steps in a row without an update at which a batch is left. A gradient scaler skips one now and then by design."""

SPIKE_SPREADS, SPIKE_RATIO, SPIKE_BLOCKS = 6.0, 0.5, 2
"""A loss leaps when so many blocks in a row lie above the median of those before by so many spreads *and* by so large
a fraction of it. Real spikes are fewfold; noise of single blocks reaches the first limit, and drifts neither."""

_WINDOW = 8

# A loss that stays up this long is no leap but another level, such as that of a new stage of training.
_FORGIVEN_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Health:
    """What is remembered of losses and skipped steps.

    Attributes:
        losses: mean loss of each of the newest blocks that did not leap, also from before a change, ``[<= 8]``.
        open_loss: sum over the unfinished block.
        num_open: steps in it.
        num_high: blocks in a row that leapt.
        num_skipped: skipped steps in a row.
    """

    losses: FloatArray = field(default_factory=lambda: read_only(np.zeros(0), np.float64))
    open_loss: float = 0.0
    num_open: int = 0
    num_high: int = 0
    num_skipped: int = 0

    @property
    def complaint(self) -> str:
        """What is wrong, or nothing."""
        if self.num_skipped >= MAX_SKIPPED:
            return f"{self.num_skipped} steps in a row had no finite gradient"
        if self.num_high >= SPIKE_BLOCKS:
            return f"the loss has leapt from {float(np.median(self.losses)):.4g} for {self.num_high} blocks of steps"
        return ""

    def take(self, step: StepObserved) -> Health:
        """Take in a step: the loss of a whole one, or that it was skipped."""
        if StepFlag.SKIPPED in step.flags:
            return changed(self, num_skipped=self.num_skipped + 1)
        health = changed(self, num_skipped=0) if self.num_skipped else self
        if step.loss is None or not math.isfinite(step.loss) or StepFlag.PARTIAL in step.flags:
            return health
        total, count = health.open_loss + step.loss, health.num_open + 1
        if count < BLOCK_STEPS:
            return changed(health, open_loss=total, num_open=count)
        mean = total / count
        if health._leaps(mean) and health.num_high < _FORGIVEN_BLOCKS:
            return changed(health, open_loss=0.0, num_open=0, num_high=health.num_high + 1)
        before = [] if health.num_high >= _FORGIVEN_BLOCKS else health.losses[1 - _WINDOW :].tolist()
        losses = read_only([*before, mean], np.float64)
        return changed(health, losses=losses, open_loss=0.0, num_open=0, num_high=0)

    def unskipped(self) -> Health:
        """Take in a step that was not skipped and of which nothing else is known."""
        return changed(self, num_skipped=0)

    def recovered(self) -> Health:
        """Begin to judge another batch; losses of before are what it is measured by."""
        return changed(self, open_loss=0.0, num_open=0, num_high=0, num_skipped=0)

    def _leaps(self, loss: float) -> bool:
        if self.losses.size < _WINDOW:
            return False
        losses = self.losses.tolist()
        usual = statistics.median(losses)
        spread = 1.4826 * statistics.median(abs(before - usual) for before in losses)
        return bool(loss > usual + max(SPIKE_SPREADS * spread, SPIKE_RATIO * abs(usual)))

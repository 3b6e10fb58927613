"""The learning rate of whoever knows the noise scale, from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.core.lr_scaling import adascale_gain

__all__ = ["LOOK_STEPS", "AdaScaleRate"]

LOOK_STEPS = 8
"""Steps between two looks at the noise scale."""

# A factor that the noise scale moved by more than this is set afresh, as growth does it: kept paths have fewer runs.
_TOLERANCE = 0.1


@dataclass(slots=True)
class AdaScaleRate:
    """AdaScale's factor, looked at every few steps and held until the noise scale has moved it by more than a tenth.

    Attributes:
        reference_batch_size: ``M0``, at which it is 1.
        batch: that it was made for; 0: none yet.
        held: the factor in force.
    """

    reference_batch_size: int
    batch: int = 0
    held: float = 1.0

    def factor(self, batch: int, noise_scale: float | None, step: int) -> float:
        """Return the factor of a step of ``batch`` rows, an epoch's last one counted as whole."""
        if batch == self.batch and step % LOOK_STEPS:
            return self.held
        reference = self.reference_batch_size
        fresh = adascale_gain(batch / reference, noise_scale, reference)
        if batch != self.batch or abs(fresh / self.held - 1.0) > _TOLERANCE:
            self.batch, self.held = batch, fresh
        return self.held

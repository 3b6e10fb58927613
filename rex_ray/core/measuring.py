"""At which steps gradient norms are taken: the same rule for workers and for the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.core.errors import ConfigError

__all__ = ["DENSE_STEPS", "INTERVAL_STEPS", "NormSchedule"]

INTERVAL_STEPS = 4
"""Noise is judged over many steps, so every fourth will do, and the others cost nothing."""

DENSE_STEPS = 40
"""Nothing is known of a batch's noise at first. A window of it is 32 measured steps, after the block that a change
leaves out: 144 steps of a batch that is too small where every fourth is measured, and 36 where each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSchedule:
    """Every step at first and after each change of the global batch, then one in so many.

    Attributes:
        interval_steps: then every such step; 0: none at all, at first neither.
        dense_steps: how many steps are all measured.
    """

    interval_steps: int = INTERVAL_STEPS
    dense_steps: int = DENSE_STEPS

    def __post_init__(self) -> None:
        if self.interval_steps < 0 or self.dense_steps < 0:
            raise ConfigError(f"intervals of gradient norms are 0 or more steps, got {self}")

    def is_due(self, step: int, since_step: int) -> bool:
        """Whether norms are taken at ``step``; the group has run its present global batch from ``since_step`` on."""
        if not self.interval_steps:
            return False
        return step - since_step < self.dense_steps or step % self.interval_steps == 0

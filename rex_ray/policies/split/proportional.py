"""A proportional controller of each rank's rows, with a dead-band (OmniLearn)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.types import IntArray, Problem
from rex_ray.policies.split.windowed import Move, Window

__all__ = ["Proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportional:
    """``b_i' = b_i mean(t) / t_i``, unless every rank's change is within the dead-band. It remembers nothing.

    Attributes:
        window: clean steps between two looks.
        smoothing: weight of the newest step in the own times, an exponential mean since the last switch.
        dead_band: changes of no more than this fraction, on every rank, are not made.
    """

    window: int = 10
    smoothing: float = 0.2
    dead_band: float = 0.2

    def begin(self, problem: Problem, global_batch_size: int) -> None:
        """Nothing to begin."""
        del problem, global_batch_size

    def judge(self, memory: None, window: Window) -> Move | str:
        """Return the controller's shares, or that all changes are within the dead-band."""
        del memory
        works = window.sizes > 0
        own_s = np.maximum(window.own_s, 1e-6)
        factor = np.where(works, float(own_s[works].mean()) / own_s, 1.0)
        largest = float(np.abs(factor - 1.0).max())
        if largest <= self.dead_band:
            return f"no rank's rows would change by more than {largest:.1%}, within the dead-band"
        asked = window.sizes * factor
        shares = apportion(int(window.sizes.sum()), asked, window.lower, window.upper, window.multiple)
        # A rank at its bound asks in vain for ever, and the noise of the others is no reason to move.
        possible = float((np.abs(shares - window.sizes) / np.maximum(window.sizes, 1)).max())
        if possible <= self.dead_band:
            return f"within the bounds no rank's rows would change by more than {possible:.1%}, within the dead-band"
        now_s = float(own_s[works].max())
        then_s = float((own_s * shares / np.maximum(window.sizes, 1))[works].max())
        return Move(
            local_batch_sizes=tuple(shares.tolist()),
            reason=f"a rank's rows would change by {largest:.1%}, beyond the dead-band of {self.dead_band:.0%}",
            predicted_gain=1.0 - then_s / now_s,
            evidence={"largest_change": largest, "slowest_s": now_s},
        )

    def moved(self, memory: None, before: IntArray, after: IntArray) -> None:
        """Nothing to remember."""
        del memory, before, after

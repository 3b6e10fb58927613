"""Other curves that the same measurements could have given: how far noise, and sizes never run, leave them open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.kind_fit import fit_kind
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.computing.run_curves import KindEvidence

__all__ = ["NUM_REPLICATES", "CurveReplicate", "replicates"]

NUM_REPLICATES = 120

_ELASTICITY_SD = 0.15
"""Sd of a curve's slope dlog t / dlog b beyond what was measured: half of what ``core.kind_fit`` has before any data,
since the nearest sizes say something of it."""

_JUDGED_SD = 0.02
"""Sd of the whole curve's elasticity where slowdowns were told apart from it: that is a judgement, and may be off."""

_SAME_SIZE = 1.05
_SEED = 20_260_101


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurveReplicate:
    """A kind's shape, fitted to the medians moved by their standard errors, and bent where nothing was measured.

    Attributes:
        shape: the fit.
        tilt: elasticity added to all of it.
        bend: elasticity added beyond the nearest measured size.
        sizes: those measured, rising, in rows.
    """

    shape: StepTimeCurve
    tilt: float
    bend: float
    sizes: FloatArray

    def predict_s(self, num_rows: IntArray) -> FloatArray:
        """Return own times at the kind's usual scale in seconds, same shape."""
        log_rows = np.log(np.maximum(num_rows, 1))
        bent = np.exp(self.tilt * log_rows + self.bend * self._distance(log_rows))
        result: FloatArray = self.shape.predict_s(num_rows) * bent
        return result

    def _distance(self, logs: FloatArray) -> FloatArray:
        """Return how far rows are from the nearest size that was measured, in log rows."""
        known = np.log(self.sizes)
        right = np.clip(np.searchsorted(known, logs), 1, known.size - 1) if known.size > 1 else np.zeros(1, dtype=int)
        nearest = np.minimum(np.abs(logs - known[right]), np.abs(logs - known[right - 1]))
        result: FloatArray = np.maximum(nearest - np.log(_SAME_SIZE), 0.0)
        return result


def replicates(kinds: tuple[KindEvidence, ...], count: int = NUM_REPLICATES) -> Iterator[tuple[CurveReplicate, ...]]:
    """Yield ``count`` sets of curves, one per kind; the same run gives the same ones."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(_SEED)))
    for _ in range(count):
        drawn = []
        for kind in kinds:
            moved = kind.medians.log_s + kind.log_se * rng.standard_normal(kind.log_se.size)
            fit = fit_kind(replace(kind.medians, log_s=moved))
            assert fit is not None, "there is evidence"
            tilt, bend = rng.standard_normal(2) * (_JUDGED_SD * kind.has_slowdowns, _ELASTICITY_SD)
            sizes = kind.sizes.keys.astype(np.float64)
            drawn.append(CurveReplicate(shape=fit.shape, tilt=float(tilt), bend=float(bend), sizes=sizes))
        yield tuple(drawn)

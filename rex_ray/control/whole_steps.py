"""Complete steps from whole arrays, as the assembler makes them of records, for a driver that sees all ranks at once.

Where nothing can be late, lost or doubled, records would only be taken apart from arrays and put together again, at
several times the price of the step's judgement. So a stretch of steps passes the same gate at once: times become
integer microseconds, norms keep nine digits, and a step with an impossible time does not leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rex_ray.control.assembly import MAX_TIME_S, quantise_norm, quantise_norms
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import BoolArray, FloatArray, IntArray, StepFlag, frozen, read_only

__all__ = ["WholeSteps"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeSteps:
    """Consecutive steps of one group under one allocation, with the same rows.

    Attributes:
        generation: identity of the group.
        allocation_version: the allocation's version.
        num_rows: rows per rank, shape ``[n]``, read-only.
        first_step: number of the first of them.
        times_us: waiting for data, computing, reducing and the whole step, shape ``[4, steps, n]``, read-only.
        is_sound: which steps have possible times, shape ``[steps]``.
    """

    generation: str
    allocation_version: int
    num_rows: IntArray
    first_step: int
    times_us: IntArray
    is_sound: BoolArray

    @classmethod
    def of(
        cls, *, generation: str, allocation_version: int, num_rows: npt.ArrayLike, first_step: int, times_s: FloatArray
    ) -> WholeSteps:
        """Quantise a stretch.

        Args:
            generation: identity of the group.
            allocation_version: the allocation's version.
            num_rows: rows per rank, shape ``[n]``.
            first_step: number of the first step.
            times_s: waiting for data, computing, reducing and the whole step in seconds, shape ``[4, steps, n]``.
        """
        rows = read_only(np.asarray(num_rows), np.int64)
        # A NaN fails both comparisons.
        possible = (times_s >= 0.0) & (times_s < MAX_TIME_S)
        is_sound = np.logical_and(possible.all(axis=(0, 2)), rows.min() >= 0)
        return cls(
            generation=generation,
            allocation_version=allocation_version,
            num_rows=rows,
            first_step=first_step,
            times_us=frozen(np.rint(np.where(possible, times_s, 0.0) * 1e6).astype(np.int64)),
            is_sound=frozen(is_sound),
        )

    def observed(
        self,
        step: int,
        *,
        epoch: int,
        flags: StepFlag = StepFlag.NONE,
        weighted_sq_norm: FloatArray | None = None,
        num_groups: IntArray | None = None,
        global_sq_norm: float | None = None,
    ) -> StepObserved | None:
        """Return a step of the stretch as the assembler lets it out; None where a time of it is impossible.

        Args:
            step: its number.
            epoch: its epoch.
            flags: union of the ranks' flags.
            weighted_sq_norm: sum over each rank's groups of ``rows |g|^2``, shape ``[n]``; None if not measured.
            num_groups: groups behind that sum, shape ``[n]``; None with no norms only.
            global_sq_norm: ``|g|^2`` of the step's gradient.
        """
        at = step - self.first_step
        if not self.is_sound[at]:
            return None
        norms = None if weighted_sq_norm is None else quantise_norms(weighted_sq_norm.tolist())
        times_us = self.times_us
        return StepObserved(
            generation=self.generation,
            epoch=epoch,
            step=step,
            allocation_version=self.allocation_version,
            num_rows=self.num_rows,
            data_us=times_us[0, at],
            compute_us=times_us[1, at],
            sync_us=times_us[2, at],
            step_us=times_us[3, at],
            weighted_sq_norm=norms,
            num_groups=None if norms is None else read_only(np.asarray(num_groups), np.int64),
            global_sq_norm=None if global_sq_norm is None else quantise_norm(global_sq_norm),
            flags=flags,
        )

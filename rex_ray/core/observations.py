"""What a policy sees. A closed union; one optimizer step is one observation, batching is transport only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rex_ray.core.types import Allocation, FloatArray, IntArray, StepFlag

__all__ = ["AllocationApplied", "Observation", "SearchResult", "StepObserved", "TelemetryGap", "TrialRequested"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepObserved:
    """One complete optimizer step over all ranks; every array has shape ``[n]`` and is read-only.

    Attributes:
        generation: group that ran the step.
        epoch: epoch number.
        step: optimizer step.
        allocation_version: allocation that the step's rows were drawn under.
        num_rows: real rows per rank.
        data_us: time waiting for data per rank.
        compute_us: forward and backward per rank up to its last gradient.
        sync_us: from the last gradient to the end of the reduction, per rank.
        step_us: wall time per rank.
        weighted_sq_norm: ``sum_j rows_j |g_j|^2`` per rank, or None when any rank did not measure it.
        num_groups: gradient groups per rank behind that sum.
        num_norm_steps: see ``StepRecord``; 2 flags a one-worker estimate over two steps' rows.
        global_sq_norm: ``|g|^2`` of the reduced gradient, or None.
        loss: row-weighted mean loss, or None.
        peak_memory_bytes: per rank, -1 where unknown; None when unknown everywhere.
        flags: union of the ranks' flags.
    """

    generation: str
    epoch: int
    step: int
    allocation_version: int
    num_rows: IntArray
    data_us: IntArray
    compute_us: IntArray
    sync_us: IntArray
    step_us: IntArray
    weighted_sq_norm: FloatArray | None = None
    num_groups: IntArray | None = None
    num_norm_steps: int = 1
    global_sq_norm: float | None = None
    loss: float | None = None
    peak_memory_bytes: IntArray | None = None
    flags: StepFlag = StepFlag.NONE

    @property
    def own_us(self) -> IntArray:
        """Own time per rank: data + compute, without the wait in the reduction."""
        total: IntArray = self.data_us + self.compute_us
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryGap:
    """No complete step for a while: evidence is missing, training may well go on."""

    generation: str
    last_step: int
    waited_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationApplied:
    """The group runs under ``allocation`` from ``step`` on. State that presumes a proposal changes only here."""

    allocation: Allocation
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A search's candidate (``objective`` is log seconds; None: the search failed, ``reason`` says why)."""

    search_id: str
    local_batch_sizes: tuple[int, ...] | None
    objective: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequested:
    """A measured search asks to have one candidate run and timed."""

    search_id: str
    trial: int
    local_batch_sizes: tuple[int, ...]


Observation: TypeAlias = StepObserved | AllocationApplied | TrialRequested | SearchResult | TelemetryGap

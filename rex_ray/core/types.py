"""The vocabulary: values that every layer speaks, frozen and without behaviour of their own.

Units are in the names: ``_s`` seconds, ``_us`` integer microseconds, ``_bytes``. Where two ranks meet in one value
its arrays run over ranks, index = rank, shape ``[n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "Allocation",
    "BoolArray",
    "FloatArray",
    "IntArray",
    "LearntShape",
    "OptimizerFamily",
    "Problem",
    "StepFlag",
    "StepRecord",
    "WorkerSpec",
    "frozen",
    "read_only",
]

IntArray: TypeAlias = npt.NDArray[np.int64]
AnyT = TypeVar("AnyT", bound=np.generic)
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def read_only(values: npt.NDArray[np.generic] | list[float] | list[int], dtype: npt.DTypeLike) -> npt.NDArray:  # type: ignore[type-arg]
    """Return ``values`` as a contiguous array of ``dtype`` that nobody can write to."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def frozen(array: npt.NDArray[AnyT]) -> npt.NDArray[AnyT]:
    """Make a private array read-only in place: what is copied at every step need not be copied twice."""
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One member of the worker group.

    Attributes:
        rank: position in the process group, ``0 .. n-1``.
        device: kind of device, e.g. ``"T4"``; workers of one kind share a step-time curve's shape.
        node: name of the machine, for people and for the report.
        min_local_batch_size: fewest rows that a planned share may have.
        max_local_batch_size: most rows that fit, or ``None`` while unknown.
        memory_bytes: the device's whole memory, or ``None`` where it cannot be read.
    """

    rank: int
    device: str
    node: str = ""
    min_local_batch_size: int = 1
    max_local_batch_size: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntShape:
    """One kind's shape as an earlier worker group left it: times at up to 8 sizes, and how much they count."""

    device: str
    num_rows: tuple[float, ...]
    own_s: tuple[float, ...]
    weights: tuple[float, ...]


OptimizerFamily: TypeAlias = Literal["sgd", "adam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a policy is asked to solve: who works, how many rows a step has, and the limits of both.

    Attributes:
        workers: the group, ``workers[i].rank == i``.
        global_batch_size: rows per optimizer step at the start (``M0``, the reference batch).
        max_global_batch_size: growth never goes beyond it.
        dataset_size: rows per epoch; None where nobody knows, as of streams.
        optimizer: what the gradient is given to: how the learning rate follows the batch depends on it, and gradient
            norms of the Adam family are measured after its preconditioner.
        local_batch_multiple: every planned share is a multiple of it, and so is every global batch; 0 rows are one.
            An epoch's last batch may be cut anyhow.
        learnt: what earlier jobs have measured of kinds of device; what this one measures itself replaces it.
    """

    workers: tuple[WorkerSpec, ...]
    global_batch_size: int
    max_global_batch_size: int
    dataset_size: int | None
    optimizer: OptimizerFamily = "sgd"
    local_batch_multiple: int = 1
    learnt: tuple[LearntShape, ...] = ()

    @property
    def num_workers(self) -> int:
        """Number of workers ``n``."""
        return len(self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who computes how many rows of each step, from one agreed step on.

    Attributes:
        version: increases by one with every published allocation of a generation.
        local_batch_sizes: rows per rank; their sum is the global batch size.
        lr_factor: multiplies the learning rate relative to the reference batch.
    """

    version: int
    local_batch_sizes: tuple[int, ...]
    lr_factor: float = 1.0

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step, over all ranks."""
        return sum(self.local_batch_sizes)


class StepFlag(IntFlag):
    """Why a step's times are not evidence about the steady state."""

    NONE = 0
    WARM_UP = 1
    """Among the first steps after start, resume, resize or a new shape (cuDNN autotune, JIT: 9-10x)."""
    SKIPPED = 2
    """The optimizer step was skipped by agreement (non-finite gradient)."""
    AFTER_GAP = 4
    """Follows an evaluation, a checkpoint, or the beginning of a pass over the data."""
    PARTIAL = 8
    """An epoch's last batch, smaller than the allocation asks for."""
    OTHER_PARAMETERS = 16
    """The first step whose gradient norms are over other parameters than those before, since some were frozen, or
    unfrozen, or Adam has a moment of them only now. Norms of before are of another gradient: begin afresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one rank measured in one optimizer step. Leaves the worker once, when every part of it is known.

    ``data_s + compute_s`` is the worker's *own* time: it ends at the last local gradient and never contains the
    wait inside the all-reduce, which equalises wall time over ranks.

    Attributes:
        generation: identity of the worker group; evidence of an earlier group is stale.
        epoch: epoch number, from 0.
        rank: who measured.
        step: optimizer step, counted from 0 over the whole run.
        allocation_version: version of the allocation that the step's rows were drawn under.
        num_rows: rows that this rank really had.
        data_s: time spent waiting for the batch.
        compute_s: forward and backward, up to the last local gradient.
        sync_s: from the last local gradient to the end of the reduction.
        step_s: wall time of the whole step.
        weighted_sq_norm: ``sum_j rows_j |g_j|^2`` over this rank's gradient groups (micro-batches; without
            accumulation one group), of the unweighted, unscaled, unclipped local mean gradient, after Adam's
            preconditioner where there is one. Under token weights a group's rows are its share of the step's tokens
            times the step's rows. None if not measured.
        num_groups: number of groups with rows in that sum.
        num_norm_steps: consecutive steps whose gradients are the groups of one estimate. 2 only where a single worker
            without micro-batches has nothing else to compare: the sums are over both steps' rows, ``global_sq_norm``
            is that of their mean gradient, and the estimate is flagged, since the weights moved in between.
        global_sq_norm: ``|g|^2`` of the reduced gradient (rank 0 only), None if not measured.
        loss: mean loss over this rank's rows, None if unknown.
        peak_memory_bytes: peak allocated device memory, None where it cannot be read.
        flags: why the times should be left out of the evidence.
    """

    generation: str
    epoch: int
    rank: int
    step: int
    allocation_version: int
    num_rows: int
    data_s: float
    compute_s: float
    sync_s: float
    step_s: float
    weighted_sq_norm: float | None = None
    num_groups: int = 1
    num_norm_steps: int = 1
    global_sq_norm: float | None = None
    loss: float | None = None
    peak_memory_bytes: int | None = None
    flags: StepFlag = StepFlag.NONE

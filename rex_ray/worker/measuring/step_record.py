"""What leaves the worker of one step: its record, complete but for what the device still computes."""

from __future__ import annotations

from functools import partial

import torch

from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.measuring.probes import DeferredScalar, PendingRecord
from rex_ray.worker.step import StepInHand

__all__ = ["pending_record"]


def pending_record(step: StepInHand, step_s: float, generation: str, device: torch.device) -> PendingRecord:
    """Return the record of a step that has ended; once for each, since it begins a new peak of the device's memory.

    Args:
        step: the step.
        step_s: its wall time.
        generation: identity of the worker group.
        device: where the model computes.
    """
    once = step.num_reductions == 1
    norms = step.norms
    skipped = StepFlag.SKIPPED in step.flags
    measured = once and norms.sound and norms.local_sq is not None and not skipped
    known = partial(
        StepRecord,
        generation=generation,
        epoch=step.plan.epoch,
        rank=step.rank,
        step=step.plan.step,
        allocation_version=step.plan.allocation.version,
        num_rows=step.num_rows,
        data_s=step.info.data_s,
        step_s=step_s,
        num_groups=norms.num_groups if measured else int(step.share_weight > 0),
        num_norm_steps=norms.num_steps if measured else 1,
        peak_memory_bytes=_peak_memory(device),
    )
    return PendingRecord(
        known=known,
        timer=step.timer,
        flags=step.flags,
        local_sq=DeferredScalar(norms.local_sq) if measured and norms.local_sq is not None else None,
        local_factor=norms.factor,
        global_sq=DeferredScalar(norms.global_sq) if measured and norms.global_sq is not None else None,
        scale=DeferredScalar(step.scale) if step.scale is not None else None,
        loss=DeferredScalar(step.loss) if step.loss is not None else None,
    )


def _peak_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak

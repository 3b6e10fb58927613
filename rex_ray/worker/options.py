"""How a worker behaves, as one value. No policy in it: these are the worker's own intervals and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["WorkerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Intervals and limits of a worker session.

    Attributes:
        global_batch_size: reference batch ``M0`` in rows per optimizer step over all ranks.
        seed: seeds each epoch's global order.
        control_interval_steps: most steps between two control boundaries; steps of 0.1 s and more use 1.
        norm_interval_steps: gradient norms are taken on every such step; 0 takes none.
        norm_dense_steps: ... and on so many at the start and after each change of the global batch.
        warm_up_steps: first steps after start, resume or resize whose times are not evidence.
        settle_steps: first steps after a change of shares whose times are not evidence.
        collective_timeout_s: limit of every collective, also of DDP's own.
        join_timeout_s: limit of the hand-shake with the controller; past it, training starts with equal shares.
        checkpoint_interval_s: shortest time between two saves through ``report``.
        small_dataset: ``"error"`` refuses fewer rows than a global batch; ``"clamp"`` lowers the batch to them.
        lr_slew: the factor on the learning rate rises by at most this share per step, and falls at once; None: it
            jumps either way.
        on_non_finite: ``"stop"``, ``"skip"`` or ``"ignore"`` a reduced gradient with a NaN or an infinity in it.
        on_out_of_memory: ``"retry"`` a step with smaller micro-batches, or ``"stop"``.
        replica_check_interval_steps: the ranks' parameters are compared every so many steps; 0: never.
        snapshot_interval_s: shortest time between two local snapshots; 0: none.
        storage_retry_s: how long a failing save is tried again before it is given up.
        preflight_timeout_s: limit of the look at every worker before training; None: no look.
        local_batch_multiple: every share is a multiple of it, but for those of an epoch's last batch.
        weight_by: ``"samples"`` weights a rank by its rows, ``"tokens"`` by the weight given to ``session.backward``.
    """

    global_batch_size: int
    seed: int = 0
    control_interval_steps: int = 4
    norm_interval_steps: int = 4
    norm_dense_steps: int = 0
    warm_up_steps: int = 3
    settle_steps: int = 1
    collective_timeout_s: float = 60.0
    join_timeout_s: float = 30.0
    checkpoint_interval_s: float = 60.0
    small_dataset: Literal["error", "clamp"] = "error"
    lr_slew: float | None = None
    weight_by: Literal["samples", "tokens"] = "samples"
    on_non_finite: Literal["stop", "skip", "ignore"] = "stop"
    on_out_of_memory: Literal["retry", "stop"] = "retry"
    replica_check_interval_steps: int = 0
    snapshot_interval_s: float = 0.0
    storage_retry_s: float = 60.0
    preflight_timeout_s: float | None = None
    local_batch_multiple: int = 1

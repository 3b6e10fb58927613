"""``RexConfig``: everything a user can set, validated before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["RexConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RexConfig:
    """What a run adapts, within which limits.

    Attributes:
        global_batch_size: rows per optimizer step over all workers at the start (``M0``).
        policy: ``"bsp"``, ``"dlb"`` or ``"rex"``.
        max_global_batch_size: growth never goes beyond it; default ``8 * global_batch_size``.
        policy_options: hyperparameters of the policy by name, e.g. ``{"min_gain": 0.05}``.
        mode: ``"auto"`` decides and applies, ``"advise"`` decides and logs only, ``"off"`` keeps equal shares.
        seed: seeds each epoch's order and every random choice of the controller.
        device_label: node label that names a worker's kind of device.
        control_interval_steps: steps between two control boundaries while steps are short; long steps use 1.
        norm_interval_steps: gradient norms are taken on every such step; 0 takes none.
        warm_up_steps: first steps after start, resume or resize that are not evidence.
        collective_timeout_s: limit of every collective among the workers.
        join_timeout_s: limit of the hand-shake between workers and controller.
        placement_timeout_s: how long to wait for nodes that meet the label selector before giving up.
        checkpoint_interval_s: shortest time between two saves through ``session.report``.
        small_dataset: ``"error"`` refuses a data set smaller than the global batch, ``"clamp"`` lowers the batch.
        weight_by: ``"samples"`` (default) or ``"tokens"``.
    """

    global_batch_size: int
    policy: str = "rex"
    max_global_batch_size: int | None = None
    policy_options: dict[str, Any] = field(default_factory=dict)
    mode: Literal["auto", "advise", "off"] = "auto"
    seed: int = 0
    device_label: str = "ray.io/accelerator-type"
    control_interval_steps: int = 4
    norm_interval_steps: int = 4
    warm_up_steps: int = 3
    collective_timeout_s: float = 60.0
    join_timeout_s: float = 30.0
    placement_timeout_s: float = 60.0
    checkpoint_interval_s: float = 60.0
    small_dataset: Literal["error", "clamp"] = "error"
    weight_by: Literal["samples", "tokens"] = "samples"

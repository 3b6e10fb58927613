"""How a controller is, for whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rex_ray.core.types import Allocation

__all__ = ["ControlStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """How the controller is.

    Attributes:
        phase: name of the controller's phase.
        generation: the running group, or None.
        last_step: newest complete step.
        allocation: what was published last.
        last_reason: the policy's newest reason, also for changing nothing.
        num_events: events handled.
        num_restarts: how often the actor came back from its journal.
        dropped: what was turned away, by reason.
        gap: the newest complaint about missing telemetry, or None while steps come in.
        fault: why the controller decides nothing any more, or None while it is well.
        row_limits: most rows that kinds of device are given since they ran out of memory.
    """

    phase: str
    generation: str | None
    last_step: int
    allocation: Allocation | None
    last_reason: str
    num_events: int
    num_restarts: int
    dropped: dict[str, int]
    gap: str | None
    fault: str | None
    row_limits: Mapping[str, int] = field(default_factory=dict)

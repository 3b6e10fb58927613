"""Where a controller stands: one phase, one class, holding only what that phase needs; and its whole memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rex_ray.core.row_limits import RowLimits
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import Proposal

__all__ = [
    "ControllerState",
    "Ended",
    "Gauge",
    "Group",
    "Phase",
    "Publication",
    "Running",
    "Starting",
    "Switching",
    "Waiting",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The running worker group. Its allocations have the versions from ``first_version`` on."""

    generation: str
    problem: Problem
    first_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """An allocation on its way to the workers.

    Attributes:
        allocation: what was published.
        reason: why.
        predicted_gain: what the policy expects of it.
        decided_step: newest step known when it was decided.
        first_us: when it was published first.
        last_us: when it was published last.
        withdraws: it restores the old shares after one that was not taken up.
    """

    allocation: Allocation
    reason: str
    decided_step: int
    first_us: int
    last_us: int
    predicted_gain: float | None = None
    withdraws: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No group runs."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """A group formed and was given its first allocation; none of its steps has been seen."""

    group: Group
    pending: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The group runs under ``allocation``."""

    group: Group
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching:
    """The group runs under ``allocation`` and was given ``pending``.

    ``withdrawn`` is what ``pending`` takes back; late workers may still run it for a while.
    """

    group: Group
    allocation: Allocation
    pending: Publication
    withdrawn: Publication | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over."""

    reason: str


Phase: TypeAlias = Waiting | Starting | Running | Switching | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Measures what a change brings.

    Attributes:
        slowest_us: own time of the slowest worker in the last clean steps under the present allocation.
        before_us: median of those under the allocation before; None when there is nothing to compare with.
        before_rows: global batch size of the allocation before.
        predicted_gain: what the policy expected.
        version: the change's allocation; another learning rate may have a newer one before it is measured.
    """

    slowest_us: tuple[int, ...] = ()
    before_us: int | None = None
    before_rows: int = 0
    version: int = 0
    predicted_gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControllerState:
    """A controller's whole memory. Plain values, so a snapshot is this written down.

    Attributes:
        phase: where it stands.
        num_events: events handled; the next one's number, which seeds its generator.
        now_us: time of the last tick.
        next_version: version of the next published allocation.
        last_step: newest complete step, or the one before the group's first.
        step_us: wall time of that step.
        policy_state: the policy's memory; kept over groups as the next one's prior.
        last_reason: the policy's newest reason, also for changing nothing.
        unheeded: the newest proposals that were noted without being published, one for the present batch and one for
            another: said once, not at every step.
        searches: identities of the searches under way.
        gauge: measures the latest change.
        dropped: what was left out, by reason.
        findings: newest verdict of each part, and how many times in a row.
        row_limits: what kinds of device were seen to hold; kept over groups.
        last_generation: the group that began last, running or lost.
        earlier: the last groups before it.
    """

    phase: Phase
    num_events: int = 0
    now_us: int = 0
    next_version: int = 1
    last_step: int = -1
    step_us: int = 0
    policy_state: object | None = None
    last_reason: str = ""
    unheeded: Mapping[str, Proposal] = field(default_factory=dict)
    searches: tuple[str, ...] = ()
    gauge: Gauge = field(default_factory=Gauge)
    dropped: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    row_limits: RowLimits = field(default_factory=RowLimits)
    last_generation: str | None = None
    earlier: tuple[str, ...] = ()

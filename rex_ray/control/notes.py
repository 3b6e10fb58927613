"""What a controller says about its own doings, for the journal, the report and the progress line; nobody acts on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rex_ray.policies.base import Finding, Proposal

__all__ = ["Applied", "Decided", "Deferred", "Dropped", "Found", "Measured", "Note", "Refused", "Withdrawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The policy asked for a change.

    Attributes:
        step: newest step known at the decision.
        kind: ``"first"``, ``"reallocate"``, ``"change_global_batch"``, ``"search"``, ``"trial"`` or ``"world_size"``.
        reason: one plain sentence.
        version: version under which it is published; None where nothing is (``advise``, searches).
        proposal: the shares asked for; None for a change of the world size.
        predicted_gain: fraction of step time that the policy expects to save, or None.
        evidence: named figures behind the decision.
    """

    step: int
    kind: str
    reason: str
    version: int | None = None
    proposal: Proposal | None = None
    predicted_gain: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """The policy asked for another change while a switch was under way; it may ask again afterwards."""

    step: int
    reason: str
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The policy asked for something that no group can run: a fault of the policy, and training goes on without it."""

    step: int
    reason: str
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The group runs under ``version`` from ``step`` on, ``lag_steps`` after the step of the decision."""

    step: int
    version: int
    local_batch_sizes: tuple[int, ...]
    lag_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """``version`` was not taken up within the limit; ``by_version`` restores the old shares."""

    step: int
    version: int
    by_version: int
    waited_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a change brought: medians of the slowest worker's own time over clean steps before and after.

    Before are those from the decision to the switch, four at least: the old shares in the world that was decided on.

    ``gain`` is the fraction of that time saved *per row*, so that it also reads right across a change of the global
    batch; at an unchanged one it is the fraction of step time saved. What growth predicts counts progress and not
    rows, which is less: its own trial of the batch tells what came of that.
    """

    step: int
    version: int
    before_us: int
    after_us: int
    gain: float
    predicted_gain: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """An event that is no evidence, by its reason; the first of each reason and every power of two is noted."""

    step: int
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part of the method judged, also where it changes nothing; see ``Finding``.

    Attributes:
        step: newest step known.
        finding: the judgement.
        count: how many times in a row its part came to this verdict; the first and every power of two is noted.
    """

    step: int
    finding: Finding
    count: int


Note: TypeAlias = Found | Decided | Deferred | Refused | Applied | Withdrawn | Measured | Dropped

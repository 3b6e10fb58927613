"""What the newest allocations stand for: a note that one was applied or measured names its version only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Plan", "Plans"]

_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a version stands for.

    Attributes:
        decided_step: newest step when it was decided.
        kind: as what, in the journal's words.
        lr_factor: factor on the learning rate that it brings.
    """

    decided_step: int
    kind: str
    lr_factor: float


class Plans:
    """One group's plans by version. Bounded: of a version that is long gone nothing is told any more."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}

    def get(self, version: int) -> Plan | None:
        """Return what a version stands for, None where that is forgotten."""
        return self._plans.get(version)

    def remember(self, version: int, plan: Plan) -> None:
        """Remember one more; the oldest is forgotten for it."""
        self._plans[version] = plan
        while len(self._plans) > _REMEMBERED:
            del self._plans[min(self._plans)]

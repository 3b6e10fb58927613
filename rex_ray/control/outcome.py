"""What a handler is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from rex_ray.control.commands import Command
from rex_ray.control.notes import Dropped, Note
from rex_ray.control.phases import ControllerState
from rex_ray.policies.base import Policy

__all__ = ["Handler", "Mode", "Outcome", "Rules", "drop"]

Mode: TypeAlias = Literal["auto", "advise", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What never changes while a controller lives.

    Attributes:
        policy: judges the observations.
        seed: event ``k`` gets the generator of ``(seed, k)``.
        mode: ``"auto"`` applies decisions, ``"advise"`` notes them only, ``"off"`` asks for none.
        republish_after_us: an allocation that no step bears yet is published again so often.
        withdraw_after_us: after so long it is taken back,
        withdraw_after_steps: but not before the group had the time of so many steps: it switches only beyond every
            batch that its loaders have drawn, which takes long where steps do.
        gauge_steps: clean steps whose median measures a change.
    """

    policy: Policy[Any]
    seed: int
    mode: Mode = "auto"
    republish_after_us: int = 2_000_000
    withdraw_after_us: int = 30_000_000
    withdraw_after_steps: int = 32
    gauge_steps: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The next state, what the driver should do, and what is worth noting."""

    state: ControllerState
    commands: tuple[Command, ...] = ()
    notes: tuple[Note, ...] = ()

    def then(self, go_on: Callable[[ControllerState], Outcome]) -> Outcome:
        """Go on from this outcome's state; commands and notes keep their order."""
        following = go_on(self.state)
        return Outcome(
            state=following.state, commands=self.commands + following.commands, notes=self.notes + following.notes
        )


Handler: TypeAlias = Callable[[Rules, ControllerState, Any], Outcome]


def drop(state: ControllerState, reason: str) -> Outcome:
    """Count an event that is no evidence; note it the first time and at every power of two."""
    count = state.dropped.get(reason, 0) + 1
    counted = replace(state, dropped={**state.dropped, reason: count})
    note = Dropped(step=state.last_step, reason=reason, count=count)
    return Outcome(state=counted, notes=(note,) if count & (count - 1) == 0 else ())

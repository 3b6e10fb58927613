"""What a scenario does to its workers, event by event. Pure data: it is printed, judged by and written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rex_ray.scenario import Episode

__all__ = ["EventKind", "ScriptedEvent", "episodes_of"]

EventKind = Literal["slowdown", "cluster-wide", "flapping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEvent:
    """One disturbance.

    Attributes:
        rank: who is slow; None: everybody.
        factor: how many times as long a slow step takes.
        onset_step: first slow step.
        num_steps: slow steps in a row.
        repeats: how often it comes; more than once is flapping.
        pause_steps: normal steps between two slow phases.
    """

    rank: int | None
    factor: float
    onset_step: int
    num_steps: int
    repeats: int = 1
    pause_steps: int = 0

    @property
    def kind(self) -> EventKind:
        """What a good answer to it looks like: a re-split and back, none at all, or few."""
        if self.rank is None:
            return "cluster-wide"
        return "slowdown" if self.repeats == 1 else "flapping"

    @property
    def end_step(self) -> int:
        """First step that is normal again, for good."""
        return self.onset_step + self.repeats * self.num_steps + (self.repeats - 1) * self.pause_steps

    def episodes(self) -> tuple[Episode, ...]:
        """The same for an emulation."""
        period = self.num_steps + self.pause_steps
        return tuple(
            Episode(
                rank=self.rank,
                start_step=self.onset_step + index * period,
                num_steps=self.num_steps,
                factor=self.factor,
            )
            for index in range(self.repeats)
        )

    def sentence(self) -> str:
        """The event in words."""
        who = "all workers" if self.rank is None else f"rank {self.rank}"
        if self.repeats > 1:
            when = f"{self.repeats} times {self.num_steps} steps slow, {self.pause_steps} normal"
            return f"{who} {self.factor:g}x from step {self.onset_step}, {when}"
        return f"{who} {self.factor:g}x at steps {self.onset_step} to {self.end_step - 1}"


def episodes_of(script: Sequence[ScriptedEvent]) -> tuple[Episode, ...]:
    """Return every event's episodes, in order."""
    return tuple(episode for event in script for episode in event.episodes())

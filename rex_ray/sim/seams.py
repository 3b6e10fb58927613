"""What the engine asks of those who stand in for training and for the search helper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.events import Event
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["Learner", "Searcher", "StepNorms"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNorms:
    """Gradient norms of one step, as workers measure them.

    A group is a set of rows whose mean gradient was measured: a rank's share, or a micro-batch of it.

    Attributes:
        weighted_sq_norm: sum over a rank's groups of ``rows |g|^2``, shape ``[n]``.
        num_groups: groups with rows behind that sum, shape ``[n]``; a rank may have none.
        global_sq_norm: ``|g|^2`` of the step's gradient.
    """

    weighted_sq_norm: FloatArray
    num_groups: IntArray
    global_sq_norm: float


class Learner(Protocol):
    """What training would make of the steps: gradient norms for the controller to see, and progress.

    Each step is asked for once and in order: first its norms, then the step itself.
    """

    @property
    def is_done(self) -> bool:
        """Whether training has come to its end; the run ends there."""
        ...

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms | None:
        """Return the gradient norms of this step, whose rows per rank are given; None where not measured."""
        ...

    def advance(self, num_rows: int, lr_factor: float) -> None:
        """Take one optimizer step of so many rows."""
        ...


class Searcher(Protocol):
    """Who runs searches. Answers arrive ``latency_steps`` later, as they do from a live helper process."""

    latency_steps: int

    def carry_out(self, command: StartSearch | TellTrial | CancelSearch) -> Sequence[Event]:
        """Take a command; return the events that it leads to."""
        ...

"""What a training loader draws from: a data set that ranks share, or a stream that each rank brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rex_ray.worker.data.sampler import Plan, Position

__all__ = ["Drawn", "Source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One step's batch on this rank.

    Attributes:
        plan: every rank's rows of the step.
        batch: this rank's rows, on the CPU; as many as the plan says, also none.
        peers_s: time that passed waiting for other ranks rather than for data.
    """

    plan: Plan
    batch: Any
    peers_s: float = 0.0


class Source(Protocol):
    """Where a rank's batches come from, step after step. All ranks call the same at the same step."""

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        ...

    @property
    def next_undrawn(self) -> int:
        """The first step whose rows are not drawn yet: shares can change here and later, not before."""
        ...

    def num_reference_steps(self, reference_batch: int) -> int:
        """Return the steps of ``reference_batch`` rows in an epoch.

        Raises:
            ConfigError: nobody knows.
        """
        ...

    def rewind(self, position: Position) -> None:
        """Begin a pass at ``position``: what was drawn and not consumed comes again."""
        ...

    def draw(self) -> Drawn | None:
        """Return the next step's batch, None at the epoch's end.

        Raises:
            DataError: rows could not be had.
        """
        ...

    def is_complete(self, position: Position) -> bool:
        """Whether the position's epoch has no row left."""
        ...

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return what beside the position a save needs, in plain values. Collective for streams."""
        ...

    def stop(self) -> None:
        """Let go of loader processes."""
        ...

    def close(self, timeout_s: float) -> None:
        """End what is under way between ranks; called on every rank when training ended well."""
        ...

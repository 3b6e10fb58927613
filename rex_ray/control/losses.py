"""What published shares cost beyond the best ones, by cause: the arithmetic that simulator and report have in common.

Step times are telescoped at the very same rows and noise: from what ran, over the shares that had been published, and
those that were right for the world they were decided in, to the exact split for the world as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Asked", "Cause", "Published", "ShareLosses", "answer_to", "published"]

Cause: TypeAlias = Literal["spline", "exploration", "unsplit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Shares that were asked for: the newest step known then, rows per rank, and the kind of the decision."""

    step: int
    shares: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Shares that were asked for.

    Attributes:
        step: newest step known at the decision, -1 before the first one.
        shares: rows per rank.
        cause: what they miss is put down to.
        world_step: a step of the world that they are right for.
    """

    step: int
    shares: tuple[int, ...]
    cause: Cause
    world_step: int


def published(
    asked: Sequence[Asked],
    *,
    last_step: int,
    is_equal: Callable[[tuple[int, ...]], bool],
    excess: Callable[[tuple[int, ...], int], float],
) -> tuple[Published, ...]:
    """Return all shares that were asked for, in order, each with its cause and the world that it is right for.

    That is the world at the decision, or the one that the shares before it were right for, whichever fits better: a
    batch may grow before an episode has been noticed.

    Args:
        asked: in the order of their versions.
        last_step: the last one of which anything is known.
        is_equal: whether shares are the equal ones of their batch.
        excess: how many times as long as the exact split shares take in the world of a step.
    """
    first = next((at for at, item in enumerate(asked) if not is_equal(item.shares)), len(asked))
    before: Cause = "exploration" if first < len(asked) else "unsplit"
    found: list[Published] = []
    world_step = 0
    for at, item in enumerate(asked):
        here = min(max(item.step, 0), last_step)
        if here != world_step and excess(item.shares, here) <= excess(item.shares, world_step):
            world_step = here
        cause: Cause = "exploration" if item.kind == "trial" else before if at < first else "spline"
        found.append(Published(step=item.step, shares=item.shares, cause=cause, world_step=world_step))
    return tuple(found)


def answer_to(items: Sequence[Published], newest: int, global_batch_size: int) -> Published:
    """Return the newest published shares of a batch; rows of another batch are growth's, and no answer to these."""
    at = newest
    while at and sum(items[at].shares) != global_batch_size:
        at -= 1
    return items[at]


@dataclass(slots=True, kw_only=True)
class ShareLosses:
    """Seconds lost by shares; a part is negative where that made the run faster.

    Attributes:
        sensing_s: the published shares are right for a world that has changed since they were decided.
        lag_s: other shares of the same batch are published and not yet in effect.
        spline_s: the published shares are not the exact split for the world that they were decided in.
        exploration_s: the same before the run's first other shares than equal ones, and where shares are a trial's.
        unsplit_s: the same in a run that never asks for other shares than equal ones: nothing is being explored.
    """

    sensing_s: float = 0.0
    lag_s: float = 0.0
    spline_s: float = 0.0
    exploration_s: float = 0.0
    unsplit_s: float = 0.0

    def enter(
        self,
        cause: Cause,
        *,
        ran_s: npt.NDArray[np.float64],
        waited_s: npt.NDArray[np.float64],
        believed_s: npt.NDArray[np.float64],
        exact_s: npt.NDArray[np.float64],
    ) -> None:
        """Enter steps whose published shares have one cause; all times of shape ``[steps]``.

        Args:
            cause: of what the published shares miss.
            ran_s: as they ran.
            waited_s: with the shares that were published by then.
            believed_s: with the exact split for the world that those were decided in.
            exact_s: with the exact split for the world as it was.
        """
        self.lag_s += float((ran_s - waited_s).sum())
        missed_s = float((waited_s - believed_s).sum())
        match cause:
            case "spline":
                self.spline_s += missed_s
            case "exploration":
                self.exploration_s += missed_s
            case "unsplit":
                self.unsplit_s += missed_s
        self.sensing_s += float((believed_s - exact_s).sum())

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.lag_s + self.spline_s + self.exploration_s + self.unsplit_s + self.sensing_s

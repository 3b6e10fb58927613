"""Whose gradient was not finite, as all ranks know it: each looks at its own part, and tells the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rex_ray.worker.group.last_words import named_ranks
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.model.listing import listed
from rex_ray.worker.notices import Notices
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["Finding", "Origins", "Signs", "signs_of"]

Signs: TypeAlias = tuple[torch.Tensor | None, ...]
"""What a rank's own part of a step looked like: its loss, the gradient of its outputs, of its parameters."""

_PARTS = ("the loss", "the gradient of the model's output", "the model's backward pass")
"""What the signs are of, the cause before the effect: the first that is not finite is the one to name."""


def signs_of(step: StepInHand) -> Signs:
    """Return this rank's own part of a step."""
    return step.loss, step.output_sum, step.norms.local_sq


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Whose fault a step was, as all ranks know it.

    Attributes:
        step: which one.
        text: what was found, in half a sentence.
        own: this rank tells the journal: it was its fault, or nobody's and it is rank 0.
    """

    step: int
    text: str
    own: bool


class Origins:
    """Finds out where a gradient that is not finite came from.

    Args:
        tracker: told of the wait for the other ranks.
        notices: has the journal told.
        group: ranks that tell each other who it was.
    """

    def __init__(self, *, tracker: StepTracker, notices: Notices, group: SideGroup) -> None:
        self._tracker = tracker
        self._notices = notices
        self._group = group

    def find(self, step: int, signs: Signs, names: Sequence[str]) -> Finding:
        """Ask every rank about its own part, and say whose fault it was. Collective.

        Args:
            step: which one.
            signs: this rank's own part.
            names: parameters whose gradient is not finite, where they are known.
        """
        own = [float(sign is not None and not math.isfinite(float(sign))) for sign in signs]
        with self._tracker.waiting():
            flags = self._group.gather(torch.tensor(own), f"whose gradient of step {step} is not finite")
        found = f"step {step}: the gradient is not finite{f' (in {listed(names)})' if names else ''}"
        for column, what in enumerate(_PARTS):
            ranks = [rank for rank, row in enumerate(flags.tolist()) if row[column]]
            if ranks:
                text = f"{found}, because {what} is not on {named_ranks(ranks)}"
                return Finding(step=step, text=text, own=self._group.rank in ranks)
        text = f"{found}, although the loss of every rank is: it arose in a backward pass, or in the sum over ranks"
        return Finding(step=step, text=text, own=self._group.rank == 0)

    def tell(self, found: Finding, what_was_done: str) -> None:
        """Have the journal told, by those ranks whose it is to tell."""
        if found.own:
            self._notices.incident(found.step, "non_finite", f"{found.text}; {what_was_done}")

"""What a single worker without micro-batches can know of gradient noise: two steps' gradients beside one another.

One gradient has nothing to be compared with. Two consecutive ones are two groups of rows, but for what the weights
moved in between, which counts as noise; so the estimate is flagged (``StepRecord.num_norm_steps``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rex_ray.worker.step import StepInHand

__all__ = ["GradientPair"]

SquaredNorm: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The first step's gradient, kept until the second one's is there."""

    step: int
    num_rows: int
    parameters: Sequence[torch.Tensor]
    gradients: list[torch.Tensor]
    scale: torch.Tensor | None


class GradientPair:
    """Holds one copy of a gradient, between the two steps of a pair only.

    Args:
        squared_norm: of gradients and their parameters. Both of a pair are given to it at the second step, so that one
            preconditioner serves both.
    """

    def __init__(self, squared_norm: SquaredNorm) -> None:
        self._squared_norm = squared_norm
        self._held: _Held | None = None

    def awaits(self, step: int) -> bool:
        """Whether ``step`` would complete a pair."""
        return self._held is not None and self._held.step == step - 1

    def begin(self, step: int) -> None:
        """Let go of a gradient whose second step was not measured."""
        if not self.awaits(step):
            self._held = None

    def take(self, step: StepInHand, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Begin a pair with a step's dense gradients, or complete it and write the norms of both steps.

        Two steps of different rows, or over different parameters, make no pair.
        """
        held, self._held = self._held, None
        if held is None or held.step != step.plan.step - 1:
            self._held = _Held(
                step=step.plan.step,
                num_rows=step.num_rows,
                parameters=parameters,
                gradients=[gradient.detach().clone() for gradient in gradients],
                scale=step.scale,
            )
            return
        same = len(held.parameters) == len(parameters)
        same = same and all(a is b for a, b in zip(held.parameters, parameters, strict=True))
        if not same or held.num_rows != step.num_rows:
            return
        first = held.gradients
        if held.scale is not None and step.scale is not None:
            torch._foreach_mul_(first, step.scale / held.scale)
        norms = step.norms
        both = self._squared_norm(first, parameters) + self._squared_norm(gradients, parameters)
        torch._foreach_add_(first, list(gradients))
        norms.local_sq, norms.factor = both, float(step.num_rows)
        norms.global_sq = self._squared_norm(first, parameters) / 4
        norms.num_groups = norms.num_steps = 2

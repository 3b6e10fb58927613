"""What the passes over a rank's share of one step have in common, and how each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from rex_ray.worker.row_cutting import slice_rows
from rex_ray.worker.step import StepInHand

__all__ = ["CountTokens", "LossFunction", "Share"]

LossFunction: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
CountTokens: TypeAlias = Callable[[Any], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's share of a step.

    Attributes:
        step: the step in hand.
        batch: what the loader handed out.
        loss_fn: returns the mean loss over rows of it.
        count_tokens: returns the tokens behind that mean; None where ranks are weighted by rows.
    """

    step: StepInHand
    batch: Any
    loss_fn: LossFunction
    count_tokens: CountTokens | None

    def rows(self, start: int, stop: int) -> Any:
        """Return these rows of the batch, or the batch itself where they are all."""
        num_rows = self.step.num_rows
        if (start, stop) == (0, num_rows):
            return self.batch
        return slice_rows(self.batch, start, stop, num_rows=num_rows, strict=True)

    def weigh(self, rows: Any, num_rows: int) -> tuple[float, float]:
        """Return the part of the share's mean loss that these rows are, and their tokens; weight by the whole share.

        So a penalty on the weights, which every pass adds to its loss, counts once and not once a pass.
        """
        step = self.step
        part, tokens = num_rows / step.num_rows if step.num_rows else 1.0, 0.0
        if self.count_tokens is not None and step.tokens is not None:
            tokens = step.tokens if num_rows == step.num_rows else float(self.count_tokens(rows))
            # The mean over no tokens is no number: it must not enter with its weight of nothing.
            step.call_tokens = step.tokens if tokens else 0.0
            part = tokens / step.tokens if step.tokens else part
        step.loss_share = part
        return part, tokens

    def note(self, loss: torch.Tensor, part: float, tokens: float) -> None:
        """A pass went well: add its part to the step's mean loss, and its tokens."""
        step = self.step
        step.tokens_seen += tokens
        mean = loss.detach().reshape(())
        if part != 1.0:
            mean = mean * part if part else torch.zeros_like(mean)
        step.loss = mean if step.loss is None else step.loss + mean

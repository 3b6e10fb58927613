"""``session.train_step``: a whole optimizer step, from the batch to the cleared gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.model.passes import SharePasses
from rex_ray.worker.model.replicas import unwrap
from rex_ray.worker.model.share import CountTokens, LossFunction
from rex_ray.worker.tracker import StepTracker

__all__ = ["TrainStep"]


class TrainStep:
    """Makes a step of the prepared model.

    Args:
        tracker: knows the gradient scaler.
        passes: forward and backward of this rank's share.
        model: the prepared model.
        optimizer: steps its parameters.
    """

    def __init__(
        self, *, tracker: StepTracker, passes: SharePasses, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._tracker = tracker
        self._passes = passes
        self._parameters = list(unwrap(model).parameters())
        self._optimizer = optimizer

    def run(
        self, batch: Any, loss_fn: LossFunction, weight: CountTokens | None, max_grad_norm: float | None
    ) -> torch.Tensor:
        """Make the step; see ``Session.train_step``."""
        if weight is not None and not callable(weight):
            raise ConfigError(
                f"session.train_step(weight={weight!r}): give a function that counts the tokens of a part of the "
                "batch, since the batch may be cut into several"
            )
        if max_grad_norm is not None and not (max_grad_norm > 0 and math.isfinite(max_grad_norm)):
            raise ConfigError(f"max_grad_norm must be a norm such as 1.0, or None to clip nothing, got {max_grad_norm}")
        loss = self._passes.run(batch, loss_fn, weight)
        self._update(max_grad_norm)
        # Also of parameters that the optimizer does not step: what they kept would be added to the next step's.
        for parameter in self._parameters:
            parameter.grad = None
        return loss

    def _update(self, max_grad_norm: float | None) -> None:
        scaler = self._tracker.scaler
        if max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters, max_grad_norm)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()

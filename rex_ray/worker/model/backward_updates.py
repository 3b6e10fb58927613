"""Optimizers that step within the backward pass: under DDP they would use a gradient that no other rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.model.compiling import Hook
from rex_ray.worker.model.listing import listed
from rex_ray.worker.step import StepInfo

__all__ = ["BackwardUpdates"]

_WATCHED_STEPS = 2
"""Such a loop does it from its first backward pass on; looking is then no longer worth its time."""


class BackwardUpdates:
    """Looks whether parameters change between the forward pass and the end of the reduction; a step hook.

    A hook on a parameter that merely looks at its gradient is the user's business, so what is refused is the update.

    Args:
        model: the bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._versions: list[int] | None = None
        self._left = _WATCHED_STEPS

    def install(self, prepared: nn.Module) -> Hook:
        """Note versions at each forward pass of the model that the user calls."""
        hook = Hook(self._after_forward)
        prepared.register_forward_hook(hook)
        return hook

    def last_gradient(self, info: StepInfo) -> None:
        """Nothing to do before the reduction ends."""

    def reduced(self, info: StepInfo) -> None:
        """Compare.

        Raises:
            ConfigError: a parameter was updated within the backward pass.
        """
        if self._versions is None:
            return
        changed = [
            name for (name, p), old in zip(self._parameters.items(), self._versions, strict=True) if p._version != old
        ]
        self._versions = None
        self._left -= 1
        if changed:
            raise ConfigError(
                f"step {info.step}: {listed(changed)} changed within the backward pass, before DDP averaged its "
                "gradient over ranks (an optimizer that steps in a parameter's hook), so replicas would drift apart; "
                "step the optimizer after the backward pass, or shard the model with fully_shard, whose hooks see the "
                "average"
            )

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        del model, args, output
        if self._left and torch.is_grad_enabled():
            self._versions = [p._version for p in self._parameters.values()]

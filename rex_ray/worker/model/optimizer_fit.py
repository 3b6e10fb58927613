"""Whether the prepared optimizer is one that ranks can share: which parameters it steps, and who steps them.

A parameter that is not the model's (of a loss with weights of its own, a head that was put on later) gets its gradient
from this rank's rows alone: nobody averages it, the ranks' copies drift apart, and nothing fails. An optimizer of
another copy of the model, or of the model before ``fully_shard`` replaced its parameters, trains nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.step import StepInHand
from rex_ray.worker.user_warning import warn

__all__ = ["IdleOptimizer", "SteppedParameters", "warn_of_local_decisions"]

_MOST_SHAPES = 3

_IDLE_BATCHES = 20
"""A gradient scaler's first scale may have 16 steps in a row left out, and no more."""


class SteppedParameters:
    """Compares an optimizer's parameters with the model's; anew whenever it was given more.

    Args:
        model: the bare model, as it was prepared.
        optimizer: the prepared one.
        num_ranks: a lone worker has nobody to drift apart from.

    Raises:
        ConfigError: the optimizer steps no parameter of the model, or others beside them; or it shards its own state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ConfigError(
                f"session.prepare does not take a {type(optimizer).__name__}: each rank holds a part of its state, and "
                "a save needs the whole; shard the model with torch.distributed.fsdp.fully_shard, which shards the "
                "state of an ordinary optimizer, too"
            )
        self._own = {id(parameter): parameter for parameter in model.parameters()}
        self._num_ranks = num_ranks
        self._num_checked = 0
        self.check(optimizer)

    def check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at parameters that came since the last look; a hook before each step.

        Raises:
            ConfigError: see above.
        """
        stepped = sum(len(group["params"]) for group in optimizer.param_groups)
        if stepped == self._num_checked:
            return
        self._num_checked = stepped
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._own]
        if not foreign:
            return
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:_MOST_SHAPES])
        more = f" and {len(foreign) - _MOST_SHAPES} more" if len(foreign) > _MOST_SHAPES else ""
        if self._are_copies_in_full_precision(foreign):
            raise ConfigError(
                f"the optimizer steps {stepped} copies of the model's parameters in float32, which would not come back "
                "with a save, so that a resumed run would begin anew in silence: keep the model itself in float32 and "
                "run its forward pass under session.autocast()"
            )
        if len(foreign) == stepped:
            raise ConfigError(
                f"the optimizer steps {stepped} parameters (of shapes {shapes}{more}), and none of them is the "
                "prepared model's, so nothing would train: make it of the very model that is prepared, and after "
                "whatever replaces parameters, such as copy.deepcopy, fully_shard or adding adapters"
            )
        if self._num_ranks > 1:
            raise ConfigError(
                f"the optimizer steps {len(foreign)} parameters (of shapes {shapes}{more}) that were not the model's "
                "when session.prepare was given it, so no rank would hear of another's gradients of them and the "
                "ranks' copies would drift apart: put the module that has them (a loss with weights of its own, a "
                "new head) and the model into one nn.Module, and prepare that; what you average yourself, or "
                "keep apart on purpose, takes an optimizer of its own and session.register"
            )

    def _are_copies_in_full_precision(self, foreign: Sequence[torch.Tensor]) -> bool:
        """Whether these are the model's own in more bits, to which a loop copies the gradients, as Apex does."""
        own = [p for p in self._own.values() if p.requires_grad]
        return (
            [p.shape for p in foreign] == [p.shape for p in own]
            and all(p.dtype == torch.float32 for p in foreign)
            and any(p.dtype in (torch.float16, torch.bfloat16) for p in own)
        )


class IdleOptimizer:
    """Warns where the prepared optimizer is never stepped, since its hooks see nothing then."""

    def __init__(self) -> None:
        self._num_batches: int | None = 0

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of every step."""
        optimizer.register_step_pre_hook(self._stepped)

    def step_ended(self, step: StepInHand) -> None:
        """Count a batch whose gradient was reduced."""
        del step
        if self._num_batches is None:
            return
        self._num_batches += 1
        if self._num_batches == _IDLE_BATCHES:
            self._num_batches = None
            warn(
                f"the prepared optimizer was not stepped in {_IDLE_BATCHES} batches, so nobody looks at the gradient, "
                "and no learning rate follows the global batch; where something else steps the parameters (as "
                "sharpness-aware optimizers have their base optimizer do), prepare that instead; for larger "
                "batches, raise global_batch_size"
            )

    def _stepped(self, *_: Any) -> None:
        if self._num_batches is not None:
            self._num_batches = 0


def warn_of_local_decisions(optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
    """Say what an optimizer needs that decides by the loss how often it asks for the gradient."""
    if isinstance(optimizer, torch.optim.LBFGS) and num_ranks > 1:
        warn(
            "LBFGS decides by the loss that its closure returns how often it evaluates it, and a rank's own loss is "
            "not another's, so ranks would end up waiting for one another: have the closure differentiate its loss and "
            "return that of all ranks, session.pool of its sum over rows and of their number"
        )

"""What keeps replicas alike: no update may use a gradient that the other ranks do not have."""

from __future__ import annotations

from torch import nn

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.step import StepInHand

__all__ = ["ReplicaGuard"]

_MOST_NAMES = 5


class ReplicaGuard:
    """Looks, before each update, for gradients that DDP left local. It would step with them and say nothing.

    Args:
        model: the bare model, as it was when DDP wrapped it.
        frozen_matters: whether parameters that are frozen now stay out of every reduction.
    """

    def __init__(self, model: nn.Module, *, frozen_matters: bool) -> None:
        self._parameters = list(model.named_parameters())
        self._never_reduced = [(name, p) for name, p in self._parameters if not p.requires_grad and frozen_matters]

    def check(self, step: StepInHand) -> None:
        """Refuse an update from local gradients.

        Raises:
            ConfigError: a parameter that was frozen when the model was wrapped has a gradient.
            RexError: the backward pass of the batch in hand ended without a reduction.
        """
        late = [name for name, p in self._never_reduced if p.requires_grad and p.grad is not None]
        if late:
            raise ConfigError(
                f"{_listed(late)} had no requires_grad when session.prepare wrapped the model and have a gradient now, "
                "which DDP never averages over ranks. Prepare DistributedDataParallel(model, "
                "find_unused_parameters=True), made while all that will ever be trained requires a gradient, and "
                "freeze it afterwards"
            )
        if step.backward_seen and not step.num_reductions:
            unused = [name for name, p in self._parameters if p.requires_grad and p.grad is None]
            reason = f" because no gradient reached {_listed(unused)}" if unused else ""
            raise RexError(
                f"step {step.plan.step}: the optimizer steps, but its gradient was not averaged over ranks{reason}; "
                "use every parameter in the loss, or prepare DistributedDataParallel(model, "
                "find_unused_parameters=True); after no_sync or session.accumulate, run the last backward pass outside"
            )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

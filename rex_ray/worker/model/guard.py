"""What keeps replicas alike: no update may use a gradient that the other ranks do not have."""

from __future__ import annotations

from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.worker.model.listing import listed
from rex_ray.worker.step import StepInHand

__all__ = ["ReplicaGuard"]

_MOST_NAMES = 5


class ReplicaGuard:
    """Looks, before each update, whether DDP left the gradient local. The optimizer would step and say nothing.

    Args:
        model: the bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.named_parameters())

    def check(self, step: StepInHand) -> None:
        """Refuse an update from local gradients.

        Raises:
            RexError: the backward pass of the batch in hand ended without a reduction.
        """
        if step.backward_seen and not step.num_reductions:
            unused = [name for name, p in self._parameters if p.requires_grad and p.grad is None]
            reason = f" because no gradient reached {listed(unused, _MOST_NAMES)}" if unused else ""
            raise RexError(
                f"step {step.plan.step}: the optimizer steps, but its gradient was not averaged over ranks{reason}; "
                "use every parameter in the loss, or prepare DistributedDataParallel(model, "
                "find_unused_parameters=True); after no_sync or session.accumulate, run the last backward pass "
                "outside; of torch.autograd.grad DDP hears nothing: call loss.backward()"
            )

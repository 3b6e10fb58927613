"""What happens around the user's ``optimizer.step()``: the learning-rate factor, and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from rex_ray.core.lr_scaling import slewed
from rex_ray.worker.misuse import check_whole_batch_seen
from rex_ray.worker.model.guard import ReplicaGuard
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["BeforeUpdate", "OptimizerHooks"]

BeforeUpdate: TypeAlias = Callable[[StepInHand, torch.optim.Optimizer], None]


class OptimizerHooks:
    """Multiplies the learning rate for the length of a step.

    It is taken back afterwards, so a scheduler, a log line and a checkpoint see the rate that the user set.

    Args:
        tracker: knows the batch in hand and its allocation.
        guard: refuses updates from gradients that are not the other ranks' too; None where there are none.
        checks: called before each update, once its gradient is known to be the global one.
        lr_slew: most that the factor rises by from one step to the next, as a share; None: any.

    Attributes:
        factor: what the rate was multiplied by last; a rise begins here.
    """

    def __init__(
        self,
        tracker: StepTracker,
        guard: ReplicaGuard | None,
        lr_slew: float | None = None,
        checks: Sequence[BeforeUpdate] = (),
    ) -> None:
        self._tracker = tracker
        self._guard = guard
        self._checks = checks
        self._lr_slew = lr_slew
        self._newest_step: int | None = None
        self.factor = 1.0
        self._own_rates: list[Any] | None = None
        self._multiplied_in_a_row = 0
        self._warned = False

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._restore(optimizer)  # an earlier step that raised never came back
        step = self._tracker.in_hand
        if step is not None and step.num_reductions:
            check_whole_batch_seen(step)
        self._look_for_multiplied_batch()
        if step is not None and self._guard is not None:
            self._guard.check(step)
        if step is None:
            return
        for check in self._checks:
            check(step, optimizer)
        self._follow(step)
        if self.factor != 1.0:
            self._own_rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _follow(self, step: StepInHand) -> None:
        """Move to the allocation's factor, upwards no faster than is allowed; once a step, however often it updates."""
        target = step.plan.allocation.lr_factor
        if self._lr_slew is None or target <= self.factor:
            self.factor = target
        elif step.plan.step != self._newest_step:
            self.factor = slewed(self.factor, target, self._lr_slew)
        self._newest_step = step.plan.step

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._restore(optimizer)
        self._tracker.batches_since_update = 0

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        if self._own_rates is not None:
            for group, rate in zip(optimizer.param_groups, self._own_rates, strict=True):
                group["lr"] = rate
            self._own_rates = None

    def _look_for_multiplied_batch(self) -> None:
        """Warn of ``if i % k == 0: optimizer.step()``; twice in a row, since a gradient scaler may skip once."""
        several = self._tracker.batches_since_update > 1
        self._multiplied_in_a_row = self._multiplied_in_a_row + 1 if several else 0
        if self._multiplied_in_a_row == 2 and not self._warned:
            self._warned = True
            warn(
                f"the optimizer steps once in {self._tracker.batches_since_update} loader batches. A loader batch "
                "is already this rank's whole share of an optimizer step, so this multiplies the global batch size; "
                "to save memory, cut one batch with session.micro_batches(batch, num_chunks), to train with larger "
                "batches, raise global_batch_size"
            )

"""What all ranks do together about a gradient that is not finite.

The all-reduce spreads a NaN or an infinity of one rank to all, so the *reduced* gradient is itself the flag that ranks
agree on, and no further collective is needed while all is well. Only when it is not finite do ranks tell each other
who it was; then every one of them knows to.

On a host, and wherever a step is to be left out, the flag is read before the update. On a device ``"stop"`` reads it
some updates late, at a fixed lag, so that the device is never waited for and all ranks still stop at the same step;
what is saved in between is checked first.

A gradient scaler looks for itself: a gradient that overflows in half precision is its daily work, and no fault. Here
only its scale is watched.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.core.types import StepFlag
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.measuring.probes import DeferredScalar, squared_norm, total_squared_norm
from rex_ray.worker.model.comm_hook import Reduction
from rex_ray.worker.model.gradient_looks import is_finite, largest_entry, local_part, reads_late
from rex_ray.worker.model.origins import Finding, Origins, Signs, signs_of
from rex_ray.worker.notices import Notices
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["LAG_UPDATES", "MOST_SKIPPED", "NonFiniteGuard", "OnNonFinite"]

OnNonFinite: TypeAlias = Literal["stop", "skip", "ignore"]

MOST_SKIPPED = 100
"""Skipped steps in a row after which a run that skips stops: it learns nothing more, and nobody might notice."""

LAG_UPDATES = 2
"""By then a device has long computed what is read, since the host seldom runs further ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """One step that is not judged yet.

    Attributes:
        step: which one.
        signs: what this rank's own part looked like.
        size: largest entry of the reduced gradient; under a scaler, the scale after the step.
        scale: under a scaler, the scale that the step ran with.
    """

    step: int
    signs: Signs
    size: DeferredScalar
    scale: DeferredScalar | None = None


class NonFiniteGuard:
    """Looks at the reduced gradient before each update.

    Args:
        tracker: knows the step in hand and the scaler.
        notices: has the journal told.
        group: ranks that tell each other who it was.
        policy: what is done.
        model: the bare model.
        reduction: knows what the gradients are views of; None where DDP does not reduce them.
        sharded: ranks hold different parts of the gradient, so that none sees another's.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        notices: Notices,
        group: SideGroup,
        policy: OnNonFinite,
        model: nn.Module,
        reduction: Reduction | None,
        sharded: bool = False,
    ) -> None:
        self._tracker = tracker
        self._group = group
        self._origins = Origins(tracker=tracker, notices=notices, group=group)
        self._policy = policy
        self._parameters = list(model.named_parameters())
        self._reduction = reduction
        self._sharded = sharded
        self._doubts: deque[_Doubt] = deque()
        self._num_skipped = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is looked at."""
        return self._policy != "ignore"

    def before_update(self, step: StepInHand, optimizer: torch.optim.Optimizer) -> None:
        """Judge the gradient that the optimizer is about to use; where it is to be skipped, take it away.

        Without a gradient an optimizer moves neither a parameter nor its own state.

        Raises:
            RexError: the policy is to stop; or a hundred steps in a row were skipped.
        """
        if not self.is_on or not step.num_reductions or self._scaler_looks(optimizer):
            return
        # Of shards each rank sees its own: whether one is bad is agreed on at once, or ranks would part.
        if self._policy == "stop" and not self._sharded and reads_late(self._parameters[0][1]):
            if gradients := self._gradients():
                size = DeferredScalar(largest_entry(gradients))
                self._doubt(_Doubt(step=step.plan.step, signs=signs_of(step), size=size), late=True)
            return
        if not self._is_bad():
            self._num_skipped = 0
            return
        found = self._origins.find(step.plan.step, signs_of(step), self._names_of_bad())
        if self._policy == "stop":
            self._stop(found, "nothing was updated")
        self._take_away(optimizer)
        step.flags |= StepFlag.SKIPPED
        self._count_skip(found)

    def step_ended(self, step: StepInHand) -> None:
        """Note what a gradient scaler made of the step; called on every rank once the loop is done with it."""
        scaler = self._tracker.scaler
        if not self.is_on or scaler is None or not scaler.is_enabled() or step.scale is None:
            return
        after = scaler.scale(torch.ones((), device=step.scale.device))
        size, scale = DeferredScalar(after), DeferredScalar(step.scale)
        doubt = _Doubt(step=step.plan.step, signs=signs_of(step), size=size, scale=scale)
        self._doubt(doubt, late=reads_late(after))

    def settle(self) -> None:
        """Judge every step that is not judged yet, waiting for the device: before a save, and at the end.

        Raises:
            RexError: one of them is a reason to stop.
        """
        while self._doubts:
            self._judge(self._doubts.popleft())

    # --- inside

    def _scaler_looks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a scaler decides: one that was prepared, or one that has a fused optimizer skip by itself."""
        scaler = self._tracker.scaler
        return (scaler is not None and scaler.is_enabled()) or getattr(optimizer, "found_inf", None) is not None

    def _gradients(self) -> list[torch.Tensor]:
        held = [p.grad for _, p in self._parameters if p.grad is not None]
        return [local_part(gradient) for gradient in held] if self._sharded else held

    def _is_bad(self) -> bool:
        """Whether an entry of the gradient is not finite, the same on all ranks.

        Mostly the reduction found out, else one pass over flat buffers does. The square of a large number overflows, on
        one kind of processor perhaps and not on the other, so what it suspects is looked at entry by entry.
        """
        reduction = self._reduction
        if reduction is not None and reduction.is_known_finite():
            return False
        buffers = [] if reduction is None else reduction.flat_gradients()
        if not buffers or any(buffer.is_sparse for buffer in buffers):
            gradients = self._gradients()
            size = float(total_squared_norm(gradients)) if gradients else 0.0
        else:
            size = sum(float(squared_norm(buffer)) for buffer in buffers)
        return self._agreed(not math.isfinite(size) and not all(map(is_finite, self._gradients())))

    def _agreed(self, bad: bool) -> bool:
        """Where each rank holds a part of the gradient, ask the others about theirs."""
        if not self._sharded:
            return bad
        return bool(self._group.sum(torch.tensor([int(bad)]), "whether the gradient is finite").item())

    def _names_of_bad(self) -> list[str]:
        return [name for name, p in self._parameters if p.grad is not None and not is_finite(local_part(p.grad))]

    def _take_away(self, optimizer: torch.optim.Optimizer) -> None:
        for _, parameter in self._parameters:
            parameter.grad = None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _doubt(self, doubt: _Doubt, *, late: bool) -> None:
        self._doubts.append(doubt)
        lag = LAG_UPDATES if late else 0
        while len(self._doubts) > lag:
            self._judge(self._doubts.popleft())

    def _judge(self, doubt: _Doubt) -> None:
        size = float(doubt.size.wait())
        if doubt.scale is not None:
            self._judge_scaled(doubt, size, float(doubt.scale.wait()))
        elif self._agreed(not math.isfinite(size)):
            late = "the updates since hold it, and nothing was saved of them"
            self._stop(self._origins.find(doubt.step, doubt.signs, []), late)

    def _judge_scaled(self, doubt: _Doubt, after: float, before: float) -> None:
        """A scale that fell tells that the scaler skipped the step, and a loss that is not finite that it had to.

        So does a scale below 1: what overflows then would overflow without a scaler. All ranks have one scale, since
        an infinity of any reaches all.
        """
        if after >= before:
            self._num_skipped = 0
            return
        loss, *_ = doubt.signs
        bad_loss = loss is not None and not math.isfinite(float(loss))
        num_bad = self._group.sum(torch.tensor([int(bad_loss)]), "whose loss was not finite").item()
        if not num_bad and after >= 1.0:
            self._num_skipped += 1  # its daily work
            return
        found = self._origins.find(doubt.step, doubt.signs, [])
        if self._policy == "stop":
            self._stop(found, f"the gradient scaler skipped the step and is at a scale of {after:g}")
        self._count_skip(found)

    def _count_skip(self, found: Finding) -> None:
        self._num_skipped += 1
        self._origins.tell(found, "all ranks left the step out")
        if self._num_skipped >= MOST_SKIPPED:
            raise RexError(
                f"{found.text}. {self._num_skipped} steps in a row were left out, so nothing is learnt any more; look "
                "for what makes the loss so, in the data of the ranks that the journal names or in too high a rate"
            )

    def _stop(self, found: Finding, state: str) -> NoReturn:
        self._origins.tell(found, "all ranks stopped")
        raise RexError(f"{found.text}; {state}. Set on_non_finite='skip' to have all ranks leave such a step out")

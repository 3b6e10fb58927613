"""Weights the gradient where it enters the model: at its output.

DDP takes the plain mean over ranks, so rank ``i``'s gradient is multiplied by ``n * b_i / B`` to make the step's
gradient ``sum_i (b_i / B) g_i``. Doing it at the model's output rather than in the reduction keeps it exact whatever
lies between: a penalty on the weights (the same on all ranks, so the mean is right as it is), a gradient scaler, a
model that is called twice, accumulation of unequal batches, a communication hook of the user's own. The one thing it
is not exact for is a penalty on the gradient with respect to the *inputs*, whose second derivative passes the output
unweighted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.model.compiling import Hook
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.tree import leading_rows, map_tensors, tensors_in

__all__ = ["OutputWeights", "has_batch_norm"]

_PLACEHOLDER_ROWS = 2
"""Rows that stand in for none: batch normalisation refuses a single one even where it is told not to train."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model normalises by statistics of the batch."""
    return any(isinstance(module, (*_BATCH_NORMS, nn.SyncBatchNorm)) for module in model.modules())


class OutputWeights:
    """Forward hooks on the prepared model.

    An empty batch never reaches the model: it sees two rows of zeros with batch normalisation set to evaluate, and
    its outputs are cut to no rows. So every parameter takes part in the reduction with a gradient of exactly zero,
    whatever a mean over nothing made of the loss.

    Args:
        tracker: knows the batch in hand.
        by_tokens: the weight is given to ``session.backward`` instead of following from the rows.
        complete: called at the end of a backward pass that leaves the whole gradient, where no DDP reduces it.
        notes_gradient: keep of each output's gradient whether it is finite.
    """

    def __init__(
        self,
        tracker: StepTracker,
        *,
        by_tokens: bool,
        complete: Callable[[], None] | None,
        notes_gradient: bool = False,
    ) -> None:
        self._tracker = tracker
        self._notes_gradient = notes_gradient
        self._by_tokens = by_tokens
        self._complete = complete
        self._call_rows: int | None = None
        self._empty_call = False
        self._asleep: list[nn.Module] = []
        self._in_backward = False
        self._pass_weight = 0.0
        self._sync_batch_norm = False
        self._stale_versions: list[int | None] | None = None

    def install(self, model: nn.Module) -> list[Hook]:
        """Register the hooks on the module that the user calls, and return them."""
        self._sync_batch_norm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        before, after = Hook(self._before_forward), Hook(self._after_forward)
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)
        return [before, after]

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tensors = tensors_in((args, kwargs))
        rows = leading_rows(tensors)
        self._call_rows = rows
        self._in_backward = False
        self._empty_call = rows == 0
        if model.training and self._sync_batch_norm:
            self._refuse_empty_shares()
        if model.training and (asleep_for := self._fewest_rows(rows)) is not None and asleep_for <= 1:
            self._put_to_sleep(model, asleep_for)
        if not self._empty_call and not any(tensor.requires_grad for tensor in tensors):
            return None
        prepare = _fill if self._empty_call else self._unweighted_input
        changed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(prepare, (args, kwargs))
        return changed

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        del model, args
        for module in self._asleep:
            module.train()
        self._asleep.clear()
        if self._empty_call:
            output = map_tensors(_cut, output)
        step = self._tracker.in_hand
        if not torch.is_grad_enabled() or step is None:
            return output
        step.called_since_reduction = True
        if not any(tensor.requires_grad for tensor in tensors_in(output)):
            step.opaque_output = type(output).__name__
            return output
        weight_now = self._weight(step)
        return map_tensors(lambda tensor: self._weighted(tensor, weight_now), output)

    def _weighted(self, output: torch.Tensor, weight: Callable[[], float]) -> torch.Tensor:
        """Return a copy of ``output`` whose gradient is weighted on its way into the model.

        Not the output itself, because the model may have computed a second one from it (a loss from its logits), and
        that inner path must not meet the weight twice. Not a view of it either: what writes into a view in place
        takes its hooks away.
        """
        if not output.requires_grad:
            return output
        copy = output.clone()

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            self._began()
            w = self._pass_weight = weight()
            step = self._tracker.in_hand
            if w and self._notes_gradient and step is not None:
                step.note_output_gradient(gradient)
            if w == 1.0:
                return gradient
            # Not 0 * gradient: the mean over no rows is NaN, and so would the product be.
            return gradient * w if w else torch.zeros_like(gradient)

        copy.register_hook(scale)
        return copy

    def _unweighted_input(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of an input whose gradient is freed of the weight again.

        So a model that is fed its own output is weighted once, and a gradient with respect to the data is exact.
        """
        step = self._tracker.in_hand
        if not value.requires_grad or step is None or not torch.is_grad_enabled():
            return value
        weight = self._weight(step)

        def unscale(gradient: torch.Tensor) -> torch.Tensor:
            w = weight()
            return gradient / w if w not in (0.0, 1.0) else gradient

        copy = value.clone()
        copy.register_hook(unscale)
        return copy

    def _weight(self, step: StepInHand) -> Callable[[], float]:
        """Return what gives the weight of this call's gradient when the backward pass asks for it."""
        if self._by_tokens:
            return lambda: self._token_weight(step)
        rows = step.num_rows if step.chunk_rows is None else step.chunk_rows
        if step.own_chunks:
            rows = self._real_rows(step)
        weight = step.weight(rows)
        return lambda: weight

    @staticmethod
    def _token_weight(step: StepInHand) -> float:
        if step.call_tokens is None:
            raise ConfigError(
                "weight_by='tokens' needs the number of tokens behind each loss: call "
                "session.backward(loss, weight=num_tokens) instead of loss.backward()"
            )
        return step.token_weight(step.call_tokens)

    def _began(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._tracker.backward_began()
        step = self._tracker.in_hand
        stale = step is not None and self._complete is None and not step.called_since_reduction
        self._stale_versions = self._gradient_versions() if stale else None
        at_end_of_backward(self._ended)

    def _ended(self) -> None:
        self._in_backward = False
        step = self._tracker.in_hand
        if step is None:
            return
        if self._stale_versions is not None and self._stale_versions != self._gradient_versions():
            raise RexError(
                f"step {step.plan.step}: a second backward pass went through a forward pass whose gradient was reduced "
                "already, and DDP adds it on this rank alone. Add the losses and call backward() once, or call the "
                "model again for the second loss"
            )
        if step.own_chunks:
            step.rows_seen += self._real_rows(step)
        if step.norms.per_group:
            self._tracker.norms.group_ended(step, self._pass_weight * step.loss_share)
        if self._complete is not None and not step.holding:
            self._complete()

    def _gradient_versions(self) -> list[int | None]:
        """Return what tells whether a backward pass added to gradients, rather than asked for an input's alone."""
        gradients = (parameter.grad for parameter in self._tracker.norms.parameters)
        return [None if gradient is None else gradient._version for gradient in gradients]

    def _real_rows(self, step: StepInHand) -> int:
        """Return the rows of the newest call; none where the share has none, and a row stands for them."""
        return (self._call_rows or 0) if step.num_rows else 0

    def _fewest_rows(self, rows: int | None) -> int | None:
        """Return the rows of a call; none where the share has none, and the call sees what stands for them."""
        step = self._tracker.in_hand
        return 0 if step is not None and not step.num_rows else rows

    def _put_to_sleep(self, model: nn.Module, rows: int) -> None:
        """Let batch normalisation use its running statistics for a call that has none of its own.

        One row has no variance over rows; over pixels it has, so only the one-dimensional form is spared then.
        """
        kinds = _BATCH_NORMS if rows == 0 else (nn.BatchNorm1d,)
        self._asleep = [module for module in model.modules() if isinstance(module, kinds) and module.training]
        for module in self._asleep:
            module.eval()

    def _refuse_empty_shares(self) -> None:
        step = self._tracker.in_hand
        if step is not None and 0 in step.plan.num_rows:
            raise ConfigError(
                f"step {step.plan.step} gives its ranks {step.plan.num_rows} rows, and SyncBatchNorm cannot run with a "
                "rank that has none; raise global_batch_size or use fewer workers"
            )


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass under way ends, on its thread, after what is queued already."""
    # There is no public name for it; DDP and FSDP end their backward passes by this very queue.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _fill(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 0 or value.shape[0] != 0:
        return value
    # Joined to the input, so that a loss may ask for the gradient with respect to it.
    return torch.cat([value, value.new_zeros((_PLACEHOLDER_ROWS, *value.shape[1:]))])


def _cut(value: torch.Tensor) -> torch.Tensor:
    return value[:0] if value.dim() > 0 and value.shape[0] == _PLACEHOLDER_ROWS else value

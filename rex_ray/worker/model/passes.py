"""Forward and backward of a rank's whole share, in as many passes as its memory asks for.

While one rank tries again the others wait in their all-reduce, so a retry must neither begin a collective of its own
nor leave one unfinished. What has happened until a pass runs out of memory decides what can be done:

- *Before the last pass's forward has passed DDP* nothing has left this rank: all local gradients are thrown away, and
  the share is run anew in smaller passes.
- *After it* DDP waits for gradients, has taken some, which are complete, and may have sent them already. Only those
  that are missing are computed again, from the rows of that pass in smaller pieces, beside DDP; handing them to their
  parameters then lets DDP go on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, MemoryExhaustedError
from rex_ray.core.types import StepFlag
from rex_ray.worker.model.beside_ddp import (
    Arrivals,
    beside_ddp,
    muted,
    reason_against_completion,
    reason_against_passes,
    with_gradient,
)
from rex_ray.worker.model.compiling import Hook
from rex_ray.worker.model.generators import GeneratorStates
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.out_of_memory import free_memory, is_out_of_memory, short
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.replicas import unwrap
from rex_ray.worker.model.share import CountTokens, LossFunction, Share
from rex_ray.worker.notices import Notices
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["SharePasses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A pass that ran out of memory.

    Attributes:
        start: its first row.
        stop: one past its last row.
        message: what the error said.
        arrived: the parameters whose gradients DDP has taken; None where it expects none yet.
        generators: random states from before the pass.
    """

    start: int
    stop: int
    message: str
    arrived: frozenset[int] | None
    generators: GeneratorStates


class SharePasses:
    """Runs a rank's share in passes, and again in smaller ones where memory does not suffice.

    Args:
        tracker: knows the batch in hand.
        notices: has the journal told.
        gradients: weights, holds and counts backward passes.
        model: the prepared model.
        limit: rows that a pass may have; learnt here.
        retries: run out of memory and try again; else the error ends training.
        beyond_retry: whether DDP is in a state from which no further gradient would wake it.

    Attributes:
        hooks: registered on the model.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        notices: Notices,
        gradients: Gradients,
        model: nn.Module,
        limit: PassLimit,
        retries: bool,
        beyond_retry: Callable[[], bool],
    ) -> None:
        self._tracker = tracker
        self._notices = notices
        self._gradients = gradients
        self._model = model
        self._limit = limit
        self._retries = retries
        self._beyond_retry = beyond_retry
        self._parameters = list(unwrap(model).parameters())
        self._whole_only = reason_against_passes(model)
        self._ddp_expects = False
        self.hooks = [Hook(self._after_forward)]
        model.register_forward_hook(self.hooks[0])
        self._has_called_ddp = False
        if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            self.hooks.append(Hook(self._before_forward))
            model.register_forward_pre_hook(self.hooks[1])

    def run(self, batch: Any, loss_fn: LossFunction, count_tokens: CountTokens | None) -> torch.Tensor:
        """Leave the step's global gradient in the parameters; return the detached mean loss of this rank's rows.

        Raises:
            MemoryExhaustedError: a pass ran out of memory and cannot be tried again; the message says why.
        """
        step = self._tracker.need_in_hand("session.train_step")
        self._refuse_old_gradients(step)
        tokens = None if count_tokens is None else float(count_tokens(batch))
        self._gradients.agree(step, tokens, "session.train_step(batch, loss_fn, weight=count_tokens)")
        self._has_called_ddp = False
        share = Share(step=step, batch=batch, loss_fn=loss_fn, count_tokens=count_tokens)
        generators = GeneratorStates(self._tracker.device)
        first_failure: _Failure | None = None
        while True:
            bounds = self._bounds(step)
            failure = self._run_passes(share, bounds)
            if failure is None:
                break
            first_failure = first_failure or failure
            self._learn(step, failure)
            if failure.arrived is not None:
                self._complete(share, failure)
                break
            self._start_over(step)
            generators.restore()
        if first_failure is None:
            self._limit.ran(step.num_rows, len(bounds) - 1, max(stop - start for start, stop in pairwise(bounds)))
        else:
            self._tell(step, first_failure)
        assert step.loss is not None
        return step.loss

    # --- passes

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        """A DDP of the user's is about to have rank 0's buffers broadcast, once a step."""
        del model, args
        self._has_called_ddp = True

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """DDP came to the end of a forward pass, and expects gradients from now on unless they are held."""
        del args, output
        step = self._tracker.in_hand
        is_ddp = isinstance(model, DistributedDataParallel)
        self._ddp_expects |= is_ddp and torch.is_grad_enabled() and step is not None and not step.holding

    def _bounds(self, step: StepInHand) -> list[int]:
        return [0, step.num_rows] if self._whole_only is not None else self._limit.bounds(step.num_rows)

    def _run_passes(self, share: Share, bounds: Sequence[int]) -> _Failure | None:
        """Run every pass, the last one with the reduction; return the first that fails."""
        step, count = share.step, len(bounds) - 1
        if count > 1:
            step.num_chunks = count
            self._gradients.watch(step)
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            is_last = number == count
            generators = GeneratorStates(self._tracker.device)
            # With one pass there is nothing in .grad before it, which tells as much and costs nothing.
            arrivals = Arrivals(self._parameters if is_last and count > 1 else ())
            with arrivals, nullcontext() if is_last else self._gradients.hold(step):
                self._ddp_expects = False
                message = self._attempt(share, start, stop, lambda loss: loss.backward())
            if message is None:
                continue
            arrived = None
            if is_last and self._ddp_expects:
                arrived = arrivals.seen if count > 1 else with_gradient(self._parameters)
            return _Failure(start=start, stop=stop, message=message, arrived=arrived, generators=generators)
        return None

    def _attempt(
        self, share: Share, start: int, stop: int, differentiate: Callable[[torch.Tensor], None]
    ) -> str | None:
        """Run one pass; return what the error said if it ran out of memory.

        The error is gone when this returns: its traceback holds every activation of the pass.
        """
        step = share.step
        try:
            rows = share.rows(start, stop)
            loss = share.loss_fn(self._model, rows)
            part, tokens = share.weigh(rows, stop - start)
            scaler = self._tracker.scaler
            scaled = loss if part == 1.0 else loss * part
            scaled = scaled if scaler is None else scaler.scale(scaled)
            differentiate(scaled)
            share.note(loss, part, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refuse_retry(step, stop - start, error)
            return short(error)
        finally:
            step.call_tokens, step.loss_share = None, 1.0
        return None

    # --- once a pass has failed

    def _refuse_retry(self, step: StepInHand, num_rows: int, error: Exception) -> None:
        """Raise where another try would leave the other ranks waiting for ever, or train on something else."""
        if not self._retries:
            error.add_note(f"step {step.plan.step}: {num_rows} rows; not tried again, since on_out_of_memory='stop'")
            raise error
        reason = self._whole_only
        if reason is None and self._beyond_retry():
            reason = "memory ran out inside the reduction itself, or after its last bucket had left"
        if reason is not None:
            raise MemoryExhaustedError(
                f"step {step.plan.step}: out of memory in a pass of {num_rows} rows, which cannot be tried again in "
                f"place: {reason}; lower global_batch_size ({short(error)})"
            ) from error

    def _learn(self, step: StepInHand, failure: _Failure) -> None:
        rows = failure.stop - failure.start
        free_memory(self._tracker.device)
        step.flags |= StepFlag.WARM_UP  # its times and norms are of several tries
        step.norms.sound = False
        if not self._limit.failed(rows):
            raise MemoryExhaustedError(
                f"step {step.plan.step}: out of memory in a pass of {rows} rows, which cannot be cut any smaller: "
                f"{failure.message}"
            )

    def _start_over(self, step: StepInHand) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        step.loss = step.output_sum = step.opaque_output = None
        step.tokens_seen, step.num_chunks = 0.0, 0
        if self._has_called_ddp and isinstance(self._model, DistributedDataParallel):
            # The others broadcast buffers once a step: not again; but where memory ran out before, once is to come.
            self._model.require_forward_param_sync = False

    def _complete(self, share: Share, failure: _Failure) -> None:
        """Compute the gradients that DDP still waits for, and hand them over."""
        assert failure.arrived is not None
        missing = [p for p in self._parameters if p.requires_grad and id(p) not in failure.arrived]
        reason = reason_against_completion(self._model, missing)
        if reason is not None:
            raise MemoryExhaustedError(
                f"step {share.step.plan.step}: out of memory in a backward pass of {failure.stop - failure.start} rows "
                f"whose reduction had begun, and it cannot be tried again in place: {reason} ({failure.message})"
            )
        failure.generators.restore()
        with beside_ddp(self._model), muted(missing):
            gradients = self._gradients_of(missing, share, failure)
        found = [(p, g) for p, g in zip(missing, gradients, strict=True) if g is not None]
        # A parameter's own backward pass is the one step that DDP waits for.
        torch.autograd.backward([p for p, _ in found], [g for _, g in found])

    def _gradients_of(
        self, parameters: Sequence[nn.Parameter], share: Share, failure: _Failure
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the failed pass's rows, computed in pieces that fit."""
        sums: list[torch.Tensor | None] = [None] * len(parameters)

        def add(loss: torch.Tensor) -> None:
            pieces = torch.autograd.grad(loss, parameters, allow_unused=True)
            for index, piece in enumerate(pieces):
                known = sums[index]
                sums[index] = piece if known is None else known if piece is None else known + piece

        at = failure.start
        while at < failure.stop:
            stop = self._limit.bounds(failure.stop, at)[1]
            message = self._attempt(share, at, stop, add)
            if message is None:
                at = stop
                continue
            self._learn(
                share.step,
                _Failure(start=at, stop=stop, message=message, arrived=None, generators=failure.generators),
            )
        return sums

    def _tell(self, step: StepInHand, failure: _Failure) -> None:
        rows = failure.stop - failure.start
        self._notices.incident(
            step.plan.step,
            "out_of_memory",
            f"memory ran out in a pass of {rows} rows ({failure.message}); the step was done in place in passes of "
            f"{self._limit.most} rows at most, and later ones begin so",
        )

    def _refuse_old_gradients(self, step: StepInHand) -> None:
        if step.backward_seen or any(p.requires_grad and p.grad is not None for p in self._parameters):
            raise ConfigError(
                f"step {step.plan.step}: session.train_step is a whole step of its own, forward to zero_grad, and "
                "there are gradients already; clear them with optimizer.zero_grad() and call it once a batch"
            )

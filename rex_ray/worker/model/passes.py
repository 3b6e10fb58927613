"""Forward and backward of a rank's whole share, in as many passes as its memory asks for.

While one rank tries again the others wait in their all-reduce, so a retry must neither begin a collective of its own
nor leave one unfinished. What has happened until a pass runs out of memory decides what can be done:

- *Before the last pass's forward has passed DDP* nothing has left this rank: all local gradients are thrown away, and
  the share is run anew in smaller passes.
- *After it* DDP waits for gradients, and gets those that are missing (``completing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError
from rex_ray.worker.model.attempts import Attempts, Failure
from rex_ray.worker.model.beside_ddp import Arrivals, with_gradient
from rex_ray.worker.model.compiling import Hook
from rex_ray.worker.model.completing import Completion
from rex_ray.worker.model.generators import GeneratorStates
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.replicas import unwrap
from rex_ray.worker.model.share import CountTokens, LossFunction, Share
from rex_ray.worker.notices import Notices
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["SharePasses"]


class SharePasses:
    """Runs a rank's share in passes, and again in smaller ones where memory does not suffice.

    Args:
        tracker: knows the batch in hand.
        notices: has the journal told.
        gradients: weights, holds and counts backward passes.
        model: the prepared model.
        limit: rows that a pass may have.
        attempts: tries each pass, and learns where memory runs out.

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
        attempts: Attempts,
    ) -> None:
        self._tracker = tracker
        self._notices = notices
        self._gradients = gradients
        self._model = model
        self._limit = limit
        self._parameters = list(unwrap(model).parameters())
        self._attempts = attempts
        self._completion = Completion(attempts=attempts, model=model, parameters=self._parameters, limit=limit)
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
        first_failure: Failure | None = None
        while True:
            bounds = self._bounds(step)
            failure = self._run_passes(share, bounds)
            if failure is None:
                break
            first_failure = first_failure or failure
            self._attempts.learn(step, failure)
            if failure.arrived is not None:
                self._completion.complete(share, failure)
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
        return [0, step.num_rows] if self._attempts.whole_only is not None else self._limit.bounds(step.num_rows)

    def _run_passes(self, share: Share, bounds: Sequence[int]) -> Failure | None:
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
                message = self._attempts.attempt(share, start, stop, lambda loss: loss.backward())
            if message is None:
                continue
            arrived = None
            if is_last and self._ddp_expects:
                arrived = arrivals.seen if count > 1 else with_gradient(self._parameters)
            return Failure(start=start, stop=stop, message=message, arrived=arrived, generators=generators)
        return None

    # --- once a pass has failed

    def _start_over(self, step: StepInHand) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        step.loss = step.output_sum = step.opaque_output = None
        step.tokens_seen, step.num_chunks = 0.0, 0
        if self._has_called_ddp and isinstance(self._model, DistributedDataParallel):
            # The others broadcast buffers once a step: not again; but where memory ran out before, once is to come.
            self._model.require_forward_param_sync = False

    def _tell(self, step: StepInHand, failure: Failure) -> None:
        self._notices.incident(
            step.plan.step,
            "out_of_memory",
            f"memory ran out in a pass of {failure.num_rows} rows ({failure.message}); the step was done in place in "
            f"passes of {self._limit.most} rows at most, and later ones begin so",
        )

    def _refuse_old_gradients(self, step: StepInHand) -> None:
        if step.backward_seen or any(p.requires_grad and p.grad is not None for p in self._parameters):
            raise ConfigError(
                f"step {step.plan.step}: session.train_step is a whole step of its own, forward to zero_grad, and "
                "there are gradients already; clear them with optimizer.zero_grad() and call it once a batch"
            )

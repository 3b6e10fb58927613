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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, MemoryExhaustedError
from rex_ray.core.types import StepFlag
from rex_ray.worker.group.side_group import distributed
from rex_ray.worker.model.compiling import Hook
from rex_ray.worker.model.generators import GeneratorStates
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.out_of_memory import free_memory, is_out_of_memory, short
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.replicas import unwrap
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.tree import slice_rows

__all__ = ["CountTokens", "LossFunction", "SharePasses"]

LossFunction: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
CountTokens: TypeAlias = Callable[[Any], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a step's passes have in common."""

    step: StepInHand
    batch: Any
    loss_fn: LossFunction
    count_tokens: CountTokens | None

    def rows(self, start: int, stop: int) -> Any:
        num_rows = self.step.num_rows
        if (start, stop) == (0, num_rows):
            return self.batch
        return slice_rows(self.batch, start, stop, num_rows=num_rows, strict=True)


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
        gradients: weights, holds and counts backward passes.
        model: the prepared model.
        limit: rows that a pass may have; learnt here.
        retries: run out of memory and try again; else the error ends training.
        beyond_retry: whether DDP is in a state from which no further gradient would wake it.

    Attributes:
        hook: registered on the model.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        gradients: Gradients,
        model: nn.Module,
        limit: PassLimit,
        retries: bool,
        beyond_retry: Callable[[], bool],
    ) -> None:
        self._tracker = tracker
        self._gradients = gradients
        self._model = model
        self._limit = limit
        self._retries = retries
        self._beyond_retry = beyond_retry
        self._parameters = list(unwrap(model).parameters())
        self._whole_only = _reason_against_passes(model)
        self._ddp_expects = False
        self.hook = Hook(self._after_forward)
        model.register_forward_hook(self.hook)

    def run(self, batch: Any, loss_fn: LossFunction, count_tokens: CountTokens | None) -> torch.Tensor:
        """Leave the step's global gradient in the parameters; return the detached mean loss of this rank's rows.

        Raises:
            MemoryExhaustedError: a pass ran out of memory and cannot be tried again; the message says why.
        """
        step = self._tracker.need_in_hand("session.train_step")
        self._refuse_old_gradients(step)
        tokens = None if count_tokens is None else float(count_tokens(batch))
        self._gradients.agree(step, tokens, "session.train_step(batch, loss_fn, weight=count_tokens)")
        share = _Share(step=step, batch=batch, loss_fn=loss_fn, count_tokens=count_tokens)
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

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """DDP came to the end of a forward pass, and expects gradients from now on unless they are held."""
        del args, output
        step = self._tracker.in_hand
        is_ddp = isinstance(model, DistributedDataParallel)
        self._ddp_expects |= is_ddp and torch.is_grad_enabled() and step is not None and not step.holding

    def _bounds(self, step: StepInHand) -> list[int]:
        return [0, step.num_rows] if self._whole_only is not None else self._limit.bounds(step.num_rows)

    def _run_passes(self, share: _Share, bounds: Sequence[int]) -> _Failure | None:
        """Run every pass, the last one with the reduction; return the first that fails."""
        step, count = share.step, len(bounds) - 1
        if count > 1:
            step.num_chunks = count
            self._gradients.watch(step)
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            is_last = number == count
            generators = GeneratorStates(self._tracker.device)
            # With one pass there is nothing in .grad before it, which tells as much and costs nothing.
            arrivals = _Arrivals(self._parameters if is_last and count > 1 else ())
            with arrivals, nullcontext() if is_last else self._gradients.hold(step):
                self._ddp_expects = False
                message = self._attempt(share, start, stop, lambda loss: loss.backward())
            if message is None:
                continue
            arrived = None
            if is_last and self._ddp_expects:
                arrived = arrivals.seen if count > 1 else _with_gradient(self._parameters)
            return _Failure(start=start, stop=stop, message=message, arrived=arrived, generators=generators)
        return None

    def _attempt(
        self, share: _Share, start: int, stop: int, differentiate: Callable[[torch.Tensor], None]
    ) -> str | None:
        """Run one pass; return what the error said if it ran out of memory.

        The error is gone when this returns: its traceback holds every activation of the pass.
        """
        step = share.step
        try:
            rows = share.rows(start, stop)
            loss = share.loss_fn(self._model, rows)
            part, tokens = self._weigh(share, rows, stop - start)
            scaler = self._tracker.scaler
            scaled = loss if part == 1.0 else loss * part
            scaled = scaled if scaler is None else scaler.scale(scaled)
            differentiate(scaled)
            self._note(step, loss, part, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refuse_retry(step, stop - start, error)
            return short(error)
        finally:
            step.call_tokens, step.loss_share = None, 1.0
        return None

    @staticmethod
    def _weigh(share: _Share, rows: Any, num_rows: int) -> tuple[float, float]:
        """Return the part of the share's mean loss that these rows are, and their tokens; weight by the whole share.

        So a penalty on the weights, which every pass adds to its loss, counts once and not once a pass.
        """
        step = share.step
        part, tokens = num_rows / step.num_rows if step.num_rows else 1.0, 0.0
        if share.count_tokens is not None and step.tokens is not None:
            tokens = step.tokens if num_rows == step.num_rows else float(share.count_tokens(rows))
            # The mean over no tokens is no number: it must not enter with its weight of nothing.
            step.call_tokens = step.tokens if tokens else 0.0
            part = tokens / step.tokens if step.tokens else part
        step.loss_share = part
        return part, tokens

    @staticmethod
    def _note(step: StepInHand, loss: torch.Tensor, part: float, tokens: float) -> None:
        step.tokens_seen += tokens
        mean = loss.detach().reshape(())
        if part != 1.0:
            mean = mean * part if part else torch.zeros_like(mean)
        step.loss = mean if step.loss is None else step.loss + mean

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
        if isinstance(self._model, DistributedDataParallel):
            # Buffers that a DDP of the user's broadcasts were broadcast for this step already.
            self._model.require_forward_param_sync = False

    def _complete(self, share: _Share, failure: _Failure) -> None:
        """Compute the gradients that DDP still waits for, and hand them over."""
        assert failure.arrived is not None
        missing = [p for p in self._parameters if p.requires_grad and id(p) not in failure.arrived]
        self._refuse_completion(share.step, missing, failure)
        failure.generators.restore()
        with _beside_ddp(self._model), _muted(missing):
            gradients = self._gradients_of(missing, share, failure)
        found = [(p, g) for p, g in zip(missing, gradients, strict=True) if g is not None]
        # A parameter's own backward pass is the one step that DDP waits for.
        torch.autograd.backward([p for p, _ in found], [g for _, g in found])

    def _refuse_completion(self, step: StepInHand, missing: Sequence[nn.Parameter], failure: _Failure) -> None:
        ddp = self._model
        assert isinstance(ddp, DistributedDataParallel)
        reason = None
        if ddp.find_unused_parameters:
            reason = "find_unused_parameters has DDP count parameters that never get a gradient"
        elif ddp.static_graph:
            reason = "static_graph has DDP count how often each gradient comes"
        elif ddp.mixed_precision is not None:
            reason = "DDP's mixed_precision keeps other gradients than the parameters' own"
        elif not missing:
            reason = "every gradient is on its way, so nothing would tell DDP that they are complete"
        if reason is not None:
            raise MemoryExhaustedError(
                f"step {step.plan.step}: out of memory in a backward pass of {failure.stop - failure.start} rows whose "
                f"reduction had begun, and it cannot be tried again in place: {reason} "
                f"({failure.message})"
            )

    def _gradients_of(
        self, parameters: Sequence[nn.Parameter], share: _Share, failure: _Failure
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
        self._tracker.incident(
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


def _reason_against_passes(model: nn.Module) -> str | None:
    """Say why a share must be run whole, and once, or None."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm has every forward pass wait for the other ranks, which make theirs once"
    if distributed() and dist.get_world_size() > 1 and not isinstance(model, DistributedDataParallel):
        return "a sharded model has every pass wait for the other ranks, which make theirs once"
    return None


def _with_gradient(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    return frozenset(id(p) for p in parameters if p.grad is not None)


class _Arrivals(AbstractContextManager[None]):
    """Notes which of some parameters get their gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._seen: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda p: self._seen.add(id(p)))
            for parameter in parameters
            if parameter.requires_grad
        ]

    @property
    def seen(self) -> frozenset[int]:
        return frozenset(self._seen)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def _beside_ddp(model: nn.Module) -> Iterator[None]:
    """Have calls of the prepared model pass by DDP, whose reduction is half done, but not by what else surrounds it."""
    bare = unwrap(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return bare(*args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


@contextmanager
def _muted(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep the hooks of parameters from seeing pieces: they see the gradient whole, once, when it is handed over."""
    hooks = [p._backward_hooks for p in parameters if p._backward_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)

"""Several backward passes for one loader batch, and the session's own backward pass.

A loader batch is a rank's *whole* share of an optimizer step. Cutting it into micro-batches saves memory and changes
nothing else: only the last one reduces, each is weighted by its own rows, and ranks may cut differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.model.replicas import is_sharded, unwrap
from rex_ray.worker.row_cutting import slice_rows
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["Gradients"]


class Gradients:
    """Backward passes of the batch in hand.

    Args:
        tracker: knows the batch in hand.
        group: ranks that agree on token counts.
        by_tokens: ranks are weighted by tokens rather than rows.
        model: the prepared model; DDP where there is more than one rank.
    """

    def __init__(self, *, tracker: StepTracker, group: SideGroup, by_tokens: bool, model: nn.Module) -> None:
        self._tracker = tracker
        self._group = group
        self._by_tokens = by_tokens
        self._model = model

    def micro_batches(self, batch: Any, num_chunks: int, weight: float | None) -> Iterator[Any]:
        """Yield ``batch`` in up to ``num_chunks`` pieces of nearly equal rows, all but the last without a reduction."""
        step = self._tracker.need_in_hand("session.micro_batches")
        if num_chunks < 1:
            raise ConfigError(f"num_chunks is {num_chunks}, and a batch has at least one micro-batch")
        self.agree(step, weight, "session.micro_batches(batch, num_chunks, weight=num_tokens)")
        rows = step.num_rows
        count = self._agreed(num_chunks) if is_sharded(unwrap(self._model)) else max(min(num_chunks, rows), 1)
        bounds = [rows * i // count for i in range(count + 1)]
        step.chunks_open = True
        if count > 1:
            step.num_chunks = count
            self.watch(step)
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            step.chunk_rows = stop - start
            is_last = number == count
            chunk = batch if count == 1 else slice_rows(batch, start, stop, num_rows=rows, strict=True)
            if is_last:
                step.chunks_open = False
                yield chunk
            else:
                with self.hold(step):
                    yield chunk
        step.chunk_rows = None

    @contextmanager
    def accumulate(self, weight: float | None) -> Iterator[None]:
        """Keep the gradients of the enclosed backward passes local."""
        step = self._tracker.need_in_hand("session.accumulate")
        if is_sharded(unwrap(self._model)):
            raise ConfigError(
                "session.accumulate lets ranks cut their batches as they like, and a sharded model has all of them "
                "meet in every pass; cut the batch with session.micro_batches(batch, num_chunks)"
            )
        self.agree(step, weight, "session.accumulate(weight=num_tokens)")
        step.own_chunks = True
        self.watch(step)
        with self.hold(step):
            yield

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Differentiate the loss of the batch, or micro-batch, in hand."""
        step = self._tracker.need_in_hand("session.backward")
        if step.tokens is None:
            self.agree(step, weight, "session.backward(loss, weight=num_tokens)")
        if self._by_tokens:
            if weight is None:
                raise ConfigError("weight_by='tokens' needs session.backward(loss, weight=num_tokens)")
            step.call_tokens = _tokens(step, weight)
            step.tokens_seen += step.call_tokens
        self._note_loss(step, loss)
        scaler = self._tracker.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        step.call_tokens = None

    def _agreed(self, num_chunks: int) -> int:
        """Return the largest of the ranks' numbers: they meet in every pass of a sharded model, with no rows too."""
        with self._tracker.waiting():
            everyones = self._group.gather(torch.tensor([num_chunks]), "how many micro-batches there are")
        return int(everyones.max())

    def agree(self, step: StepInHand, weight: float | None, call: str) -> None:
        """Learn the global token count of the step; the wait for slower ranks is not this rank's own time."""
        if not self._by_tokens:
            if weight is not None:
                raise ConfigError(
                    f"weight={weight} was given, but ranks are weighted by their rows; set weight_by='tokens' to "
                    "weight them by tokens"
                )
            return
        if weight is None:
            raise ConfigError(f"weight_by='tokens' needs this rank's token count of the whole batch: {call}")
        if step.tokens is not None:
            raise RexError(f"step {step.plan.step}: the token count was agreed already; call {call} once a batch")
        step.tokens = _tokens(step, weight)
        with step.timer.paused():
            total = self._group.sum(torch.tensor([step.tokens], dtype=torch.float64), "the step's token count")
        step.total_tokens = float(total)

    def watch(self, step: StepInHand) -> None:
        """Take each backward pass of the step for a gradient group of its own, where norms are measured."""
        if self._tracker.measures_norm:
            self._tracker.norms.watch(step)

    @contextmanager
    def hold(self, step: StepInHand) -> Iterator[None]:
        """Keep the gradients of the enclosed pass local; those of a sharded model are reduced each time, and added."""
        unsynchronised: AbstractContextManager[None] = nullcontext()
        if isinstance(self._model, DistributedDataParallel):
            unsynchronised = self._model.no_sync()
        step.holding = True
        try:
            with unsynchronised:
                yield
        finally:
            step.holding = False

    def _note_loss(self, step: StepInHand, loss: torch.Tensor) -> None:
        """Add the loss to the step's mean over this rank's rows (or tokens)."""
        rows = step.num_rows if step.chunk_rows is None else step.chunk_rows
        part, whole = float(rows), float(step.num_rows)
        if step.tokens is not None and step.call_tokens is not None:
            part, whole = step.call_tokens, step.tokens
        if part <= 0 or whole <= 0 or step.own_chunks:
            return  # a mean over nothing is NaN, and weighs nothing
        share = loss.detach().reshape(()) * (part / whole)
        step.loss = share if step.loss is None else step.loss + share


def _tokens(step: StepInHand, weight: float) -> float:
    """Return the tokens that were counted; none where the share has no rows, and the batch stands for none."""
    return float(weight) if step.num_rows else 0.0

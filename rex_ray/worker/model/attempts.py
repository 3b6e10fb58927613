"""One pass over some rows of a share: tried, and learnt from where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rex_ray.core.errors import MemoryExhaustedError, first_line
from rex_ray.core.types import StepFlag
from rex_ray.worker.model.beside_ddp import reason_against_passes
from rex_ray.worker.model.generators import GeneratorStates
from rex_ray.worker.model.out_of_memory import free_memory, is_out_of_memory
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.share import Share
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker

__all__ = ["Attempts", "Failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
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

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return self.stop - self.start


class Attempts:
    """Tries passes of the prepared model.

    Args:
        tracker: knows device and gradient scaler.
        model: the prepared model.
        limit: rows that a pass may have; learnt here.
        retries: a pass that runs out of memory may be tried again; else the error ends training.
        beyond_retry: whether DDP is in a state from which no further gradient would wake it.

    Attributes:
        whole_only: why a share must be run whole, and once, or None.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        model: nn.Module,
        limit: PassLimit,
        retries: bool,
        beyond_retry: Callable[[], bool],
    ) -> None:
        self._tracker = tracker
        self._model = model
        self._limit = limit
        self._retries = retries
        self._beyond_retry = beyond_retry
        self.whole_only = reason_against_passes(model)

    def attempt(self, share: Share, start: int, stop: int, differentiate: Callable[[torch.Tensor], None]) -> str | None:
        """Run one pass; return what the error said if it ran out of memory.

        The error is gone when this returns: its traceback holds every activation of the pass.

        Raises:
            MemoryExhaustedError: memory ran out where no retry is safe.
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
            return first_line(error)
        finally:
            step.call_tokens, step.loss_share = None, 1.0
        return None

    def learn(self, step: StepInHand, failure: Failure) -> None:
        """Have later passes be smaller, and the step be no evidence.

        Raises:
            MemoryExhaustedError: there are no smaller ones.
        """
        free_memory(self._tracker.device)
        step.flags |= StepFlag.WARM_UP  # its times and norms are of several tries
        step.norms.sound = False
        if not self._limit.failed(failure.num_rows):
            raise MemoryExhaustedError(
                f"step {step.plan.step}: out of memory in a pass of {failure.num_rows} rows, which cannot be cut any "
                f"smaller: {failure.message}"
            )

    def _refuse_retry(self, step: StepInHand, num_rows: int, error: Exception) -> None:
        """Raise where another try would leave the other ranks waiting for ever, or train on something else."""
        if not self._retries:
            error.add_note(f"step {step.plan.step}: {num_rows} rows; not tried again, since on_out_of_memory='stop'")
            raise error
        reason = self.whole_only
        if reason is None and self._beyond_retry():
            reason = "memory ran out inside the reduction itself, or after its last bucket had left"
        if reason is not None:
            raise MemoryExhaustedError(
                f"step {step.plan.step}: out of memory in a pass of {num_rows} rows, which cannot be tried again in "
                f"place: {reason}; lower global_batch_size ({first_line(error)})"
            ) from error

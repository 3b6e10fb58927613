"""One step as the worker sees it: the batch in the user's hand, and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from rex_ray.core.types import StepFlag
from rex_ray.worker.sampler import Plan
from rex_ray.worker.timing import StepTimer

__all__ = ["StepHook", "StepInHand", "StepInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What a step hook is told.

    Attributes:
        step: the step, counted over the whole run.
        num_rows: this rank's real rows.
        all_rows: every rank's.
        began_s: when the batch was handed to the loop (``time.perf_counter``).
        data_s: how long the loop waited for the batch before that; own time so far is
            ``data_s + (now - began_s)``.
    """

    step: int
    num_rows: int
    all_rows: tuple[int, ...]
    began_s: float
    data_s: float


class StepHook(Protocol):
    """Called inside each step, on the thread that runs backward."""

    def last_gradient(self, info: StepInfo) -> None:
        """The last local gradient is there; time spent here counts as the worker's own."""
        ...

    def reduced(self, info: StepInfo) -> None:
        """The reduction ended and the optimizer has not stepped; time spent here counts as synchronisation."""
        ...


@dataclass(slots=True, kw_only=True)
class StepInHand:
    """The batch that the user's loop holds.

    Attributes:
        plan: the step's rows over all ranks.
        rank: this rank.
        asked_s: when the loop asked for the batch.
        info: what step hooks are told.
        timer: marks of computing and reducing.
        flags: known reasons why the step is no evidence.
        holding: gradients stay local for now (a micro-batch that is not the last one).
        chunk_rows: rows of the micro-batch under way; None: the whole share is one batch.
        own_chunks: the user cuts micro-batches; their rows are read off the model's input.
        chunks_open: a loop over micro-batches has not reached its last one.
        rows_seen: rows of the micro-batches whose backward pass ended.
        tokens: this rank's token count, once given; None when samples are counted.
        total_tokens: its sum over ranks.
        tokens_seen: tokens of the losses that were differentiated.
        call_tokens: tokens of the loss that is being differentiated.
        backward_seen: a gradient has flowed through the model.
        called_since_reduction: the model was called with gradients since the last reduction.
        opaque_output: type of a model output in which no tensor with a gradient was found.
        num_reductions: reductions that ended.
        consumed: the position has moved past this batch.
        closed: its record is written.
        buckets: DDP's buffers, where the reduction leaves the global gradient; empty where nobody takes its norm.
    """

    plan: Plan
    rank: int
    asked_s: float
    info: StepInfo
    timer: StepTimer
    flags: StepFlag
    holding: bool = False
    chunk_rows: int | None = None
    own_chunks: bool = False
    chunks_open: bool = False
    rows_seen: int = 0
    tokens: float | None = None
    total_tokens: float = 0.0
    tokens_seen: float = 0.0
    call_tokens: float | None = None
    backward_seen: bool = False
    called_since_reduction: bool = False
    opaque_output: str | None = None
    num_reductions: int = 0
    consumed: bool = False
    closed: bool = False
    local_sq: torch.Tensor | None = None
    global_sq: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    buckets: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """This rank's real rows."""
        return self.plan.num_rows[self.rank]

    def weight(self, num_rows: int) -> float:
        """Return ``n * num_rows / B``: what turns DDP's mean over ranks into the mean over rows."""
        return len(self.plan.num_rows) * num_rows / self.plan.total_rows

    def token_weight(self, tokens: float) -> float:
        """Return ``n * tokens / total``; 0 where nobody has a token."""
        return len(self.plan.num_rows) * tokens / self.total_tokens if self.total_tokens else 0.0

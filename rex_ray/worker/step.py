"""One step as the worker sees it: the batch in the user's hand, and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from rex_ray.core.types import StepFlag
from rex_ray.worker.data.sampler import Plan
from rex_ray.worker.measuring.timing import StepTimer

__all__ = ["StepHook", "StepInHand", "StepInfo", "StepNorms"]


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
class StepNorms:
    """What is measured of one step's gradient.

    Attributes:
        opened: whether anything is.
        sound: whether it is what it should be; norms are left out of the record otherwise.
        per_group: each backward pass is a gradient group of its own; else the rank's share is one.
        num_passes: groups whose backward pass ended.
        parts: of the pass under way, squared norms by parameter.
        buckets: gradients that the reduction makes global, with their parameters where those matter.
        local_sq: sum of ``factor``-less ``rows_j |g_j|^2`` over this rank's groups, loss-scaled.
        factor: turns it into rows times squared norm of the unweighted gradient, but for the loss scale.
        num_groups: groups with rows in it.
        num_steps: see ``StepRecord.num_norm_steps``.
        global_sq: squared norm of the reduced gradient, loss-scaled; rank 0 only.
    """

    opened: bool = False
    sound: bool = True
    per_group: bool = False
    num_passes: int = 0
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    buckets: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    local_sq: torch.Tensor | None = None
    factor: float = 1.0
    num_groups: int = 0
    num_steps: int = 1
    global_sq: torch.Tensor | None = None

    def add_local(self, part: torch.Tensor) -> None:
        """Add a part of the local squared norm; out of place, since a part may be on its way to the host."""
        self.local_sq = part if self.local_sq is None else self.local_sq + part


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
        num_chunks: micro-batches that the session cut; 0: it cut none.
        loss_share: the part of the share that the loss under way was multiplied by, beside its weight.
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
        norms: what is measured of its gradient.
        scale: the loss scale; None without a gradient scaler.
        loss: mean loss over this rank's rows.
        output_sum: sum over the gradients of the model's outputs; only whether it is finite means anything.
    """

    plan: Plan
    rank: int
    asked_s: float
    info: StepInfo
    timer: StepTimer
    flags: StepFlag
    holding: bool = False
    chunk_rows: int | None = None
    num_chunks: int = 0
    loss_share: float = 1.0
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
    scale: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    output_sum: torch.Tensor | None = None
    norms: StepNorms = field(default_factory=StepNorms)

    @property
    def num_rows(self) -> int:
        """This rank's real rows."""
        return self.plan.num_rows[self.rank]

    def note_output_gradient(self, gradient: torch.Tensor) -> None:
        """Keep whether the gradient of a model's output is finite, without waiting for it.

        A sum is read once and written nowhere, and what is not finite makes it so; in half precision it would
        overflow by itself.
        """
        part = gradient.detach().sum(dtype=torch.float32 if gradient.dtype.itemsize < 4 else None)
        self.output_sum = part if self.output_sum is None else self.output_sum + part

    def weight(self, num_rows: int) -> float:
        """Return ``n * num_rows / B``: what turns DDP's mean over ranks into the mean over rows."""
        return len(self.plan.num_rows) * num_rows / self.plan.total_rows

    def token_weight(self, tokens: float) -> float:
        """Return ``n * tokens / total``; 0 where nobody has a token."""
        return len(self.plan.num_rows) * tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one."""
        return len(self.plan.num_rows) == 1

    @property
    def share_weight(self) -> float:
        """The weight of this rank's whole share."""
        return self.weight(self.num_rows) if self.tokens is None else self.token_weight(self.tokens)

    def group_factor(self, weight: float) -> float:
        """Return what turns the squared norm of a gradient that was weighted by ``weight`` into ``rows |g|^2``.

        With ``w = n b / B`` and the gradient ``w g``, it is ``b / w^2 = B / (n w)``. Under token weights ``b`` is then
        the group's share of the step in rows of the mean number of tokens, and the noise scale is in such rows.
        """
        return self.plan.total_rows / (len(self.plan.num_rows) * weight) if weight else 0.0

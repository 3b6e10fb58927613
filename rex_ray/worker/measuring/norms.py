"""The two norms that the gradient noise scale is made of: of groups of rows, and of the whole step.

A rank's share is one group, and each of its micro-batches is, where there are several: more groups see the noise
better, and a single worker sees it at all. Frozen parameters count not at all, tied ones once; under Adam the norms
are taken after its preconditioner. All of it happens on measured steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rex_ray.core.measuring import NormSchedule
from rex_ray.core.types import StepFlag
from rex_ray.worker.measuring.pairs import GradientPair
from rex_ray.worker.measuring.probes import squared_norm, total_squared_norm
from rex_ray.worker.model.preconditioner import AdamPreconditioner
from rex_ray.worker.step import StepInHand, StepNorms

__all__ = ["Bucket", "GradientNorms"]


class Bucket(Protocol):
    """Local gradients that are reduced together, as DDP hands them to its communication hook."""

    def buffer(self) -> torch.Tensor:
        """Return them as one vector, or the one sparse gradient."""
        ...

    def parameters(self) -> list[torch.Tensor]:
        """Return whose they are."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """Return them in the shapes of their parameters."""
        ...


class GradientNorms:
    """Takes the norms of one rank's steps.

    Args:
        schedule: which steps are measured.

    Attributes:
        parameters: the model's, each once.
        preconditioner: what the norms are taken after; None: of the bare gradient.
        lossless: the reduction does not round; what it rounds away would be taken for gradient noise.
    """

    def __init__(self, schedule: NormSchedule) -> None:
        self._schedule = schedule
        self._global_batch_size = 0
        self._since_step = 0
        self._counted: tuple[bool, ...] | None = None
        self._watching: list[RemovableHandle] = []
        self._pair = GradientPair(self._squared_norm)
        self.parameters: Sequence[nn.Parameter] = ()
        self.preconditioner: AdamPreconditioner | None = None
        self.lossless = True

    def due(self, step: int) -> bool:
        """Whether ``step`` is one to measure; the second of a pair is too."""
        if not self.lossless:
            return False
        return self._schedule.is_due(step, self._since_step) or self._pair.awaits(step)

    def begin(self, step: int, global_batch_size: int) -> None:
        """Let go of what an earlier step left behind, and note from which step on the allocation's batch is run."""
        if global_batch_size != self._global_batch_size:
            self._global_batch_size, self._since_step = global_batch_size, step
        self._let_go()
        self._pair.begin(step)

    def watch(self, step: StepInHand) -> None:
        """Take each backward pass of the step for a group of its own.

        A reduction sees the running sum over them, so the norms are taken where each gradient arrives.
        """
        if step.norms.per_group:
            return
        self._open(step)
        step.norms.per_group = True
        for index, parameter in enumerate(self.parameters):
            if self._counts(parameter):
                note = partial(self._note, step.norms, index, parameter)
                self._watching.append(parameter.register_hook(note))

    def group_ended(self, step: StepInHand, weight: float) -> None:
        """A watched backward pass ended whose gradient was weighted by ``weight``."""
        norms = step.norms
        norms.num_passes += 1
        parts, norms.parts = list(norms.parts.values()), {}
        if not weight:
            return
        if not parts:
            norms.sound = False
            return
        norms.add_local(torch.stack(parts).sum() * step.group_factor(weight))
        norms.num_groups += 1

    def look_at(self, step: StepInHand, bucket: Bucket) -> None:
        """Take the norm of a bucket of the local gradient, which the reduction will overwrite."""
        self._open(step)
        norms = step.norms
        gradients, parameters = self._counted_in(bucket)
        if not gradients or not self._measurable(norms, gradients):
            return
        if step.rank == 0:
            norms.buckets.append((gradients, parameters))
        if not norms.per_group and not step.alone:
            norms.add_local(self._squared_norm(gradients, parameters))

    def reduced(self, step: StepInHand) -> None:
        """Take the norm of the global gradient, and settle what the local ones are of."""
        self._open(step)
        norms = step.norms
        if norms.per_group:
            # A micro-batch that was differentiated twice, or never, is no group.
            norms.sound &= step.num_chunks in (0, norms.num_passes)
        elif not step.alone:
            norms.factor = step.group_factor(step.share_weight)
            norms.num_groups = int(step.share_weight > 0)
        if norms.sound and step.rank == 0:
            self._measure_global(step)
        norms.buckets.clear()
        self._let_go()

    # --- inside

    def _open(self, step: StepInHand) -> None:
        """Note which parameters count, once a step, and flag the step where they are others than before."""
        if step.norms.opened:
            return
        step.norms.opened = True
        if self.preconditioner is not None:
            self.preconditioner.begin()
        counted = tuple(self._counts(parameter) for parameter in self.parameters)
        if not any(counted):
            step.norms.sound = False
            return
        if self._counted is not None and counted != self._counted:
            step.flags |= StepFlag.OTHER_PARAMETERS
        self._counted = counted

    def _counts(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and (self.preconditioner is None or self.preconditioner.knows(parameter))

    def _measurable(self, norms: StepNorms, gradients: Sequence[torch.Tensor]) -> bool:
        """Adam's preconditioner is dense: of a sparse gradient no norm is taken after it."""
        norms.sound &= self.preconditioner is None or not any(gradient.is_sparse for gradient in gradients)
        return norms.sound

    def _note(self, norms: StepNorms, index: int, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None or not self._measurable(norms, [gradient]):
            return
        # Twice in a pass (parts that are recomputed and differentiated on their own): only their sum would do.
        norms.sound &= index not in norms.parts
        norms.parts[index] = self._squared_norm([gradient], [parameter])

    def _counted_in(self, bucket: Bucket) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a bucket's gradients that count, as one flat buffer where all do and none is preconditioned."""
        parameters, buffer = list(bucket.parameters()), bucket.buffer()
        counts = [self._counts(parameter) for parameter in parameters]
        if all(counts) and (buffer.is_sparse or self.preconditioner is None):
            return [buffer], parameters
        if buffer.is_sparse:
            return [], []
        # A gradient that was left on a frozen layer stays in its bucket and passes the reduction as it is.
        kept = [k for k, counted in enumerate(counts) if counted]
        gradients = bucket.gradients()
        return [gradients[k] for k in kept], [parameters[k] for k in kept]

    def _squared_norm(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.preconditioner is not None:
            return self.preconditioner.squared_norm(gradients, parameters)
        return squared_norm(gradients[0]) if len(gradients) == 1 else total_squared_norm(gradients)

    def _measure_global(self, step: StepInHand) -> None:
        """Take the norm of a few flat buffers where the gradient lies in them, else of every parameter's gradient."""
        norms = step.norms
        pair = step.alone and not norms.per_group
        buffers = [gradient for gradients, _ in norms.buckets for gradient in gradients]
        if buffers and not pair and not any(buffer.is_sparse for buffer in buffers):
            parts = [self._squared_norm(gradients, parameters) for gradients, parameters in norms.buckets]
            norms.global_sq = torch.stack(parts).sum()
            return
        counted = [(p.grad, p) for p in self.parameters if p.grad is not None and self._counts(p)]
        gradients = [gradient for gradient, _ in counted]
        parameters = [parameter for _, parameter in counted]
        if not gradients or not self._measurable(norms, gradients):
            return
        if not pair:
            norms.global_sq = self._squared_norm(gradients, parameters)
        elif not any(gradient.is_sparse for gradient in gradients):
            self._pair.take(step, gradients, parameters)

    def _let_go(self) -> None:
        for handle in self._watching:
            handle.remove()
        self._watching.clear()
        if self.preconditioner is not None:
            self.preconditioner.release()

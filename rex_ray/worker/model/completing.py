"""A reduction that was half done when memory ran out, and has to go on, since the other ranks wait in it.

DDP waits for gradients, has taken some, which are complete, and may have sent them already. Only those that are missing
are computed again, from the rows of that pass in smaller pieces, beside DDP; handing them to their parameters then lets
DDP go on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rex_ray.core.errors import MemoryExhaustedError
from rex_ray.worker.model.attempts import Attempts, Failure
from rex_ray.worker.model.beside_ddp import beside_ddp, muted, reason_against_completion
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.share import Share

__all__ = ["Completion"]


class Completion:
    """Computes the gradients that DDP still waits for, and hands them over.

    Args:
        attempts: tries the pieces.
        model: the prepared model.
        parameters: all of the model's.
        limit: rows that a piece may have.
    """

    def __init__(
        self, *, attempts: Attempts, model: nn.Module, parameters: Sequence[nn.Parameter], limit: PassLimit
    ) -> None:
        self._attempts = attempts
        self._model = model
        self._parameters = parameters
        self._limit = limit

    def complete(self, share: Share, failure: Failure) -> None:
        """Do what a failed backward pass left to do.

        Raises:
            MemoryExhaustedError: this DDP would not go on so, or memory does not suffice for a piece.
        """
        assert failure.arrived is not None
        missing = [p for p in self._parameters if p.requires_grad and id(p) not in failure.arrived]
        reason = reason_against_completion(self._model, missing)
        if reason is not None:
            raise MemoryExhaustedError(
                f"step {share.step.plan.step}: out of memory in a backward pass of {failure.num_rows} rows whose "
                f"reduction had begun, and it cannot be tried again in place: {reason} ({failure.message})"
            )
        failure.generators.restore()
        with beside_ddp(self._model), muted(missing):
            gradients = self._gradients_of(missing, share, failure)
        found = [(p, g) for p, g in zip(missing, gradients, strict=True) if g is not None]
        # A parameter's own backward pass is the one step that DDP waits for.
        torch.autograd.backward([p for p, _ in found], [g for _, g in found])

    def _gradients_of(
        self, parameters: Sequence[nn.Parameter], share: Share, failure: Failure
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
            message = self._attempts.attempt(share, at, stop, add)
            if message is None:
                at = stop
                continue
            self._attempts.learn(
                share.step,
                Failure(start=at, stop=stop, message=message, arrived=None, generators=failure.generators),
            )
        return sums

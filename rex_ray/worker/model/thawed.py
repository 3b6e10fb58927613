"""Gradients that DDP does not know of, since their layers were frozen when it was made.

DDP reduces what required a gradient when it wrapped the model, and nothing else: a layer that thaws later would be
trained on local gradients, in silence. Wrapping the frozen layers too would have every step reduce their zeros and
search the graph for them. So they are averaged here, in one flat buffer once the backward pass has ended, and cost
nothing as long as they are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["FlatBucket", "ThawedGradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBucket:
    """Local gradients in one buffer, in the form of DDP's own buckets.

    Attributes:
        flat: the gradients one after the other, then per parameter how many ranks have one.
        views: the gradients, in the shapes of their parameters.
        thawed: the parameters.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]
    thawed: list[nn.Parameter]

    @classmethod
    def of(cls, thawed: list[nn.Parameter]) -> FlatBucket:
        """Copy the local gradients; a rank that has none contributes nothing."""
        size = sum(parameter.numel() for parameter in thawed)
        flat = torch.zeros(size + len(thawed), dtype=thawed[0].dtype, device=thawed[0].device)
        views, start = [], 0
        for k, parameter in enumerate(thawed):
            view = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            views.append(view)
            if parameter.grad is not None:
                view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                flat[size + k] = 1.0
        return cls(flat=flat, views=views, thawed=thawed)

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one vector."""
        return self.flat[: len(self.flat) - len(self.thawed)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients."""
        return list(self.thawed)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients in the shapes of their parameters."""
        return self.views

    def average(self, group: dist.ProcessGroup) -> None:
        """Average over ranks, and give each parameter its part; one that no rank has a gradient for keeps none."""
        group.allreduce([self.flat.div_(group.size())]).wait()
        has_one = self.flat[len(self.flat) - len(self.thawed) :].tolist()
        for parameter, view, count in zip(self.thawed, self.views, has_one, strict=True):
            parameter.grad = view if count else None


class ThawedGradients:
    """Finds the parameters that train now and that DDP's buckets do not hold.

    Args:
        model: the bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        # What the user told DDP to leave alone stays alone.
        ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self._unknown = {id(p): p for name, p in model.named_parameters() if name not in ignored}
        self._is_complete = False

    def seen(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take note of parameters of a bucket."""
        for parameter in parameters:
            self._unknown.pop(id(parameter), None)

    @property
    def knows_all(self) -> bool:
        """Whether every bucket was seen."""
        return self._is_complete

    def reduction_ended(self) -> None:
        """A reduction passes every bucket that there is."""
        self._is_complete = True

    @property
    def present(self) -> bool:
        """Whether a parameter trains that DDP does not know."""
        return bool(self._unknown) and any(parameter.requires_grad for parameter in self._unknown.values())

    def buckets(self) -> list[FlatBucket]:
        """Copy the local gradients of all of them, one bucket per kind of number and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self._unknown.values():
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        return [FlatBucket.of(thawed) for thawed in kinds.values()]

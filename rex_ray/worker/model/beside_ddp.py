"""What a retry must know of DDP, and how missing gradients are computed beside one whose reduction is half done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.worker.group.side_group import distributed
from rex_ray.worker.model.replicas import unwrap

__all__ = ["Arrivals", "beside_ddp", "muted", "reason_against_completion", "reason_against_passes", "with_gradient"]


def reason_against_passes(model: nn.Module) -> str | None:
    """Say why a share must be run whole, and once, or None."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm has every forward pass wait for the other ranks, which make theirs once"
    if distributed() and dist.get_world_size() > 1 and not isinstance(model, DistributedDataParallel):
        return "a sharded model has every pass wait for the other ranks, which make theirs once"
    return None


def reason_against_completion(ddp: nn.Module, missing: Sequence[nn.Parameter]) -> str | None:
    """Say why DDP could not go on with gradients that are handed over one by one, or None."""
    assert isinstance(ddp, DistributedDataParallel)
    if ddp.find_unused_parameters:
        return "find_unused_parameters has DDP count parameters that never get a gradient"
    if ddp.static_graph:
        return "static_graph has DDP count how often each gradient comes"
    if ddp.mixed_precision is not None:
        return "DDP's mixed_precision keeps other gradients than the parameters' own"
    if not missing:
        return "every gradient is on its way, so nothing would tell DDP that they are complete"
    return None


def with_gradient(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """Return the identities of those that have a gradient."""
    return frozenset(id(p) for p in parameters if p.grad is not None)


class Arrivals(AbstractContextManager[None]):
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
        """Their identities."""
        return frozenset(self._seen)

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def beside_ddp(model: nn.Module) -> Iterator[None]:
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
def muted(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
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

"""Devices that run out of memory, emulated: above so many rows a layer raises what CUDA's allocator would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Scarce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, most_rows: int) -> torch.Tensor:
        ctx.most_rows = most_rows
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        check(len(gradients[0]), ctx.most_rows)
        return gradients[0], None


class Scarce(nn.Module):
    """Passes its input on; runs out of memory above ``most_rows`` rows, forward or backward."""

    def __init__(self, where: str, most_rows: int = 2**40) -> None:
        super().__init__()
        self.where = where
        self.most_rows = most_rows
        self.rows_seen: list[int] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.rows_seen.append(len(values))
        if self.where == "forward":
            check(len(values), self.most_rows)
        return _Scarce.apply(values, self.most_rows) if self.where == "backward" else values


def check(num_rows: int, most_rows: int) -> None:
    if num_rows > most_rows:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_rows} rows")


def narrow_net(where: str, most_rows: int = 2**40, *, normalise: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Three layers with the scarce place between the first and the second; the same weights on every call."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        Scarce(where, most_rows),
        nn.BatchNorm1d(8) if normalise else nn.Identity(),
        nn.Dropout(dropout),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 1),
    ).double()


def scarce_part(net: nn.Module) -> Scarce:
    return next(module for module in net.modules() if isinstance(module, Scarce))

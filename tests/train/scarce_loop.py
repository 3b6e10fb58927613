"""A plain loop on devices of which one kind runs out of memory in its backward pass, as CUDA would say it."""

from __future__ import annotations

from typing import Any

import torch
from row_counter import RowCounter, RowIds

from rex_ray import get_session

ROWS_THAT_FIT = {"T4": 20, "V100": 2**40}
EPOCH_ROWS, BATCH = 320, 48


class _Scarce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, most_rows: int) -> torch.Tensor:
        ctx.most_rows = most_rows
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(gradients[0]) > ctx.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradients[0], None


class ScarceCounter(RowCounter):
    """Counts rows as ``RowCounter`` does, as long as they fit."""

    def __init__(self, most_rows: int) -> None:
        super().__init__(seconds_per_row=0.0)
        self.most_rows = most_rows

    def forward(self, row_ids: torch.Tensor) -> torch.Tensor:
        counted: torch.Tensor = _Scarce.apply(super().forward(row_ids), self.most_rows)
        return counted


def scarce_loop(config: dict[str, Any]) -> None:
    """Count rows for ``num_epochs``; report the fewest and the most times that a row was counted."""
    session = get_session()
    net = ScarceCounter(ROWS_THAT_FIT[session.device_kind])
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    loader = session.loader(RowIds())
    for _ in session.epochs(config["num_epochs"]):
        for row_ids in loader:
            # A row's weight falls by one for each time it is seen, in an epoch's smaller last step, too.
            optimizer.param_groups[0]["lr"] = float(session.pool_sum(len(row_ids)))
            model(row_ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = -net.weight.detach()
        session.report({"fewest": round(float(counts.min()), 9), "most": round(float(counts.max()), 9)})

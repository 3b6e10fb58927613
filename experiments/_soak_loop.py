"""The loop that ``experiments.soak`` trains for half an hour: it counts its rows, and workers slow down at times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from rex_ray import get_session

__all__ = ["BATCH", "NUM_ROWS", "slowdown", "soak_loop"]

NUM_ROWS, BATCH = 240, 24
SECONDS_PER_ROW: Mapping[str, float] = {"T4": 0.006, "V100": 0.003}
_BLOCK_STEPS = 40
_SLOW_SHARE = 0.2
_FEATURES = 16
_MANY_EPOCHS = 1_000_000


class RowIds(Dataset[int]):
    """Rows that are their own numbers."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> int:
        return index


class CountingNet(nn.Module):
    """A weight per row, which falls by one each time that the row is seen, and a small network that just trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts = nn.Parameter(torch.zeros(NUM_ROWS, dtype=torch.float64))
        self.net = nn.Sequential(nn.Linear(_FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).double()

    def forward(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return what each row adds to the loss."""
        features = torch.sin(row_ids[:, None] * torch.arange(1, _FEATURES + 1, dtype=torch.float64))
        return self.counts[row_ids] + self.net(features)[:, 0].square()


def slowdown(seed: int, rank: int, step: int) -> float:
    """Return how many times as long a step of this rank takes: a fifth of all blocks of 40 steps are slow.

    The same in every process and after every restart, so that a step that is done again is as slow as it was.
    """
    rng = np.random.default_rng([seed, rank, step // _BLOCK_STEPS])
    return float(rng.uniform(1.3, 3.0)) if rng.random() < _SLOW_SHARE else 1.0


def soak_loop(config: dict[str, Any]) -> None:
    """Train until ``config["folder"]`` holds a file ``stop``; log each step on rank 0."""
    session = get_session()
    folder = Path(config["folder"])
    model = CountingNet()
    groups = [
        {"params": [model.counts], "lr": float(BATCH)},
        {"params": model.net.parameters(), "lr": 0.01, "weight_decay": 1e-3},
    ]
    model, optimizer = session.prepare(model, torch.optim.SGD(groups))
    loader = session.loader(RowIds())
    seconds_per_row = SECONDS_PER_ROW.get(session.device_kind, 0.0)
    for epoch in session.epochs(_MANY_EPOCHS):
        for row_ids in loader:
            time.sleep(seconds_per_row * len(row_ids) * slowdown(config["seed"], session.rank, session.step))
            model(row_ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.rank == 0:
                with (folder / "steps").open("a", encoding="utf-8") as log:
                    log.write(f"{time.time():.3f} {session.step} {session.world_size} {session.generation}\n")
        counts = -session.unwrap(model).counts.detach()
        session.report({"epochs": epoch + 1, "fewest": float(counts.min()), "most": float(counts.max())})
        if session.pool(float((folder / "stop").exists()), 1.0) > 0:
            return

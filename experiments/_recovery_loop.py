"""A loop whose model shows at the end which rows it was trained on, how often and when, whatever happened meanwhile.

Under ``learning rate = global batch`` and the mean loss, ``counts[i]`` falls by one each time that row ``i`` is seen.
``trace[i]`` does so too, and shrinks a little at every step: where it ends depends on the very step that saw the row.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from rex_ray import get_session
from rex_ray.worker.data.sampler import epoch_order

__all__ = ["BATCH", "NUM_ROWS", "SECONDS_PER_ROW", "LoggedStep", "counted_loop", "logged_steps", "undisturbed"]

NUM_ROWS, BATCH = 240, 24
SECONDS_PER_ROW: Mapping[str, float] = {"T4": 0.004, "V100": 0.002}
_SHRINKS_BY = 1e-3
_MANY_EPOCHS = 100_000


class RowIds(Dataset[int]):
    """Rows that are their own numbers."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> int:
        return index


class RowCounter(nn.Module):
    """Two weights per row, see the module; takes its time in the forward pass."""

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(NUM_ROWS, dtype=torch.float64))
        self.trace = nn.Parameter(torch.zeros(NUM_ROWS, dtype=torch.float64))
        self._seconds_per_row = seconds_per_row

    def forward(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return what each row adds to the loss."""
        time.sleep(self._seconds_per_row * len(row_ids))
        return self.counts[row_ids] + self.trace[row_ids]


def counted_loop(config: dict[str, Any]) -> None:
    """Train until ``config["folder"]`` holds a file ``stop``, or for ``num_epochs``; log each step on rank 0."""
    session = get_session()
    folder = Path(config["folder"])
    counter = RowCounter(SECONDS_PER_ROW.get(session.device_kind, 0.0))
    model, optimizer = session.prepare(counter, _optimizer(counter))
    loader = session.loader(RowIds())
    for epoch in session.epochs(config.get("num_epochs", _MANY_EPOCHS)):
        for row_ids in loader:
            output = model(row_ids)
            if session.rank == 1 and (folder / "kill").exists():
                output.register_hook(lambda _: _die(folder))
            output.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.rank == 0:
                with (folder / "steps").open("a", encoding="utf-8") as log:
                    log.write(f"{time.time():.3f} {session.step} {session.world_size} {session.generation}\n")
        session.report(_metrics(counter, epoch))
        if session.pool(float((folder / "stop").exists()), 1.0) > 0:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step that was trained: when (s since 1970), which, by how many workers of which group."""

    at_s: float
    step: int
    num_workers: int
    generation: str


def logged_steps(folder: Path) -> list[LoggedStep]:
    """Return what a loop has logged so far; a line that is being written is left for the next look."""
    if not (folder / "steps").exists():
        return []
    text = (folder / "steps").read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [
        LoggedStep(at_s=float(at_s), step=int(step), num_workers=int(num_workers), generation=generation)
        for at_s, step, num_workers, generation in (line.split() for line in lines)
    ]


def undisturbed(num_epochs: int, seed: int = 0) -> dict[str, float]:
    """Return the metrics of a plain loop in this process, to which nothing happens: the same rows in the same order."""
    model = RowCounter(0.0)
    optimizer = _optimizer(model)
    for epoch in range(num_epochs):
        for row_ids in epoch_order(seed, epoch, NUM_ROWS).split(BATCH):
            model(row_ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return _metrics(model, num_epochs - 1)


def _optimizer(model: RowCounter) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [model.counts]},
        {"params": [model.trace], "weight_decay": _SHRINKS_BY / BATCH},
    ]
    return torch.optim.SGD(groups, lr=float(BATCH))


def _metrics(model: RowCounter, epoch: int) -> dict[str, float]:
    counts = (-model.counts.detach()).round(decimals=9)
    weights = torch.arange(1, NUM_ROWS + 1, dtype=torch.float64)
    return {
        "epochs": float(epoch + 1),
        "fewest": float(counts.min()),
        "most": float(counts.max()),
        "trace": float(model.trace.detach() @ weights),
    }


def _die(folder: Path) -> None:
    """Be killed in the midst of the backward pass, once."""
    (folder / "kill").rename(folder / "killed")
    os.kill(os.getpid(), signal.SIGKILL)

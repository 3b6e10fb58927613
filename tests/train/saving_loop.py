"""A loop whose worker kills itself once there is a snapshot to lose nothing by, and a disk that can be full."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch
from fsspec.implementations.local import LocalFileSystem
from row_counter import BATCH, ROWS, RowIds
from torch import nn

from rex_ray import get_session
from rex_ray.train.checkpoint_list import LIST_FILE
from rex_ray.worker.data.sampler import epoch_order

SECONDS_PER_STEP = 0.02


class Disk(LocalFileSystem):
    """A local disk that is full, or read-only, for as long as a file of that name says so.

    Ray Train's own list of checkpoints finds room: Ray writes it some time after a report, and ends the run with its
    own error where it cannot (docs/limitations.md).
    """

    cachable = False

    def __init__(self, flags: str = "", **options: Any) -> None:
        super().__init__(flags=flags, **options)
        self.flags = flags

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            for flag, code in (("full", errno.ENOSPC), ("read-only", errno.EROFS)):
                if Path(self.flags, flag).exists() and Path(path).name != LIST_FILE:
                    raise OSError(code, os.strerror(code), path)
        return super()._open(path, mode, block_size, **options)


def disk(flags: Path) -> Any:
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Disk(str(flags))))


class Weights(nn.Module):
    """A weight per row, trained towards its number; momentum mixes every step into all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

    def forward(self, row_ids: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS_PER_STEP)
        return self.weight[row_ids] - row_ids


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def undisturbed(num_epochs: int) -> float:
    """What the loop reports at its end where nothing goes wrong, by plain torch in one process."""
    model = Weights()
    optimizer = optimizer_of(model)
    for epoch in range(num_epochs):
        for row_ids in epoch_order(0, epoch, ROWS).split(BATCH):
            (model.weight[row_ids] - row_ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return score(model)


def score(model: nn.Module) -> float:
    weights = next(model.parameters()).detach()
    return float(weights @ torch.linspace(0.1, 1.0, ROWS, dtype=torch.float64))


def saving_loop(config: dict[str, Any]) -> None:
    session, flags = get_session(), Path(config["flags"])
    (flags / f"run-{session._saves._rank.snapshots._place.run}").touch()
    bare = Weights()
    model, optimizer = session.prepare(bare, optimizer_of(bare))
    loader = session.loader(RowIds())
    for epoch in session.epochs(config["num_epochs"]):
        for row_ids in loader:
            if epoch == 1 and session.rank == 1:
                _die_once_a_snapshot_is_there(session, flags)
            model(row_ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == config.get("full_at") and session.rank == 0:
            (flags / "full").touch()
        session.report({"epoch": epoch, "score": score(bare)})
        (flags / "full").unlink(missing_ok=True)


def _die_once_a_snapshot_is_there(session: Any, flags: Path) -> None:
    """Kill this process when a snapshot of this epoch is written; say how far training and the snapshot are."""
    word = flags / "killed"
    newest = max((manifest.step for manifest, _ in session._saves._rank.snapshots._place.found()), default=0)
    if not word.exists() and newest > ROWS // BATCH:
        word.write_text(json.dumps({"step": session.step, "snapshot": newest}))
        os.kill(os.getpid(), signal.SIGKILL)

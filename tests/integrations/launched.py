"""What a launcher leaves in a worker's environment, and what the libraries keep of it between two runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from scripted import ScriptedLink, opened
from torch.utils.data import Dataset

from rex_ray.worker.session import Session

SHARES = (3, 9)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids, of which a language model is asked for some: their number differs from row to row."""

    def __init__(self, num_rows: int, *, padded: bool) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, 19, (num_rows, 7), generator=draw)
        self.lengths = torch.randint(2, 8, (num_rows,), generator=draw) if padded else torch.full((num_rows,), 7)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self.ids[row].masked_fill(torch.arange(7) >= self.lengths[row], -100)
        return {"input_ids": self.ids[row], "labels": labels}


@contextlib.contextmanager
def launched(rank: int, num_ranks: int = 2, shares: Any = SHARES, **options: Any) -> Iterator[Session]:
    """Open a session with these shares as a launcher's worker has it: ranks in the environment."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with opened(ScriptedLink(shares), global_batch_size=sum(shares), **options) as session:
            yield session
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        for name in names:
            os.environ.pop(name, None)


def flat(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()

"""What a save holds.

A state is made of tensors and plain values only, so ``torch.load(weights_only=True)`` reads it. The whole position in
the data is (epoch, cursor): a group of any size can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rex_ray.core.types import Allocation
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.model.replicas import unwrap

__all__ = [
    "Prepared",
    "Stateful",
    "allocation_of",
    "lr_factor_of",
    "position_of",
    "restore_rng",
    "save_allocation",
    "save_position",
]


class Stateful(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take a state back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What ``session.prepare`` was given: the model as the user calls it, and the parts beside it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Stateful | None = None
    scaler: torch.amp.GradScaler | None = None

    def _parts(self) -> dict[str, Any]:
        bare = unwrap(self.model)
        parts = {"model": bare, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self) -> dict[str, Any]:
        """Return every part's state by name."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, state: MutableMapping[str, Any]) -> None:
        """Load every part that the state holds, and take it out: a second copy of the model is not kept."""
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state.pop(name))


def save_position(position: Position, dataset_size: int | None, seed: int) -> dict[str, Any]:
    """Return the position as plain values; an epoch's end is the next one's beginning."""
    epoch, cursor = position.epoch, position.cursor
    if dataset_size is not None and cursor >= dataset_size:
        epoch, cursor = epoch + 1, 0
    return {"epoch": epoch, "cursor": cursor, "step": position.step, "dataset_size": dataset_size, "seed": seed}


def position_of(state: Mapping[str, Any]) -> Position:
    """Return the saved position."""
    saved = state["position"]
    return Position(epoch=saved["epoch"], cursor=saved["cursor"], step=saved["step"])


def save_allocation(allocation: Allocation | None) -> dict[str, Any] | None:
    """Return the allocation as plain values."""
    if allocation is None:
        return None
    return {
        "version": allocation.version,
        "local_batch_sizes": list(allocation.local_batch_sizes),
        "lr_factor": allocation.lr_factor,
    }


def allocation_of(state: Mapping[str, Any]) -> Allocation | None:
    """Return the saved allocation."""
    saved = state.get("allocation")
    if saved is None:
        return None
    return Allocation(
        version=saved["version"], local_batch_sizes=tuple(saved["local_batch_sizes"]), lr_factor=saved["lr_factor"]
    )


def lr_factor_of(state: Mapping[str, Any]) -> float:
    """Return what the learning rate was multiplied by last, on its way to the allocation's factor perhaps."""
    allocation = allocation_of(state)
    reached: float = state.get("lr_factor", 1.0 if allocation is None else allocation.lr_factor)
    return reached


def restore_rng(saved: Mapping[str, Any], rank: int, num_ranks: int) -> None:
    """Take this rank's generator states back, if the group is as large as it was.

    In a group of another size ranks keep their fresh generators: two ranks with one state would draw the same
    dropout masks.
    """
    cpu, cuda = saved["cpu"], saved.get("cuda")
    if len(cpu) != num_ranks:
        return
    # Copies: torch reads a generator's state from the start of its storage, and a row is a view into the middle.
    torch.set_rng_state(cpu[rank].cpu().clone())
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda[rank].cpu().clone())

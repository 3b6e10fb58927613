"""What a save holds.

A state is made of tensors and plain values only, so ``torch.load(weights_only=True)`` reads it. The whole position in
the data is (epoch, cursor): a group of any size can go on from it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import Allocation
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.model.replicas import is_sharded, unwrap
from rex_ray.worker.saving.overruled import in_words, refuse_other_kind, settings_of
from rex_ray.worker.saving.sharded_state import ShardedModel, ShardedOptimizer
from rex_ray.worker.user_warning import warn

__all__ = [
    "Prepared",
    "Stateful",
    "allocation_of",
    "check_same_data",
    "load_part",
    "lr_factor_of",
    "position_of",
    "restore_rng",
    "save_allocation",
    "save_position",
    "tell_other_batch",
]

_MOST_SAID = 300


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

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the model and the optimizer, and rank 0's state is the whole."""
        return is_sharded(unwrap(self.model))

    def _parts(self) -> dict[str, Any]:
        bare: Any = unwrap(self.model)
        optimizer: Any = self.optimizer
        if is_sharded(bare):
            bare, optimizer = ShardedModel(bare), ShardedOptimizer(bare, optimizer)
        parts = {"model": bare, "optimizer": optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self) -> dict[str, Any]:
        """Return every part's state by name."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, state: MutableMapping[str, Any]) -> None:
        """Load every part that the state holds, and take it out: a second copy of the model is not kept.

        Raises:
            ConfigError: a part does not take what was saved of it.
        """
        rate_moves = "scheduler" in state or any(_is_schedule(part) for part in state.get("registered", {}).values())
        for name, part in self._parts().items():
            if name in state:
                load_part(name, part, state.pop(name), rate_moves=rate_moves)


def _is_schedule(saved: Any) -> bool:
    """Whether a registered part was one of ``session.prepare_scheduler``."""
    return isinstance(saved, Mapping) and isinstance(saved.get("scheduler"), Mapping)


def load_part(name: str, part: Stateful, saved: Any, *, rate_moves: bool = False) -> None:
    """Give a part its state back; say which settings of an optimizer or a schedule that leaves without effect.

    Args:
        name: what it is called.
        part: takes the state.
        saved: the state.
        rate_moves: a schedule was saved, too.

    Raises:
        ConfigError: it does not take it.
    """
    given, then = settings_of(part), settings_of(part, saved, rate_moves=rate_moves)
    refuse_other_kind(name, part, given, then)
    try:
        part.load_state_dict(saved)
    except Exception as error:
        said = " ".join(str(error).split())[:_MOST_SAID]
        raise ConfigError(
            f"the {name} does not take what the save holds of it ({type(error).__name__}: {said}); resume with the "
            "code that made the save, or give the run another name to begin anew"
        ) from error
    if (told := in_words(name, given, then)) is not None:
        warn(told)


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


def check_same_data(state: Mapping[str, Any], position: Position, num_rows: int | None, *, asked_seed: int) -> None:
    """Refuse to resume in other data: a cursor means nothing there.

    Args:
        state: what was saved.
        position: where training stands, before the save's place in the data is used.
        num_rows: of the training set; None: it is a stream.
        asked_seed: the user's; the saved one counts, and another one is warned of.

    Raises:
        ConfigError: the training set has another size than the saved one, or is of another kind.
    """
    saved, seed = state["position"]["dataset_size"], state["position"]["seed"]
    began = saved is not None or position.cursor > 0
    if began and saved != num_rows:
        then = "streams" if saved is None else f"a training set of {saved} rows"
        now = "streams" if num_rows is None else f"{num_rows} rows"
        raise ConfigError(
            f"the save was made with {then} and this one has {now}; resume with the same data, or start a new run"
        )
    if seed != asked_seed:
        warn(f"seed={asked_seed} is without effect: the resumed run's orders are drawn from {seed}")


def save_allocation(allocation: Allocation | None, devices: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the allocation as plain values, with the kind of device that each of its shares is for."""
    if allocation is None:
        return None
    return {
        "version": allocation.version,
        "local_batch_sizes": list(allocation.local_batch_sizes),
        "lr_factor": allocation.lr_factor,
        "devices": list(devices),
    }


def allocation_of(state: Mapping[str, Any], devices: Sequence[str] | None = None) -> Allocation | None:
    """Return the saved allocation.

    Args:
        state: what was saved.
        devices: kind of device of each present rank: shares go to the kinds that they were for, since Ray may give
            rank ``i`` another node than last time; None: as they were saved.
    """
    saved = state.get("allocation")
    if saved is None:
        return None
    shares = tuple(saved["local_batch_sizes"])
    if devices is not None and (before := saved.get("devices")):
        shares = shares_by_kind(shares, before, devices)
    return Allocation(version=saved["version"], local_batch_sizes=shares, lr_factor=saved["lr_factor"])


def shares_by_kind(shares: tuple[int, ...], before: Sequence[str], now: Sequence[str]) -> tuple[int, ...]:
    """Return shares of the kinds ``before``, in the order of the kinds ``now``.

    For other kinds, or other numbers of them, they are no shares at all: what is kept is their sum, as one number.
    """
    if sorted(before) != sorted(now):
        return (sum(shares),)
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for kind, share in zip(before, shares, strict=True):
        waiting[kind].append(share)
    return tuple(waiting[kind].popleft() for kind in now)


def tell_other_batch(state: Mapping[str, Any], reference_batch: int, resumed: Allocation | None) -> None:
    """Warn where the run began with another batch than it is asked for now: its rows come back with the save.

    Args:
        state: what was saved.
        reference_batch: rows per step that the script asks for.
        resumed: the saved allocation.
    """
    began = state.get("reference_batch")
    if began is not None and began != reference_batch and resumed is not None:
        warn(
            f"global_batch_size={reference_batch} differs from the {began} rows that this run began with: it goes on "
            f"with the {resumed.global_batch_size} rows of its save, and its schedules count steps of "
            f"{reference_batch} rows from here on; give the run another name to begin anew"
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

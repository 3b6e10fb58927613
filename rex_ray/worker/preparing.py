"""Tells what a loop gives ``session.prepare`` apart by kind, and prepares each part in the order that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.model.replicas import unwrap
from rex_ray.worker.model.scheduling import ReferenceScheduler
from rex_ray.worker.parts import Parts
from rex_ray.worker.saving.state import Prepared, restore_rng
from rex_ray.worker.user_warning import warn

__all__ = ["prepare_model", "prepare_parts"]

PrepareModel = Callable[[nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler | None], tuple[Any, ...]]


class Preparing(Protocol):
    """The calls of a session that prepare something."""

    def loader(self, dataset: Any) -> Any:
        """Return a training loader."""
        ...

    def eval_loader(self, dataset: Any) -> Any:
        """Return a loader to evaluate with."""
        ...

    def prepare_scheduler(self, scheduler: Any, *, name: str) -> Any:
        """Return a schedule that ends where it should."""
        ...


def prepare_parts(parts: Sequence[Any], prepare_model: PrepareModel, session: Preparing) -> tuple[Any, ...]:
    """Prepare each part; return what came of them in the order in which they were given.

    Args:
        parts: one model, one optimizer, and any number of schedulers and DataLoaders, a gradient scaler.
        prepare_model: given model, optimizer, scheduler and scaler, returns those that are there, prepared.
        session: prepares the rest.

    Raises:
        ConfigError: no model or optimizer, several, or something else.
    """
    kinds = [_kind(part) for part in parts]
    model, optimizer = _one(parts, kinds, "model"), _one(parts, kinds, "optimizer")
    if kinds.count("scaler") > 1:
        raise ConfigError("session.prepare takes one gradient scaler, the prepared optimizer's; got several")
    schedulers, loaders = _numbers(kinds, "scheduler"), _numbers(kinds, "loader")
    first = {"scheduler": schedulers[:1], "scaler": _numbers(kinds, "scaler")}
    beside = {kind: parts[numbers[0]] if numbers else None for kind, numbers in first.items()}
    prepared = dict(enumerate(parts))
    done = prepare_model(parts[model], parts[optimizer], beside["scheduler"], beside["scaler"])
    prepared |= zip((model, optimizer, *first["scheduler"], *first["scaler"]), done, strict=True)
    # The model first: the group joins the controller with its training loader, and tells it of model and optimizer.
    for k, number in enumerate(loaders):
        prepared[number] = (session.eval_loader if k else session.loader)(parts[number])
    for k, number in enumerate(schedulers[1:], start=2):
        prepared[number] = session.prepare_scheduler(parts[number], name=f"scheduler_{k}")
    return tuple(prepared[number] for number in range(len(parts)))


def prepare_model(
    parts: Parts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    scaler: torch.amp.GradScaler | None,
) -> tuple[Any, ...]:
    """Make a model train on all ranks, and have it saved; load what a save holds of it and of what steps it.

    Returns:
        What was given, in the same order, without what is None.
    """
    if scheduler is not None:
        scheduler = ReferenceScheduler(scheduler, parts.tracker)
    prepared = Prepared(model=unwrap(model), optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    joined, restored = parts.feed.joined, parts.met.restored
    trained = parts.model_side.prepare(model, prepared, restored, optimizer_known=not joined)
    parts.collector.prepare(prepared)
    parts.schedule.optimizer = optimizer
    if prepared.is_sharded:
        parts.saves.rely_on_rank_0()
    if joined:
        _warn_of_late_prepare(parts.model_side.normalises_over_rows, parts.model_side.optimizer_family)
    if restored is not None:
        restore_rng(restored["rng"], parts.met.values.rank, parts.met.values.size)
    return (trained, optimizer, *(part for part in (scheduler, scaler) if part is not None))


def _warn_of_late_prepare(normalises_over_rows: bool, optimizer: OptimizerFamily) -> None:
    """Say what the controller was not told, since the group joined it with the loader."""
    unknown = []
    if normalises_over_rows:
        unknown.append("that the model normalises over rows, and may give a worker a single one")
    if optimizer != "sgd":
        unknown.append("that the optimizer is of Adam's kind, and has the learning rate follow the batch as SGD's")
    if unknown:
        warn(
            "session.loader was called before session.prepare, so the controller does not know "
            f"{', nor '.join(unknown)}; call prepare first (a scheduler that needs len(loader) is given to "
            "session.prepare_scheduler afterwards)"
        )


def _kind(part: object) -> str:
    if isinstance(part, nn.Module):
        return "model"
    if isinstance(part, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(part, torch.amp.GradScaler):
        return "scaler"
    if isinstance(part, DataLoader):
        return "loader"
    if hasattr(part, "step") and hasattr(part, "state_dict"):
        return "scheduler"
    if isinstance(part, (list, tuple)) and part and all(isinstance(each, torch.optim.Optimizer) for each in part):
        raise ConfigError(_ONE_OPTIMIZER.format(f"a {type(part).__name__}"))
    raise ConfigError(
        f"session.prepare takes one nn.Module, its optimizer, schedulers, a gradient scaler and DataLoaders, got a "
        f"{type(part).__name__}; a data set is given to session.loader or session.eval_loader"
    )


_ONE_OPTIMIZER = (
    "session.prepare takes one optimizer, got {}: give the one whose learning rate follows the global batch, and have "
    "others saved with session.register(name=optimizer)"
)


def _one(parts: Sequence[Any], kinds: Sequence[str], kind: str) -> int:
    found = _numbers(kinds, kind)
    if len(found) == 1:
        return found[0]
    if kind == "optimizer" and found:
        raise ConfigError(_ONE_OPTIMIZER.format(str(len(found))))
    given = ", ".join(type(part).__name__ for part in parts) or "nothing"
    what = "an nn.Module and its optimizer" if not found else "one model; put several networks into one nn.Module"
    raise ConfigError(f"session.prepare takes {what}; got {given}")


def _numbers(kinds: Sequence[str], kind: str) -> list[int]:
    return [number for number, each in enumerate(kinds) if each == kind]

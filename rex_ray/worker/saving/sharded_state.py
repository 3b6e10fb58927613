"""A sharded model's state, whole: what a save holds of it does not depend on how many ranks there were.

Every rank must take part in each call, since each holds a part. The whole is collected on the host of rank 0, which
writes it; the others get an empty state. To load, every rank is given the whole, and keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["ShardedModel", "ShardedOptimizer"]


class ShardedModel:
    """The parameters and buffers of a model that ``fully_shard`` divided.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors on rank 0."""
        whole = _whole()
        collected: dict[str, Any] = whole.get_model_state_dict(self._model, options=_to_host(whole))
        return collected

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take whole tensors."""
        whole = _whole()
        options = whole.StateDictOptions(full_state_dict=True)
        whole.set_model_state_dict(self._model, dict(state_dict), options=options)


class ShardedOptimizer:
    """The state of an optimizer of a sharded model; it names parameters as the model does.

    Args:
        model: whose parameters it steps.
        optimizer: the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors on rank 0."""
        whole = _whole()
        collected: dict[str, Any] = whole.get_optimizer_state_dict(
            self._model, self._optimizer, options=_to_host(whole)
        )
        return collected

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take whole tensors."""
        whole = _whole()
        options = whole.StateDictOptions(full_state_dict=True)
        whole.set_optimizer_state_dict(self._model, self._optimizer, dict(state_dict), options=options)


def _whole() -> Any:
    from torch.distributed.checkpoint import state_dict  # noqa: PLC0415 - costs time, and only who shards needs it

    return state_dict


def _to_host(whole: Any) -> Any:
    return whole.StateDictOptions(full_state_dict=True, cpu_offload=True)

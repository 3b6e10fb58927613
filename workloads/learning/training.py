"""One optimizer step after the other, as ranks that share a batch would take them together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rex_ray.worker.data.sampler import epoch_order
from workloads.learning.recipe import Recipe, Task

__all__ = ["CHUNK_ROWS", "ChunkNorms", "Place", "State", "Training"]

CHUNK_ROWS = 32
"""Rows whose mean gradient is measured as one group."""

_MOMENTUM = 0.9

State: TypeAlias = Mapping[str, npt.NDArray[np.float32]]
"""Parameters and momentum, each as one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where training stands.

    Attributes:
        epoch: from 0.
        cursor: rows of this epoch that were consumed.
        step: optimizer steps taken.
        num_rows: rows consumed in all.
    """

    epoch: int = 0
    cursor: int = 0
    step: int = 0
    num_rows: int = 0

    def after(self, num_rows: int, dataset_size: int) -> Place:
        """Return the place after a step of so many rows; no step crosses an epoch's end."""
        ends = self.cursor + num_rows >= dataset_size
        return Place(
            epoch=self.epoch + ends,
            cursor=0 if ends else self.cursor + num_rows,
            step=self.step + 1,
            num_rows=self.num_rows + num_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkNorms:
    """Gradient norms of one step.

    Attributes:
        sq_norms: ``|g|^2`` of each chunk's mean gradient, in the order of rows; the last chunk may be smaller.
        global_sq_norm: ``|g|^2`` of the step's.
    """

    sq_norms: npt.NDArray[np.float32]
    global_sq_norm: float


class Training:
    """A model in training.

    A step's gradient is the mean over its rows, summed from chunks of ``CHUNK_ROWS`` in their order: the same numbers
    in the same order however the batch is split. The learning rate ticks as ``session.prepare_scheduler`` has it:
    once for each reference batch of rows that was begun.

    Args:
        task: what is trained on.
        seed: of weights, order and augmentation.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.place = Place()
        self._task, self._seed = task, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_hashed(f"weights/{seed}"))
            self.model = task.make_model()
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        recipe = task.recipe
        self._optimizer = torch.optim.SGD(
            self._parameters, lr=recipe.learning_rate, momentum=_MOMENTUM, weight_decay=recipe.weight_decay
        )
        for parameter in self._parameters:
            self._optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._order: tuple[int, Tensor] | None = None
        self._pending: tuple[int, ChunkNorms] | None = None

    def gradient(self, num_rows: int) -> ChunkNorms:
        """Compute the gradient of the next step; asking again for the same rows costs nothing."""
        if self._pending is None or self._pending[0] != num_rows:
            self._pending = (num_rows, self._backward(num_rows))
        return self._pending[1]

    def step(self, num_rows: int, lr_factor: float) -> ChunkNorms:
        """Take one optimizer step of the next rows, its learning rate multiplied as a live run would."""
        norms = self.gradient(num_rows)
        recipe, place = self._task.recipe, self.place
        if recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, recipe.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = scheduled_rate(recipe, place, self._task.dataset_size) * lr_factor
        self._optimizer.step()
        self._pending = None
        self.place = place.after(num_rows, self._task.dataset_size)
        return norms

    def evaluate(self) -> float:
        """Return the metric on the test set."""
        self.model.eval()
        metric = self._task.evaluate(self.model)
        self.model.train()
        return metric

    def state(self) -> State:
        """Return a copy of all that the steps so far have made."""
        momentum = [self._optimizer.state[parameter]["momentum_buffer"] for parameter in self._parameters]
        return {"parameters": _joined(self._parameters), "momentum": _joined(momentum)}

    def restore(self, state: State, place: Place) -> None:
        """Go on from a state that was taken at ``place``."""
        momentum = [self._optimizer.state[parameter]["momentum_buffer"] for parameter in self._parameters]
        with torch.no_grad():
            for tensors, values in ((self._parameters, state["parameters"]), (momentum, state["momentum"])):
                start = 0
                for tensor in tensors:
                    part = torch.from_numpy(values[start : start + tensor.numel()])
                    tensor.copy_(part.view(tensor.shape))
                    start += tensor.numel()
        self._pending = None
        self.place = place

    def next_rows(self, num_rows: int) -> Tensor:
        """Return the rows that the next step takes, in the order that a live run has them in."""
        place = self.place
        if self._order is None or self._order[0] != place.epoch:
            self._order = (place.epoch, epoch_order(self._seed, place.epoch, self._task.dataset_size))
        return self._order[1][place.cursor : place.cursor + num_rows]

    def _backward(self, num_rows: int) -> ChunkNorms:
        inputs, targets = self._task.batch(self._seed, self.place.epoch, self.next_rows(num_rows))
        sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        sq_norms = []
        for start in range(0, num_rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            loss = self._task.loss(self.model, inputs[part], targets[part])
            grads = torch.autograd.grad(loss, self._parameters)
            sq_norms.append(_sq_norm(grads))
            weight = min(CHUNK_ROWS, num_rows - start) / num_rows
            torch._foreach_add_(sums, grads, alpha=weight)
        for parameter, mean in zip(self._parameters, sums, strict=True):
            parameter.grad = mean
        return ChunkNorms(sq_norms=torch.stack(sq_norms).numpy(), global_sq_norm=float(_sq_norm(sums)))


def scheduled_rate(recipe: Recipe, place: Place, dataset_size: int) -> float:
    """Return the learning rate of the step at ``place``, without any factor of the global batch."""
    per_epoch = -(-dataset_size // recipe.reference_batch_size)
    ticks = place.epoch * per_epoch - (-place.cursor // recipe.reference_batch_size)
    warm_up, total = recipe.warm_up_epochs * per_epoch, recipe.num_epochs * per_epoch
    if ticks < warm_up:
        return recipe.learning_rate * (ticks + 1) / (warm_up + 1)
    return recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (ticks - warm_up) / (total - warm_up)))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _joined(tensors: Sequence[Tensor]) -> npt.NDArray[np.float32]:
    joined: npt.NDArray[np.float32] = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
    return joined


def _sq_norm(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()

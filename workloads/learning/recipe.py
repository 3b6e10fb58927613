"""What a task is, to those who train on it: rows, a model, a loss, a metric, and a recipe that suits them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor, nn

__all__ = ["Recipe", "Task", "fingerprint_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a task is trained; what was swept for it, ``workloads.learning.pilot`` reproduces.

    Attributes:
        num_epochs: passes over the data; the schedule of the learning rate ends with the last.
        reference_batch_size: ``M0`` that the learning rate was tuned for.
        learning_rate: at ``M0``, at the top of the schedule.
        warm_up_epochs: the rate rises in a line for so long, then falls along a cosine to 0.
        weight_decay: of every parameter.
        max_grad_norm: longer gradients are cut to this length after their norms were taken; None: none is.
        target: the metric that counts as trained.
        higher_is_better: whether the metric is to rise.
        evaluations_per_epoch: passes over the test set in each epoch, at equal distances in rows.
    """

    num_epochs: int
    reference_batch_size: int
    learning_rate: float
    warm_up_epochs: float = 0.0
    weight_decay: float = 5e-4
    max_grad_norm: float | None = None
    target: float
    higher_is_better: bool = True
    evaluations_per_epoch: int = 2


class Task(Protocol):
    """Data and model of one task. Everything is a pure function of its arguments and the data."""

    name: str
    recipe: Recipe
    dataset_size: int
    fingerprint: str
    """Digest of the data and of what is made of them: equal ones train alike."""

    def with_recipe(self, recipe: Recipe) -> Task:
        """Return the same task, trained otherwise."""
        ...

    def make_model(self) -> nn.Module:
        """Return a model with fresh weights, from torch's generator."""
        ...

    def batch(self, seed: int, epoch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these rows, as augmented in this epoch."""
        ...

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, its mean over rows."""
        ...

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric on the whole test set."""
        ...


def fingerprint_of(name: str, recipe: Recipe, *made_by: object, data: Iterable[npt.NDArray[Any]]) -> str:
    """Return the digest of a task.

    Args:
        name: of the task.
        recipe: how it is trained; its target ends nothing and changes nothing but what is said of a way.
        made_by: what else decides on how it trains, the model at last; each with a telling ``repr``.
        data: every array that is trained on or judged by.
    """
    digest = hashlib.sha256(repr((name, replace(recipe, target=0.0), *made_by)).encode())
    for array in data:
        digest.update(array.tobytes())
    return digest.hexdigest()

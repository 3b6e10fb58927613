"""A way through training, step by step: what the gradients' norms were, and how good the model had become."""

from __future__ import annotations

from typing import Protocol

from workloads.learning.recipe import Recipe, Task
from workloads.learning.training import ChunkNorms, Place, Training

__all__ = ["TrainedPath", "WayThrough", "is_evaluated"]


class WayThrough(Protocol):
    """One model's way. Each step: first its norms if they are wanted, then the step."""

    @property
    def place(self) -> Place:
        """Where it stands."""
        ...

    def norms(self, num_rows: int) -> ChunkNorms:
        """Return the norms of the next step, were it of so many rows."""
        ...

    def step(self, num_rows: int, lr_factor: float) -> tuple[ChunkNorms, float | None]:
        """Take it; return its norms, and the metric after it where one is due."""
        ...

    def save(self) -> None:
        """Keep what is not kept yet, if anything ever is."""
        ...


def is_evaluated(recipe: Recipe, before: Place, after: Place, dataset_size: int) -> bool:
    """Whether the metric is due after a step: at the first one beyond each equal part of an epoch's rows."""
    parts = recipe.evaluations_per_epoch
    return after.num_rows * parts // dataset_size > before.num_rows * parts // dataset_size


class TrainedPath:
    """The way as it is trained, nothing kept.

    Args:
        task: what is trained on.
        seed: of weights, order and augmentation.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._training = Training(task, seed)

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self._training.place

    def norms(self, num_rows: int) -> ChunkNorms:
        """Return the norms of the next step."""
        return self._training.gradient(num_rows)

    def step(self, num_rows: int, lr_factor: float) -> tuple[ChunkNorms, float | None]:
        """Take it."""
        before = self.place
        norms = self._training.step(num_rows, lr_factor)
        due = is_evaluated(self._task.recipe, before, self.place, self._task.dataset_size)
        return norms, self._training.evaluate() if due else None

    def save(self) -> None:
        """Nothing is kept."""

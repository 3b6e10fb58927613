"""A way through training, step by step: what the gradients' norms were, and how good the model had become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workloads.learning.recipe import Recipe, Task
from workloads.learning.store import PathStore, Run
from workloads.learning.training import ChunkNorms, Place, State, Training

__all__ = ["KeptPath", "TrainedPath", "WayThrough", "is_evaluated"]


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


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """The run in hand.

    Attributes:
        node: where it begins.
        num_rows: of each step.
        lr_factor: of each step.
        run: what is known of it.
        num_kept: steps of it that are on disk.
        num_taken: steps of it that were taken.
    """

    node: str
    num_rows: int
    lr_factor: float
    run: Run
    num_kept: int
    num_taken: int = 0


class KeptPath:
    """A way of which as much is read as was ever trained, and the rest is trained and kept.

    Where it leaves all known ways, training goes on from the nearest kept state before, through the steps between.

    Args:
        task: what is trained on.
        seed: of weights, order and augmentation.
        store: of this task and seed.
    """

    def __init__(self, task: Task, seed: int, store: PathStore) -> None:
        self._task, self._seed, self._store = task, seed, store
        self._node = store.root
        self._stretch: _Stretch | None = None
        self._place = Place()
        self._schedule: list[tuple[int, float]] = []
        self._training: Training | None = None
        self._kept: tuple[Place, State | None] = (Place(), None)

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self._place

    def norms(self, num_rows: int) -> ChunkNorms:
        """Return the norms of the next step."""
        stretch = self._stretch
        if stretch is not None and stretch.num_rows == num_rows and stretch.num_taken < len(stretch.run.norms):
            return stretch.run.norms[stretch.num_taken]
        if not self._is_trained_to_here:
            known = self._store.first_norms(self._here(), num_rows)
            if known is not None:
                return known
        return self._trained_to_here().gradient(num_rows)

    def step(self, num_rows: int, lr_factor: float) -> tuple[ChunkNorms, float | None]:
        """Take it."""
        stretch = self._stretch
        if stretch is None or (num_rows, lr_factor) != (stretch.num_rows, stretch.lr_factor) or not self._place.cursor:
            self._close()
            stretch = self._open(num_rows, lr_factor)
        run, at = stretch.run, stretch.num_taken
        if at == len(run.norms):
            self._train(run, num_rows, lr_factor)
        stretch.num_taken += 1
        self._schedule.append((num_rows, lr_factor))
        self._place = self._place.after(num_rows, self._task.dataset_size)
        return run.norms[at], run.metrics.get(at + 1)

    def save(self) -> None:
        """Keep the run in hand as far as it went."""
        stretch = self._stretch
        if stretch is not None and len(stretch.run.norms) > stretch.num_kept:
            self._store.write(stretch.node, stretch.num_rows, stretch.lr_factor, stretch.run)
            stretch.num_kept = len(stretch.run.norms)

    @property
    def _is_trained_to_here(self) -> bool:
        return self._training is not None and self._training.place == self._place

    def _here(self) -> str:
        stretch = self._stretch
        if stretch is None:
            return self._node
        return self._store.after(stretch.node, stretch.num_rows, stretch.lr_factor, stretch.num_taken)

    def _close(self) -> None:
        self.save()
        self._node, self._stretch = self._here(), None

    def _open(self, num_rows: int, lr_factor: float) -> _Stretch:
        run = self._store.read(self._node, num_rows, lr_factor)
        num_kept = 0 if run is None else len(run.norms)
        if run is None:
            run = Run(state=self._trained_to_here().state() if self._is_state_due else None)
        if run.state is not None:
            self._kept = (self._place, run.state)
        self._stretch = _Stretch(node=self._node, num_rows=num_rows, lr_factor=lr_factor, run=run, num_kept=num_kept)
        return self._stretch

    @property
    def _is_state_due(self) -> bool:
        """A state is kept at each epoch's begin: more would fill disks, fewer make a way that is left dear."""
        return self._place.cursor == 0 < self._place.num_rows

    def _train(self, run: Run, num_rows: int, lr_factor: float) -> None:
        training = self._trained_to_here()
        before = training.place
        run.norms.append(training.step(num_rows, lr_factor))
        if is_evaluated(self._task.recipe, before, training.place, self._task.dataset_size):
            run.metrics[len(run.norms)] = training.evaluate()

    def _trained_to_here(self) -> Training:
        if self._training is None:
            self._training = Training(self._task, self._seed)
        training, (place, state) = self._training, self._kept
        if state is not None and training.place.step < place.step:
            training.restore(state, place)
        for num_rows, lr_factor in self._schedule[training.place.step :]:
            training.step(num_rows, lr_factor)
        return training

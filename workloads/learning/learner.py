"""Real SGD behind the seam of ``sim``: norms for the controller, progress by optimizer steps, accuracy on real data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rex_ray.core.errors import ConfigError
from rex_ray.core.noise_scale import moments_of_sums
from rex_ray.core.types import read_only
from rex_ray.sim.seams import StepNorms
from workloads.learning.path import KeptPath, TrainedPath, WayThrough
from workloads.learning.recipe import Task
from workloads.learning.store import PathStore
from workloads.learning.tasks import load_task
from workloads.learning.training import CHUNK_ROWS, ChunkNorms

__all__ = ["Evaluation", "SgdLearner", "learner_of", "make_learner"]

# Raised when the code of a step changes what comes of it: paths that were kept before are not read any more.
_LAW = 1

# The noise scale that the oracle is told remembers about so many rows' steps; fewer groups than these say nothing.
_MEMORY_ROWS = 16384
_FEWEST_GROUPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The metric on the whole test set.

    Attributes:
        num_steps: optimizer steps before it.
        num_rows: rows before it.
        metric: fraction correct, or perplexity.
    """

    num_steps: int
    num_rows: int
    metric: float


class SgdLearner:
    """A ``sim.Learner`` that trains a model.

    Gradients are measured on chunks of ``CHUNK_ROWS`` rows of the step's order, whatever the shares: a chunk belongs to
    the rank that has its first row, so that sum and number of groups do not depend on the split, and a rank may have
    none. These are more groups than a live run without micro-batches sees, one per rank, and so a less noisy estimate
    of the noise scale: eight groups at 256 rows, 64 at 2,048.

    Args:
        task: what is trained on.
        path: its way.

    Attributes:
        evaluations: so far, in order.
    """

    def __init__(self, task: Task, path: WayThrough) -> None:
        self._task, self._path = task, path
        self.evaluations: list[Evaluation] = []
        self._noise = self._signal = self._groups = 0.0

    @property
    def dataset_size(self) -> int:
        """Rows per epoch."""
        return self._task.dataset_size

    @property
    def num_epochs(self) -> int:
        """Epochs that end training."""
        return self._task.recipe.num_epochs

    @property
    def reference_batch_size(self) -> int:
        """``M0``: the batch that the learning rate is meant for."""
        return self._task.recipe.reference_batch_size

    @property
    def target(self) -> float:
        """The metric that counts as trained."""
        return self._task.recipe.target

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric is to rise."""
        return self._task.recipe.higher_is_better

    @property
    def is_done(self) -> bool:
        """Whether the epochs are used up."""
        return self._path.place.epoch >= self.num_epochs

    @property
    def num_rows_left(self) -> int:
        """Rows of this epoch that are not consumed yet: no step may take more."""
        return self.dataset_size - self._path.place.cursor

    @property
    def noise_scale(self) -> float | None:
        """``phi`` in rows, from all chunks of the last 16,384 rows or so; None while too few are known."""
        if self._groups < _FEWEST_GROUPS:
            return None
        return self._noise / self._signal if self._signal > 0 else math.inf

    @property
    def final_metric(self) -> float | None:
        """The newest metric; None before the first."""
        return self.evaluations[-1].metric if self.evaluations else None

    def steps_to_target(self) -> int | None:
        """Return the steps after which the metric first reached the target; None while it has not."""
        return next((found.num_steps for found in self.evaluations if self.is_good(found.metric)), None)

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms:
        """Return the norms of a step by rank."""
        del step  # it is the next one
        return by_rank(self._path.norms(sum(num_rows)), num_rows)

    def advance(self, num_rows: int, lr_factor: float) -> None:
        """Take one optimizer step.

        Raises:
            ConfigError: more rows than the epoch has left.
        """
        if not 0 < num_rows <= self.num_rows_left:
            raise ConfigError(f"a step of {num_rows} rows does not fit an epoch with {self.num_rows_left} left")
        norms, metric = self._path.step(num_rows, lr_factor)
        self._remember(norms, num_rows)
        if metric is not None:
            place = self._path.place
            self.evaluations.append(Evaluation(num_steps=place.step, num_rows=place.num_rows, metric=metric))
        if self.is_done:
            self._path.save()

    def save(self) -> None:
        """Keep the way so far, where there is a cache; at the end of training this is done anyway."""
        self._path.save()

    def is_good(self, metric: float) -> bool:
        """Whether a metric is as good as the target."""
        return metric >= self.target if self.higher_is_better else metric <= self.target

    def _remember(self, norms: ChunkNorms, num_rows: int) -> None:
        """Pool the moments of every step, each as many times as it has rows, older ones counting less."""
        if norms.sq_norms.size < 2:
            return
        weighted = float(_rows_of_chunks(num_rows) @ norms.sq_norms)
        noise, signal = moments_of_sums(weighted, norms.sq_norms.size, num_rows, norms.global_sq_norm)
        kept = math.exp(-num_rows / _MEMORY_ROWS)
        self._noise = self._noise * kept + num_rows * float(noise)
        self._signal = self._signal * kept + num_rows * float(signal)
        self._groups += norms.sq_norms.size


def by_rank(norms: ChunkNorms, num_rows: Sequence[int]) -> StepNorms:
    """Give each chunk to the rank that has its first row."""
    chunk_rows = _rows_of_chunks(sum(num_rows))
    firsts = np.arange(chunk_rows.size) * CHUNK_ROWS
    owner = np.searchsorted(np.cumsum(num_rows), firsts, side="right")
    weighted = np.bincount(owner, weights=chunk_rows * norms.sq_norms, minlength=len(num_rows))
    return StepNorms(
        weighted_sq_norm=read_only(weighted, np.float64),
        num_groups=read_only(np.bincount(owner, minlength=len(num_rows)), np.int64),
        global_sq_norm=norms.global_sq_norm,
    )


def make_learner(
    task: str,
    *,
    seed: int,
    reference_batch_size: int | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> SgdLearner:
    """Return a learner that has not begun.

    It computes on one thread, which is set for the whole process: only so are equal seeds equal bytes.

    Args:
        task: see ``task_names``.
        seed: of weights, order of rows and augmentation.
        reference_batch_size: the user's ``M0``: a learning-rate factor of 1 is right for it; default the recipe's. At
            another one the recipe's learning rate is kept, as a user's would be.
        data_dir: where the task's files are; default: see ``tasks``.
        cache_dir: where paths are kept that were trained once; None: nowhere.

    Raises:
        ConfigError: no such task, no such files, or no such batch.
    """
    loaded = load_task(task, data_dir)
    reference = loaded.recipe.reference_batch_size if reference_batch_size is None else reference_batch_size
    if not 0 < reference <= loaded.dataset_size:
        raise ConfigError(f"a reference batch of {reference} rows does not fit {loaded.dataset_size} rows of {task}")
    return learner_of(loaded, seed=seed, cache_dir=cache_dir)


def learner_of(task: Task, *, seed: int, cache_dir: Path | None = None) -> SgdLearner:
    """Return a learner of a task that is at hand; see ``make_learner``."""
    torch.set_num_threads(1)
    if cache_dir is None:
        return SgdLearner(task, TrainedPath(task, seed))
    # Sums are taken in the order that torch and the processor's instructions have them in.
    identity = f"{_LAW}/{task.fingerprint}/{seed}/{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}"
    return SgdLearner(task, KeptPath(task, seed, PathStore(cache_dir, identity)))


def _rows_of_chunks(num_rows: int) -> np.typing.NDArray[np.int64]:
    count = -(-num_rows // CHUNK_ROWS)
    rows = np.full(count, CHUNK_ROWS)
    rows[-1] = num_rows - CHUNK_ROWS * (count - 1)
    return rows

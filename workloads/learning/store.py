"""Ways through training on disk: runs of equal steps, each filed under all that came before it.

A *run* is a stretch of steps of equal rows and learning-rate factor within an epoch. Its file lies in a folder that is
named after a digest of every step before it, so two schedules share what they have in common and no more. A run that
was once left early and once went on is one file, the longer; what follows is filed under the length that was taken.

Files are plain arrays (npz, no pickle), written whole or not at all: two processes may train the same way at once, and
what either writes is what the other would have.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rex_ray.core.errors import ConfigError
from workloads.learning.training import ChunkNorms, State

__all__ = ["PathStore", "Run"]


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """Equal steps and what came of them.

    Attributes:
        norms: of each step.
        metrics: on the test set, by the number of steps of this run before them.
        state: of the model before the first step; None where it was not kept.
    """

    norms: list[ChunkNorms] = field(default_factory=list)
    metrics: dict[int, float] = field(default_factory=dict)
    state: State | None = None


class PathStore:
    """Runs of one model, of one seed.

    Args:
        folder: of all models.
        identity: what decides how a model is trained, in words.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.root = _digest(identity)
        self._folder = folder / self.root

    def after(self, node: str, num_rows: int, lr_factor: float, num_steps: int) -> str:
        """Return the name of the place that so many steps lead to."""
        return _digest(f"{node}/{num_rows}/{lr_factor.hex()}/{num_steps}")

    def read(self, node: str, num_rows: int, lr_factor: float) -> Run | None:
        """Return the longest run of such steps that was ever made from a place; None: none was.

        Raises:
            ConfigError: the file is damaged.
        """
        return self._read(self._file(node, num_rows, lr_factor))

    def first_norms(self, node: str, num_rows: int) -> ChunkNorms | None:
        """Return the norms of a first step of so many rows, which do not depend on its learning rate."""
        for path in self._parent(node).glob(f"{num_rows}-*.npz"):
            run = self._read(path)
            if run is not None and run.norms:
                return run.norms[0]
        return None

    def write(self, node: str, num_rows: int, lr_factor: float, run: Run) -> None:
        """Keep a run, unless one at least as long is kept already."""
        kept = self.read(node, num_rows, lr_factor)
        if kept is not None and len(kept.norms) >= len(run.norms):
            return
        path = self._file(node, num_rows, lr_factor)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        arrays: dict[str, Any] = {
            "sq_norms": np.stack([norms.sq_norms for norms in run.norms]),
            "global_sq_norm": np.array([norms.global_sq_norm for norms in run.norms]),
            "evaluated": np.array(list(run.metrics), dtype=np.int64),
            "metric": np.array(list(run.metrics.values()), dtype=np.float64),
            **(run.state or {}),
        }
        with part.open("wb") as stream:
            np.savez(stream, **arrays)
        part.replace(path)

    def _read(self, path: Path) -> Run | None:
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except FileNotFoundError:
            return None
        except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
            raise ConfigError(f"{path} is damaged ({error}); remove it, and its steps are trained again") from error
        lengths = zip(arrays.pop("sq_norms"), arrays.pop("global_sq_norm").tolist(), strict=True)
        evaluated = zip(arrays.pop("evaluated").tolist(), arrays.pop("metric").tolist(), strict=True)
        return Run(
            norms=[ChunkNorms(sq_norms=sq_norms, global_sq_norm=reduced) for sq_norms, reduced in lengths],
            metrics=dict(evaluated),
            state=arrays or None,
        )

    def _parent(self, node: str) -> Path:
        return self._folder / node[:2] / node

    def _file(self, node: str, num_rows: int, lr_factor: float) -> Path:
        return self._parent(node) / f"{num_rows}-{lr_factor.hex()}.npz"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]

"""A matrix of cells whose rows are worlds and methods and whose last axis is the seed: played, and summed up.

Runs of one seed share their world (noise, episodes, gradients), so methods are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from experiments._harness import bootstrap_median
from experiments.lab.cells import Cell, Result
from experiments.lab.command import Runner
from experiments.lab.tables import Comparison

__all__ = ["Played", "paired_effect_pct", "play_all", "ratio", "seeded"]


class Played:
    """Results by cell.

    Args:
        results: by the key of their cell.
    """

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._results = results

    def __getitem__(self, cell: Cell) -> Result:
        """The result of a cell that was played."""
        return self._results[cell.key]

    def times_s(self, cells: Sequence[Cell]) -> list[float]:
        """Return the virtual seconds to the target of each cell.

        Raises:
            RuntimeError: one did not reach it.
        """
        times = [self[cell].tta_s for cell in cells]
        missed = [cell.key for cell, time_s in zip(cells, times, strict=True) if time_s is None]
        if missed:
            raise RuntimeError(f"these runs did not reach their target: {', '.join(missed)}")
        return [time_s for time_s in times if time_s is not None]

    def median_s(self, cells: Sequence[Cell]) -> float:
        """Return the median of the same."""
        return median(self.times_s(cells))

    def spread_pct(self, cells: Sequence[Cell]) -> float:
        """Return the range of the same in per cent of the median."""
        times = self.times_s(cells)
        return 100 * (max(times) - min(times)) / median(times)

    def comparison(self, named: Iterable[tuple[str, Cell]]) -> Comparison:
        """Return cells and results for the records, each cell under the name that the tables have for it."""
        pairs = list(named)
        cells = [replace(cell, method=name) for name, cell in pairs]
        return Comparison(cells=cells, results=[self[cell] for _, cell in pairs])


def seeded(cell: Cell, seeds: Iterable[int]) -> list[Cell]:
    """Return the cell once per seed."""
    return [replace(cell, seed=seed) for seed in seeds]


def play_all(cells: Iterable[Cell], run: Runner) -> Played:
    """Play every cell once, equal ones together."""
    unique = {cell.key: cell for cell in cells}
    return Played(dict(zip(unique, run(list(unique.values())), strict=True)))


def ratio(played: Played, cells: Sequence[Cell], others: Sequence[Cell]) -> float:
    """Return the ratio of median times to the target."""
    return played.median_s(cells) / played.median_s(others)


def paired_effect_pct(
    played: Played, cells: Sequence[Cell], others: Sequence[Cell], *, seed: int
) -> tuple[float, float, float]:
    """Return how much longer ``cells`` take than ``others`` of the same seeds in per cent: median, 95 % interval."""
    times, references = np.array(played.times_s(cells)), np.array(played.times_s(others))
    return bootstrap_median(100 * (times / references - 1), seed=seed)

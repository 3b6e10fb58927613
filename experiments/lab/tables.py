"""The tables of a comparison: one row per world and method, medians over seeds, the oracles' figures beside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from experiments._harness import Row, Scalar
from experiments.lab.cells import TRACE, Cell, Result
from experiments.lab.methods import CONTROLS, METHODS, PERIODS
from experiments.lab.summary import Ratio, ratio, spread

__all__ = ["Comparison", "rounded"]

_REFERENCES = {
    "bsp": "bsp",
    "best_fixed_equal": "equal",
    "best_fixed_balanced": "balanced",
    "oracle": "oracle",
    "oracle_delayed": "delayed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Cells and what came of them. Runs of one seed share their world, so methods are compared in pairs.

    Attributes:
        cells: as they were asked for.
        results: in the same order.
    """

    cells: Sequence[Cell]
    results: Sequence[Result]

    def worlds(self) -> list[Cell]:
        """Return each world once, in order: a cell without method and seed."""
        return list({world.key: world for world in map(_world, self.cells)}.values())

    def methods(self, world: Cell) -> list[str]:
        """Return who was played in a world: methods, then an experiment's own variants as they come, then controls."""
        played = dict.fromkeys(cell.method for cell in self.cells if _world(cell) == world)
        variants = [method for method in played if method not in METHODS and method not in CONTROLS]
        return [method for method in (*METHODS, *variants, *CONTROLS) if method in played]

    def by_seed(self, world: Cell, method: str) -> dict[int, Result]:
        """Return a method's results in a world by seed."""
        return {
            cell.seed: result
            for cell, result in zip(self.cells, self.results, strict=True)
            if cell.method == method and _world(cell) == world
        }

    def pairs(self, world: Cell, method: str, other: str) -> tuple[list[Result], list[Result]]:
        """Return the results of two methods on the seeds that both have."""
        mine, others = self.by_seed(world, method), self.by_seed(world, other)
        seeds = [seed for seed in mine if seed in others]
        return [mine[seed] for seed in seeds], [others[seed] for seed in seeds]

    def ratio(self, world: Cell, method: str, other: str) -> Ratio:
        """Return the ratio of the median times to the target on the seeds that both have."""
        return ratio(*self.pairs(world, method, other))

    def times(self) -> list[Row]:
        """Return the table of times to the target: median, spread over seeds, and ratios in pairs."""
        return [self._times(world, method) for world, method in self._rows()]

    def resources(self) -> list[Row]:
        """Return the table of what the workers did meanwhile: batches, balance, waste and control; medians."""
        return [self._resources(world, method) for world, method in self._rows()]

    def _rows(self) -> Iterator[tuple[Cell, str]]:
        for world in self.worlds():
            for method in self.methods(world):
                yield world, method

    def _times(self, world: Cell, method: str) -> Row:
        results = list(self.by_seed(world, method).values())
        found = spread(results)
        row: dict[str, Scalar] = {
            **_place(world, method),
            "seeds": len(results),
            "missed": found.num_missed,
            "tta_s": rounded(found.median_s),
            "quartiles": _range(found.quarter_s, found.three_quarters_s),
            "range": _range(found.lowest_s, found.highest_s),
        }
        for other, column in _REFERENCES.items():
            mine, others = self.pairs(world, method, other)
            against = ratio(mine, others) if mine else None
            row[f"vs_{column}"] = None if against is None else rounded(against.value, 3)
            if other == "bsp":
                row["vs_bsp_95pct"] = None if against is None else _range(against.low, against.high, 3)
        metrics = [result.final_metric for result in results if result.final_metric is not None]
        swept_s = median(result.swept_s for result in results)
        return row | {
            "metric": round(median(metrics), 4) if metrics else None,
            "sweep_s": rounded(swept_s) if swept_s else None,
        }

    def _resources(self, world: Cell, method: str) -> Row:
        results = list(self.by_seed(world, method).values())
        smallest = median(result.smallest_batch for result in results)
        largest = median(result.largest_batch for result in results)
        return {
            **_place(world, method),
            "B": f"{largest:.0f}" if smallest == largest else f"{smallest:.0f}-{largest:.0f}",
            "changes": PERIODS.get(method, ""),
            "steps": round(median(result.num_steps for result in results)),
            "switches": round(median(result.num_switches for result in results)),
            "imbalance": round(median(result.imbalance for result in results), 3),
            "rii": round(median(result.rii for result in results), 3),
            "rii_wait": round(median(result.rii_wait for result in results), 3),
            "charged_pct": round(median(_charged_pct(result) for result in results), 2),
        }


def _charged_pct(result: Result) -> float:
    return 100 * result.charged_s / (result.total_s - result.charged_s)


def _world(cell: Cell) -> Cell:
    """Return what a method meets: its options and its batch, what it is charged and who answers it, are its own."""
    return replace(cell, method="", seed=0, search="none", charges="none", options={})


def _place(world: Cell, method: str) -> dict[str, Scalar]:
    trained = f"{world.workload} trace" if world.learner == TRACE else world.learner
    return {"training": trained, "cluster": world.cluster, "disturbance": world.disturbance, "method": method}


def _range(low: float, high: float, digits: int = 1) -> str | None:
    if math.isnan(low) or math.isinf(low):
        return None
    ends = ["missed" if math.isinf(end) else f"{end:.{digits}f}" for end in (low, high)]
    return "..".join(ends)


def rounded(value: float, digits: int = 1) -> float | None:
    """Return a figure for a table; None where there is none."""
    return round(value, digits) if math.isfinite(value) else None

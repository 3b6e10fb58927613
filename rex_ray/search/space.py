"""Which splits a search looks at: few numbers instead of one per worker, whole rows with an exact sum from each.

Bayesian optimisation learns little about sixteen free shares in fifteen trials, and a constraint on their sum makes
every one of its trials cost seconds. So workers of like speed move together, each group by a factor ``exp(z)`` away
from the exact split, and the largest-remainder method makes rows of it: any ``z`` is a valid split, no constraint
needed. A quantum of rows, beside ``z``, is what finds tile steps, which no smooth curve shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.split import CurveSet, exact_split
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["MAX_SHIFT", "MIN_GAIN", "QUANTA", "LocalBatchSizes", "Point", "SplitSpace", "on_tiles"]

LocalBatchSizes: TypeAlias = tuple[int, ...]

MAX_SHIFT = 0.25
"""Largest ``|z|``: a group's share moves by at most a quarter relative to the last group's. Curves that are further
off than that are refitted by the split itself before a search is worth its trials (a choice)."""

QUANTA = (1, 8, 16, 32)
"""Rows that may belong together: the tile sizes of matrix units and the multiples of them."""

MIN_GAIN = 0.005
"""A gain below this, as a fraction of the step time, is none (the noise of a median over ten steps is about 1 %)."""

# A tile plan that the curves expect to be this much slower is not worth its steps: a tile wastes less than itself.
_HOPELESS = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a search looks: ``shifts`` holds ``z`` of every group but the last, whose ``z`` is 0."""

    shifts: tuple[float, ...] = ()
    quantum: int = 1


def on_tiles(curves: Sequence[StepTimeCurve], problem: SearchProblem, quantum: int) -> IntArray | None:
    """Return the exact split of ``problem``'s rows on ``curves`` in whole tiles of ``quantum`` rows, in tiles.

    None where the bounds leave no room for it. Rows that make no whole tile are left over.
    """
    units = problem.global_batch_size // quantum
    lower, upper = _tile_bounds(problem, quantum)
    if units < len(curves) or (lower > upper).any():
        return None
    try:
        plan = exact_split(curves, units * quantum, lower * quantum, upper * quantum, quantum)
    except InfeasibleError:
        return None
    return np.array(plan.local_batch_sizes, dtype=np.int64) // quantum


class SplitSpace:
    """The splits that one search chooses from.

    Args:
        problem: what is asked.

    Attributes:
        finest: rows that belong together in every split, the smallest quantum.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._curves = problem.curves()
        self._workers = CurveSet(self._curves)
        self._rows = problem.global_batch_size
        self._lower = np.array(problem.lower, dtype=np.int64)
        self._upper = np.minimum(np.array(problem.upper, dtype=np.int64), self._rows)
        self._group = problem.groups()
        self.finest = problem.local_batch_multiple
        exact = np.array(problem.plan, dtype=np.int64) // self.finest
        self._bases = {self.finest: exact, **self._tile_plans()}

    @property
    def num_shifts(self) -> int:
        """How many numbers a point has beside its quantum."""
        return int(self._group.max())

    @property
    def quanta(self) -> tuple[int, ...]:
        """The quanta of rows that a point may have, the finest first."""
        return tuple(self._bases)

    def own_s(self, local_batch_sizes: LocalBatchSizes) -> FloatArray:
        """Return every rank's own time under a split as the curves see it, shape ``[n]``."""
        return self._workers.own_s(np.array(local_batch_sizes, dtype=np.int64))

    def split(self, point: Point) -> LocalBatchSizes:
        """Return the split at ``point``: whole rows within bounds, their sum the global batch."""
        base = self._bases[point.quantum]
        weights = base * np.exp(np.array([*point.shifts, 0.0]))[self._group]
        lower, upper = _tile_bounds(self.problem, point.quantum)
        return self._whole(apportion(int(base.sum()), weights, lower, upper), point.quantum)

    def point_of(self, local_batch_sizes: LocalBatchSizes, quantum: int) -> Point | None:
        """Return the point whose split this is, to within a quantum per rank; None where there is none."""
        sizes = np.array(local_batch_sizes)
        shifts = self._shifts(sizes, self._bases[quantum])
        if shifts is None or not all(abs(shift) <= MAX_SHIFT for shift in shifts):
            return None
        point = Point(shifts=shifts, quantum=quantum)
        off = int(np.abs(np.array(self.split(point)) - sizes).max())
        return point if off <= quantum else None

    def quantum_of(self, local_batch_sizes: LocalBatchSizes) -> int:
        """Return the largest quantum whose own plan this is; the finest for the exact split and for any other."""
        if local_batch_sizes == self.problem.plan:
            return self.finest
        coarse = {q: units for q, units in self._bases.items() if q > self.finest}
        return max(
            (q for q, units in coarse.items() if self._whole(units, q) == local_batch_sizes), default=self.finest
        )

    def seeds(self) -> tuple[LocalBatchSizes, ...]:
        """Return what is looked at first, without repetition: the plan, what runs, tile plans, shares by speed."""
        times = np.array([float(curve.predict_s(self._rows / len(self._curves))) for curve in self._curves])
        by_speed = apportion(self._rows, 1.0 / times, self._lower, self._upper, self.finest)
        coarse = [q for q in self.quanta if q > self.finest]
        tiles = [self.split(Point(shifts=(0.0,) * self.num_shifts, quantum=q)) for q in coarse]
        others = [*tiles, tuple(by_speed.tolist())]
        worth_it = _HOPELESS * float(self.own_s(self.problem.plan).max())
        hopeful = [sizes for sizes in others if float(self.own_s(sizes).max()) <= worth_it]
        running = [self.problem.incumbent] if self._fits(self.problem.incumbent) else []
        return tuple(dict.fromkeys([self.problem.plan, *running, *hopeful]))

    def all_splits(self, quantum: int, limit: int) -> tuple[LocalBatchSizes, ...] | None:
        """Return every split in whole tiles of ``quantum``; None where there may be more than ``limit``."""
        ranges = self._totals(quantum)
        if math.prod(len(totals) for totals in ranges) > limit:
            return None
        return tuple(dict.fromkeys(self._whole(units, quantum) for units in self._grid(ranges, quantum)))

    def corrected(self, local_batch_sizes: LocalBatchSizes, own_s: Sequence[float]) -> LocalBatchSizes | None:
        """Return the exact split on curves that are rescaled through measured times; None where it promises nothing.

        Where workers hold one another up (a shared host, a shared link) no curve of one worker's rows says so, but
        splitting again on times measured under the last split closes in on the best one. A split in tiles is followed
        by another in the same tiles.
        """
        measured, expected = np.array(own_s), self.own_s(local_batch_sizes)
        if measured.shape != expected.shape or not (np.isfinite(measured).all() and (measured >= 0).all()):
            return None
        known = (expected > 0) & (measured > 0)
        factors = np.where(known, measured / np.where(expected > 0, expected, 1.0), 1.0)
        curves = tuple(curve.scaled(float(factor)) for curve, factor in zip(self._curves, factors, strict=True))
        quantum = max(q for q in self.quanta if self._in_tiles(local_batch_sizes, q))
        units = on_tiles(curves, self.problem, quantum)
        if units is None:
            return None
        sizes = self._whole(units, quantum)
        promised_s = float((self.own_s(sizes) * factors).max())
        return sizes if promised_s < (1.0 - MIN_GAIN) * float(measured.max()) else None

    # --- inside

    def _fits(self, local_batch_sizes: LocalBatchSizes) -> bool:
        """Bounds may have moved, and another batch been decided, since what runs was put in place."""
        sizes = np.array(local_batch_sizes)
        is_within = (self._lower <= sizes).all() and (sizes <= self._upper).all()
        return bool(sizes.sum() == self._rows and is_within and (sizes % self.finest == 0).all())

    def _tile_plans(self) -> dict[int, IntArray]:
        if self.problem.kind == "model":
            return {}
        plans = {}
        for quantum in (q for q in QUANTA if q > self.finest and q % self.finest == 0):
            units = on_tiles(self._curves, self.problem, quantum)
            if units is not None and self._spare_rank(units, quantum) is not None:
                plans[quantum] = units
        return plans

    def _in_tiles(self, local_batch_sizes: LocalBatchSizes, quantum: int) -> bool:
        num_odd = sum(size % quantum > 0 for size in local_batch_sizes)
        return num_odd <= (self._rows % quantum > 0)

    def _spare_rank(self, units: IntArray, quantum: int) -> int | None:
        """The rank that takes the rows that make no whole tile: the one that a further tile delays least."""
        rest = self._rows - quantum * int(units.sum())
        room = units * quantum + rest <= self._upper
        if not room.any():
            return None
        return int(np.argmin(np.where(room, self._workers.own_s((units + 1) * quantum), np.inf)))

    def _whole(self, units: IntArray, quantum: int) -> LocalBatchSizes:
        """Rows from whole tiles; where no rank has room for the odd rows, the nearest split that has."""
        sizes = units * quantum
        rest = self._rows - int(sizes.sum())
        if rest:
            rank = self._spare_rank(units, quantum)
            if rank is None:
                sizes = apportion(self._rows, sizes, self._lower, self._upper, self.finest)
            else:
                sizes[rank] += rest
        return tuple(sizes.tolist())

    def _shifts(self, sizes: IntArray, base: IntArray) -> tuple[float, ...] | None:
        count = self.num_shifts + 1
        now = np.bincount(self._group, weights=sizes, minlength=count)
        then = np.bincount(self._group, weights=base, minlength=count)
        if (now <= 0).any() or (then <= 0).any():
            return None
        logs = np.log(now / then)
        return tuple(float(shift) for shift in logs[:-1] - logs[-1])

    def _totals(self, quantum: int) -> list[range]:
        """Per group but the last: the totals that shifts can reach, in quanta."""
        base, group = self._bases[quantum], self._group
        lower, upper = _tile_bounds(self.problem, quantum)
        ranges = []
        for number in range(self.num_shifts):
            own, rest = float(base[group == number].sum()), float(base[group != number].sum())
            units = own + rest
            least = units * own / (own + rest * math.exp(2 * MAX_SHIFT)) if own else 0.0
            most = units * own / (own + rest * math.exp(-2 * MAX_SHIFT)) if own else 0.0
            first = max(math.floor(least), int(lower[group == number].sum()))
            last = min(math.ceil(most), int(upper[group == number].sum()))
            ranges.append(range(first, last + 1))
        return ranges

    def _grid(self, ranges: Sequence[range], quantum: int) -> Iterator[IntArray]:
        base, last = self._bases[quantum], self.num_shifts
        lower, upper = _tile_bounds(self.problem, quantum)
        for totals in product(*ranges):
            per_group = (*totals, int(base.sum()) - sum(totals))
            units = np.empty(base.size, dtype=np.int64)
            try:
                for number, total in enumerate(per_group):
                    ranks = self._group == number
                    units[ranks] = apportion(total, base[ranks], lower[ranks], upper[ranks])
            except InfeasibleError:
                continue
            shifts = self._shifts(units, base) if last else ()
            if shifts is None or all(abs(shift) <= MAX_SHIFT + self._grain(base) for shift in shifts):
                yield units

    def _grain(self, base: IntArray) -> float:
        """How far one row, or tile, of the smallest group moves a shift: rounding reaches so much further."""
        totals = np.bincount(self._group, weights=base, minlength=self.num_shifts + 1)
        return 1.0 / max(float(totals.min()), 1.0)


def _tile_bounds(problem: SearchProblem, quantum: int) -> tuple[IntArray, IntArray]:
    lower = np.array(problem.lower, dtype=np.int64)
    upper = np.minimum(np.array(problem.upper, dtype=np.int64), problem.global_batch_size)
    return -(-lower // quantum), upper // quantum

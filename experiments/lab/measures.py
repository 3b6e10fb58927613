"""From the steps of a run to the figures of its row: the same for policies and controls, traces and real SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from experiments.lab.cells import Result
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.scenario.timeline import own_times
from rex_ray.sim import Scenario

__all__ = ["Played", "result_of", "timed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """What was run.

    Attributes:
        step_s: duration per step in seconds, shape ``[steps]``.
        slowest_s: own time of the slowest rank per step in seconds, shape ``[steps]``.
        mean_own_s: own time per step in seconds, the mean over ranks, shape ``[steps]``.
        num_rows: rows per step, shape ``[steps]``.
        step_charges_s: what control cost beside each step in seconds, shape ``[steps]``; None: nothing.
        num_switches: allocations that were put in place after the first.
        lost_s: parts of the loss against the oracle.
    """

    step_s: FloatArray
    slowest_s: FloatArray
    mean_own_s: FloatArray
    num_rows: IntArray
    step_charges_s: FloatArray | None = None
    num_switches: int = 0
    lost_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def whole_s(self) -> FloatArray:
        """Duration per step with what control cost beside it, shape ``[steps]``."""
        return self.step_s if self.step_charges_s is None else self.step_s + self.step_charges_s

    @property
    def total_s(self) -> float:
        """Duration in seconds, control included."""
        return float(self.whole_s.sum())


def timed(scenario: Scenario, rows: Sequence[tuple[int, ...]]) -> Played:
    """Return how long given steps take.

    Args:
        scenario: the world.
        rows: rows per rank in each step.
    """
    pieces, start = [], 0
    for per_rank, alike in groupby(rows):
        stop = start + len(list(alike))
        data_s, compute_s = own_times(scenario.timelines, start, stop, per_rank)
        durations_s = scenario.network.step_s(data_s, compute_s)
        pieces.append((durations_s, data_s + compute_s))
        start = stop
    own_s = np.concatenate([own for _, own in pieces])
    return Played(
        step_s=np.concatenate([durations for durations, _ in pieces]),
        slowest_s=own_s.max(axis=1),
        mean_own_s=own_s.mean(axis=1),
        num_rows=np.array([sum(per_rank) for per_rank in rows]),
    )


def result_of(played: Played, scenario: Scenario, *, tta_s: float | None) -> Result:
    """Return the row of a run.

    Args:
        played: what was run.
        scenario: its world: the workers' peak rates count for the resource inefficiency.
        tta_s: virtual seconds to the target; None where it was not reached.
    """
    step_s, rows = played.step_s, played.num_rows
    peak = sum(line.profile.peak_rows_per_s for line in scenario.timelines)
    ends_epoch = rows.cumsum() % scenario.problem.dataset_size == 0
    whole = rows[~ends_epoch] if not ends_epoch.all() else rows
    return Result(
        tta_s=tta_s,
        total_s=played.total_s,
        num_steps=len(step_s),
        num_rows=int(rows.sum()),
        smallest_batch=int(whole.min()),
        largest_batch=int(rows.max()),
        num_switches=played.num_switches,
        imbalance=float((played.slowest_s / played.mean_own_s - 1).mean()),
        rii=1.0 - float(rows.sum()) / (played.total_s * peak),
        rii_wait=float((step_s - played.mean_own_s).sum() / step_s.sum()),
        charged_s=played.total_s - float(step_s.sum()),
        lost_s=played.lost_s,
    )

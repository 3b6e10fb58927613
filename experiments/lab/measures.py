"""From the steps of a run to the figures of its row: the same for policies and controls, traces and real SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.lab.cells import Result
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.scenario import WorkerTimeline

__all__ = ["Played", "result_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """What was run.

    Attributes:
        own_s: own time per step and rank in seconds, shape ``[steps, n]``.
        step_s: duration per step in seconds, shape ``[steps]``.
        num_rows: rows per step, shape ``[steps]``.
        num_switches: allocations that were put in place after the first.
        charged_s: seconds of control on the critical path, beside the steps.
        swept_s: seconds of the sweep that found the batch.
        final_metric: the validation metric at the end.
        lost_s: parts of the loss against the oracle.
    """

    own_s: FloatArray
    step_s: FloatArray
    num_rows: IntArray
    num_switches: int = 0
    charged_s: float = 0.0
    swept_s: float = 0.0
    final_metric: float | None = None
    lost_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Duration in seconds, control included."""
        return float(self.step_s.sum()) + self.charged_s


def result_of(played: Played, timelines: Sequence[WorkerTimeline], *, tta_s: float | None) -> Result:
    """Return the row of a run.

    Args:
        played: what was run.
        timelines: the workers, for the peak rates of the resource inefficiency.
        tta_s: virtual seconds to the target; None where it was not reached.
    """
    step_s, own_s, rows = played.step_s, played.own_s, played.num_rows
    num_workers = own_s.shape[1]
    peak = sum(_peak_rows_per_s(line) for line in timelines)
    return Result(
        tta_s=tta_s,
        total_s=played.total_s,
        num_steps=len(step_s),
        num_rows=int(rows.sum()),
        final_metric=played.final_metric,
        smallest_batch=int(rows[:-1].min(initial=rows.max())),
        largest_batch=int(rows.max()),
        num_switches=played.num_switches,
        imbalance=float((own_s.max(axis=1) / own_s.mean(axis=1) - 1).mean()),
        rii=1.0 - float(rows.sum()) / (played.total_s * peak),
        rii_wait=float((step_s[:, None] - own_s).sum() / (num_workers * step_s.sum())),
        charged_s=played.charged_s,
        swept_s=played.swept_s,
        lost_s=played.lost_s,
    )


def _peak_rows_per_s(line: WorkerTimeline) -> float:
    rows = np.arange(1, line.profile.max_local_batch_size + 1)
    return float((rows / line.profile.own_time_s(rows)).max())

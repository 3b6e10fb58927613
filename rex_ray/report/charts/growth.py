"""The global batch and the learning rate that follows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rex_ray.report.charts.figure import Figure, Key, axes, both_widths, end_labels, step_range, steps_line
from rex_ray.report.charts.svg import Frame
from rex_ray.report.reading.schema import DecisionRow, GroupData

__all__ = ["growth_figure"]

_TITLE = "Global batch and learning rate"


def growth_figure(decisions: Sequence[DecisionRow], groups: Sequence[GroupData]) -> Figure | None:
    """Lines: global batch and learning rate as multiples of the first; None where neither ever changed."""
    applied = [row for row in decisions if row.applied_at_step is not None and row.after]
    if len({(sum(row.after), row.lr_factor) for row in applied}) < 2:
        return None
    starts = np.array([row.applied_at_step for row in applied], dtype=np.int64)
    batch = np.array([sum(row.after) / sum(applied[0].after) for row in applied])
    rate = np.array([row.lr_factor for row in applied])
    top = 1.08 * float(max(batch.max(), rate.max()))
    description = f"global batch ends at {batch[-1]:.3g} times the first, the learning rate at {rate[-1]:.3g} times"

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(0.0, top)
        body = [axes(frame, x, y, "optimizer step", "times the first")]
        body.append(steps_line(starts, batch, x, y, "line whole thick"))
        body.append(steps_line(starts, rate, x, y, "line metric"))
        ends = [(float(y(batch[-1])), "batch", "whole"), (float(y(rate[-1])), "learning rate", "metric")]
        if variant == "narrow":
            ends[1] = (ends[1][0], "LR", "metric")
        body.append(end_labels(frame, ends))
        return frame.wrap("".join(body), title=_TITLE, description=description, variant=variant)

    wide, narrow = both_widths(draw, right=(116, 60))
    keys = (
        Key(mark='<path class="line whole thick" d="M2 7H32"/>', meaning="global batch"),
        Key(mark='<path class="line metric" d="M2 7H32"/>', meaning="factor on the learning rate"),
    )
    caption = (
        f"Multiples of the first: the global batch goes from {sum(applied[0].after):,} to {sum(applied[-1].after):,} "
        f"rows, the learning rate's factor ends at {rate[-1]:.3g}."
    )
    return Figure(title=_TITLE, caption=caption, wide=wide, narrow=narrow, keys=keys)

"""Charts of the global batch: the noise scale that it follows, and the learning rate that follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.charts.figures import Figure, both_widths, step_range
from rex_ray.report.charts.svg import Frame, Scale, line_path
from rex_ray.report.reading.schema import DecisionRow, GroupData, NoiseSeries

__all__ = ["growth_figure", "noise_figure"]

SHOWN_BELOW = 0.05
"""Windows whose p is below this are marked."""

_MAX_POINTS = 400
_MOST_OCTAVES = 8


def noise_figure(noise: NoiseSeries, groups: Sequence[GroupData]) -> Figure:
    """Lines: the noise scale and the global batch over steps; marks: where the test says that it is above twice it."""
    keep = np.unique(np.linspace(0, noise.steps.size - 1, min(_MAX_POINTS, noise.steps.size)).round().astype(np.int64))
    known = noise.noise_scale[np.isfinite(noise.noise_scale) & (noise.noise_scale > 0)]
    least = math.floor(math.log2(min([float(noise.batch.min()), *known.tolist()])))
    most = math.ceil(math.log2(max([2.0 * float(noise.batch.max()), *known.tolist()])))
    every = max(1, math.ceil((most - least) / _MOST_OCTAVES))
    ticks = [(float(power), _rows(power)) for power in range(least, most + 1, every)]
    shown = noise.p_value[keep] < SHOWN_BELOW
    description = (
        f"noise scale over {noise.steps.size} windows, {int((noise.p_value < SHOWN_BELOW).sum())} of them marked"
    )

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(float(least), float(most))
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.log2(noise.noise_scale[keep])
        steps = noise.steps[keep].astype(np.float64)
        body = [frame.axes(x, y, "optimizer step", "rows", ticks)]
        body.append(_steps_line(noise.steps, np.log2(noise.batch), x, y, "line whole"))
        body.append(f'<path class="line metric" d="{line_path(x(steps), y(level))}"/>')
        floor = frame.height - frame.bottom
        marks = "".join(f"M{at:.1f} {floor}v-7" for at in x(steps[shown]).tolist())
        body.append(f'<path class="shown" d="{marks}"/>' if marks else "")
        return frame.wrap("".join(body), title="Noise scale", description=description, variant=variant)

    wide, narrow = both_widths(draw)
    caption = (
        "How many rows per step still pay: gradient noise over gradient, a ratio of sums over the newest "
        f"{noise.window} blocks of {noise.block_steps} measured steps; the global batch in grey. Logarithmic; gaps are "
        "windows in which the noise hides the gradient. Marks at the bottom: the window's signed-rank test shows at p "
        f"below {SHOWN_BELOW:g} that the noise scale is above twice the batch. It is asked at every block here, "
        "whatever the policy asked."
    )
    return Figure(title="Noise scale", caption=caption, wide=wide, narrow=narrow)


def _rows(power: int) -> str:
    """``2 ** power`` rows, in units of 1,024 or its square where that is shorter; less than a row has no name."""
    if power < 0:
        return ""
    if power < 13:
        return str(2**power)
    return f"{2 ** (power - 10)}k" if power < 20 else f"{2 ** (power - 20)}M"


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
        body = [frame.axes(x, y, "optimizer step", "times the first")]
        body.append(_steps_line(starts, batch, x, y, "line whole"))
        body.append(_steps_line(starts, rate, x, y, "line metric"))
        title = "Global batch and learning rate"
        return frame.wrap("".join(body), title=title, description=description, variant=variant)

    wide, narrow = both_widths(draw)
    caption = (
        f"The global batch in grey, from {sum(applied[0].after):,} to {sum(applied[-1].after):,} rows; the factor on "
        f"the learning rate in blue, at {rate[-1]:.3g} in the end."
    )
    return Figure(title="Global batch and learning rate", caption=caption, wide=wide, narrow=narrow)


def _steps_line(starts: IntArray, values: FloatArray, x: Scale, y: Scale, css: str) -> str:
    """A line that keeps each value from its start to the next one's, the last to the end."""
    edges = np.append(starts.astype(np.float64), x.high)
    px = x(np.repeat(edges, 2)[1:-1])
    return f'<path class="{css}" d="{line_path(px, y(np.repeat(values, 2)))}"/>'

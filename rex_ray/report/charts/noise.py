"""The gradient noise scale, the global batch that follows it, and the test of every window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rex_ray.core.types import FloatArray
from rex_ray.report.charts.figure import Figure, Key, axes, both_widths, step_range, steps_line
from rex_ray.report.charts.svg import Frame, Scale, line_path, text
from rex_ray.report.reading.schema import GroupData, NoiseSeries

__all__ = ["noise_figure"]

SHOWN_BELOW = 0.05
"""Windows whose p is below this are marked."""

_LEAST_P = 1e-3
_TEST_PX = 56
_MAX_POINTS = 400
_MOST_OCTAVES = 8
_TITLE = "Noise scale"


def noise_figure(noise: NoiseSeries, groups: Sequence[GroupData]) -> Figure:
    """Lines: the noise scale and the global batch over steps; below: the p of the test that it is above twice it."""
    keep = np.unique(np.linspace(0, noise.steps.size - 1, min(_MAX_POINTS, noise.steps.size)).round().astype(np.int64))
    known = noise.noise_scale[np.isfinite(noise.noise_scale) & (noise.noise_scale > 0)]
    least = math.floor(math.log2(min([float(noise.batch.min()), *known.tolist()])))
    most = math.ceil(math.log2(max([2.0 * float(noise.batch.max()), *known.tolist()])))
    every = max(1, math.ceil((most - least) / _MOST_OCTAVES))
    ticks = [(float(power), _rows(power)) for power in range(least, most + 1, every)]
    num_shown = int((noise.p_value < SHOWN_BELOW).sum())
    description = f"noise scale over {noise.steps.size} windows, {num_shown} of them marked"
    steps = noise.steps[keep].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log2(noise.noise_scale[keep])

    def draw(frame: Frame, variant: str) -> str:
        test = Frame(frame.width, frame.height, left=frame.left, right=frame.right, bottom=frame.bottom)
        frame = Frame(
            frame.width, frame.height, frame.left, frame.right, frame.top, bottom=frame.bottom + _TEST_PX + 34
        )
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(float(least), float(most))
        body = [_axes_above(frame, test, x, y, ticks)]
        body.append(steps_line(noise.steps, np.log2(noise.batch), x, y, "line whole thick"))
        body.append(f'<path class="line metric" d="{line_path(x(steps), y(level))}"/>')
        body.append(_test_panel(test, x, steps, noise.p_value[keep]))
        return frame.wrap("".join(body), title=_TITLE, description=description, variant=variant)

    wide, narrow = both_widths(draw)
    keys = (
        Key(mark='<path class="line metric" d="M2 7H32"/>', meaning="noise scale"),
        Key(mark='<path class="line whole thick" d="M2 7H32"/>', meaning="global batch"),
        Key(mark='<circle class="dot metric" cx="17" cy="7" r="3.4"/>', meaning=f"p below {SHOWN_BELOW:g}"),
        Key(mark='<circle class="dot open" cx="17" cy="7" r="3"/>', meaning=f"p of {SHOWN_BELOW:g} or more"),
    )
    caption = (
        "How many rows per step still pay: gradient noise over gradient, a ratio of sums over the newest "
        f"{noise.window} blocks of {noise.block_steps} measured steps. Logarithmic; gaps are windows in which the "
        "noise hides the gradient. Below: p of the window's signed-rank test that the noise scale is above twice the "
        "batch. It is asked at every block here, whatever the policy asked."
    )
    return Figure(title=_TITLE, caption=caption, wide=wide, narrow=narrow, keys=keys)


def _axes_above(frame: Frame, test: Frame, x: Scale, y: Scale, ticks: Sequence[tuple[float, str]]) -> str:
    """The upper panel's axes; names of steps stand below the lower one, which shares them."""
    upper = Frame(frame.width, frame.height, frame.left, frame.right, frame.top, frame.bottom)
    no_steps = Scale(math.inf, math.inf, x.start, x.end)
    lower = Scale(0.0, 1.0, test.height - test.bottom, test.height - test.bottom)
    return axes(upper, no_steps, y, "", "rows", ticks) + test.axes(x, lower, "optimizer step", "", [])


def _test_panel(frame: Frame, x: Scale, steps: FloatArray, p_value: FloatArray) -> str:
    """Small p stand high: what a test shows rises above its line."""
    floor = frame.height - frame.bottom
    y = Scale(0.0, -math.log10(_LEAST_P), floor, floor - _TEST_PX)
    line = float(y(-math.log10(SHOWN_BELOW)))
    parts = [
        text(2, floor - _TEST_PX - 10, "p of the window's test", css="soft"),
        f'<path class="limit" d="M{frame.left} {line:.1f}H{frame.width - frame.right}"/>',
        text(frame.left - 7, line + 4, f"{SHOWN_BELOW:g}", anchor="end"),
        text(frame.left - 7, floor + 2, "1", anchor="end"),
        text(frame.left - 7, floor - _TEST_PX + 6, f"{_LEAST_P:g}", anchor="end"),
    ]
    heights = y(-np.log10(np.clip(p_value, _LEAST_P, 1.0)))
    radius = 2.6 if len(steps) <= 120 else 1.8
    for at, height, p in zip(x(steps).tolist(), heights.tolist(), p_value.tolist(), strict=True):
        css = "shown" if p < SHOWN_BELOW else "open"
        parts.append(f'<circle class="dot {css}" cx="{at:.1f}" cy="{height:.1f}" r="{radius:g}"/>')
    return "".join(parts)


def _rows(power: int) -> str:
    """``2 ** power`` rows, in units of 1,024 or its square where that is shorter; less than a row has no name."""
    if power < 0:
        return ""
    if power < 13:
        return str(2**power)
    return f"{2 ** (power - 10)}k" if power < 20 else f"{2 ** (power - 20)}M"

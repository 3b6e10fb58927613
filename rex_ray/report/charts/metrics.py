"""What the training loop reported, over time: of one run, or of several in one chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rex_ray.core.types import FloatArray
from rex_ray.report.charts.figure import MAX_POINTS, Figure, Key, axes, spread
from rex_ray.report.charts.kinds import NUM_HUES, point_mark
from rex_ray.report.charts.svg import DASHES, Frame, Scale, line_path, text
from rex_ray.report.reading.schema import MetricPoint

__all__ = ["metric_figures"]

_MOST_DOTS = 80
_MOST_ROWS = 30


def metric_figures(runs: Mapping[str, Sequence[MetricPoint]]) -> tuple[Figure, ...]:
    """One small chart per metric that ever changed, in the order of first report; a line per run.

    Args:
        runs: what each reported, by the run's name.
    """
    names = dict.fromkeys(name for points in runs.values() for point in points for name in point.metrics)
    figures = []
    for name in names:
        lines = {run: _series(name, points) for run, points in runs.items()}
        lines = {run: series for run, series in lines.items() if len(series)}
        if len({value for series in lines.values() for value in series[:, 1].tolist()}) > 1:
            figures.append(_metric_figure(name, lines, list(runs)))
    return tuple(figures)


def _series(name: str, points: Sequence[MetricPoint]) -> FloatArray:
    pairs = [(p.elapsed_s, p.metrics[name]) for p in points if name in p.metrics and np.isfinite(p.metrics[name])]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _metric_figure(name: str, lines: Mapping[str, FloatArray], order: Sequence[str]) -> Figure:
    every = np.concatenate(list(lines.values()))
    low, high = float(every[:, 1].min()), float(every[:, 1].max())
    margin = 0.06 * (high - low)
    is_alone = len(order) == 1
    description = "; ".join(
        ("" if is_alone else f"{run}: ") + f"from {s[0, 1]:.4g} to {s[-1, 1]:.4g} in {s[-1, 0]:.0f} seconds"
        for run, s in lines.items()
    )

    def draw(frame: Frame, variant: str) -> str:
        x = frame.x_scale(0.0, float(every[:, 0].max()))
        y = frame.y_scale(low - margin, high + margin)
        body = [axes(frame, x, y, "time since the loop began, s", name)]
        body += [
            _draw_line(series, order.index(run), x(series[:, 0]), y(series[:, 1])) for run, series in lines.items()
        ]
        if not is_alone:
            body.append(_names(lines, order, x, y))
        return frame.wrap("".join(body), title=name, description=description, variant=variant)

    right = (12, 12) if is_alone else (120, 96)
    wide = draw(Frame(460 if is_alone else 960, 250 if is_alone else 320, left=50, right=right[0], top=28), "wide")
    narrow = draw(Frame(340, 240, left=50, right=right[1], top=28), "narrow")
    caption = "; ".join(
        ("" if is_alone else f"{run}: ")
        + f"last {s[-1, 1]:.4g}, lowest {s[:, 1].min():.4g}, highest {s[:, 1].max():.4g}"
        for run, s in lines.items()
    )
    return Figure(
        title=name,
        caption=f"{caption[0].upper()}{caption[1:]}." if is_alone else f"{caption}.",
        wide=wide,
        narrow=narrow,
        keys=() if is_alone else tuple(_key(run, order.index(run)) for run in lines),
        columns=("time, s", name) if is_alone else ("run", "time, s", name),
        rows=_numbers(lines, is_alone),
    )


def _names(lines: Mapping[str, FloatArray], order: Sequence[str], x: Scale, y: Scale) -> str:
    """Name every run where its line ends: runs take different times, and few lines end at the right edge."""
    places = spread([float(y(series[-1, 1])) for series in lines.values()], y.end + 4, y.start - 2)
    parts = []
    for (run, series), place in zip(lines.items(), places, strict=True):
        at, height = float(x(series[-1, 0])), float(y(series[-1, 1]))
        css = _css(order.index(run))
        parts.append(f'<path class="thread {css}" d="M{at + 4:.1f} {height:.1f}L{at + 11:.1f} {place:.1f}"/>')
        parts.append(text(at + 14, place + 4, _short(run)))
    return "".join(parts)


def _css(index: int) -> str:
    return f"k{index % NUM_HUES}"


def _short(run: str) -> str:
    return run if len(run) <= 14 else f"{run[:13]}…"


def _key(run: str, index: int) -> Key:
    dash = DASHES[index % len(DASHES)]
    attributes = f' stroke-dasharray="{dash}"' if dash else ""
    mark = f'<path class="line"{attributes} d="M2 7H32"/>{point_mark(17, 7, index)}'
    return Key(mark=f'<g class="{_css(index)}">{mark}</g>', meaning=run)


def _draw_line(series: FloatArray, index: int, px: FloatArray, py: FloatArray) -> str:
    if len(series) > MAX_POINTS:
        keep = _even(len(series), MAX_POINTS)
        px, py = px[keep], py[keep]
    dash = DASHES[index % len(DASHES)]
    attributes = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<path class="line"{attributes} d="{line_path(px, py)}"/>']
    if len(px) <= _MOST_DOTS:
        parts += [point_mark(a, b, index, 3.0) for a, b in zip(px.tolist(), py.tolist(), strict=True)]
    return f'<g class="{_css(index)}">{"".join(parts)}</g>'


def _numbers(lines: Mapping[str, FloatArray], is_alone: bool) -> tuple[tuple[str, ...], ...]:
    rows = []
    for run, series in lines.items():
        for at, value in series[_even(len(series), min(_MOST_ROWS, len(series)))].tolist():
            rows.append((f"{at:,.1f}", f"{value:.5g}") if is_alone else (run, f"{at:,.1f}", f"{value:.5g}"))
    return tuple(rows)


def _even(count: int, most: int) -> list[int]:
    kept: list[int] = np.unique(np.linspace(0, count - 1, most).round().astype(np.int64)).tolist()
    return kept

"""The calibration's drawings: a value with its bounds per case, or lines over a scale. One SVG file each, no script.

A chart names the table and the columns that it is drawn from, so a table that is absent or has changed costs its chart
and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rex_ray.report.charts.svg import DASHES, Frame, Scale, line_path, text

__all__ = ["CHARTS", "Chart", "draw", "draw_chart"]

Tables = Mapping[str, Sequence[Mapping[str, Any]]]

# Okabe and Ito's palette (jfly.uni-koeln.de/color): told apart by every kind of sight.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a8a")
_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#e3e3e3;fill:none}"
    ".axis{stroke:#555;fill:none}.goal{stroke:#a00;stroke-dasharray:5 4;fill:none}.title{font-weight:600}</style>"
)
_NO_TICKS = Scale(math.inf, math.inf, 0.0, 0.0)
_ROW_PX, _LABEL_PX, _TITLE_PX = 19, 330, 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One drawing.

    Attributes:
        name: of its file.
        title: what it shows, in a few words.
        table: where its rows are.
        kind: ``"cases"`` is a value with its bounds per row, ``"lines"`` is lines over ``x``.
        value: column of the value.
        label: columns that name a case, or a line.
        x: column of the abscissa, for lines.
        low: column of the lower bound.
        high: column of the upper bound.
        goal: a dashed line there.
        x_label: of the horizontal axis.
        y_label: of the vertical axis, for lines.
        log_x: whether the abscissa is drawn in powers of two.
        is_step: whether lines rise in steps, as a distribution does.
    """

    name: str
    title: str
    table: str
    kind: Literal["cases", "lines"]
    value: str
    label: tuple[str, ...]
    x: str = ""
    low: str = ""
    high: str = ""
    goal: float | None = None
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    is_step: bool = False


CHARTS: tuple[Chart, ...] = (
    Chart(
        name="false-resplits",
        title="Re-splits for nothing, by noise and workers: bounds of 95 %, dashed the goal",
        table="trigger.false re-splits",
        kind="cases",
        value="per_10k",
        label=("noise", "workers"),
        low="low",
        high="high",
        goal=1.0,
        x_label="per 10,000 steps of the group",
    ),
    Chart(
        name="trigger-delays",
        title="Steps from a slowdown to the alarm: median to 95th percentile, by noise, factor and length",
        table="trigger.delays",
        kind="cases",
        value="median",
        label=("noise", "factor", "length"),
        high="p95",
        goal=10.0,
        x_label="slow steps until the alarm, the last one included",
    ),
    Chart(
        name="detectors-delays",
        title="The same of simpler detectors, tuned to one false alarm in 10,000 steps",
        table="trigger.comparators: delays",
        kind="cases",
        value="median",
        label=("detector", "noise", "factor", "length"),
        high="p95",
        x_label="slow steps until the alarm, the last one included",
    ),
    Chart(
        name="growth-errors",
        title="Growth for nothing at a noise scale of exactly two batches: bounds of 95 %, dashed the goal",
        table="growth.errors",
        kind="cases",
        value="false_pct",
        label=("noise", "test"),
        low="false_pct_low",
        high="false_pct_high",
        goal=5.0,
        x_label="per cent of decisions",
    ),
    Chart(
        name="growth-power",
        title="Growth where it is due, by how far the noise scale is above the batch",
        table="growth.power",
        kind="lines",
        value="power_pct",
        label=("test", "noise"),
        x="phi_over_batch",
        low="power_pct_low",
        high="power_pct_high",
        x_label="noise scale over batch",
        y_label="per cent of decisions",
        log_x=True,
    ),
    Chart(
        name="ax-ratios",
        title="Step time over the true optimum's: dot after the search, line to the exact split on curves",
        table="search.measured time",
        kind="cases",
        value="to_optimum",
        label=("world", "num_workers"),
        high="exact_to_optimum",
        x_label="ratio",
    ),
    Chart(
        name="cost",
        title="Controller time per worker and step",
        table="cost.controller",
        kind="lines",
        value="us_per_worker_step",
        label=("path",),
        x="num_workers",
        low="low",
        high="high",
        x_label="workers",
        y_label="microseconds",
        log_x=True,
    ),
)
"""What is drawn, where the table was measured."""


def draw(tables: Tables, charts: Sequence[Chart] = CHARTS) -> dict[str, str]:
    """Return the SVG files by name of every chart whose table and columns are there."""
    drawings = {}
    for chart in charts:
        rows = [row for row in tables.get(chart.table, ()) if _number(row.get(chart.value)) is not None]
        if rows and all(column in rows[0] for column in (*chart.label, *filter(None, (chart.x,)))):
            drawings[chart.name] = draw_chart(chart, rows)
    return drawings


def draw_chart(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one chart as a file of its own."""
    return _draw_cases(chart, rows) if chart.kind == "cases" else _draw_lines(chart, rows)


def _draw_cases(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
    frame = Frame(860, _TITLE_PX + _ROW_PX * len(rows) + 44, left=_LABEL_PX, top=_TITLE_PX)
    ends = [_bounds(chart, row) for row in rows]
    reach = max([high for _, high in ends] + ([chart.goal] if chart.goal is not None else []))
    least = min(low for low, _ in ends)
    x = frame.x_scale(min(0.0, least) if least < reach / 2 else least - 0.05 * (reach - least), reach or 1.0)
    parts = [frame.axes(x, _NO_TICKS, chart.x_label, "")]
    for index, (row, (low, high)) in enumerate(zip(rows, ends, strict=True)):
        at = frame.top + _ROW_PX * (index + 0.5)
        parts.append(text(frame.left - 8, at + 4, _label(chart, row), anchor="end"))
        parts.append(f'<path stroke="{_PALETTE[0]}" stroke-width="2" d="M{_at(x, low)} {at}H{_at(x, high)}"/>')
        parts.append(f'<circle cx="{_at(x, float(row[chart.value]))}" cy="{at}" r="4" fill="{_PALETTE[0]}"/>')
    if chart.goal is not None:
        parts.append(f'<path class="goal" d="M{_at(x, chart.goal)} {frame.top}V{frame.height - frame.bottom}"/>')
    return _file(frame, chart, parts)


def _draw_lines(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(_label(chart, row), []).append(row)
    frame = Frame(860, 420 + _ROW_PX * len(lines), left=64, top=_TITLE_PX, bottom=52 + _ROW_PX * len(lines))
    ends = [_bounds(chart, row) for row in rows]
    top = max([high for _, high in ends] + ([chart.goal] if chart.goal is not None else []))
    positions = [_position(chart, row) for row in rows]
    x, y = frame.x_scale(min(positions), max(positions)), frame.y_scale(min(0.0, *(e[0] for e in ends)), top or 1.0)
    parts = [_line_axes(frame, chart, x, y, sorted({float(row[chart.x]) for row in rows}))]
    for index, (label, members) in enumerate(lines.items()):
        ordered = sorted(members, key=lambda row: _position(chart, row))
        parts.append(_line(chart, ordered, x, y, index))
        at = frame.height - _ROW_PX * (len(lines) - index) + 4
        parts.append(f'<path {_stroke(index)} d="M{frame.left} {at - 4}h34"/>{text(frame.left + 42, at, label)}')
    if chart.goal is not None:
        parts.append(f'<path class="goal" d="M{frame.left} {_at(y, chart.goal)}H{frame.width - frame.right}"/>')
    return _file(frame, chart, parts)


def _line_axes(frame: Frame, chart: Chart, x: Scale, y: Scale, values: Sequence[float]) -> str:
    """Axes; on a scale of powers the abscissa is labelled where something was measured."""
    if not chart.log_x:
        return frame.axes(x, y, chart.x_label, chart.y_label)
    under = frame.height - frame.bottom + 17
    labels = [text(_px(x, math.log2(value)), under, f"{value:g}", anchor="middle") for value in values]
    middle = (frame.left + frame.width - frame.right) / 2
    labels.append(text(middle, under + 17, chart.x_label, anchor="middle"))
    return frame.axes(_NO_TICKS, y, "", chart.y_label) + "".join(labels)


def _line(chart: Chart, rows: Sequence[Mapping[str, Any]], x: Scale, y: Scale, index: int) -> str:
    at = np.array([_position(chart, row) for row in rows])
    values = np.array([float(row[chart.value]) for row in rows])
    marks = []
    for row, position, value in zip(rows, at.tolist(), values.tolist(), strict=True):
        low, high = _bounds(chart, row)
        if low < high:
            span = f"M{_at(x, position)} {_at(y, low)}V{_at(y, high)}"
            marks.append(f'<path {_stroke(index, dashed=False)} opacity=".45" d="{span}"/>')
        if not chart.is_step:
            colour = _PALETTE[index % len(_PALETTE)]
            marks.append(f'<circle cx="{_at(x, position)}" cy="{_at(y, value)}" r="3" fill="{colour}"/>')
    if chart.is_step:
        at, values = np.repeat(at, 2)[1:], np.repeat(values, 2)[:-1]
    return f'<path {_stroke(index)} d="{line_path(x(at), y(values))}"/>' + "".join(marks)


def _stroke(index: int, *, dashed: bool = True) -> str:
    dash = DASHES[index // 2 % len(DASHES)] if dashed else ""
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{_PALETTE[index % len(_PALETTE)]}" stroke-width="1.8"{pattern}'


def _file(frame: Frame, chart: Chart, parts: Sequence[str]) -> str:
    title = text(8, 19, chart.title, css="title")
    body = f'{_STYLE}<rect width="100%" height="100%" fill="#fff"/>{title}{"".join(parts)}'
    described = f"{chart.title}, from the table {chart.table}"
    drawing = frame.wrap(body, title=chart.title, description=described, variant="chart")
    return drawing.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.width}" ', 1) + "\n"


def _position(chart: Chart, row: Mapping[str, Any]) -> float:
    return math.log2(float(row[chart.x])) if chart.log_x else float(row[chart.x])


def _bounds(chart: Chart, row: Mapping[str, Any]) -> tuple[float, float]:
    value = float(row[chart.value])
    low, high = _number(row.get(chart.low)), _number(row.get(chart.high))
    return value if low is None else low, value if high is None else high


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _label(chart: Chart, row: Mapping[str, Any]) -> str:
    return ", ".join(str(row[column]) for column in chart.label if row[column] not in (None, ""))


def _px(scale: Scale, value: float) -> float:
    return float(scale(value))


def _at(scale: Scale, value: float) -> str:
    return f"{_px(scale, value):.1f}"

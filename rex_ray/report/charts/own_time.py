"""How long each worker took on its own, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray
from rex_ray.report.charts.events import LANE_PX, event_keys, event_lane
from rex_ray.report.charts.figure import MAX_POINTS, Figure, Key, axes, both_widths, end_labels, step_range, thin
from rex_ray.report.charts.kinds import are_many, hands, kinds
from rex_ray.report.charts.svg import Frame, Scale, area_path, line_path
from rex_ray.report.reading.schema import DecisionRow, EventRow, GroupData

__all__ = ["own_time_figure"]

_TITLE = "Own time per worker"
_RANGE = (10, 90)
_REACH_OWN, _REACH_STEP = 98.5, 90.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """A line, or a band between two.

    Attributes:
        css: its classes.
        dash: its pattern.
        name: what stands at its end, or ``""``.
        steps: where its points are, shape ``[p]``.
        seconds: how high, shape ``[p]``.
        upper_s: the band's other side, shape ``[p]``, or None for a line.
    """

    css: str
    dash: str = ""
    name: str = ""
    steps: FloatArray
    seconds: FloatArray
    upper_s: FloatArray | None = None


def own_time_figure(
    groups: Sequence[GroupData], decisions: Sequence[DecisionRow], events: Sequence[EventRow], hues: dict[str, int]
) -> Figure:
    """Lines: each rank's own time over steps, the whole step's in grey, and what happened above them.

    Where ranks are many: the median of each kind of device, a band for most of its workers, and the slowest of all.
    """
    many = are_many(groups)
    highest = _highest(groups)
    unit, factor = ("ms", 1e3) if highest < 1.0 else ("s", 1.0)
    top = 1.12 * highest * factor
    moves = [decision for decision in decisions if decision.moved_rows]
    description = f"{len(moves)} decisions and {len(events)} events marked; wall time of the whole step in grey"
    drawn = [_kind_lines(group, hues) if many else _rank_lines(group, hues) for group in groups]

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(0.0, top)
        body = [axes(frame, x, y, "optimizer step", f"own time, {unit}")]
        body += [_path(line, factor, x, y) for lines in drawn for line in lines]
        body.append(event_lane(moves, events, frame, x))
        named = [line for line in drawn[-1] if line.name]
        ends = [(float(y(min(line.seconds[-1] * factor, top))), line.name, line.css) for line in named]
        body.append(end_labels(frame, ends))
        return frame.wrap("".join(body), title=_TITLE, description=description, variant=variant)

    wide, narrow = both_widths(draw, right=(110, 72), top=28 + LANE_PX)
    keys = [Key(mark='<path class="line whole" d="M2 7H32"/>', meaning="the whole step")]
    if many:
        keys.append(Key(mark='<path class="line slowest" d="M2 7H32"/>', meaning="the slowest worker"))
    caption = (
        "Data, forward and backward up to the last local gradient, without the wait for the others. "
        + ("Lines: medians of each kind of device; bands: 10 to 90 % of its workers. " if many else "")
        + "Rare spikes are cut off at the top; epochs' last, partial batches are left out."
        + _thinned(groups)
    )
    return Figure(title=_TITLE, caption=caption, wide=wide, narrow=narrow, keys=(*keys, *event_keys(moves, events)))


def _highest(groups: Sequence[GroupData]) -> float:
    """How high the chart reaches: beyond all but the rarest own times, and most whole steps.

    Warm-up steps take ten times as long as others, and a machine that halts for a moment stretches a whole step as
    much: fitting those in would flatten what the chart is about.
    """
    steady = [(group.own_s.max(axis=1)[group.steady], group.step_s[group.steady]) for group in groups]
    own_s, step_s = (np.concatenate(column) for column in zip(*steady, strict=True))
    if not own_s.size:
        return max(float(group.step_s.max()) for group in groups)
    return max(float(np.percentile(own_s, _REACH_OWN)), float(np.percentile(step_s, _REACH_STEP)))


def _thinned(groups: Sequence[GroupData]) -> str:
    bucket = max(1, round(max(len(group.steps) for group in groups) / MAX_POINTS))
    return f" Each point is the median of about {bucket:,} steps." if bucket > 1 else ""


def _thin_whole(group: GroupData, columns: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Thin columns of shape ``[k]`` over the steps of whole batches; all steps where no batch was whole."""
    whole = ~group.partial if not group.partial.all() else group.partial
    return thin(group.steps[whole], np.column_stack(columns)[whole])


def _rank_lines(group: GroupData, hues: dict[str, int]) -> list[_Line]:
    steps, seconds = _thin_whole(group, [group.step_s, *group.own_s.T])
    lines = [_Line(css="whole", steps=steps, seconds=seconds[:, 0])]
    for hand in hands(group, hues):
        name = f"{hand.rank} {hand.device}"
        own_s = seconds[:, 1 + hand.rank]
        lines.append(_Line(css=hand.css, dash=hand.dash, name=name, steps=steps, seconds=own_s))
    return lines


def _kind_lines(group: GroupData, hues: dict[str, int]) -> list[_Line]:
    columns = [group.step_s, group.own_s.max(axis=1)]
    for kind in kinds(group, hues):
        own_s = group.own_s[:, kind.ranks]
        columns += [np.median(own_s, axis=1), *np.percentile(own_s, _RANGE, axis=1)]
    steps, seconds = _thin_whole(group, columns)
    lines = [
        _Line(css="whole", steps=steps, seconds=seconds[:, 0]),
        _Line(css="slowest", steps=steps, seconds=seconds[:, 1]),
    ]
    for k, kind in enumerate(kinds(group, hues)):
        middle, low, high = seconds[:, 2 + 3 * k : 5 + 3 * k].T
        lines.append(_Line(css=kind.css, steps=steps, seconds=low, upper_s=high))
        lines.append(_Line(css=kind.css, dash=kind.dash, name=kind.device, steps=steps, seconds=middle))
    return lines


def _path(line: _Line, factor: float, x: Scale, y: Scale) -> str:
    px, py = x(line.steps), y(np.minimum(line.seconds * factor, y.high))
    if line.upper_s is not None:
        upper = y(np.minimum(line.upper_s * factor, y.high))
        return f'<path class="range {line.css}" d="{area_path(px, py, upper)}"/>'
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return f'<path class="line {line.css}"{dash} d="{line_path(px, py)}"/>'

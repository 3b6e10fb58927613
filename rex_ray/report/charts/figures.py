"""The report's charts: who had how many rows, how long each worker took, and how the metrics went.

The charts over steps are drawn twice, for a wide and for a narrow page: scaling one drawing down to a phone makes its
text unreadable. Long runs are thinned to one point per bucket of steps; the caption says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.charts.svg import DASHES, Frame, Scale, area_path, line_path, shade, text
from rex_ray.report.reading.schema import DecisionRow, GroupData, MetricPoint

__all__ = [
    "Figure",
    "LegendEntry",
    "both_widths",
    "device_colours",
    "legend",
    "metric_figures",
    "own_time_figure",
    "split_figure",
    "step_range",
]

# Okabe and Ito's palette (jfly.uni-koeln.de/color), in an order in which neighbours differ for every kind of sight.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDE = (960, 320)
_NARROW = (400, 300)
_MAX_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with what a reader should know about it; ``narrow`` is ``""`` where one drawing serves every width."""

    title: str
    caption: str
    wide: str
    narrow: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """How one rank is drawn."""

    rank: int
    device: str
    node: str
    fill: str
    stroke: str
    dash: str


def device_colours(groups: Sequence[GroupData]) -> dict[str, str]:
    """One hue per kind of device, by name, so that two runs on the same kinds look alike."""
    kinds = sorted({device for group in groups for device in group.devices})
    return {kind: _PALETTE[k % len(_PALETTE)] for k, kind in enumerate(kinds)}


def legend(group: GroupData, colours: dict[str, str]) -> tuple[LegendEntry, ...]:
    """How each rank of a group is drawn: hue by kind; shade and dash by order within the kind."""
    entries = []
    for rank, (device, node) in enumerate(zip(group.devices, group.nodes, strict=True)):
        index = group.devices[:rank].count(device)
        entries.append(
            LegendEntry(
                rank=rank,
                device=device,
                node=node,
                fill=shade(colours[device], index, group.devices.count(device)),
                stroke=colours[device],
                dash=DASHES[index % len(DASHES)],
            )
        )
    return tuple(entries)


def both_widths(draw: Callable[[Frame, str], str]) -> tuple[str, str]:
    """Draw for a wide and for a narrow page."""
    return draw(Frame(*_WIDE), "wide"), draw(Frame(*_NARROW), "narrow")


def step_range(groups: Sequence[GroupData]) -> tuple[float, float]:
    """Return the first step of a run and the one after its last."""
    return float(groups[0].steps[0]), float(groups[-1].steps[-1] + 1)


def planned_shares(group: GroupData) -> tuple[IntArray, IntArray]:
    """Return the first step of every allocation, shape ``[m]``, and its shares, shape ``[m, n]``.

    An epoch's last batch has fewer rows than its allocation asks for, or a few more; any other step shows them as
    planned. An allocation that ran such batches alone is left out, unless there is no other.
    """
    starts = np.flatnonzero(np.diff(group.versions, prepend=group.versions[0] - 1))
    ends = [*starts[1:], len(group.steps)]
    spans = list(zip(starts.tolist(), ends, strict=True))
    planned = [(lo, hi) for lo, hi in spans if not group.partial[lo:hi].all()] or spans
    shown = [lo + int(group.partial[lo:hi].argmin()) for lo, hi in planned]
    return group.steps[[lo for lo, _ in planned]], group.num_rows[shown]


def split_figure(groups: Sequence[GroupData], colours: dict[str, str]) -> Figure:
    """Stacked areas: the global batch over steps, and each rank's share of it."""
    plans = [planned_shares(group) for group in groups]
    top = float(max(shares.sum(axis=1).max() for _, shares in plans))
    ended = zip(groups[-1].devices, plans[-1][1][-1].tolist(), strict=True)
    description = ", ".join(
        f"rank {rank} ({device}) ends with {rows} rows" for rank, (device, rows) in enumerate(ended)
    )

    def draw(frame: Frame, variant: str) -> str:
        frame = Frame(frame.width, frame.height, right=110 if variant == "wide" else 84)
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(0.0, top)
        body = [frame.axes(x, y, "optimizer step", "rows per step")]
        for group, (starts, shares) in zip(groups, plans, strict=True):
            body.append(_areas(group, starts, shares, x, y, colours))
        body.append(_end_labels(groups[-1], plans[-1][1][-1], frame, y, variant))
        return frame.wrap("".join(body), title="Split of the global batch", description=description, variant=variant)

    wide, narrow = both_widths(draw)
    caption = (
        "Each band is one rank's rows; together they are the global batch. At the right: what each had at the end."
    )
    return Figure(title="Split of the global batch", caption=caption, wide=wide, narrow=narrow)


def _areas(group: GroupData, starts: IntArray, shares: IntArray, x: Scale, y: Scale, colours: dict[str, str]) -> str:
    """One band per rank, with vertical edges where the allocation changes."""
    edges = np.append(starts, group.steps[-1] + 1)
    px = x(np.repeat(edges, 2)[1:-1].astype(np.float64))
    tops = np.repeat(np.cumsum(shares, axis=1), 2, axis=0)
    parts = []
    for entry in legend(group, colours):
        upper = y(tops[:, entry.rank].astype(np.float64))
        lower = y((tops[:, entry.rank] - np.repeat(shares[:, entry.rank], 2)).astype(np.float64))
        parts.append(f'<path class="band" fill="{entry.fill}" d="{area_path(px, lower, upper)}"/>')
    return "".join(parts)


def _end_labels(group: GroupData, shares: IntArray, frame: Frame, y: Scale, variant: str) -> str:
    """Name each band beside its end, where it is high enough to be named."""
    tops = np.cumsum(shares)
    parts = []
    for rank, (device, rows, top) in enumerate(zip(group.devices, shares.tolist(), tops.tolist(), strict=True)):
        upper, lower = float(y(float(top))), float(y(float(top - rows)))
        if lower - upper >= 13:
            name = f"{rank}: {device}" if variant == "wide" else device
            parts.append(text(frame.width - frame.right + 6, (upper + lower) / 2 + 4, f"{name} · {rows}"))
    return "".join(parts)


def thin(steps: IntArray, values: FloatArray, max_points: int = _MAX_POINTS) -> tuple[FloatArray, FloatArray]:
    """Reduce to at most ``max_points`` buckets of consecutive steps: their middle and their median.

    Args:
        steps: shape ``[k]``.
        values: shape ``[k, ...]``.
        max_points: most points kept.
    """
    bounds = np.unique(np.linspace(0, len(steps), min(max_points, len(steps)) + 1).astype(np.int64))
    pieces = list(pairwise(bounds))
    middles = np.array([steps[lo:hi].mean() for lo, hi in pieces])
    medians = np.stack([np.median(values[lo:hi], axis=0) for lo, hi in pieces])
    return middles, medians


def own_time_figure(groups: Sequence[GroupData], decisions: Sequence[DecisionRow], colours: dict[str, str]) -> Figure:
    """Lines: each rank's own time over steps, the whole step's in grey, and where decisions took effect."""
    # Warm-up steps take ten times as long as others; fitting them in would flatten what the chart is about.
    steady_s = np.concatenate(
        [np.append(group.own_s.max(axis=1), group.step_s)[np.tile(group.steady, 2)] for group in groups]
    )
    highest = float(np.percentile(steady_s, 99.5)) if steady_s.size else max(float(g.step_s.max()) for g in groups)
    unit, factor = ("ms", 1e3) if highest < 1.0 else ("s", 1.0)
    top = 1.12 * highest * factor
    moves = [decision for decision in decisions if decision.moved_rows]
    description = f"{len(moves)} decisions marked; wall time of the whole step in grey"

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(*step_range(groups)), frame.y_scale(0.0, top)
        body = [frame.axes(x, y, "optimizer step", f"own time, {unit}"), _decision_marks(moves, frame, x)]
        for group in groups:
            whole = ~group.partial if not group.partial.all() else group.partial
            middles, medians = thin(group.steps[whole], np.column_stack([group.own_s, group.step_s])[whole])
            px, py = x(middles), y(np.minimum(medians * factor, top))
            body.append(f'<path class="line whole" d="{line_path(px, py[:, -1])}"/>')
            for entry in legend(group, colours):
                dash = f' stroke-dasharray="{entry.dash}"' if entry.dash else ""
                path = line_path(px, py[:, entry.rank])
                body.append(f'<path class="line" stroke="{entry.stroke}"{dash} d="{path}"/>')
        return frame.wrap("".join(body), title="Own time per worker", description=description, variant=variant)

    wide, narrow = both_widths(draw)
    bucket = max(1, round(max(len(group.steps) for group in groups) / _MAX_POINTS))
    thinned = f" Each point is the median of about {bucket} steps." if bucket > 1 else ""
    caption = (
        "Data, forward and backward up to the last local gradient, without the wait for the others; the whole step "
        "in grey. Numbered lines are those of the decisions below that moved rows. Slower start-up steps are cut off "
        f"at the top; epochs' last, partial batches are left out.{thinned}"
    )
    return Figure(title="Own time per worker", caption=caption, wide=wide, narrow=narrow)


def _decision_marks(decisions: Sequence[DecisionRow], frame: Frame, x: Scale) -> str:
    """A numbered vertical line where each took effect; numbers that would overlap are left out."""
    parts: list[str] = []
    free_from = -1.0
    for decision in decisions:
        at = float(x(float(decision.applied_at_step or 0)))
        parts.append(f'<path class="mark" d="M{at:.1f} {frame.top}V{frame.height - frame.bottom}"/>')
        if at >= free_from:
            parts.append(text(at + 3, frame.top + 9, str(decision.number), css="mark-number"))
            free_from = at + 6 + 7 * len(str(decision.number))
    return "".join(parts)


def metric_figures(metrics: Sequence[MetricPoint]) -> tuple[Figure, ...]:
    """One small chart per metric that ever changed, in the order of first report."""
    names = dict.fromkeys(name for point in metrics for name in point.metrics)
    figures = []
    for name in names:
        points = [(p.elapsed_s, p.metrics[name]) for p in metrics if name in p.metrics and np.isfinite(p.metrics[name])]
        if len({value for _, value in points}) > 1:
            figures.append(_metric_figure(name, np.array(points)))
    return tuple(figures)


def _metric_figure(name: str, points: FloatArray) -> Figure:
    elapsed_s, values = points[:, 0], points[:, 1]
    margin = 0.06 * float(np.ptp(values))
    frame = Frame(460, 260)
    x = frame.x_scale(0.0, float(elapsed_s[-1]))
    y = frame.y_scale(float(values.min()) - margin, float(values.max()) + margin)
    if len(points) > _MAX_POINTS:
        elapsed_s, values = elapsed_s[_even_indices(len(points))], values[_even_indices(len(points))]
    px, py = x(elapsed_s), y(values)
    body = frame.axes(x, y, "time since the loop began, s", name)
    body += f'<path class="line metric" d="{line_path(px, py)}"/>'
    if len(points) <= 80:
        dots = zip(px.tolist(), py.tolist(), strict=True)
        body += "".join(f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in dots)
    description = f"from {values[0]:.4g} to {values[-1]:.4g} in {elapsed_s[-1]:.0f} seconds"
    drawing = frame.wrap(body, title=name, description=description, variant="any")
    caption = f"Last {values[-1]:.4g}; lowest {points[:, 1].min():.4g}, highest {points[:, 1].max():.4g}."
    return Figure(title=name, caption=caption, wide=drawing)


def _even_indices(count: int) -> IntArray:
    return np.linspace(0, count - 1, _MAX_POINTS).round().astype(np.int64)

"""What every chart of the report is made with: two widths, one style, points no denser than a screen.

A chart is drawn twice, for a wide and for a narrow page: scaling one drawing down to a phone makes its text unreadable.
Colours are classes of the page's style sheet, so that a dark page and a printed one have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.charts.svg import Frame, Scale, line_path, text
from rex_ray.report.reading.schema import GroupData

__all__ = ["Figure", "Key", "axes", "both_widths", "end_labels", "spread", "step_range", "steps_line", "thin"]

MAX_POINTS = 240
"""Points per line, about one for every three pixels of a wide chart."""

_WIDE = (960, 330)
_NARROW = (340, 300)
_LABEL_PX = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of a chart's key: a small drawing of 34 x 14 pixels and what it stands for."""

    mark: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart in two widths, with what a reader should know about it.

    Attributes:
        title: its heading.
        caption: what it shows, and how it was computed.
        wide: the drawing for a wide page.
        narrow: the same for a phone.
        keys: what its marks stand for, where they do not say it themselves.
        columns: names of the columns of ``rows``.
        rows: the chart in numbers, for whoever cannot see it; ``()`` where a table of the page has them anyway.
    """

    title: str
    caption: str
    wide: str
    narrow: str
    keys: tuple[Key, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def both_widths(draw: Callable[[Frame, str], str], *, right: tuple[int, int] = (14, 10), top: int = 28) -> list[str]:
    """Draw for a wide and for a narrow page, with room at the ``right`` of each for labels."""
    frames = [
        Frame(width, height, left=50, right=margin, top=top)
        for (width, height), margin in zip((_WIDE, _NARROW), right, strict=True)
    ]
    return [draw(frames[0], "wide"), draw(frames[1], "narrow")]


def axes(  # one parameter per side of the frame reads better than a record
    frame: Frame, x: Scale, y: Scale, x_label: str, y_label: str, y_ticks: Sequence[tuple[float, str]] | None = None
) -> str:
    """Grid and axes; the vertical one's name stands above it, where it needs no turned head."""
    return frame.axes(x, y, x_label, "", y_ticks) + text(2, 15, y_label, css="soft")


def step_range(groups: Sequence[GroupData]) -> tuple[float, float]:
    """Return the first step of a run and the one after its last, whichever groups ran them: one may resume earlier."""
    return float(min(group.steps[0] for group in groups)), float(max(group.steps[-1] for group in groups) + 1)


def thin(steps: IntArray, values: FloatArray, max_points: int = MAX_POINTS) -> tuple[FloatArray, FloatArray]:
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


def steps_line(starts: IntArray, values: FloatArray, x: Scale, y: Scale, css: str) -> str:
    """A line that keeps each value from its start to the next one's, the last to the end."""
    edges = np.append(starts.astype(np.float64), x.high)
    px = x(np.repeat(edges, 2)[1:-1])
    return f'<path class="{css}" d="{line_path(px, y(np.repeat(values, 2)))}"/>'


def spread(wanted: Sequence[float], low: float, high: float, apart: float = _LABEL_PX) -> list[float]:
    """Return places near the wanted ones, ``apart`` from one another and within ``[low, high]`` where they fit.

    Labels that want the same place form a cluster around their mean; clusters that meet are merged.
    """
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    clusters: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        clusters.append([index])
        starts.append(_start([wanted[index]], low, high, apart))
        while len(clusters) > 1 and starts[-1] < starts[-2] + apart * len(clusters[-2]):
            merged = clusters.pop(-2) + clusters.pop()
            del starts[-2:]
            clusters.append(merged)
            starts.append(_start([wanted[k] for k in merged], low, high, apart))
    places = [0.0] * len(wanted)
    for cluster, start in zip(clusters, starts, strict=True):
        for k, index in enumerate(cluster):
            places[index] = start + apart * k
    return places


def _start(wanted: Sequence[float], low: float, high: float, apart: float) -> float:
    extent = apart * (len(wanted) - 1)
    return max(low, min(float(np.mean(wanted)) - extent / 2, high - extent))


def end_labels(frame: Frame, ends: Sequence[tuple[float, str, str]]) -> str:
    """Name lines beside their ends: ``(height, name, class)`` each, with a thread to a name that had to move."""
    right = frame.width - frame.right
    places = spread([end[0] for end in ends], frame.top + 4, frame.height - frame.bottom - 2)
    parts = []
    for (height, name, css), place in zip(ends, places, strict=True):
        parts.append(f'<path class="thread {css}" d="M{right + 1} {height:.1f}L{right + 11} {place:.1f}"/>')
        parts.append(text(right + 14, place + 4, name))
    return "".join(parts)

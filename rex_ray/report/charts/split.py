"""The global batch over steps, and who has how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import IntArray
from rex_ray.report.charts.figure import Figure, axes, both_widths, end_labels, step_range
from rex_ray.report.charts.kinds import are_many, hands, kinds
from rex_ray.report.charts.svg import Frame, Scale, area_path
from rex_ray.report.reading.schema import GroupData

__all__ = ["planned_shares", "split_figure"]

_MAX_CHANGES = 480


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Band:
    """A band: its shares at every change, shape ``[m]``, and how it is drawn."""

    name: str
    short: str
    css: str
    opacity: float
    rows: IntArray


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


def split_figure(groups: Sequence[GroupData], hues: dict[str, int]) -> Figure:
    """Stacked areas: the global batch over steps, and each rank's share of it; each kind's where ranks are many."""
    first, last = step_range(groups)
    plans = [_visible(*planned_shares(group), first, last) for group in groups]
    many = are_many(groups)
    bands = [_bands(group, shares, hues, many) for group, (_, shares) in zip(groups, plans, strict=True)]
    top = float(max(shares.sum(axis=1).max() for _, shares in plans))
    description = ", ".join(f"{band.name} ends with {band.rows[-1]:,} rows" for band in bands[-1])

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(first, last), frame.y_scale(0.0, top)
        body = [axes(frame, x, y, "optimizer step", "rows per step")]
        for group, (starts, _), drawn in zip(groups, plans, bands, strict=True):
            body.append(_areas(group, starts, drawn, x, y))
        body.append(_names(bands[-1], frame, y, variant))
        return frame.wrap("".join(body), title="Split of the global batch", description=description, variant=variant)

    wide, narrow = both_widths(draw, right=(150, 104))
    who = "kind of device" if many else "worker"
    caption = (
        f"Each band is one {who}'s rows; together they are the global batch. At the right: what each had at the end."
    )
    return Figure(title="Split of the global batch", caption=caption, wide=wide, narrow=narrow)


def _visible(starts: IntArray, shares: IntArray, first: float, last: float) -> tuple[IntArray, IntArray]:
    """Of changes that fall on one pixel, keep the last."""
    pixel = ((starts - first) / max(last - first, 1.0) * _MAX_CHANGES).astype(np.int64)
    keep = np.append(np.diff(pixel) > 0, True)
    kept = starts[keep].copy()
    kept[0] = starts[0]
    return kept, shares[keep]


def _bands(group: GroupData, shares: IntArray, hues: dict[str, int], many: bool) -> list[_Band]:
    if many:
        return [
            _Band(
                name=f"{len(kind.ranks)} × {kind.device}",
                short=kind.device,
                css=kind.css,
                opacity=0.85,
                rows=shares[:, kind.ranks].sum(axis=1),
            )
            for kind in kinds(group, hues)
        ]
    return [
        _Band(
            name=f"rank {hand.rank} ({hand.device})",
            short=f"{hand.rank} {hand.device}",
            css=hand.css,
            opacity=hand.opacity,
            rows=shares[:, hand.rank],
        )
        for hand in hands(group, hues)
    ]


def _areas(group: GroupData, starts: IntArray, bands: Sequence[_Band], x: Scale, y: Scale) -> str:
    """One band each, with vertical edges where the allocation changes."""
    edges = np.append(starts, group.steps[-1] + 1)
    px = x(np.repeat(edges, 2)[1:-1].astype(np.float64))
    below = np.zeros(len(starts))
    parts = []
    for band in bands:
        above = below + band.rows
        path = area_path(px, y(np.repeat(below, 2)), y(np.repeat(above, 2)))
        parts.append(f'<path class="band {band.css}" fill-opacity="{band.opacity:g}" d="{path}"/>')
        below = above
    return "".join(parts)


def _names(bands: Sequence[_Band], frame: Frame, y: Scale, variant: str) -> str:
    """Name each band beside its end; the name of one that is too thin moves aside."""
    tops = np.cumsum([band.rows[-1] for band in bands])
    middles = [float(y(float(top - band.rows[-1] / 2))) for top, band in zip(tops, bands, strict=True)]
    ends = []
    for band, middle in zip(bands, middles, strict=True):
        name = band.name.replace("rank ", "") if variant == "wide" else band.short
        ends.append((middle, f"{name} · {band.rows[-1]:,}", band.css))
    return end_labels(frame, ends)

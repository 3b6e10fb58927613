"""A few primitives for inline SVG: scales, ticks, paths. No script, no network, no style sheet of its own.

Charts are drawn here rather than by a plotting library because a page that must open from a laptop's file system
would carry megabytes of somebody else's JavaScript, for lines that a path element says in a kilobyte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from rex_ray.core.types import FloatArray

__all__ = ["DASHES", "Frame", "Scale", "area_path", "format_tick", "line_path", "nice_ticks", "text"]

DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Stroke patterns; a line is told apart by its pattern as well as by its colour."""


_DIGIT_PX = 8.0  # of a figure in type of 12 or 13 pixels, rather too much than too little


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map of data ``[low, high]`` to pixels ``[start, end]``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, values: FloatArray | float) -> FloatArray:
        """Pixels of data values; a domain without extent maps to its start."""
        extent = self.high - self.low
        share = (np.asarray(values, dtype=np.float64) - self.low) / (extent if extent > 0 else 1.0)
        pixels: FloatArray = self.start + share * (self.end - self.start)
        return pixels


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing of ``width`` x ``height`` pixels with margins around its plot area."""

    width: int
    height: int
    left: int = 52
    right: int = 14
    top: int = 14
    bottom: int = 38

    def x_scale(self, low: float, high: float) -> Scale:
        """Scale over the plot area's width."""
        return Scale(low, high, self.left, self.width - self.right)

    def y_scale(self, low: float, high: float) -> Scale:
        """Scale over the plot area's height, upwards."""
        return Scale(low, high, self.height - self.bottom, self.top)

    def axes(
        self, x: Scale, y: Scale, x_label: str, y_label: str, y_ticks: Sequence[tuple[float, str]] | None = None
    ) -> str:
        """Grid, ticks and labels; ``y_ticks`` are values and their names where round values of ``y`` say little."""
        parts = []
        if y_ticks is None:
            y_ticks = [(value, format_tick(value)) for value in nice_ticks(y.low, y.high, max(3, self.height // 50))]
        for value, name in y_ticks:
            at = float(y(value))
            parts.append(f'<path class="grid" d="M{self.left} {at:.1f}H{self.width - self.right}"/>')
            parts.append(text(self.left - 7, at + 4, name, anchor="end"))
        for value in nice_ticks(x.low, x.high, max(3, self.width // 110)):
            name, at = format_tick(value), float(x(value))
            reach = _DIGIT_PX * len(name) / 2
            # The last one may stand at the very edge, where half of it would be cut off.
            at, anchor = (self.width - 1.0, "end") if at + reach > self.width else (at, "middle")
            parts.append(text(at, self.height - self.bottom + 17, name, anchor=anchor))
        parts.append(f'<path class="axis" d="M{self.left} {self.height - self.bottom}H{self.width - self.right}"/>')
        parts.append(text((self.left + self.width - self.right) / 2, self.height - 4, x_label, anchor="middle"))
        if y_label:
            middle = (self.top + self.height - self.bottom) / 2
            turned = f' transform="rotate(-90 12 {middle:.1f})"'
            parts.append(text(12, middle, y_label, anchor="middle", extra=turned))
        return "".join(parts)

    def wrap(self, body: str, *, title: str, description: str, variant: str) -> str:
        """Close the drawing: an image with a name and a description for those who cannot see it."""
        return (
            f'<svg class="{variant}" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(title, quote=True)}. {escape(description, quote=True)}">{body}</svg>'
        )


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "", extra: str = "") -> str:
    """One line of text; ``content`` is escaped."""
    css_class = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css_class}{extra}>{escape(content)}</text>'


def nice_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Round values 1, 2, 2.5 or 5 times a power of ten apart, about ``count`` of them, within ``[low, high]``."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return (low,) if math.isfinite(low) else ()
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= 0.9 * raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(k * step for k in range(first, last + 1))


def format_tick(value: float) -> str:
    """A number as short as it can be said."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def line_path(x: FloatArray, y: FloatArray) -> str:
    """Path data through the points; a point that is not finite interrupts the line."""
    out: list[str] = []
    pen_down = False
    for px, py in zip(x.tolist(), y.tolist(), strict=True):
        if not math.isfinite(py):
            pen_down = False
            continue
        out.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        pen_down = True
    return "".join(out)


def area_path(x: FloatArray, lower: FloatArray, upper: FloatArray) -> str:
    """Closed path data between two lines."""
    there = "".join(f"L{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), upper.tolist(), strict=True))
    back = "".join(f"L{a:.1f} {b:.1f}" for a, b in zip(x[::-1].tolist(), lower[::-1].tolist(), strict=True))
    return f"M{there[1:]}{back}Z"

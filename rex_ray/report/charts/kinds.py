"""How workers are drawn: a hue per kind of device; shade and dash within a kind; whole kinds where they are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import IntArray
from rex_ray.report.charts.svg import DASHES
from rex_ray.report.reading.schema import GroupData

__all__ = ["NUM_HUES", "Hand", "Kind", "are_many", "device_hues", "fleet_text", "hands", "kinds", "point_mark"]

NUM_HUES = 6
"""Hues of the style sheet, ``k0`` and so on: Okabe and Ito's palette (jfly.uni-koeln.de/color), in an order in which
neighbours differ for every kind of sight. A seventh kind of device has the first hue again, and another mark."""

MANY_RANKS = 12
"""Above as many workers no line of one's own can be followed: charts show kinds of device, and their extremes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """How one rank is drawn.

    Attributes:
        rank: of the group.
        device: its kind.
        node: its machine, or ``""``.
        css: class of its hue.
        opacity: of its band.
        dash: of its line.
    """

    rank: int
    device: str
    node: str
    css: str
    opacity: float
    dash: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """The ranks of one kind of device.

    Attributes:
        device: the kind.
        css: class of its hue.
        dash: of its line.
        ranks: whose, shape ``[m]``.
    """

    device: str
    css: str
    dash: str
    ranks: IntArray


def device_hues(groups: Sequence[GroupData]) -> dict[str, int]:
    """Number the kinds of device by name, so that two runs on the same kinds look alike."""
    names = sorted({device for group in groups for device in group.devices})
    return {device: k for k, device in enumerate(names)}


def hands(group: GroupData, hues: dict[str, int]) -> tuple[Hand, ...]:
    """Return how each rank of a group is drawn."""
    seen: dict[str, int] = {}
    entries = []
    for rank, (device, node) in enumerate(zip(group.devices, group.nodes, strict=True)):
        index = seen[device] = seen.get(device, -1) + 1
        fading = index / max(group.devices.count(device) - 1, 1)
        entries.append(
            Hand(
                rank=rank,
                device=device,
                node=node,
                css=f"k{hues[device] % NUM_HUES}",
                opacity=round(0.9 - 0.45 * fading, 3),
                dash=DASHES[(index + hues[device] // NUM_HUES) % len(DASHES)],
            )
        )
    return tuple(entries)


def kinds(group: GroupData, hues: dict[str, int]) -> tuple[Kind, ...]:
    """Return how each kind of device of a group is drawn."""
    devices = np.array(group.devices)
    return tuple(
        Kind(
            device=device,
            css=f"k{hues[device] % NUM_HUES}",
            dash=DASHES[hues[device] % len(DASHES)],
            ranks=np.flatnonzero(devices == device),
        )
        for device in sorted(set(group.devices))
    )


def are_many(groups: Sequence[GroupData]) -> bool:
    """Whether workers are shown by kind of device."""
    return max(group.num_workers for group in groups) > MANY_RANKS


def fleet_text(group: GroupData) -> str:
    """Return a group's workers in a few words: ``2 × T4 + 2 × V100``."""
    counts = {device: group.devices.count(device) for device in dict.fromkeys(group.devices)}
    return " + ".join(f"{count}\u00a0×\u00a0{device}" for device, count in counts.items())


def point_mark(x: float, y: float, hue: int, radius: float = 4.0) -> str:
    """A point whose shape names the kind as well as its hue: circle, square, triangle, diamond."""
    r, wide, high = radius, 1.2 * radius, 1.3 * radius
    if hue % 4 == 0:
        return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
    shape = (
        f"M{x - r:.1f} {y - r:.1f}h{2 * r:g}v{2 * r:g}h{-2 * r:g}Z",
        f"M{x:.1f} {y - wide:.1f}l{wide:g} {2 * r:g}h{-2 * wide:g}Z",
        f"M{x:.1f} {y - high:.1f}l{high:g} {high:g}l{-high:g} {high:g}l{-high:g} {-high:g}Z",
    )[hue % 4 - 1]
    return f'<path class="dot" d="{shape}"/>'

"""What happened, in a lane above a chart over steps: decisions by number, everything else by its shape."""

from __future__ import annotations

from collections.abc import Sequence

from rex_ray.report.charts.figure import Key
from rex_ray.report.charts.svg import Frame, Scale, text
from rex_ray.report.reading.schema import DecisionRow, EventRow

__all__ = ["EVENT_WORDS", "LANE_PX", "event_keys", "event_lane"]

LANE_PX = 34
"""Height that the lane takes above the chart."""

EVENT_WORDS = {
    "slow": "a worker became slower",
    "recovered": "it became faster again",
    "lost": "a worker was lost",
    "group": "a new group of workers",
    "incident": "an incident that a worker dealt with",
    "memory": "out of memory",
    "drain": "a machine is about to go",
    "save": "a save was asked for",
    "note": "a worker told",
}
"""Kinds of event and how a reader would say them."""

# Around the origin, at most 5 pixels each way. Shapes differ first, and hue only underlines what is bad.
_SHAPES = {
    "slow": '<path class="event" d="M-5-4H5L0 5Z"/>',
    "recovered": '<path class="event open" d="M-5 4H5L0-5Z"/>',
    "lost": '<path class="event bad open" d="M-4-4L4 4M-4 4L4-4"/>',
    "group": '<path class="event" d="M0-5L5 0L0 5L-5 0Z"/>',
    "incident": '<path class="event bad" d="M-5 4H5L0-5Z"/>',
    "memory": '<path class="event bad" d="M-4-4H4V4H-4Z"/>',
    "drain": '<path class="event open" d="M-4-4H4V4H-4Z"/>',
    "save": '<circle class="event open" r="3.5"/>',
}
_MOST_LINES = 60


def event_lane(decisions: Sequence[DecisionRow], events: Sequence[EventRow], frame: Frame, x: Scale) -> str:
    """Draw decisions at the step at which they took effect, and events; marks that would overlap are left out."""
    floor = frame.height - frame.bottom
    numbers, shapes = frame.top - LANE_PX + 13, frame.top - 10
    parts: list[str] = []
    free_from = -1.0
    for decision in decisions:
        at = float(x(float(decision.applied_at_step or 0)))
        is_named = at >= free_from
        if is_named or len(decisions) <= _MOST_LINES:
            parts.append(f'<path class="mark" d="M{at:.1f} {numbers + 3}V{floor}"/>')
        if is_named:
            parts.append(text(at, numbers, str(decision.number), anchor="middle", css="mark-number"))
            free_from = at + 8 + 7 * len(str(decision.number))
    taken: dict[str, float] = {}
    for event in events:
        at = float(x(float(min(max(event.step, x.low), x.high))))
        # A loss among many slowdowns must not be the one that is left out: each kind minds its own kind only.
        if event.kind in _SHAPES and at >= taken.get(event.kind, -1.0):
            parts.append(f'<g transform="translate({at:.1f} {shapes})">{_SHAPES[event.kind]}</g>')
            taken[event.kind] = at + 8
    return "".join(parts)


def event_keys(decisions: Sequence[DecisionRow], events: Sequence[EventRow]) -> tuple[Key, ...]:
    """What stands in the lane, of what is there only."""
    keys = []
    if decisions:
        mark = '<text x="17" y="11" text-anchor="middle" class="mark-number">1</text>'
        keys.append(Key(mark=mark, meaning="a decision that moved rows, by its number below"))
    there = {event.kind for event in events}
    for kind, meaning in EVENT_WORDS.items():
        if kind in there and kind in _SHAPES:
            keys.append(Key(mark=f'<g transform="translate(17 7)">{_SHAPES[kind]}</g>', meaning=meaning))
    return tuple(keys)

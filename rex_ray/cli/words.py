"""How the commands write times, shares and sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rex_ray.scenario import Source
from rex_ray.sim.limits import NO_NETWORK

__all__ = [
    "duration",
    "hours",
    "misfit_text",
    "network_line",
    "range_text",
    "rows_by_device",
    "shares_text",
    "source_text",
]


def duration(seconds: float) -> str:
    """Return a time in the unit that a reader would choose."""
    return (
        f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.1f} min" if seconds < 7200 else f"{hours(seconds)} h"
    )


def hours(seconds: float) -> str:
    """Return a time in hours."""
    return f"{seconds / 3600:.2f}"


def range_text(low: int, high: int, between: str = " to ") -> str:
    """Return two ends, or the one number where they meet."""
    return f"{low}" if low == high else f"{low}{between}{high}"


def rows_by_device(devices: Sequence[str], rows: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return kind, fewest and most rows of every run of like devices, in the order of ranks."""
    ranges = []
    start = 0
    for device, run in groupby(devices):
        shares = rows[start : (start := start + len(list(run)))]
        ranges.append((device, min(shares), max(shares)))
    return ranges


def shares_text(ranges: Sequence[tuple[str, int, int]]) -> str:
    """Return what ``rows_by_device`` found as text."""
    return ", ".join(f"{device} {range_text(low, high, '-')}" for device, low, high in ranges)


def misfit_text(batch: int, cluster: str, num_workers: int, most_rows: int) -> str:
    """Return what is wrong with a global batch that a cluster cannot take."""
    return (
        f"a global batch of {batch} rows does not fit {cluster}: {num_workers} workers take at least a row each and "
        f"hold {most_rows} together; give another --global-batch-size"
    )


def network_line(network: str) -> str:
    """Return what is assumed of the all-reduce, for people."""
    if network == NO_NETWORK:
        return "network: an all-reduce that takes no time (--network none)"
    device, plus, _ = network.partition("+")
    device, colon, per_node = device.partition(":")
    nodes = f"{device} nodes of {per_node}" if colon else f"{device} nodes"
    how = "overlapped with the backward pass as in Cannikin" if plus else "not overlapped with the backward pass"
    return f"network: the measured all-reduce between {nodes}, {how}"


def source_text(source: Source) -> str:
    """Return a source as text."""
    return f"{source.repo} {source.path} at {source.commit[:12]}"

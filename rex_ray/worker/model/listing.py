"""Names in an error: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed"]


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names in words, such as ``0.weight, 0.bias, 2.weight and 9 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")

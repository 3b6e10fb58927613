"""When an epoch of streams is over, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.counts import Count

__all__ = ["UnknownLengthError", "WhenToEnd", "account", "is_over"]

WhenToEnd: TypeAlias = Literal["all", "shortest"]


class UnknownLengthError(ConfigError, TypeError):
    """A stream has no length. A TypeError too, so that ``list(loader)`` and progress bars do without one."""


def is_over(counts: Sequence[Count], end: WhenToEnd) -> bool:
    """Whether no rank has a row left, or one has none where the shortest stream ends the epoch."""
    exhausted = [count.exhausted for count in counts]
    return all(exhausted) if end == "all" else any(exhausted)


def account(used: Sequence[int], counts: Sequence[Count], lengths: Sequence[int | None]) -> str:
    """Say what became of every rank's rows, as far as anybody knows."""
    whole = f"streams brought {', '.join(map(str, used))} rows"
    parts = []
    for rank, (count, rows, length) in enumerate(zip(counts, used, lengths, strict=True)):
        if count.exhausted:
            continue
        if length is not None:
            parts.append(f"{max(length - rows, 0)} rows of rank {rank}")
        else:
            parts.append(f"{count.num_rows} rows that rank {rank} had read, and all that it had not")
    if not parts:
        return f"{whole}, none left out"
    ended = ", ".join(str(rank) for rank, count in enumerate(counts) if count.exhausted)
    return f"{whole}; the stream of rank {ended} is exhausted, and left out are {'; '.join(parts)}"

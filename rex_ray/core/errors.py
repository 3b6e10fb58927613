"""The errors of rex_ray. Each class answers one question: whose fault is it?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DataError",
    "IllegalEventError",
    "InfeasibleError",
    "LinkError",
    "MemoryExhaustedError",
    "RexError",
    "StorageError",
    "first_line",
    "nearest_name_hint",
]


class RexError(Exception):
    """Base class of every error that rex_ray raises on purpose."""


class ConfigError(RexError, ValueError):
    """The user's: a value that cannot work. The message names the value and the remedy."""


class DataError(RexError):
    """The data's: rows that could not be read or are not what they were. Says which rows, on which rank, and when."""


class InfeasibleError(RexError):
    """Nobody's: no allocation satisfies the workers' bounds at this global batch size."""


class LinkError(RexError):
    """The network's: a peer did not answer within the stated limit. The message says who waited for whom."""


class StorageError(RexError):
    """The storage's: what was saved cannot be read back whole. The message names the path and what is wrong there."""


class MemoryExhaustedError(RexError):
    """The device's: a pass ran out of memory and could not be tried again in place. The message says why."""


class IllegalEventError(RexError):
    """A driver's bug: an event that the controller cannot meet in its present phase.

    Args:
        message: what was wrong.
        history: the most recent events, oldest first, as text; they tell the story of the failure.
    """

    def __init__(self, message: str, history: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.history = history

    def __str__(self) -> str:
        """The message followed by the recent history."""
        if not self.history:
            return self.message
        return self.message + "\nrecent events, oldest first:\n  " + "\n  ".join(self.history)

    def __reduce__(self) -> tuple[type[IllegalEventError], tuple[str, tuple[str, ...]]]:
        """Pickle both arguments: the error crosses process boundaries inside Ray."""
        return (type(self), (self.message, self.history))


def first_line(error: BaseException) -> str:
    """Return what an error says in one line: the first, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name nearest to a mistyped one, or the list of names.

    Case does not count: ``t4`` is nearest to ``T4``.
    """
    names = sorted(known)
    by_folded = {known_name.casefold(): known_name for known_name in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return f" (did you mean {by_folded[close[0]]!r}?)" if close else f" (known: {', '.join(names)})"

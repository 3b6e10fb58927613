"""What ranks last said of themselves, and the words that ranks and times are named by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Activity", "Heard", "Word", "error_text", "named_ranks", "seconds_text"]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a rank's training thread does.

    Attributes:
        doing: where it is, in words that follow "rank 2 is".
        waits_for: what it waits for other ranks with; None while it computes.
    """

    doing: str
    waits_for: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a rank says of itself, over and over.

    Attributes:
        beat: number of the word; one that grows is a sign of life whatever the rest says.
        doing: see ``Activity``.
        for_s: how long it has done so, by its own clock.
        waits_for: see ``Activity``.
        left: why it left the session, or None while it is in it; a rank that gave up waiting keeps ``waits_for``.
    """

    beat: int
    doing: str
    for_s: float
    waits_for: str | None = None
    left: str | None = None

    def encode(self) -> str:
        """Return the word as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Word:
        """Return the word that a text holds."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A rank's newest word, and how old it is by the listener's own clock: clocks of two machines never meet.

    Attributes:
        word: None if it was never heard of.
        age_s: time since the word changed, or since the listener began to listen.
    """

    word: Word | None
    age_s: float


def seconds_text(seconds: float) -> str:
    """Return a time as people say it."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 0, 1 and 3``, ``ranks 0 to 15``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    if len(shown) > _MOST_NAMED:
        shown = [*shown[:_MOST_NAMED], f"{len(shown) - _MOST_NAMED} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def error_text(error: BaseException) -> str:
    """Return an error in one line, its kind first."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"

"""What ranks last said of themselves, and what that tells whoever waits for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Account", "Activity", "Heard", "Word", "give_account", "named_ranks", "seconds_text"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who keeps the others waiting.

    Attributes:
        text: one sentence part per kind of rank, the likeliest causes first.
        missing: ranks that do not wait as well.
        disagree: some wait for something else.
        first_witness: no rank below this one waits as well, so this one tells it for all.
    """

    text: str
    missing: tuple[int, ...]
    disagree: bool
    first_witness: bool


def give_account(
    rank: int, waits_for: str, others: Mapping[int, Heard], *, silent_after_s: float, store_silent_s: float | None
) -> Account:
    """Tell from the others' last words why a rank waits.

    Args:
        rank: who waits.
        waits_for: for what.
        others: every other rank.
        silent_after_s: a rank whose word is older than this is no longer there, or cannot be reached.
        store_silent_s: for how long rank 0's store has not answered; None: it does.
    """
    never: list[int] = []
    parts_silent: list[str] = []
    parts_left: list[str] = []
    parts_busy: list[str] = []
    elsewhere: dict[str, list[int]] = {}
    alike: list[int] = []
    for other, heard in sorted(others.items()):
        word = heard.word
        if store_silent_s is not None and other == 0 and (word is None or word.left is None):
            parts_silent.insert(
                0,
                f"the store on rank 0, where ranks leave word, has not answered for {seconds_text(store_silent_s)}, so "
                "rank 0's process is dead or stopped, or its machine cannot be reached",
            )
            continue
        if word is None:
            never.append(other)
        elif word.left is not None and word.waits_for is None:
            parts_left.append(f"rank {other} {word.left}")
        elif word.left is None and heard.age_s > silent_after_s:
            parts_silent.append(f"rank {other} was last heard of {seconds_text(heard.age_s)} ago, {word.doing}")
        elif word.waits_for is None:
            since = seconds_text(word.for_s + heard.age_s)
            parts_busy.append(f"rank {other} is alive and has been {word.doing} for {since}")
        elif word.waits_for == waits_for:
            alike.append(other)
        else:
            elsewhere.setdefault(word.waits_for, []).append(other)
    parts = parts_silent + parts_left + parts_busy
    if never:
        parts.insert(0, f"{named_ranks(never)} {'was' if len(never) == 1 else 'were'} never heard of")
    parts += [f"{named_ranks(whose)} {_verb(whose)} for {what} instead" for what, whose in elsewhere.items()]
    if alike:
        parts.append(f"{named_ranks(alike)} {_verb(alike)} as well")
    waiting = alike + [other for whose in elsewhere.values() for other in whose]
    missing = tuple(other for other in sorted(others) if other not in waiting)
    return Account(
        text="; ".join(parts),
        missing=missing,
        disagree=bool(elsewhere),
        first_witness=all(rank < other for other in waiting),
    )


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


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"

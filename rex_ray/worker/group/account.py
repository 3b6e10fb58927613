"""Why a rank waits: who keeps it waiting, as far as the others' last words tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from rex_ray.worker.group.last_words import Heard, named_ranks, seconds_text

__all__ = ["Account", "give_account"]


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


class _State(Enum):
    NEVER_HEARD = auto()
    SILENT = auto()
    LEFT = auto()
    BUSY = auto()
    WAITING = auto()


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
    told: dict[_State, dict[int, str]] = {state: {} for state in _State}
    for other, heard in sorted(others.items()):
        of_store_s = store_silent_s if other == 0 else None
        state, text = _told_of(other, heard, silent_after_s=silent_after_s, store_silent_s=of_store_s)
        told[state][other] = text
    never, waiting = list(told[_State.NEVER_HEARD]), told[_State.WAITING]
    alike = [other for other, what in waiting.items() if what == waits_for]
    elsewhere: dict[str, list[int]] = {}
    for other, what in waiting.items():
        if what != waits_for:
            elsewhere.setdefault(what, []).append(other)

    parts = [f"{named_ranks(never)} {'was' if len(never) == 1 else 'were'} never heard of"] if never else []
    parts += [text for state in (_State.SILENT, _State.LEFT, _State.BUSY) for text in told[state].values()]
    parts += [f"{named_ranks(ranks)} {_wait(ranks)} for {what} instead" for what, ranks in elsewhere.items()]
    parts += [f"{named_ranks(alike)} {_wait(alike)} as well"] if alike else []
    return Account(
        text="; ".join(parts),
        missing=tuple(other for other in sorted(others) if other not in waiting),
        disagree=bool(elsewhere),
        first_witness=all(rank < other for other in waiting),
    )


def _told_of(rank: int, heard: Heard, *, silent_after_s: float, store_silent_s: float | None) -> tuple[_State, str]:
    """Return how a rank is, and what is said of it; of one that waits, what for."""
    word = heard.word
    if store_silent_s is not None and (word is None or word.left is None):
        return _State.SILENT, (
            f"the store on rank 0, where ranks leave word, has not answered for {seconds_text(store_silent_s)}, so "
            "rank 0's process is dead or stopped, or its machine cannot be reached"
        )
    if word is None:
        return _State.NEVER_HEARD, ""
    if word.left is not None and word.waits_for is None:
        return _State.LEFT, f"rank {rank} {word.left}"
    if word.left is None and heard.age_s > silent_after_s:
        return _State.SILENT, f"rank {rank} was last heard of {seconds_text(heard.age_s)} ago, {word.doing}"
    if word.waits_for is None:
        since = seconds_text(word.for_s + heard.age_s)
        return _State.BUSY, f"rank {rank} is alive and has been {word.doing} for {since}"
    # Also of a rank that gave up the wait and left: it did not keep anybody waiting.
    return _State.WAITING, word.waits_for


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"

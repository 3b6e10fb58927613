"""What a rank has heard of the others, and for how long it has listened: moments are arguments, nothing waits.

Clocks of two machines are never compared: how old a word is, the listener tells by its own, from when the word's
number last changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rex_ray.worker.group.last_words import Heard, Word

__all__ = ["Hearing", "Pace", "StoreWatch"]

_BEAT_S = 1.0
_BEATS_PER_LIMIT = 10
_SILENT_BEATS = 3
# A beat beyond the silence itself: the last word may have been said just before.
_SURE = 1.3
_MOST_READS_PER_S = 20_000
# A beat comes a little early or late, and one that is early should not wait for the next.
_NEARLY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often ranks speak and listen.

    Attributes:
        beat_s: between two words of a rank.
        listen_s: between two looks at what all the others said.
    """

    beat_s: float
    listen_s: float

    @classmethod
    def of(cls, size: int, limit_s: float) -> Pace:
        """Return the pace of ``size`` ranks, one store for all of them, whose waits have this limit."""
        beat_s = min(_BEAT_S, limit_s / _BEATS_PER_LIMIT)
        return cls(beat_s=beat_s, listen_s=max(beat_s, size * size / _MOST_READS_PER_S))

    @property
    def silent_after_s(self) -> float:
        """Age of a word from which its rank counts as silent."""
        return _SILENT_BEATS * self.listen_s

    @property
    def sure_after_s(self) -> float:
        """How long to listen until whoever is silent has shown so."""
        return _SURE * self.silent_after_s

    @property
    def sure_limit_s(self) -> float:
        """How long that may take before an account is given with what there is."""
        return 2.0 * self.silent_after_s + 2.0 * self.listen_s


class Hearing:
    """The others' newest words.

    One thread changes it, within a lock that another one holds to read it.

    Args:
        rank: who listens.
        size: number of ranks.
        pace: how often.
    """

    def __init__(self, rank: int, size: int, pace: Pace) -> None:
        self.others = [other for other in range(size) if other != rank]
        self._pace = pace
        self._words: dict[int, Word] = {}
        self._changed_s: dict[int, float] = {}
        self._since_s: float | None = None
        self._listened_s: float | None = None

    @property
    def unheard(self) -> list[int]:
        """Ranks that have not said a word."""
        return [other for other in self.others if other not in self._words]

    def is_due(self, moment_s: float) -> bool:
        """Whether it is time to listen again."""
        return self._listened_s is None or moment_s - self._listened_s >= _NEARLY * self._pace.listen_s

    def begin(self, moment_s: float) -> None:
        """Listen to all from now on; harmless while that goes on. No word counts as older than this."""
        if self._since_s is None:
            self._since_s = moment_s
            self._changed_s = dict.fromkeys(self.others, moment_s)

    def take(self, found: Mapping[int, bytes], moment_s: float) -> None:
        """Take in what was found on the board."""
        self._listened_s = moment_s
        for rank, text in found.items():
            word = Word.decode(text)
            if rank not in self._words or self._words[rank].beat != word.beat:
                self._changed_s[rank] = moment_s
            self._words[rank] = word

    def pause(self) -> None:
        """Listen no longer: what is said from now on is not missed."""
        self._since_s = None

    def is_sure(self, after_s: float | None = None) -> bool:
        """Whether it has listened for so long that a silence, or one that began at ``after_s``, was noticed."""
        if self._since_s is None or self._listened_s is None:
            return False
        since_s = self._since_s if after_s is None else max(self._since_s, after_s)
        return self._listened_s - since_s > self._pace.sure_after_s

    def newest(self, moment_s: float) -> dict[int, Heard]:
        """Return the newest word of every other rank."""
        return {
            other: Heard(word=self._words.get(other), age_s=moment_s - self._changed_s.get(other, moment_s))
            for other in self.others
        }


class StoreWatch:
    """Whether the store answers that ranks leave word in; where it does not, rank 0 is to blame.

    One thread changes it, one value at a time, so that another one can read it without a lock.

    Args:
        patience_s: it counts as silent from then on.
        watched: whether it lives with rank 0, and that is another rank; else nobody is blamed.

    Attributes:
        gone: the connection broke.
    """

    def __init__(self, patience_s: float, *, watched: bool) -> None:
        self.gone = False
        self._patience_s = patience_s
        self._watched = watched
        self._asked_s: float | None = None

    def ask(self, moment_s: float) -> None:
        """It is called upon."""
        self._asked_s = moment_s

    def answer(self) -> None:
        """All calls have returned."""
        self._asked_s = None

    def silent_s(self, moment_s: float) -> float | None:
        """For how long it has not answered; None while it does or nobody is to blame."""
        asked_s = self._asked_s  # the thread that asks may have its answer meanwhile
        if asked_s is None or not self._watched:
            return None
        silent_s = moment_s - asked_s
        return silent_s if self.gone or silent_s > self._patience_s else None

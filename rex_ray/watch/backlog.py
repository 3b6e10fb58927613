"""Sights that wait for whoever asks, counted so that nobody is shown one twice, nor past a restart of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rex_ray.control.journal import Entry
from rex_ray.control.reading import Earlier
from rex_ray.watch.fold import RunFold
from rex_ray.watch.seams import Ended, Progress, Sight

__all__ = ["Backlog", "Mark", "Shown"]

_MOST_SIGHTS: Final = 4096
_BEYOND_ALL: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far somebody has seen.

    Attributes:
        life: how often the host had come back from its journal when it answered.
        num_sights: sights of the run until then.
    """

    life: int = 0
    num_sights: int = 0

    @classmethod
    def of_this_life(cls) -> Mark:
        """Return the mark of somebody who comes anew and wants what the host's present life saw, nothing before it."""
        return cls(life=-1, num_sights=_BEYOND_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer.

    Attributes:
        sights: what happened since the mark, in order.
        progress: where the run stands now.
        mark: to ask with the next time.
        num_missed: sights since the mark that are no longer there, since nobody asked for too long.
    """

    sights: tuple[Sight, ...]
    progress: Progress
    mark: Mark
    num_missed: int

    @property
    def in_order(self) -> tuple[Sight, ...]:
        """All of it as a watcher should see it: what happened, then where that led; the run's end comes last."""
        ends = tuple(sight for sight in self.sights if isinstance(sight, Ended))
        return (*(sight for sight in self.sights if not isinstance(sight, Ended)), self.progress, *ends)


class Backlog:
    """Folds entries, and keeps the newest sights.

    A host that comes back from its journal folds again what it needs of it, every event that shows something among
    it, and finds the same sights in the same order. Only those of events that were lost with the old host, steps of
    its last seconds, are not there: whoever had seen them is shown what the new life saw, from its beginning. What was
    reported is never among them, since the journal has it on disk before anybody sees it.

    Args:
        most_sights: so many are kept.
    """

    def __init__(self, most_sights: int = _MOST_SIGHTS) -> None:
        self._fold = RunFold()
        self._sights: deque[Sight] = deque(maxlen=most_sights)
        self._num_sights = 0
        self._life = 0
        self._num_before = 0

    def take(self, entries: Iterable[Entry]) -> None:
        """Take in entries, in order."""
        for entry in entries:
            self._keep(self._fold.take(entry))

    def take_earlier(self, earlier: Iterable[Earlier]) -> None:
        """Take in, before all else, what a journal tells of the time before its newest snapshot."""
        for event in earlier:
            self._keep(self._fold.take_earlier(event))

    def _keep(self, sights: tuple[Sight, ...]) -> None:
        if sights:
            self._sights.extend(sights)
            self._num_sights += len(sights)

    def end(self, elapsed_s: float, reason: str) -> None:
        """Show the run's end where no entry told of it: a journal that failed has none."""
        if not any(isinstance(sight, Ended) for sight in self._sights):
            self._sights.append(Ended(elapsed_s=elapsed_s, reason=reason))
            self._num_sights += 1

    def resumed(self, life: int) -> None:
        """What was taken in until now is the journal of an earlier life; this is the ``life``-th after the first."""
        self._life, self._num_before = life, self._num_sights

    def progress(self) -> Progress:
        """Return where the run stands after the newest entry."""
        return self._fold.progress()

    def since(self, mark: Mark, progress: Progress) -> Shown:
        """Return what happened since a mark that an earlier answer gave, or since the beginning.

        Args:
            mark: how far the asker has seen.
            progress: where the run stands, with what only the host knows.
        """
        seen = mark.num_sights if mark.life == self._life else min(mark.num_sights, self._num_before)
        oldest = self._num_sights - len(self._sights)
        return Shown(
            sights=tuple(islice(self._sights, max(seen - oldest, 0), None)),
            progress=progress,
            mark=Mark(life=self._life, num_sights=self._num_sights),
            num_missed=max(oldest - seen, 0),
        )

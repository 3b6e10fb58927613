"""The thread that speaks for a rank, and listens to the others while it waits for them.

It runs beside the training thread, so that the story is there when a limit passes, also if the store has died with
rank 0 by then.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rex_ray.worker.group.account import Account, give_account
from rex_ray.worker.group.board import Board
from rex_ray.worker.group.hearing import Hearing, Pace, StoreWatch
from rex_ray.worker.group.last_words import Activity, Word
from rex_ray.worker.group.sentences import long_wait
from rex_ray.worker.measuring.timing import now_s

__all__ = ["Herald"]

_MEETING_S = 0.02
_CLOSE_LIMIT_S = 1.0


class _Listens(Enum):
    IN_LONG_WAITS = auto()
    FOR_AN_ACCOUNT = auto()
    FOR_A_FIRST_WORD = auto()


@dataclass(frozen=True, slots=True)
class _Doing:
    activity: Activity
    since_s: float

    def lasting_s(self) -> float:
        return now_s() - self.since_s


class Herald:
    """Speaks for this rank every beat, listens where that is asked for or a wait is long, and gives account.

    Args:
        rank: this rank.
        size: number of ranks.
        limit_s: limit of the waits that are to be told; a beat is at most a tenth of it.
        board: where words are left.
        activity: what the training thread does; asked on the herald's thread.
        on_long_wait: told there in one sentence when a wait passes half its limit, on the first rank that waits.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        limit_s: float,
        board: Board,
        *,
        activity: Callable[[], Activity],
        on_long_wait: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._long_wait_s = limit_s / 2
        self._board = board
        self._activity = activity
        self._on_long_wait = on_long_wait
        self._pace = Pace.of(size, limit_s)
        # Set by the training thread alone.
        self._listens = _Listens.IN_LONG_WAITS
        self._farewell: str | None = None
        self._wake = threading.Event()
        # Set by the herald's thread alone; what is heard, within the lock.
        self._doing: _Doing | None = None
        self._told: Activity | None = None
        self._store = StoreWatch(self._pace.silent_after_s, watched=board.on_rank_0 and rank != 0)
        self._hearing = Hearing(rank, size, self._pace)
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rex_ray-presence", daemon=True)
        self._thread.start()

    # --- asked by the training thread

    def hears_all(self, limit_s: float) -> bool:
        """Listen until every rank has said its first word; return whether all did within the limit."""
        return self._listen_until(_Listens.FOR_A_FIRST_WORD, lambda: not self._hearing.unheard, limit_s)

    def account(self, what: str, after_s: float | None) -> Account:
        """Return why this rank waits for ``what``, once it has listened for long enough or cannot any more.

        Args:
            what: what it waits for.
            after_s: a silence that began then is to be noticed too.
        """
        self._listen_until(
            _Listens.FOR_AN_ACCOUNT,
            lambda: self._store.gone or self._hearing.is_sure(after_s),
            self._pace.sure_limit_s,
        )
        return self._account(what)

    def lasting_s(self, activity: Activity) -> float:
        """Return for how long the rank has been doing so, as far as its last word knows."""
        doing = self._doing
        return doing.lasting_s() if doing is not None and doing.activity == activity else 0.0

    def stop(self, farewell: str) -> None:
        """Say a last word, within a second, and be silent."""
        self._farewell = farewell
        self._wake.set()
        self._thread.join(_CLOSE_LIMIT_S)

    def _listen_until(self, listens: _Listens, enough: Callable[[], bool], limit_s: float) -> bool:
        with self._heard:
            self._listens = listens
            self._wake.set()
            heard_enough = self._heard.wait_for(enough, timeout=limit_s)
            self._listens = _Listens.IN_LONG_WAITS
        return heard_enough

    # --- its thread

    def _run(self) -> None:
        for beat in itertools.count(1):
            self._wake.clear()
            farewell = self._farewell  # looked at once: the thread ends after the word that says it
            self._store.ask(now_s())
            try:
                doing = self._speak(beat, farewell)
                self._listen_if_due(doing)
            except RuntimeError:
                # A broken connection stays broken, and every further call would print the store's own stack.
                with self._heard:
                    self._store.gone = True
                    self._heard.notify_all()
                return
            self._store.answer()
            if farewell is not None:
                return
            self._tell_long_wait(doing)
            self._wake.wait(_MEETING_S if self._listens is _Listens.FOR_A_FIRST_WORD else self._pace.beat_s)

    def _speak(self, beat: int, farewell: str | None) -> _Doing:
        activity, doing = self._activity(), self._doing
        if doing is None or doing.activity != activity:
            doing = self._doing = _Doing(activity, now_s())
        word = Word(
            beat=beat,
            doing=activity.doing,
            for_s=doing.lasting_s(),
            waits_for=activity.waits_for,
            left=farewell,
        )
        self._board.write(self._rank, word.encode())
        return doing

    def _listen_if_due(self, doing: _Doing) -> None:
        """Listen to who has not said a word at every turn, to all at most every so often."""
        listens = self._listens
        waits_long = doing.activity.waits_for is not None and doing.lasting_s() > self._pace.beat_s
        if listens is _Listens.FOR_A_FIRST_WORD:
            self._listen(self._hearing.unheard, begin=False)
        elif listens is _Listens.IN_LONG_WAITS and not waits_long:
            with self._heard:
                self._hearing.pause()
        elif self._hearing.is_due(now_s()):
            self._listen(self._hearing.others, begin=True)

    def _listen(self, others: Sequence[int], *, begin: bool) -> None:
        found = self._board.read(others)  # outside of the lock: the store may never answer
        with self._heard:
            moment_s = now_s()
            if begin:
                self._hearing.begin(moment_s)
            self._hearing.take(found, moment_s)
            self._heard.notify_all()

    def _tell_long_wait(self, doing: _Doing) -> None:
        """Say so, once, when a wait has passed half its limit: a backend may end the process at the whole one."""
        what, waited_s = doing.activity.waits_for, doing.lasting_s()
        if what is None:
            self._told = None
        elif waited_s > self._long_wait_s and doing.activity != self._told and self._hearing.is_sure():
            self._told = doing.activity
            account = self._account(what)
            if account.first_witness:
                self._on_long_wait(long_wait(self._rank, what, waited_s, account))

    def _account(self, what: str) -> Account:
        with self._heard:
            moment_s = now_s()
            others, store_silent_s = self._hearing.newest(moment_s), self._store.silent_s(moment_s)
        return give_account(
            self._rank, what, others, silent_after_s=self._pace.silent_after_s, store_silent_s=store_silent_s
        )

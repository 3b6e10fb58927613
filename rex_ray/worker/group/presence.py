"""Who waited for whom: every rank says what it does, and one that waits too long repeats what the others last said.

A collective that does not end tells nothing but that it did not end. So a thread of each rank leaves a word in the
process group's store every second, made of what the training thread does anyway; a step only says what it waits for,
in a microsecond. While the training thread waits for others, the same thread listens to their words, so that the story
is there when a limit passes, also if the store has died with rank 0 by then. Clocks of two machines are never compared:
how old a word is, the listener tells by its own, from when the word's number last changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from rex_ray.core.errors import LinkError
from rex_ray.worker.group.board import Board, open_board
from rex_ray.worker.group.last_words import Account, Activity, Heard, Word, give_account, seconds_text
from rex_ray.worker.group.waits import Told, Waiting, is_backend_error
from rex_ray.worker.measuring.timing import now_s

__all__ = ["Presence"]

_log = logging.getLogger("rex_ray")

_BEAT_S = 1.0
_BEATS_PER_LIMIT = 10
_SILENT_BEATS = 3
# A beat beyond the silence itself: the last word may have been said just before.
_SURE = 1.3
_MEETING_S = 0.02
_MOST_READS_PER_S = 20_000
_CLOSE_LIMIT_S = 1.0


class Presence:
    """This rank's word to the others, and theirs to it.

    Args:
        rank: this rank.
        size: number of ranks; of one alone nobody wants to hear.
        limit_s: limit of the waits that are to be told; a beat is at most a tenth of it.
        board: where words are left; default: the process group's own store.

    Raises:
        LinkError: the store cannot be reached.

    Attributes:
        activity: what the training thread does; asked by the thread that speaks.
        waits_for: what that thread waits for other ranks with, where it said so.
        on_long_wait: told in one sentence when a wait passes half its limit, on the first rank that waits.
    """

    def __init__(self, rank: int, size: int, limit_s: float, board: Board | None = None) -> None:
        self.rank, self.size = rank, size
        self.activity: Callable[[], Activity] = lambda: Activity(doing="opening its session")
        self.waits_for: str | None = None
        self.on_long_wait: Callable[[str], None] = lambda told: _log.warning("%s", told)
        self._limit_s = limit_s
        self._beat_s = min(_BEAT_S, limit_s / _BEATS_PER_LIMIT)
        self._listen_s = max(self._beat_s, size * size / _MOST_READS_PER_S)
        self._gave_up: str | None = None
        self._left: str | None = None
        self._beat = 0
        self._doing: tuple[Activity, float] | None = None
        self._told: Activity | None = None
        self._changed_s: dict[int, float] = {}
        self._words: dict[int, Word] = {}
        self._listening_since_s: float | None = None
        self._listened_s: float | None = None
        self._asked_s: float | None = None
        self._store_gone = False
        self._hurried = self._meeting = False
        self._stopping = False
        self._wake = threading.Event()
        self._heard = threading.Condition()
        self._board = open_board(limit_s) if board is None and size > 1 else board
        self._thread: threading.Thread | None = None
        if self._board is not None:
            self._thread = threading.Thread(target=self._run, name="rex_ray-presence", daemon=True)
            self._thread.start()

    @classmethod
    def of_process_group(cls, limit_s: float) -> Presence:
        """Return this process's presence among the ranks of ``torch.distributed``, or of one alone without it."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, limit_s)
        return cls(dist.get_rank(), dist.get_world_size(), limit_s)

    # --- the training thread's side

    def meet(self, limit_s: float) -> None:
        """Wait until every rank was heard of: who never opens a session is named before any collective.

        Raises:
            LinkError: some were not, within the limit.
        """
        if self._thread is None:
            return
        began_s = now_s()
        with self.waiting("all ranks to open their sessions"), self._heard:
            self._meeting = True
            self._wake.set()
            met = self._heard.wait_for(lambda: len(self._words) == self.size - 1, timeout=limit_s)
            self._meeting = False
        if not met:
            raise self.lost("all ranks to open their sessions", now_s() - began_s, limit_s=limit_s)

    def waiting(self, what: str) -> Waiting:
        """The training thread waits for others with ``what``."""
        return Waiting(self, what)

    def told(self, what: str, limit_s: float | None = None, *, any_error: bool = True) -> Told:
        """The training thread waits for others with ``what``; a backend's error becomes one that says for whom.

        Args:
            what: what is waited for.
            limit_s: its limit, where it is known.
            any_error: whatever goes wrong in there is the backend's; else only what looks like it.

        Raises:
            LinkError: the backend gave up.
        """
        return Told(self, what, limit_s, any_error=any_error)

    def explained(self, error: BaseException) -> BaseException:
        """Return what ended the loop: a backend's error from a collective of the user's as one that says for whom."""
        if not is_backend_error(error):
            return error
        activity = self.activity()
        what = activity.waits_for or f"a collective of the loop's own, {activity.doing}"
        return self.lost(what, self._lasting_s(activity), error=error)

    def lost(
        self, what: str, waited_s: float, *, limit_s: float | None = None, error: BaseException | None = None
    ) -> LinkError:
        """Return the error of a wait that failed, with what the others last said.

        Takes a few beats where the wait broke at once: a word must be missed before its rank counts as silent.

        Args:
            what: what was waited for.
            waited_s: how long.
            limit_s: the wait's limit, if it has one that is known.
            error: what the backend says of it.
        """
        timed_out = "timed out" in str(error).lower() or (limit_s is not None and waited_s >= 0.95 * limit_s)
        limit = "" if limit_s is None else f" (limit {limit_s:g} s)"
        if timed_out or error is None:
            head = f"rank {self.rank} waited {seconds_text(waited_s)} for {what}{limit}"
        else:
            said = str(error).strip().splitlines()
            head = (
                f"rank {self.rank} waited for {what}, which broke after {seconds_text(waited_s)}{limit}, saying "
                f"{(said[0] if said else type(error).__name__)!r}"
            )
        with self.waiting(what):
            # Who died a moment ago has spoken a moment ago: its silence is yet to come.
            account = self._gathered_account(what, after_s=0.0 if timed_out else now_s())
        if account is None or not account.text:
            return LinkError(
                f"{head} and got no answer; every rank must make this call at the same place of its loop, and a rank "
                "that died is named in its own log"
            )
        advice = ""
        if account.disagree:
            advice = "; every rank must make the same calls at the same places of its loop"
        elif not account.missing:
            advice = "; every rank is there, so they cannot reach one another"
        self._gave_up = what
        return LinkError(f"{head}: {account.text}{advice}")

    def leave(self, error: BaseException | None = None) -> None:
        """Say a last word, within a second, and be silent.

        Args:
            error: what ended training here; None: its loop is done.
        """
        if self._left is not None:
            return
        self.waits_for = self._gave_up if isinstance(error, LinkError) else None
        lines = str(error).strip().splitlines() or [""]
        self._left = "has ended its loop" if error is None else f"left after {type(error).__name__}: {lines[0]}"
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT_S)

    # --- the thread

    def _run(self) -> None:
        while True:
            self._wake.clear()
            stopping = self._stopping  # looked at before the word, so that the last one is said
            self._asked_s = now_s()
            try:
                self._speak()
                if self._due():
                    self._listen()
            except RuntimeError:
                # A broken connection stays broken, and every further call would print the store's own stack.
                with self._heard:
                    self._store_gone = True
                    self._heard.notify_all()
                return
            self._asked_s = None
            if stopping:
                return
            self._tell_long_wait()
            self._wake.wait(_MEETING_S if self._meeting else self._beat_s)

    def _speak(self) -> None:
        assert self._board is not None
        activity = self._own_activity()
        if self._doing is None or self._doing[0] != activity:
            self._doing = (activity, now_s())
        self._beat += 1
        word = Word(
            beat=self._beat,
            doing=activity.doing,
            for_s=now_s() - self._doing[1],
            waits_for=activity.waits_for,
            left=self._left,
        )
        self._board.write(self.rank, word.encode())

    def _own_activity(self) -> Activity:
        activity, waits_for = self.activity(), self.waits_for
        return activity if waits_for is None else Activity(doing=activity.doing, waits_for=waits_for)

    def _due(self) -> bool:
        """Whether to listen: while this rank waits for long, at most every so often."""
        if self._meeting:
            return True
        assert self._doing is not None
        activity, since_s = self._doing
        waits_long = activity.waits_for is not None and now_s() - since_s > self._beat_s
        if not (waits_long or self._hurried):
            self._listening_since_s = None
            return False
        return self._listened_s is None or now_s() - self._listened_s >= 0.9 * self._listen_s

    def _listen(self) -> None:
        assert self._board is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._meeting:
            others = [rank for rank in others if rank not in self._words]
        found = self._board.read(others)
        with self._heard:
            self._listened_s = now_s()
            if self._listening_since_s is None and not self._meeting:
                self._listening_since_s = self._listened_s
                self._changed_s = dict.fromkeys(others, self._listened_s)
            for rank, text in found.items():
                word = Word.decode(text)
                if rank not in self._words or self._words[rank].beat != word.beat:
                    self._changed_s[rank] = self._listened_s
                self._words[rank] = word
            self._heard.notify_all()

    def _lasting_s(self, activity: Activity) -> float:
        """How long the rank has been doing so, as far as the last words know."""
        doing = self._doing
        return now_s() - doing[1] if doing is not None and doing[0] == activity else 0.0

    # --- the story

    @property
    def _silent_after_s(self) -> float:
        return _SILENT_BEATS * self._listen_s

    def _gathered_account(self, what: str, after_s: float) -> Account | None:
        """Listen until a silence since ``after_s`` would have been noticed, within a limit, and tell what there is."""
        if self._thread is None or self._left is not None:
            return None
        with self._heard:
            self._hurried = True
            self._wake.set()
            self._heard.wait_for(
                lambda: self._store_gone or self._has_listened_enough(after_s),
                timeout=2.0 * self._silent_after_s + 2 * self._listen_s,
            )
            self._hurried = False
        return self._account(what)

    def _has_listened_enough(self, after_s: float = 0.0) -> bool:
        since_s, listened_s = self._listening_since_s, self._listened_s
        if since_s is None or listened_s is None:
            return False
        return listened_s - max(since_s, after_s) > _SURE * self._silent_after_s

    def _account(self, what: str) -> Account:
        moment_s = now_s()
        others = {
            rank: Heard(
                word=self._words.get(rank),
                age_s=moment_s - self._changed_s.get(rank, moment_s),
            )
            for rank in range(self.size)
            if rank != self.rank
        }
        return give_account(
            self.rank,
            what,
            others,
            silent_after_s=self._silent_after_s,
            store_silent_s=self._store_silent_s(moment_s),
        )

    def _store_silent_s(self, moment_s: float) -> float | None:
        """For how long the store has not answered, None while it does or is nobody else's."""
        asked_s = self._asked_s
        if asked_s is None or self._board is None or not self._board.on_rank_0 or self.rank == 0:
            return None
        silent_s = moment_s - asked_s
        return silent_s if self._store_gone or silent_s > self._silent_after_s else None

    def _tell_long_wait(self) -> None:
        """Say so, once, when a wait has passed half its limit: a backend may end the process at the whole one."""
        if self._doing is None:
            return
        activity, since_s = self._doing
        waited_s = now_s() - since_s
        if activity.waits_for is None:
            self._told = None
        elif waited_s > self._limit_s / 2 and activity != self._told and self._has_listened_enough():
            self._told = activity
            account = self._account(activity.waits_for)
            if account.first_witness:
                told = f"rank {self.rank} has waited {seconds_text(waited_s)} for {activity.waits_for}: {account.text}"
                self.on_long_wait(told)

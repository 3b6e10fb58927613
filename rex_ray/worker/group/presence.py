"""Who waited for whom: every rank says what it does, and one that waits too long repeats what the others last said.

A collective that does not end tells nothing but that it did not end. So a thread of each rank leaves a word in the
process group's store every second, made of what the training thread does anyway; a step only says what it waits for,
in a microsecond. While the training thread waits for others, that thread (``herald``) listens to their words; here is
the training thread's side of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

from rex_ray.core.errors import LinkError
from rex_ray.worker.group.board import Board, open_board
from rex_ray.worker.group.herald import Herald
from rex_ray.worker.group.last_words import Activity
from rex_ray.worker.group.sentences import FailedWait, farewell
from rex_ray.worker.group.waits import Told, Waiting, is_backend_error
from rex_ray.worker.measuring.timing import now_s

__all__ = ["Presence"]

_log = logging.getLogger("rex_ray")


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
        waits_for: what the training thread waits for other ranks with, where it said so.
        on_long_wait: told in one sentence when a wait passes half its limit, on the first rank that waits.
    """

    def __init__(self, rank: int, size: int, limit_s: float, board: Board | None = None) -> None:
        self.activity: Callable[[], Activity] = lambda: Activity(doing="opening its session")
        self.waits_for: str | None = None
        self.on_long_wait: Callable[[str], None] = lambda told: _log.warning("%s", told)
        self._rank = rank
        self._gave_up: str | None = None
        self._herald: Herald | None = None
        board = open_board(limit_s) if board is None and size > 1 else board
        if board is not None:
            self._herald = Herald(
                rank,
                size,
                limit_s,
                board,
                activity=self._own_activity,
                on_long_wait=self._tell_long_wait,
            )

    @classmethod
    def of_process_group(cls, limit_s: float) -> Presence:
        """Return this process's presence among the ranks of ``torch.distributed``, or of one alone without it."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, limit_s)
        return cls(dist.get_rank(), dist.get_world_size(), limit_s)

    def meet(self, limit_s: float) -> None:
        """Wait until every rank was heard of: who never opens a session is named before any collective.

        Raises:
            LinkError: some were not, within the limit.
        """
        herald = self._herald
        if herald is None:
            return
        what, began_s = "all ranks to open their sessions", now_s()
        with self.waiting(what):
            met = herald.hears_all(limit_s)
        if not met:
            raise self.lost(what, now_s() - began_s, limit_s=limit_s)

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
        herald = self._herald
        lasting_s = 0.0 if herald is None else herald.lasting_s(activity)
        return self.lost(what, lasting_s, error=error)

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
        failed = FailedWait(rank=self._rank, what=what, waited_s=waited_s, limit_s=limit_s, error=error)
        herald, account = self._herald, None
        if herald is not None:
            with self.waiting(what):
                # Who died a moment ago has spoken a moment ago: its silence is yet to come.
                account = herald.account(what, after_s=None if failed.timed_out else now_s())
            self._gave_up = what
        return LinkError(failed.sentence(account))

    def leave(self, error: BaseException | None = None) -> None:
        """Say a last word, within a second, and be silent; waits that fail later are told without the others' words.

        Args:
            error: what ended training here; None: its loop is done.
        """
        herald, self._herald = self._herald, None
        if herald is not None:
            self.waits_for = self._gave_up if isinstance(error, LinkError) else None
            herald.stop(farewell(error))

    def _own_activity(self) -> Activity:
        activity, waits_for = self.activity(), self.waits_for
        return activity if waits_for is None else Activity(doing=activity.doing, waits_for=waits_for)

    def _tell_long_wait(self, told: str) -> None:
        self.on_long_wait(told)

"""One rank does what may take long; the others wait for as long as it says that it is at it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from rex_ray.core.errors import RexError
from rex_ray.worker.group.last_words import error_text
from rex_ray.worker.group.side_group import SideGroup

__all__ = ["done_by"]

_Result = TypeVar("_Result")
_BEAT_S = 1.0


class _Errand(threading.Thread, Generic[_Result]):
    def __init__(self, act: Callable[[], _Result]) -> None:
        super().__init__(name="rex_ray-errand", daemon=True)
        self._act = act
        self.result: _Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the rank that waits raises it
            self.error = error


def done_by(
    group: SideGroup,
    rank: int,
    act: Callable[[], _Result],
    what: str,
    *,
    give_up: Callable[[], _Result | None] = lambda: None,
) -> _Result:
    """Have ``rank`` do something and return what came of it on every rank, or raise there what it raised.

    A collective's limit is for ranks that answer at once, and a storage may need minutes. So the rank acts on a thread
    of its own, and its main thread tells the others every second that it is at it: they wait as long as that goes on,
    and no longer than the collective's limit once it stops.

    Args:
        group: every member must call this.
        rank: who acts.
        act: what it does; its result is small and can be pickled.
        what: what is waited for, for the error.
        give_up: asked at every beat; a result other than None, or what it raises, is taken, and the thread left to
            itself.

    Raises:
        RexError: what ``act`` or ``give_up`` raised, if it was one; else, on the other ranks, one that tells of it.
        LinkError: the rank stopped to answer.
    """
    if group.rank != rank:
        while not group.broadcast(torch.zeros(1), what, source=rank).item():
            pass
        return cast("_Result", _taken(group.broadcast_object(None, what, source=rank)))
    errand = _Errand(act)
    errand.start()
    beat_s = min(_BEAT_S, group.timeout_s / 4)
    outcome = None
    while outcome is None:
        errand.join(beat_s)
        outcome = _abandoned(give_up) if errand.is_alive() else (errand.result, errand.error)
        group.broadcast(torch.tensor([float(outcome is not None)]), what, source=rank)
    result, error = outcome
    told = error if error is None or isinstance(error, RexError) else _retold(error, rank, what)
    group.broadcast_object((result, told), what, source=rank)
    if error is not None:
        raise error
    return cast("_Result", result)


def _abandoned(give_up: Callable[[], _Result | None]) -> tuple[_Result | None, BaseException | None] | None:
    try:
        result = give_up()
    except RexError as error:
        return None, error
    return None if result is None else (result, None)


def _taken(message: tuple[Any, RexError | None]) -> Any:
    result, error = message
    if error is not None:
        raise error
    return result


def _retold(error: BaseException, rank: int, what: str) -> RexError:
    return RexError(f"rank {rank} failed at {what}: {error_text(error)}")

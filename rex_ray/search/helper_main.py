"""The helper process: reads requests from its standard input, searches, and writes replies.

``python -m rex_ray.search.helper_main``, started by ``helper``. It steps aside for training (``nice``), bounds the
processor time that an answer may take, and is gone as soon as its standard input ends: no search outlives its asker.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from rex_ray.search.dialogue import Proposer, Result, SplitSearch, run_on_curves
from rex_ray.search.protocol import Message, decode, encode, objective_from, problem_from
from rex_ray.search.space import SplitSpace

__all__ = ["main"]

_NICE: Final = 10
"""A tenth of a worker's weight where both want the same core; 19 would leave a search unfinished on a full machine."""

_ANSWER_CPU_S: Final = 60.0
"""The system ends a helper whose single answer takes more processor time: nothing in Python could."""


@dataclass(slots=True)
class _Open:
    """A search under way, and what it has taken."""

    search: SplitSearch
    is_measured: bool
    cpu_s: float = 0.0


class _Desk:
    """Carries requests out, one after the other."""

    def __init__(self, send: Callable[[Message], None], is_cancelled: Callable[[int], bool]) -> None:
        self._send = send
        self._is_cancelled = is_cancelled
        self._open: dict[int, _Open] = {}

    def handle(self, message: Message) -> None:
        """Carry one request out; a fault of its own ends a search, not the helper."""
        number = int(message.get("search", -1))
        try:
            match message["op"]:
                case "start":
                    self._start(number, message)
                case "tell":
                    self._tell(number, message)
                case "cancel":
                    self._open.pop(number, None)
                case "warm":
                    with contextlib.suppress(ImportError):
                        _load_ax()
        except Exception as error:  # noqa: BLE001 - told to the asker, whose exact split stands
            self._open.pop(number, None)
            self._fail(number, _one_line(error))

    def _start(self, number: int, message: Message) -> None:
        problem = problem_from(message["problem"])
        limit_s = float(message["cpu_limit_s"])
        begun_s = time.process_time()

        def is_spent() -> bool:
            spent_s = opened.cpu_s + (time.process_time() - begun_s if not opened.is_measured else 0.0)
            return spent_s >= limit_s or self._is_cancelled(number)

        search = SplitSearch(problem, partial(_ax_proposer, seed=int(message["seed"])), is_spent)
        opened = self._open[number] = _Open(search, problem.kind == "measured")
        if search.needs_proposer:
            try:
                _load_ax()
            except Exception as error:  # noqa: BLE001 - whatever a broken installation raises, the remedy is the same
                del self._open[number]
                self._fail(number, f"Ax cannot be imported ({_one_line(error)}); install ax-platform to search")
                return
        begun_s = time.process_time()
        if opened.is_measured:
            self._go_on(number, opened)
        else:
            result = run_on_curves(search)
            opened.cpu_s = time.process_time() - begun_s
            self._end(number, opened, result)

    def _tell(self, number: int, message: Message) -> None:
        opened = self._open.get(number)
        if opened is not None:
            objective = objective_from(message["objective"])
            opened.search.tell(int(message["trial"]), objective, tuple(message["own_s"]))
            self._go_on(number, opened)

    def _go_on(self, number: int, opened: _Open) -> None:
        begun_s = time.process_time()
        trial = opened.search.ask()
        opened.cpu_s += time.process_time() - begun_s
        if trial is None:
            self._end(number, opened, opened.search.result())
        else:
            self._send({"op": "trial", "search": number, "trial": trial.number, "sizes": trial.local_batch_sizes})

    def _end(self, number: int, opened: _Open, result: Result | None) -> None:
        self._open.pop(number, None)
        if result is None:
            self._fail(number, "every trial was refused")
            return
        self._send(
            {
                "op": "finished",
                "search": number,
                "sizes": result.local_batch_sizes,
                "objective": result.objective,
                "num_trials": result.num_trials,
                "cpu_s": opened.cpu_s,
            }
        )

    def _fail(self, number: int, reason: str) -> None:
        self._send({"op": "failed", "search": number, "reason": reason})


def _step_aside() -> None:
    """Give way to training: this process, and the group that Linux makes of every session (autogroup).

    Sessions share the processor evenly, whatever is nice within them. Only in a session of its own, as its asker starts
    it: started by hand, it would have everything else in the caller's session give way, too.
    """
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # other systems have no such group, and some kernels none either
            Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


def main() -> None:
    """Serve until the standard input ends."""
    _step_aside()
    channel = _private_channel()
    logging.disable(logging.WARNING)  # Ax tells of every trial
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    cancelled: set[int] = set()
    threading.Thread(target=_read, args=(inbox, cancelled), name="rex_ray-requests", daemon=True).start()
    desk = _Desk(lambda message: _write(channel, message), cancelled.__contains__)
    while True:
        message = inbox.get()
        _bound_cpu()
        desk.handle(message)
        if message.get("op") == "cancel":  # what it called off came before it
            cancelled.discard(int(message["search"]))


def _read(inbox: queue.SimpleQueue[Message], cancelled: set[int]) -> None:
    try:
        for line in sys.stdin.buffer:
            message = decode(line)
            if message["op"] == "cancel":
                cancelled.add(int(message["search"]))
            inbox.put(message)
    except Exception:  # noqa: BLE001 - half a line of an asker that was killed, say: nobody is left to be told
        traceback.print_exc()
        os._exit(1)
    # The asker is gone, or wants us to be: also in the middle of a search, which only this thread can tell.
    os._exit(0)


def _private_channel() -> BinaryIO:
    """Return the pipe to the asker, and turn what libraries print into errors' way: it would garble replies."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return channel


def _write(channel: BinaryIO, message: Message) -> None:
    try:
        channel.write(encode(message))
    except BrokenPipeError:
        os._exit(0)


def _bound_cpu() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + _ANSWER_CPU_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _load_ax() -> None:
    from rex_ray.search import ax_proposer  # noqa: F401, PLC0415 - seconds, and only where a search needs it


def _ax_proposer(space: SplitSpace, quantum: int, seed: int) -> Proposer:
    from rex_ray.search.ax_proposer import AxProposer  # noqa: PLC0415

    return AxProposer(space, quantum, seed)


def _one_line(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    main()

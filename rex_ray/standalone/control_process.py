"""The control server as rank 0 sees it: started, started again where it dies, ended."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Final

from rex_ray.core.child_environment import child_environment
from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.standalone.orders import Orders, said
from rex_ray.standalone.orders import line as as_line

__all__ = ["ControlProcess", "write_within"]

logger = logging.getLogger("rex_ray")

_START_LIMIT_S: Final = 60.0
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 30.0
_HEALTHY_S: Final = 60.0
_KILL_LIMIT_S: Final = 2.0
_TELL_LIMIT_S: Final = 30.0


class ControlProcess:
    """Owns the server's process, on a thread that sleeps while it lives.

    A server that dies is started again at the same port and goes on from its journal. Training never waits for it; the
    workers' links find it there again.

    Args:
        orders: what the server is told.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        # Each with the process that said it; None: it says nothing more.
        self._words: queue.Queue[tuple[subprocess.Popen[bytes] | None, dict[str, Any] | None]] = queue.Queue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rex_ray-control", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the server, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, limit_s: float = _START_LIMIT_S) -> int:
        """Start the server; return the port that it listens on.

        Raises:
            ConfigError: it cannot listen at the address.
            LinkError: it did not start within the limit, or ended.
        """
        try:
            self._spawn()
        except OSError as error:
            raise LinkError(
                f"the control server's process cannot be started on rank 0's machine ({error}): look at its memory and "
                "its limit of processes (ulimit -u)"
            ) from error
        self._thread.start()
        word = self._next_word(limit_s)
        if word is not None and "port" in word:
            self._orders = replace(self._orders, port=int(word["port"]))
            return self._orders.port
        self._end(0.0)
        if word is not None and "failed" in word:
            raise ConfigError(
                f"the control server cannot listen at {self._orders.host} ({word['failed']}): give "
                "training(control_address=...), or REX_RAY_CONTROL_ADDRESS, an address of rank 0's machine that the "
                "other machines reach"
            )
        raise LinkError(
            f"the control server ({sys.executable} -m rex_ray.standalone.server) did not start within {limit_s:g} s; "
            "its standard error, above, may say why"
        )

    def finish(self, reason: str, limit_s: float) -> dict[str, Any] | None:
        """Have the server end the journal; return how the controller was, None where nobody says so in time.

        The server goes on answering whoever looks on, until ``close``.
        """
        self._stopping.set()
        with self._lock:
            self._tell(as_line({"finish": reason}))
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0 and (word := self._next_word(left_s)) is not None:
            if "ended" in word:
                ended: dict[str, Any] = word["ended"]
                return ended
        return None

    def close(self, limit_s: float) -> None:
        """Have the server end, within the limit, and leave nothing behind.

        Without ``finish`` before, the journal is left open, for the ranks that torchrun starts again.
        """
        self._end(limit_s)

    # --- on the thread

    def _run(self) -> None:
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            began_s = time.monotonic()
            process = self._process
            self._hear(process)
            self._words.put((process, None))
            if self._stopping.is_set():
                return
            if time.monotonic() - began_s >= _HEALTHY_S:
                back_off_s = _FIRST_BACK_OFF_S
            status = _reaped(process)
            logger.warning(
                "the control server ended (exit status %s) and is started again in %.1f s; training goes on under the "
                "last allocation",
                status,
                back_off_s,
            )
            if self._stopping.wait(back_off_s):
                return
            back_off_s = min(2 * back_off_s, _LAST_BACK_OFF_S)
            try:
                self._spawn()
            except OSError as error:
                logger.warning("the control server cannot be started: %s", error)

    def _hear(self, process: subprocess.Popen[bytes] | None) -> None:
        """Pass on what a server says, until it says nothing more."""
        if process is None or process.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed meanwhile
            for heard in process.stdout:
                with contextlib.suppress(ValueError):  # a line that was torn by the server's death
                    self._words.put((process, said(heard)))

    # --- on either

    def _spawn(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            # -P: no module of the working directory may pass for one of the library's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rex_ray.standalone.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=child_environment(os.environ),
                start_new_session=True,  # an interrupt from the keyboard is rank 0's to answer
            )
            self._tell(self._orders.to_line())

    def _tell(self, data: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # that it died is seen by the thread
                write_within(process.stdin.fileno(), data, _TELL_LIMIT_S)

    def _next_word(self, limit_s: float) -> dict[str, Any] | None:
        """Return what the present server says next; None where it says nothing in time, or nothing more.

        What its predecessors said is no word of its: the end of one that was started again is not the end of this one.
        """
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                process, word = self._words.get(timeout=left_s)
            except queue.Empty:
                return None
            if process is self._process:
                return word
        return None

    def _end(self, limit_s: float) -> None:
        """Close its input, which it takes for rank 0's end, and after the limit end it by force."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        _reaped(process, limit_s)
        self._thread.join(_KILL_LIMIT_S)
        if process.stdout is not None and not self._thread.is_alive():
            process.stdout.close()


def write_within(descriptor: int, data: bytes, limit_s: float) -> None:
    """Write all of it: orders may be more than a pipe holds, and the server may not read yet, or never.

    Raises:
        TimeoutError: the other end did not take it within the limit.
        OSError: it is gone.
    """
    deadline = time.monotonic() + limit_s
    os.set_blocking(descriptor, False)
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    rest = memoryview(data)
    while rest:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poller.poll(left_s * 1e3):
            raise TimeoutError("the control server takes no orders")
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(descriptor, rest) :]


def _reaped(process: subprocess.Popen[bytes] | None, limit_s: float = _KILL_LIMIT_S) -> int | None:
    """Return how a server ended, after the limit by force: it must not write beside its successor, nor outlive us."""
    if process is None:
        return None
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_LIMIT_S)
    return process.returncode

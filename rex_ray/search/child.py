"""A process that is spoken to in lines over pipes that never block: what it does not take now, it is offered later."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Final

from rex_ray.core.child_environment import child_environment
from rex_ray.search.protocol import Message, decode, encode

__all__ = ["Child"]

_CHUNK_BYTES: Final = 1 << 16
_KEPT_STDERR_BYTES: Final = 4096
_KILL_LIMIT_S: Final = 2.0


class Child:
    """A running helper process.

    Args:
        env: added to the present environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        # -P: no module of the working directory may pass for one of the library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rex_ray.search.helper_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=child_environment(os.environ, env),
            start_new_session=True,  # an interrupt from the keyboard is the asker's to answer
        )
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._unsent = b""
        self._half_line = b""
        self._stderr = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Say something; it goes out now, or with a later exchange."""
        self._unsent += encode(message)
        self._flush()

    def exchange(self) -> tuple[list[Message], bool]:
        """Return what it said since, and whether it lives."""
        is_alive = self._process.poll() is None  # first: what a dead one said is all there
        self._flush()
        *lines, self._half_line = (self._half_line + _read_all(self._process.stdout)).split(b"\n")
        self._stderr = (self._stderr + _read_all(self._process.stderr))[-_KEPT_STDERR_BYTES:]
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(decode(line))
        return messages, is_alive

    def last_words(self) -> str:
        """Say how it died."""
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        ended = f"the search helper ended (exit status {self._process.returncode})"
        return f"{ended}: {lines[-1].strip()}" if lines else ended

    def kill(self) -> None:
        """Have it end by force, without waiting: tearing down what Ax has loaded takes a fifth of a second."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def is_gone(self) -> bool:
        """Whether nothing is left of it."""
        return self._process.poll() is not None

    def end(self, timeout_s: float) -> None:
        """Have it end and wait for that: first by closing its input, after ``timeout_s`` by force."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_LIMIT_S)

    def _flush(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # that it died is seen from its exit status
            while self._unsent:
                written = os.write(self._process.stdin.fileno(), self._unsent[:_CHUNK_BYTES])
                self._unsent = self._unsent[written:]


def _read_all(pipe: IO[bytes] | None) -> bytes:
    assert pipe is not None
    read = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe.fileno(), _CHUNK_BYTES):
            read += chunk
    return read

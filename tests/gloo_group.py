"""Real ranks for tests: processes joined by gloo that stay up between tests, each call within a wall limit.

Starting Python and torch costs seconds, so one group serves many tests. A call that fails or runs past its limit
leaves the group in an unknown state: its processes are ended, by process group, and the next call starts fresh ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

COLLECTIVE_LIMIT_S = 20.0


class RankError(AssertionError):
    """At least one rank raised; ``errors[rank]`` is its text, None where it returned."""

    def __init__(self, errors: list[str | None]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(errors) if text))
        self.errors = errors


class GlooGroup:
    """``num_ranks`` processes in one group; its backend is gloo unless said otherwise."""

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank and return the results in rank order.

        The function must be importable (module level). A rank that raises fails the call with RankError; one that
        is not done within the limit fails it with TimeoutError.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + limit_s
        replies: list[tuple[Any, str | None]] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                self.stop()
                raise TimeoutError(f"rank {rank} is not done with {function.__name__} after {limit_s:g} s")
            try:
                replies.append(pipe.recv())
            except EOFError:
                replies.append((None, "the process died"))
        if any(error for _, error in replies):
            self.stop()
            raise RankError([error for _, error in replies])
        return [result for result, _ in replies]

    def stop(self) -> None:
        """End every process that this group started, their loader processes included."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.num_ranks, self._backend, port, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, num_ranks: int, backend: str, port: int, pipe: Connection) -> None:
    os.setsid()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    # Loader processes are forked in a Ray worker, too; spawned ones, as this process was, take seconds each.
    multiprocessing.set_start_method("fork", force=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((function(rank, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))

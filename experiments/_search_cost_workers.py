"""Two training processes that run a block of steps when they are told to, and say how long a step took."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments._overhead_loops import LEARNING_RATE, WIDTH, layered_net, train_step

__all__ = ["Workers"]

NUM_RANKS = 2
LOCAL_ROWS = 64
_LIMIT_S = 120.0
_BETWEEN_S = 0.01


class Workers:
    """Two gloo ranks under plain DDP. Use as a context: they are gone at its end.

    Args:
        store: a file that does not exist yet, through which they find each other.
        sleep_s: seconds that each step sleeps in backward, as if a device computed.
    """

    def __init__(self, store: Path, sleep_s: float) -> None:
        self._store, self._sleep_s = store, sleep_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        """Start them."""
        context = multiprocessing.get_context("spawn")
        for rank in range(NUM_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, str(self._store), self._sleep_s, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End them: their pipes close."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)

    def run(self, num_steps: int, meanwhile: Callable[[], None]) -> float:
        """Run a block of steps; return the median step of rank 0 in seconds.

        Args:
            num_steps: steps of the block.
            meanwhile: called again and again until it is done.

        Raises:
            TimeoutError: they are not done within the limit.
        """
        for pipe in self._pipes:
            pipe.send(num_steps)
        deadline_s = time.monotonic() + _LIMIT_S
        medians = []
        for rank, pipe in enumerate(self._pipes):
            while not pipe.poll(_BETWEEN_S):
                meanwhile()
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"rank {rank} is not done with {num_steps} steps after {_LIMIT_S:g} s")
            medians.append(float(pipe.recv()))
        return medians[0]


def _work(rank: int, store: str, sleep_s: float, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=_LIMIT_S)
    )
    model = DistributedDataParallel(layered_net(sleep_s), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs = torch.randn(LOCAL_ROWS, WIDTH)
    try:
        while True:
            num_steps = pipe.recv()
            step_s = []
            for _ in range(num_steps):
                begun_s = time.perf_counter()
                train_step(model, optimizer, inputs)
                step_s.append(time.perf_counter() - begun_s)
            pipe.send(float(np.median(step_s)))
    except EOFError:
        dist.destroy_process_group()

"""The one place where a worker reads clocks.

A worker's *own* time ends at its last local gradient: what follows is the all-reduce, which makes every rank as slow
as the slowest, so its wait says nothing about the rank that waits. On CUDA the device runs behind the host and must
not be synchronised for a measurement, so marks are events that are recorded in stream order and read steps later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch

__all__ = ["CudaMark", "HostMark", "Mark", "StepTimer", "mark_of", "now_s"]


def now_s() -> float:
    """Return the host's monotonic clock in seconds; only differences mean anything."""
    return time.perf_counter()


class Mark(Protocol):
    """A moment in the order of the device's work."""

    def ready(self) -> bool:
        """Whether the moment has passed and can be read without waiting."""
        ...


class HostMark:
    """A moment on the host's clock, for devices that work in step with the host."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = now_s()

    def ready(self) -> bool:
        """Always: the host's clock is read at once."""
        return True


class CudaMark:
    """A timing event in the current CUDA stream; polled, never waited for."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def ready(self) -> bool:
        """Whether the device has passed the event."""
        return bool(self.event.query())


AnyMark: TypeAlias = HostMark | CudaMark


def mark_of(device: torch.device) -> type[AnyMark]:
    """Return what marks a moment of the work on ``device``, once it is called."""
    return CudaMark if device.type == "cuda" else HostMark


def _between_s(start: AnyMark, stop: AnyMark) -> float:
    if isinstance(start, CudaMark) and isinstance(stop, CudaMark):
        return float(start.event.elapsed_time(stop.event)) / 1e3
    assert isinstance(start, HostMark), "one step's marks are of one kind"
    assert isinstance(stop, HostMark), "one step's marks are of one kind"
    return stop.at_s - start.at_s


class StepTimer:
    """Splits one step into own computation and synchronisation.

    A step usually has one reduction. Where it has several (two losses, two backward passes), computing and
    reducing alternate, and each part is summed, so that no wait leaks into the own time.
    """

    __slots__ = ("_compute", "_mark", "_open", "_pause_s", "_paused_s", "_stalls", "_start", "_stop", "_sync")

    def __init__(self, device: torch.device) -> None:
        # Asked once: to look at a device's kind costs more than a look at the clock.
        self._mark = mark_of(device)
        self._compute: list[tuple[AnyMark, AnyMark]] = []
        self._sync: list[tuple[AnyMark, AnyMark]] = []
        self._open: list[tuple[AnyMark, AnyMark]] = []
        self._stalls: list[tuple[AnyMark, AnyMark]] = []
        self._pause_s = self._paused_s = 0.0
        self._start = self._mark()
        self._stop: AnyMark | None = None

    def last_gradient(self) -> None:
        """The last local gradient of a backward pass is there; its reduction starts."""
        self._stop = self._mark()
        self._compute.append((self._start, self._stop))
        self._paused_s += self._pause_s
        self._pause_s = 0.0
        self._stalls += self._open
        self._open = []

    def reduced(self) -> None:
        """The reduction ended."""
        if self._stop is not None:
            self._start = self._mark()
            self._sync.append((self._stop, self._start))
            self._stop = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the enclosed wait for other ranks out of the own time, if a backward pass follows in this step."""
        began_s = now_s()
        try:
            yield
        finally:
            self._pause_s += now_s() - began_s

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the enclosed work of the device as waiting for other ranks, if a backward pass follows in this step.

        What it is on the host's clock is no matter on a device: that waits when its own stream comes there.
        """
        began = self._mark()
        try:
            yield
        finally:
            if self._stop is None:
                self._open.append((began, self._mark()))

    @property
    def reducing(self) -> bool:
        """Whether the last local gradient is there and its reduction has not ended."""
        return self._stop is not None

    @property
    def measured(self) -> bool:
        """Whether there was a reduction to measure up to."""
        return bool(self._sync)

    def ready(self) -> bool:
        """Whether every mark can be read without waiting."""
        return all(stop.ready() for _, stop in self._sync) and all(stop.ready() for _, stop in self._stalls)

    def compute_s(self) -> float:
        """Own computation in seconds, up to the last local gradient."""
        return max(sum(_between_s(a, b) for a, b in self._compute) - self._stalled_s() - self._paused_s, 0.0)

    def sync_s(self) -> float:
        """Reductions in seconds, waiting for slower ranks included, also within a sharded model's passes."""
        return sum(_between_s(a, b) for a, b in self._sync) + self._stalled_s()

    def _stalled_s(self) -> float:
        return sum(_between_s(a, b) for a, b in self._stalls)

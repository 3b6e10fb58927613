"""One line that says how a run goes: rewritten in place on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import Final, TextIO

from rex_ray.loggers.terminal import CLEAR_LINE, is_terminal
from rex_ray.watch.seams import Ended, Progress, RunInfo, Sight
from rex_ray.watch.words import duration

__all__ = ["ProgressLine", "progress_text"]

_MOST_SHARES: Final = 8


class ProgressLine:
    """Step, rows per second, global batch, split, who is slowest and why, learning rate, time left.

    Where the stream is no terminal there are no bars and no carriage returns: one plain line, with the run's name, at
    most every ``interval_s``, and a last one.

    Args:
        stream: default: standard error as it is when the run begins.
        interval_s: shortest time between two plain lines; on a terminal the line is as fresh as what is seen.
    """

    def __init__(self, stream: TextIO | None = None, interval_s: float = 30.0) -> None:
        self._given = stream
        self._interval_s = interval_s
        self._stream: TextIO = sys.stderr
        self._name = ""
        self._is_terminal = False
        self._due_s = 0.0
        self._newest: Progress | None = None
        self._printed = ""

    def begin(self, run: RunInfo) -> None:
        """Find out what is written to."""
        self._stream = self._given or sys.stderr
        self._is_terminal = is_terminal(self._stream)
        self._name = run.name
        self._newest, self._printed = None, ""
        # The first plain line is worth most where there is one: the group stands, and steps go on.
        self._due_s = 0.0

    def see(self, sight: Sight) -> None:
        """Show where the run stands."""
        if isinstance(sight, Ended):
            self._last_line()
        if not isinstance(sight, Progress):
            return
        self._newest = sight
        if self._is_terminal:
            self._write(CLEAR_LINE + _cut(progress_text(sight)))
        elif sight.step >= 0 and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self._interval_s
            self._plain_line(sight)

    def close(self) -> None:
        """Leave the newest line standing."""
        self._last_line()

    def _last_line(self) -> None:
        newest, self._newest = self._newest, None
        if newest is None:
            return
        if self._is_terminal:
            self._write(CLEAR_LINE + _cut(progress_text(newest)) + "\n")
        elif newest.step >= 0:
            self._plain_line(newest)

    def _plain_line(self, progress: Progress) -> None:
        text = progress_text(progress)
        if text != self._printed:
            self._printed = text
            self._write(f"{self._name}: {text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress_text(progress: Progress) -> str:
    """Return where a run stands in one line; what is not known is left out."""
    if progress.step < 0 or not progress.workers:
        parts = ["waiting for workers" if not progress.workers else f"{len(progress.workers)} workers begin"]
    else:
        parts = [f"step {progress.step:,}", *_epoch(progress), *_speed(progress), *_split(progress)]
        parts += [*_slowest(progress), *_rate(progress)]
        if progress.left_s is not None:
            parts.append(f"{duration(progress.left_s)} left")
    trouble = progress.fault or progress.gap
    if trouble is not None:
        parts.append(f"nothing is decided any more: {trouble}" if progress.fault else trouble)
    return " | ".join(parts)


def _epoch(progress: Progress) -> list[str]:
    if progress.epoch < 0:
        return []
    of = "" if progress.num_epochs is None else f"/{progress.num_epochs}"
    return [f"epoch {progress.epoch + 1}{of}"]


def _speed(progress: Progress) -> list[str]:
    return [] if math.isnan(progress.rows_per_s) else [f"{progress.rows_per_s:,.0f} rows/s"]


def _split(progress: Progress) -> list[str]:
    sizes = [worker.local_batch_size for worker in progress.workers]
    if len(sizes) <= _MOST_SHARES:
        return [f"batch {progress.global_batch_size} = {'/'.join(map(str, sizes))}"]
    return [f"batch {progress.global_batch_size} on {len(sizes)} workers, {min(sizes)} to {max(sizes)} rows each"]


def _slowest(progress: Progress) -> list[str]:
    rank = progress.slowest_rank
    if rank is None:
        return []
    device = progress.workers[rank].device
    return [f"slowest rank {rank} ({device}): {progress.slowest_why}"]


def _rate(progress: Progress) -> list[str]:
    if progress.learning_rate is None:
        return []
    factor = "" if progress.lr_factor == 1.0 else f" x{progress.lr_factor:.3g}"
    return [f"lr {progress.learning_rate:.3g}{factor}"]


def _cut(text: str) -> str:
    """One row of the terminal: a longer line could not be rewritten."""
    width = max(shutil.get_terminal_size().columns - 1, 20)
    return text if len(text) <= width else text[: width - 3] + "..."

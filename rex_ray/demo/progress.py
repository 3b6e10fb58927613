"""One line of progress per interval, read off the journal while the run writes it.

Following the file instead of asking the run keeps the demo outside the training: it sees what anyone could see.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from rex_ray.control.events import MetricReported
from rex_ray.control.journal import EVENTS_FILE
from rex_ray.control.notes import Applied
from rex_ray.control.vocabulary import CODEC

__all__ = ["JournalFollower", "Progress", "follow"]

POLL_S = 0.5
PLAIN_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is; None where nothing is known yet."""

    epoch: int | None = None
    accuracy: float | None = None
    elapsed_s: float | None = None
    local_batch_sizes: tuple[int, ...] | None = None

    def line(self, policy: str, num_epochs: int) -> str:
        """The progress line."""
        parts = [f"{policy:<4}"]
        if self.epoch is None or self.elapsed_s is None:
            parts.append("starting workers")
        else:
            parts += [f"epoch {self.epoch + 1:>3}/{num_epochs}", f"{self.elapsed_s:5.1f} s"]
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.3f}")
        if self.local_batch_sizes is not None:
            parts.append("shares " + "/".join(map(str, self.local_batch_sizes)))
        return "   ".join(parts)


class JournalFollower:
    """Reads the lines that were added to a journal since it was last asked.

    Args:
        journal_dir: may not exist yet.
    """

    def __init__(self, journal_dir: Path) -> None:
        self._path = journal_dir / EVENTS_FILE
        self._offset = 0
        self.progress = Progress()

    def poll(self) -> Progress:
        """Return the progress as of the newest complete line."""
        if not self._path.exists():
            return self.progress
        with self._path.open("rb") as file:
            file.seek(self._offset)
            *complete, torn = file.read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in complete)
        del torn  # its writer is not done with it; it is read again
        for line in complete:
            self._take(line)
        return self.progress

    def _take(self, line: bytes) -> None:
        try:
            data = json.loads(line) if line else {}
        except json.JSONDecodeError:
            return  # cut short by a driver that died; the next one began a new line
        event = CODEC.decode(data["event"]) if "event" in data else None
        if isinstance(event, MetricReported):
            self.progress = replace(
                self.progress,
                epoch=event.epoch,
                accuracy=event.metrics.get("accuracy"),
                elapsed_s=event.elapsed_us / 1e6,
            )
        for note in CODEC.decode(data["notes"]) if "notes" in data else ():
            if isinstance(note, Applied):
                self.progress = replace(self.progress, local_batch_sizes=note.local_batch_sizes)


@contextmanager
def follow(journal_dir: Path, console: Console, *, policy: str, num_epochs: int) -> Iterator[None]:
    """Show progress while the body runs: a living line on a terminal, a plain line now and then elsewhere."""
    follower = JournalFollower(journal_dir)
    stop = threading.Event()
    status = console.status(follower.progress.line(policy, num_epochs)) if console.is_terminal else None
    printed = Progress()

    def watch() -> None:
        nonlocal printed
        shown, silent_s = follower.progress, PLAIN_INTERVAL_S
        while not stop.wait(POLL_S):
            silent_s += POLL_S
            progress = follower.poll()
            if progress == shown or (status is None and silent_s < PLAIN_INTERVAL_S):
                continue
            shown, silent_s = progress, 0.0
            if status is not None:
                status.update(progress.line(policy, num_epochs))
            else:
                console.print(progress.line(policy, num_epochs), highlight=False)
                printed = progress

    watcher = threading.Thread(target=watch, name="demo-progress", daemon=True)
    if status is not None:
        status.start()
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join(timeout=10 * POLL_S)
        if status is not None:
            status.stop()
    if (last := follower.poll()) != printed:
        console.print(last.line(policy, num_epochs), highlight=False)

"""Where a rank stands in its stream: what a save holds of it, and what can be kept of that on resuming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rex_ray.worker.data.stream_reader import Resumption, StreamBatch
from rex_ray.worker.tree import is_plain

__all__ = ["StreamMark", "read_marks", "why_lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMark:
    """How far one rank's loader processes had read when a certain batch had been used.

    Attributes:
        num_requests: batches asked for, in turn of the processes.
        num_read: rows taken off the stream, by process.
        states: the data set's states, by process; None where it has none, or where one cannot be saved.
    """

    num_requests: int
    num_read: tuple[int, ...]
    states: tuple[Any, ...] | None

    @classmethod
    def start(cls, num_processes: int) -> StreamMark:
        """Return the beginning of a pass."""
        streams = max(num_processes, 1)
        return cls(num_requests=0, num_read=(0,) * streams, states=(None,) * streams)

    def after(self, fetched: StreamBatch) -> StreamMark:
        """Return the mark once a batch was read."""
        k = fetched.process
        read = (*self.num_read[:k], self.num_read[k] + fetched.num_read, *self.num_read[k + 1 :])
        states = None if self.states is None else (*self.states[:k], fetched.state, *self.states[k + 1 :])
        return replace(self, num_requests=self.num_requests + 1, num_read=read, states=states)

    @property
    def turn(self) -> int:
        """The process whose turn it is."""
        return self.num_requests % len(self.num_read)

    def resumptions(self) -> dict[int, Resumption]:
        """Return where each process's stream goes on."""
        states = self.states or (None,) * len(self.num_read)
        return {k: Resumption(rows, states[k]) for k, rows in enumerate(self.num_read) if rows}

    def to_plain(self) -> dict[str, Any]:
        """Return what a save holds: tensors and plain values."""
        states = self.states if is_plain(self.states) else None
        return {
            "num_requests": self.num_requests,
            "num_read": list(self.num_read),
            "states": None if states is None else list(states),
        }


def read_marks(saved: Mapping[str, Any]) -> tuple[StreamMark, ...]:
    """Return every rank's mark of a save."""
    return tuple(
        StreamMark(
            num_requests=rank["num_requests"],
            num_read=tuple(rank["num_read"]),
            states=None if rank["states"] is None else tuple(rank["states"]),
        )
        for rank in saved["ranks"]
    )


def why_lost(marks: Sequence[StreamMark], processes: Sequence[int], *, resumable: bool) -> str | None:
    """Return why streams cannot go on where a save was made, None where they can.

    Args:
        marks: every rank's of the save.
        processes: every rank's loader processes now.
        resumable: whether the streams bring the same rows in the same order again.
    """
    if not resumable:
        return "rows of these streams are dealt to whoever asks first, so they come in another order now"
    if len(marks) != len(processes):
        return (
            f"{len(marks)} ranks read them then and {len(processes)} do now, and who reads what is the data set's own"
        )
    then, now = [len(mark.num_read) for mark in marks], [max(count, 1) for count in processes]
    if then != now:
        return f"{then} loader processes read them then and {now} do now, and who reads what is the data set's own"
    return None

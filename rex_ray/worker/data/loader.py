"""The training loader: hands out a source's batches, one plan with every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rex_ray.core.errors import RexError
from rex_ray.worker.data.dataloader import to_device
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.data.source import Source
from rex_ray.worker.group.asked_saves import SnapshotTurns
from rex_ray.worker.group.switch import Switch
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.progress import Progress
from rex_ray.worker.tracker import StepTracker

__all__ = ["Course", "Occasions", "TrainLoader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasions:
    """What others do between two batches, on every rank before the same one.

    Attributes:
        end_pass: called when an epoch's last batch is consumed.
        save: saves for the given reason; False: not now, since something would be lost.
        snapshots: local copies between saves.
    """

    end_pass: Callable[[], None]
    save: Callable[[str], bool]
    snapshots: SnapshotTurns


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What goes on around the batches.

    Attributes:
        switch: agrees on new shares before each batch.
        tracker: follows the batch in hand.
        progress: where training stands in the data.
        reference_batch: rows per step at the start, for ``len``.
        start_pass: settles what the last pass left, and returns where this one begins.
        end_pass: called when an epoch's last batch is consumed.
    """

    switch: Switch
    tracker: StepTracker
    progress: Progress
    reference_batch: int
    start_pass: Callable[[], Position]
    end_pass: Callable[[], None]


class TrainLoader:
    """Yields this rank's batches of the current epoch, from the first sample that is not consumed yet.

    Iterating again after leaving a loop early goes on where the loop was left: a batch counts as consumed once its
    gradient was reduced, or once the next one was asked for.

    Args:
        source: where the batches come from.
        course: what goes on around them.
    """

    def __init__(self, source: Source, course: Course) -> None:
        self.dataset = source.dataset
        self._source: Source | None = source
        self._course = course
        self._newest: _Pass | None = None

    def __len__(self) -> int:
        """Reference steps per epoch, ``ceil(N / M0)``: what a learning-rate schedule should count.

        Raises:
            ConfigError: the rows are a stream, which nobody has counted. It is a TypeError too.
        """
        return self._opened().num_reference_steps(self._course.reference_batch)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        source = self._opened()
        source.rewind(self._course.start_pass())
        self._newest = _Pass(self)
        return self._newest

    def next_batch(self, asking: _Pass) -> Any:
        """Hand out the next batch of the newest pass."""
        if asking is not self._newest:
            raise RexError("this iterator of session.loader was replaced by a newer one; use one at a time")
        course, tracker, progress = self._course, self._course.tracker, self._course.progress
        tracker.asked_for_next()
        asked_s = now_s()
        course.switch.boundary(progress.position.step, tracker.last_step_s)
        drawing_s = now_s()
        drawn = self._opened().draw()
        if drawn is None:
            self._newest = None
            course.end_pass()
            raise StopIteration
        assert drawn.plan.step == progress.position.step, "a pass hands out its plans in step order"
        batch = to_device(drawn.batch, tracker.device)
        tracker.begin(drawn.plan, asked_s=asked_s, waited_s=now_s() - drawing_s - drawn.peers_s)
        return batch

    def stop(self) -> None:
        """Let go of the iterator, and with it of the loader processes."""
        if self._source is not None:
            self._source.stop()
        self._newest = self._source = None

    def _opened(self) -> Source:
        if self._source is None:
            raise RexError("the session that made this loader is closed")
        return self._source


class _Pass:
    """One iteration over the loader."""

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader
        self._exhausted = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        try:
            return self._loader.next_batch(self)
        except StopIteration:
            self._exhausted = True
            raise

"""``session.report``: metrics to the journal at once, a save now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rex_ray.core.errors import StorageError
from rex_ray.worker.data.feed import Feed
from rex_ray.worker.group.asked_saves import SnapshotTurns
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink, MetricRecord
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.notices import Notices
from rex_ray.worker.saving.checking import check_plain
from rex_ray.worker.saving.collecting import Collector
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.snapshots import Snapshots
from rex_ray.worker.saving.writing import Attempts, SaveWriter
from rex_ray.worker.tracker import StepTracker

__all__ = ["Saves", "SavingRank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingRank:
    """What the saves of one rank are made of, and where they go.

    Attributes:
        reporter: takes metrics and states.
        link: takes metrics for the journal.
        group: ranks to agree with.
        tracker: the step in hand and the position.
        notices: has the journal told of what went wrong.
        feed: the data side.
        generation: identity of the worker group.
        collector: knows what a save holds.
        snapshots: this rank's local snapshots; None: there are none.
        interval_s: shortest time between two saves.
        retry_s: how long a failing one is tried again.
    """

    reporter: Reporter
    link: ControlLink
    group: SideGroup
    tracker: StepTracker
    notices: Notices
    feed: Feed
    generation: str
    collector: Collector
    snapshots: Snapshots | None
    interval_s: float
    retry_s: float


class Saves:
    """Metrics and saves of one rank.

    A save passes through the reporter on every rank at once, which in Ray Train is a barrier of seconds. So it is
    made only every so often, and ranks agree on it by rank 0's clock. One that the storage refuses is tried again for
    a while, then left out: training goes on, and the next one tries anew.

    Args:
        rank: what they are made of, and where they go.
    """

    def __init__(self, rank: SavingRank) -> None:
        self._rank = rank
        self._writer = SaveWriter(rank.reporter, rank.group, rank.retry_s)
        self._opened_s = self._saved_s = now_s()
        self._metrics: Mapping[str, Any] = {}
        self._unsaved: Mapping[str, Any] | None = None

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Journal the metrics, and save if that is due."""
        self._metrics = dict(metrics)
        rank = self._rank
        rank.tracker.close()
        elapsed_s = now_s() - self._opened_s
        if rank.group.rank == 0:
            position = rank.tracker.progress.position
            record = MetricRecord(
                generation=rank.generation,
                epoch=position.epoch,
                step=position.step,
                elapsed_s=elapsed_s,
                metrics={name: number for name, value in metrics.items() if (number := _number(value)) is not None},
            )
            rank.link.send([record])
        due = now_s() - self._saved_s >= rank.interval_s or rank.feed.at_the_end
        with rank.tracker.waiting():
            agreed = rank.group.broadcast(torch.tensor([int(due)]), "session.report")
        if agreed.item():
            self._save(metrics)
        else:
            self._unsaved = dict(metrics)

    def save_now(self, reason: str) -> None:
        """Save at once, with the metrics that were reported last; called on every rank before the same step.

        Args:
            reason: who asked, for the journal; rank 0's counts.
        """
        self._rank.tracker.close()
        began_s, step = now_s(), self._rank.tracker.progress.position.step
        written = self._save(self._metrics).written
        if written and self._rank.group.rank == 0:
            self._rank.notices.now("save", f"saved before step {step} in {now_s() - began_s:.1f} s: {reason}")

    def between_steps(self, reason: str) -> bool:
        """Save before the step that is about to be handed out, on every rank; False where that would lose something."""
        if not self._rank.feed.is_whole:
            return False
        self.save_now(reason)
        return True

    @property
    def snapshot_turns(self) -> SnapshotTurns:
        """When local snapshots are taken, and how: where a save would lose nothing either."""
        snapshots = self._rank.snapshots
        return SnapshotTurns() if snapshots is None else SnapshotTurns(due=snapshots.due, take=self._take_snapshot)

    def rely_on_rank_0(self) -> None:
        """Have no other rank keep snapshots: of a sharded model rank 0 alone collects the whole."""
        if self._rank.snapshots is not None:
            self._rank.snapshots.keep_on_first(self._rank.group.rank)

    def finish(self) -> None:
        """Save what was reported last, if it was not saved; called on every rank when training is over.

        Raises:
            StorageError: the storage refuses it, so what was trained last would be lost.
        """
        if self._unsaved is None:
            return
        attempts = self._save(self._unsaved)
        self._unsaved = None
        if not attempts.written:
            raise StorageError(
                f"training is over, and its last save could not be written: {attempts.failures[-1]}; mend the storage "
                "and start the run again under its name, and it goes on from its newest save"
            )

    def close(self, limit_s: float, *, failed: bool) -> None:
        """Let a snapshot be written that is under way; without a failure nobody needs one any more."""
        if self._rank.snapshots is not None:
            self._rank.snapshots.close(limit_s, keep=failed)

    def _take_snapshot(self) -> bool:
        if self._rank.snapshots is None or not self._rank.feed.is_whole:
            return False
        self._rank.tracker.close()
        self._rank.snapshots.take(self._collect)
        return True

    def _save(self, metrics: Mapping[str, Any]) -> Attempts:
        state = self._collect()
        attempts = self._writer.write(state)
        if self._rank.group.rank == 0:
            self._tell(attempts)
        self._rank.reporter.report(metrics, state if attempts.written else None)
        self._unsaved = None if attempts.written else dict(metrics)
        self._saved_s = now_s()
        if attempts.written and self._rank.snapshots is not None:
            self._rank.snapshots.postpone()
        return attempts

    def _collect(self) -> dict[str, Any]:
        """Return the state, after making sure that it could be read back."""
        state = self._rank.collector.collect()
        check_plain(state)
        return state

    def _tell(self, attempts: Attempts) -> None:
        """Say aloud what was wrong with the storage, if anything was."""
        if not attempts.failures:
            return
        num_failed, last = len(attempts.failures), attempts.failures[-1]
        times = f"{num_failed} time{'s' if num_failed > 1 else ''}"
        if attempts.written:
            message = f"saved after the storage failed {times} within {attempts.lasted_s:.1f} s: {last}"
        else:
            message = (
                f"gave up a save after the storage failed {times} within {attempts.lasted_s:.1f} s, and trains on; "
                f"the next save tries again: {last}"
            )
        self._rank.notices.aloud("storage", message)


def _number(value: Any) -> float | None:
    """Return a metric as a number, None if it is no single one. Never raises: the other ranks already wait."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None

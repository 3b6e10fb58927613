"""What is seen of a run while it goes on, and what whoever looks on implements.

All of it is a fold of the controller's events and notes, so that it needs nothing from the workers that the journal
does not have, and a run that was made can be watched again from its journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

__all__ = ["Ended", "Happened", "Progress", "Reported", "RunInfo", "Sight", "Watcher", "WorkerView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run is called and was asked to do.

    Attributes:
        name: what people call it; the tag of its metrics.
        run_id: identity of this ``fit``: a tracker's run is one per ``run_id``, whatever groups come and go.
        policy: name of the policy.
        settings: the configuration, as plain values by name.
        run_dir: folder that is the run's own, where a tracker may leave what it needs to go on with it; ``""``: none.
    """

    name: str
    run_id: str
    policy: str
    settings: Mapping[str, bool | int | float | str]
    run_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One rank as the newest complete steps show it.

    Attributes:
        rank: its number in the group.
        device: kind of device.
        node: machine, ``""`` where unknown.
        local_batch_size: rows of its share.
        own_s: median of data + compute over the newest steady steps in seconds, NaN before the first.
    """

    rank: int
    device: str
    node: str
    local_batch_size: int
    own_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
        elapsed_s: since the run began, by the driver's ticks.
        epoch: epoch of the newest complete step, -1 before the first.
        step: newest complete step, -1 before the first.
        rows_per_s: over the newest complete steps, NaN before the first.
        step_s: median wall time of the newest complete steps in seconds, NaN before the first.
        global_batch_size: rows per step.
        lr_factor: what the global batch does to the learning rate.
        num_epochs: epochs that the loop asked for, or None where it did not say.
        learning_rate: the optimizer's own as last reported, without ``lr_factor``, or None.
        workers: the group, in rank order; empty before the first joined.
        slowest_rank: whose own time is the longest, or None.
        slowest_why: why, in a few words: ``"larger share"``, ``"slowed down 1.8x since step 400"``, ...
        imbalance: ``max_i t_i / mean_i t_i - 1`` of ``own_s``, NaN where unknown.
        noise_scale: gradient noise scale in rows, or None.
        left_s: estimated time to the end of the last epoch, or None where nobody knows how many there are.
        num_changes: allocations that took effect after the first.
        num_lost: ranks lost so far.
        num_incidents: things that went wrong on a rank and were dealt with so far.
        gap: complaint about missing telemetry, or None.
        fault: why nothing is decided any more, or None.
    """

    elapsed_s: float
    epoch: int
    step: int
    rows_per_s: float
    step_s: float
    global_batch_size: int
    lr_factor: float
    workers: tuple[WorkerView, ...]
    slowest_rank: int | None
    slowest_why: str
    imbalance: float
    num_epochs: int | None = None
    learning_rate: float | None = None
    noise_scale: float | None = None
    left_s: float | None = None
    num_changes: int = 0
    num_lost: int = 0
    num_incidents: int = 0
    gap: str | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One thing worth a line: a decision, its outcome, a loss, an incident.

    Attributes:
        elapsed_s: when.
        step: newest complete step then; of a group, the one before its first, which may lie behind what was seen.
        kind: ``"decided"``, ``"applied"``, ``"measured"``, ``"withdrawn"``, ``"group"``, ``"lost"``, ``"incident"``,
            or ``"noted"``, which is for the record alone: a save, the look before training, how a search ended.
        text: one sentence in plain English, numbers with units.
        figures: named figures behind it, for trackers.
    """

    elapsed_s: float
    step: int
    kind: str
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Metrics that the training loop reported."""

    elapsed_s: float
    epoch: int
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run's end, and why."""

    elapsed_s: float
    reason: str


Sight: TypeAlias = Progress | Happened | Reported | Ended


class Watcher(Protocol):
    """Somebody who looks on, in the driver's process: a progress line, a tracker.

    A watcher never holds training up, and its own faults are logged once and end it, not the run. It is begun once per
    ``fit``, in whatever groups the workers train; so a tracker has one run per job, and none per rank.
    """

    def begin(self, run: RunInfo) -> None:
        """Called once, before the first ``see``."""
        ...

    def see(self, sight: Sight) -> None:
        """Take one thing in; those of a run come in order. ``Progress`` comes at most once a second."""
        ...

    def close(self) -> None:
        """Write what is held back; called once, after the run's end or the driver's interruption."""
        ...
